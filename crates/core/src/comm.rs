//! Collectives between ranks, and the mesh of ranks.
//!
//! [`Comm`] has an all-to-all of counts and of rows of bytes, reduce-scatters by a balanced tree, gathers, a barrier, and `abort`. The
//! all-to-all of rows, reduce-scatters and gathers of parts are asynchronous: they return a [`Transfer`] that owns its buffers.
//!
//! A [`Mesh`] has a communicator for each axis along which something is sharded. A caller that asks for a rank names the axis.
//!
//! | axis | ranks | what is exchanged |
//! |---|---|---|
//! | `all` | every rank | losses, loads, reports; gradients of replicated weights: attention, norms, routers, embedding |
//! | `ep` | ranks that shard the experts of a layer | tokens to experts and back |
//! | `dp` | ranks that hold the same experts | gradients of experts |
//!
//! In Megatron's and torchtitan's words: dense parameters are data-parallel over all ranks; experts are expert-parallel over `ep`, with
//! `dp` replicas. Tokens are divided among all ranks in order, so the tokens of a replica are consecutive, and so are its shards of a
//! micro-batch.
//!
//! If a rank fails, panics or leaves, pending and later calls of all other ranks return an error, along every axis. An interrupted
//! collective may leave anything in its buffers, so a caller calls [`Comm::check`] before it uses a result. No metric, checkpoint or
//! held-out loss is therefore computed from undefined buffers.
//!
//! Three kinds of parallelism are not implemented, but would fit in here:
//!
//! * Pipeline ranks would be a fourth, outermost axis. Each rank would own a range of blocks, and micro-batches would travel between
//!   ranges.
//! * A two-level all-to-all, within a host and between hosts, would be an exchange over an `ep` of two communicators. A token would be
//!   sent once to a host, and from there once to each rank.
//! * Context parallelism would divide attention by positions. Keys and values would go around the ranks of a fifth axis; all other ops
//!   treat tokens independently.

use crate::{Backend, Error, Result};
use std::fmt::{self, Debug};
use std::ops::Range;
use std::time::Duration;

/// Collectives between ranks. Every method is called by all ranks in the same order.
pub trait Comm<B: Backend>: Debug + Send + Sync {
    /// This rank, from 0.
    fn rank(&self) -> usize;
    /// Number of ranks.
    fn world(&self) -> usize;
    /// All-gather of row counts. `send` holds n counts per rank; those for rank `p` begin at `p · n`. The result is
    /// `[world, world · n]`: row `r` is what rank `r` sends, and the columns of `p` are what rank `p` receives, so that a host learns both
    /// with one read.
    fn counts(&self, b: &B, send: &B::Buf<i32>) -> Result<B::Buf<i32>>;
    /// Starts an all-to-all of rows of `row_bytes` bytes: `send_rows[p]` rows go to rank `p`, in order. The `recv_rows[p]` rows from each
    /// rank, in rank order, become the first rows of `into`, which the transfer returns. Both buffers may be longer; rows beyond these are
    /// neither sent nor changed. Asynchronous: several transfers may be in flight, and other collectives may be called meanwhile.
    ///
    /// # Errors
    /// Errors of the backend and of other ranks. Rows beyond the buffers' capacity are an error of this call. A number of received rows
    /// that differs from `recv_rows` is an error when the transfer is awaited.
    fn begin_all_to_all_v(
        &self,
        b: &B,
        send: B::Buf<u8>,
        row_bytes: usize,
        send_rows: &[usize],
        recv_rows: &[usize],
        into: B::Buf<u8>,
    ) -> Result<Transfer<B, B::Buf<u8>>>;
    /// Starts reduce-scatters over ranks, by a balanced tree, ((0+1)+(2+3))…; each rank gets its part. Asynchronous: several transfers may
    /// be in flight, and other collectives may be called meanwhile. All ranks pass the same number of sums, with the same parts.
    ///
    /// # Errors
    /// Those of the backend and of other ranks; for parts out of range of the values or `into`, here or when the transfer is awaited.
    fn begin_reduce_scatter_tree(&self, b: &B, sums: Vec<TreeSum<B>>) -> Result<Transfer<B>>;
    /// Starts a gather of parts to every rank: the bytes of rank `p` go to the ranges `parts[p]` of `into`, one after the other. Bytes of
    /// `into` outside all parts do not change. All ranks pass the same parts. Asynchronous, as [`Comm::begin_reduce_scatter_tree`]. If
    /// another handle shares `into`, the result is a copy.
    ///
    /// # Errors
    /// Those of the backend and of other ranks; for parts out of range of `mine` or `into`, here or when the transfer is awaited.
    fn begin_all_gather_parts(
        &self,
        b: &B,
        mine: B::Buf<u8>,
        parts: &[Vec<Range<usize>>],
        into: B::Buf<u8>,
    ) -> Result<Transfer<B, B::Buf<u8>>>;
    /// Every rank's values, in rank order. All ranks send the same number of values.
    fn all_gather(&self, b: &B, values: &B::Buf<f32>) -> Result<B::Buf<f32>>;
    /// [`Comm::all_gather`] of F64, bit for bit.
    fn all_gather_f64(&self, b: &B, values: &B::Buf<f64>) -> Result<B::Buf<f64>>;
    /// Waits for all ranks.
    fn barrier(&self) -> Result<()>;
    /// Reports to all ranks that this one failed; their pending and later calls return this error.
    fn abort(&self, why: &str);
    /// Whether a rank has failed, without waiting. Call it after reading the result of a collective and before using it: an interrupted
    /// collective may leave anything.
    ///
    /// # Errors
    /// [`Error::Comm`] if one has.
    fn check(&self) -> Result<()> {
        Ok(())
    }
    /// Time that this rank has waited for others, in all of its collectives so far, along every axis of the mesh.
    fn waited(&self) -> Duration {
        Duration::ZERO
    }
    /// Number of ranks on this rank's host, itself included.
    fn host_ranks(&self) -> usize {
        self.world()
    }
    /// Whether an all-to-all counts as filled to its capacity, whatever arrives: for predictions of memory.
    fn fills_room(&self) -> bool {
        false
    }
}

/// The ranks of a communicator on the host side, whatever transport carries their rows: used to create and to end a device's communicator.
pub trait Peers: Debug + Send + Sync {
    /// This rank, from 0.
    fn rank(&self) -> usize;
    /// Number of ranks.
    fn world(&self) -> usize;
    /// Every rank's bytes, in rank order. Waits for all ranks; all call this in the same order among their collectives.
    ///
    /// # Errors
    /// [`Error::Comm`] for a rank that has failed or left.
    fn gather(&self, bytes: &[u8]) -> Result<Vec<Vec<u8>>>;
    /// See [`Comm::abort`].
    fn abort(&self, why: &str);
    /// See [`Comm::check`].
    ///
    /// # Errors
    /// [`Error::Comm`] if a rank has failed.
    fn check(&self) -> Result<()>;
    /// See [`Comm::waited`].
    fn waited(&self) -> Duration;
    /// See [`Comm::host_ranks`].
    fn host_ranks(&self) -> usize;
}

/// A sum of [`Comm::begin_reduce_scatter_tree`].
#[derive(Debug)]
pub struct TreeSum<B: Backend> {
    /// This rank's values.
    pub values: B::Buf<f32>,
    /// The range of values for each rank; it may be empty.
    pub parts: Vec<Range<usize>>,
    /// Buffer for the sum of this rank's part, of the part's length.
    pub into: B::Buf<f32>,
}

/// A collective in flight, which returns `T` (sums, by default). It owns every buffer that it reads and writes until it is awaited, so that
/// the lifetime of memory depends on when the rank waits, and not on the speed of another rank.
///
/// If a transfer is dropped without being awaited, the other ranks still get their data.
#[must_use = "what is under way is waited for"]
pub struct Transfer<B: Backend, T = Vec<<B as Backend>::Buf<f32>>>(Box<Finish<B, T>>);

type Finish<B, T> = dyn FnOnce(&B) -> Result<T> + Send;

impl<B: Backend, T> Transfer<B, T> {
    /// A transfer that `finish` completes. `finish` owns the buffers; when it is dropped, nothing may read or write them any more.
    pub fn new(finish: impl FnOnce(&B) -> Result<T> + Send + 'static) -> Self {
        Self(Box::new(finish))
    }

    /// Waits, and returns the results in the buffers that were passed in. Device work that is issued afterwards runs after the transfer.
    ///
    /// # Errors
    /// From the backend and other ranks, as from a pending call.
    pub fn wait(self, b: &B) -> Result<T> {
        (self.0)(b)
    }
}

impl<B: Backend, T> Debug for Transfer<B, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Transfer")
    }
}

/// The ranks of a run, with a communicator for each axis along which something is sharded. A caller that asks for a rank or a number of
/// ranks names the axis.
///
/// There are dp · ep ranks; rank = dp rank · ep + ep rank. The experts of every layer are sharded over the ep ranks of a replica; the dp
/// replicas hold the same experts. All other weights are replicated on every rank. F32 masters and moments are sharded over the ranks
/// that hold the same weights: each rank keeps its rows. The tokens of a batch are divided among all ranks, in order, so that the tokens
/// of a replica are consecutive.
#[derive(Debug)]
pub struct Mesh<'a, B: Backend> {
    /// Every rank. Each has its own shards of a batch, so losses, loads, reports and the gradients of replicated weights are reduced here;
    /// checkpoints gather values here.
    pub all: &'a dyn Comm<B>,
    /// The ranks that shard a layer's experts: dispatch and combine.
    pub ep: &'a dyn Comm<B>,
    /// The ranks that hold the same experts: their gradients are reduced here, and before a step their weights are gathered.
    pub dp: &'a dyn Comm<B>,
}

/// The number of ranks along each axis of a [`Mesh`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct MeshShape {
    /// Replicas of the experts.
    pub dp: usize,
    /// Ranks that shard the experts.
    pub ep: usize,
}

impl MeshShape {
    /// One rank.
    pub const ONE: Self = Self { dp: 1, ep: 1 };

    /// Number of ranks.
    pub fn ranks(&self) -> usize {
        self.dp * self.ep
    }

    /// Position of a rank along both axes: (dp rank, ep rank).
    pub fn place(&self, rank: usize) -> (usize, usize) {
        (rank / self.ep, rank % self.ep)
    }

    /// The ranks of a replica, which shard its experts.
    pub fn replica(&self, dp_rank: usize) -> Vec<usize> {
        (0..self.ep).map(|e| dp_rank * self.ep + e).collect()
    }

    /// The ranks that hold the same experts, one per replica.
    pub fn same_experts(&self, ep_rank: usize) -> Vec<usize> {
        (0..self.dp).map(|d| d * self.ep + ep_rank).collect()
    }
}

impl fmt::Display for MeshShape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} x {}", self.dp, self.ep)
    }
}

impl<'a, B: Backend> Mesh<'a, B> {
    /// Experts sharded over all ranks: no two ranks hold the same.
    pub fn new(all: &'a dyn Comm<B>) -> Self {
        Self { all, ep: all, dp: &SoloComm }
    }

    /// The number of ranks along each axis.
    pub fn shape(&self) -> MeshShape {
        MeshShape { dp: self.dp.world(), ep: self.ep.world() }
    }
}

/// See [`Mesh::new`].
impl<'a, B: Backend, C: Comm<B>> From<&'a C> for Mesh<'a, B> {
    fn from(all: &'a C) -> Self {
        Self::new(all)
    }
}

/// See [`Mesh::new`].
impl<'a, B: Backend> From<&'a dyn Comm<B>> for Mesh<'a, B> {
    fn from(all: &'a dyn Comm<B>) -> Self {
        Self::new(all)
    }
}

/// A rank's communicators along the axes of a [`Mesh`].
#[derive(Debug)]
pub struct Axes<C> {
    /// Every rank.
    pub all: C,
    /// The ranks that shard the experts.
    pub ep: C,
    /// The ranks that hold the same experts.
    pub dp: C,
}

impl<C> Axes<C> {
    /// The mesh of these communicators.
    pub fn mesh<B: Backend>(&self) -> Mesh<'_, B>
    where
        C: Comm<B>,
    {
        Mesh { all: &self.all, ep: &self.ep, dp: &self.dp }
    }
}

impl<B: Backend> Clone for Mesh<'_, B> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<B: Backend> Copy for Mesh<'_, B> {}

/// One rank alone: every collective is the identity.
#[derive(Debug, Clone, Copy, Default)]
pub struct SoloComm;

impl<B: Backend> Comm<B> for SoloComm {
    fn rank(&self) -> usize {
        0
    }
    fn world(&self) -> usize {
        1
    }
    fn counts(&self, _: &B, send: &B::Buf<i32>) -> Result<B::Buf<i32>> {
        Ok(send.clone())
    }
    fn begin_all_to_all_v(
        &self,
        _: &B,
        send: B::Buf<u8>,
        row_bytes: usize,
        send_rows: &[usize],
        recv_rows: &[usize],
        mut into: B::Buf<u8>,
    ) -> Result<Transfer<B, B::Buf<u8>>> {
        let bytes = match (send_rows, recv_rows) {
            ([to], [from]) if to == from => to.checked_mul(row_bytes),
            _ => None,
        };
        match bytes.filter(|bytes| *bytes <= B::len(&send).min(B::len(&into))) {
            Some(bytes) => {
                Ok(Transfer::new(move |b: &B| b.copy(&send, 0..bytes, &mut into, 0).map(|()| into)))
            }
            None => {
                let got = format!("{send_rows:?} and {recv_rows:?} of {row_bytes} bytes");
                let expected =
                    format!("the same of one rank, within {} and {} bytes", B::len(&send), B::len(&into));
                Err(Error::shape("all_to_all_v", "rows", got, expected))
            }
        }
    }
    fn begin_reduce_scatter_tree(&self, _: &B, sums: Vec<TreeSum<B>>) -> Result<Transfer<B>> {
        for TreeSum { values, parts, .. } in &sums {
            all_of("reduce_scatter_tree", parts, B::len(values))?;
        }
        let sum = |b: &B, TreeSum { values, mut into, .. }: TreeSum<B>| {
            b.copy(&values, 0..B::len(&values), &mut into, 0).map(|()| into)
        };
        Ok(Transfer::new(move |b| sums.into_iter().map(|of| sum(b, of)).collect()))
    }
    fn begin_all_gather_parts(
        &self,
        _: &B,
        mine: B::Buf<u8>,
        parts: &[Vec<Range<usize>>],
        mut into: B::Buf<u8>,
    ) -> Result<Transfer<B, B::Buf<u8>>> {
        let parts: &[Range<usize>] = parts.first().map_or(&[], Vec::as_slice);
        all_of("all_gather_parts", parts, B::len(&mine))?;
        Ok(Transfer::new(move |b: &B| b.copy(&mine, 0..B::len(&mine), &mut into, 0).map(|()| into)))
    }
    fn all_gather(&self, _: &B, values: &B::Buf<f32>) -> Result<B::Buf<f32>> {
        Ok(values.clone())
    }
    fn all_gather_f64(&self, _: &B, values: &B::Buf<f64>) -> Result<B::Buf<f64>> {
        Ok(values.clone())
    }
    fn barrier(&self) -> Result<()> {
        Ok(())
    }
    fn abort(&self, _: &str) {}
}

/// Checks that the only rank's part is everything.
fn all_of(call: &'static str, parts: &[Range<usize>], len: usize) -> Result<()> {
    match parts {
        [all] if *all == (0..len) => Ok(()),
        _ => Err(Error::shape(call, "parts", format!("{parts:?}"), format!("all {len} in one"))),
    }
}
