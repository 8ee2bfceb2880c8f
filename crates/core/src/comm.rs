//! Collectives between ranks, and the mesh of ranks.
//!
//! [`Comm`] has an all-to-all of counts and of rows of bytes, reduce-scatters that sum by a balanced tree, gathers, a barrier, and `abort`.
//! The all-to-all of rows, reduce-scatters and gathers of parts are asynchronous: they return a [`Transfer`] that owns its buffers.
//!
//! A [`Mesh`] has a communicator for each axis along which something is sharded. A rank has a number on each axis, so code that needs this
//! number chooses an axis.
//!
//! | axis | ranks | what is exchanged |
//! |---|---|---|
//! | `all` | every rank | losses, loads, reports; gradients of replicated weights: attention, norms, routers, embedding |
//! | `ep` | ranks that shard the experts of a layer | tokens to experts and back |
//! | `dp` | ranks that hold the same experts | gradients of experts |
//!
//! In Megatron's and torchtitan's words: dense parameters are data-parallel over all ranks; experts are expert-parallel over `ep`, with
//! `dp` replicas. Tokens are divided among all ranks in order, so the tokens and the micro-batch shards of a replica are consecutive.
//!
//! If a rank fails, panics or leaves, pending and later calls of all other ranks return an error, along every axis. An interrupted
//! collective may leave undefined values in its buffers, so the caller calls [`Comm::check`] before it uses a result. No metric, checkpoint
//! or held-out loss is therefore computed from undefined buffers.
//!
//! Three kinds of parallelism are not implemented, but this interface could be extended to them:
//!
//! * Pipeline ranks would be a fourth, outermost axis. Each rank would own a range of blocks, and micro-batches would travel between
//!   ranges.
//! * A two-level all-to-all, within a host and between hosts, would use two communicators for the `ep` axis. A token would be sent once to
//!   a host, and from there once to each rank.
//! * Context parallelism would shard attention by sequence position. Keys and values would circulate among the ranks of a fifth axis; all
//!   other ops treat tokens independently.

use crate::{Backend, Error, Result};
use std::fmt::{self, Debug};
use std::ops::Range;
use std::time::Duration;

/// Collectives between ranks. All ranks call the methods in the same order.
pub trait Comm<B: Backend>: Debug + Send + Sync {
    /// This rank, from 0.
    fn rank(&self) -> usize;
    /// Number of ranks.
    fn world(&self) -> usize;
    /// All-gather of row counts. `send` holds n counts per rank; the counts for rank `p` begin at index `p · n`. The result is `[world,
    /// world · n]`: row `r` holds the counts that rank `r` sends, and the columns of `p` hold the counts that rank `p` receives. The host
    /// thus reads both with one download.
    fn counts(&self, b: &B, send: &B::Buf<i32>) -> Result<B::Buf<i32>>;
    /// Starts an all-to-all of rows of `row_bytes` bytes: `send_rows[p]` rows go to rank `p`, in order. The `recv_rows[p]` rows from each
    /// rank, in rank order, become the first rows of `into`, which the transfer returns. Both buffers may have more rows, which are neither
    /// sent nor changed. The call is asynchronous: several transfers may be in flight, and other collectives may be called meanwhile.
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
    /// Starts reduce-scatters over ranks, by a balanced tree, ((0+1)+(2+3))…; each rank receives the sum of its part. The call is
    /// asynchronous: several transfers may be in flight, and other collectives may be called meanwhile. All ranks pass the same number of
    /// sums, with the same parts.
    ///
    /// # Errors
    /// Errors of the backend and of other ranks. Parts that exceed the values or `into` are an error of this call or of the wait for the
    /// transfer.
    fn begin_reduce_scatter_tree(&self, b: &B, sums: Vec<TreeSum<B>>) -> Result<Transfer<B>>;
    /// Starts a gather of parts to every rank: the bytes of rank `p` go to the ranges `parts[p]` of `into`, one after the other. Bytes of
    /// `into` outside all parts do not change. All ranks pass the same parts. The call is asynchronous, like
    /// [`Comm::begin_reduce_scatter_tree`]. If another handle shares `into`, the result is a copy.
    ///
    /// # Errors
    /// Errors of the backend and of other ranks. Parts that exceed `mine` or `into` are an error of this call or of the wait for the
    /// transfer.
    fn begin_all_gather_parts(
        &self,
        b: &B,
        mine: B::Buf<u8>,
        parts: &[Vec<Range<usize>>],
        into: B::Buf<u8>,
    ) -> Result<Transfer<B, B::Buf<u8>>>;
    /// Gathers every rank's values, in rank order. All ranks send the same number of values.
    fn all_gather(&self, b: &B, values: &B::Buf<f32>) -> Result<B::Buf<f32>>;
    /// [`Comm::all_gather`] of F64 values, without a change of any bit.
    fn all_gather_f64(&self, b: &B, values: &B::Buf<f64>) -> Result<B::Buf<f64>>;
    /// Waits for all ranks.
    fn barrier(&self) -> Result<()>;
    /// Reports to all ranks that this one failed; their pending and later calls return this error.
    fn abort(&self, why: &str);
    /// Checks, without waiting, whether a rank has failed. Call this method after reading the result of a collective and before using that
    /// result, because an interrupted collective may leave undefined values.
    ///
    /// # Errors
    /// [`Error::Comm`] if a rank has failed.
    fn check(&self) -> Result<()> {
        Ok(())
    }
    /// Total time that this rank has waited for other ranks so far, in its collectives along every axis of the mesh.
    fn waited(&self) -> Duration {
        Duration::ZERO
    }
    /// Number of ranks on this rank's host, itself included.
    fn host_ranks(&self) -> usize {
        self.world()
    }
    /// Whether every all-to-all counts as filled to its capacity, however few rows arrive. Predictions of memory return `true`.
    fn fills_room(&self) -> bool {
        false
    }
}

/// Communication between the host processes or threads of all ranks of a communicator. This communication does not use the transport that
/// sends rows. A backend uses `Peers` to create and to shut down the communicator of a device.
pub trait Peers: Debug + Send + Sync {
    /// This rank, from 0.
    fn rank(&self) -> usize;
    /// Number of ranks.
    fn world(&self) -> usize;
    /// Gathers every rank's bytes, in rank order, and waits for all ranks. All ranks call this method in the same order among their
    /// collectives.
    ///
    /// # Errors
    /// [`Error::Comm`] if a rank has failed or left.
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
    /// The values of this rank, which are added to the values of the other ranks.
    pub values: B::Buf<f32>,
    /// For each rank, the range of values whose sum that rank receives. A range may be empty.
    pub parts: Vec<Range<usize>>,
    /// The buffer that receives the sum of the range of this rank. The buffer has the length of the range.
    pub into: B::Buf<f32>,
}

/// A collective operation that has started and may not be complete. The result of the operation is of type `T`, which is a list of sums by
/// default. A transfer owns every buffer that it reads or writes until [`Transfer::wait`] returns. So the time at which memory is freed
/// depends on when this rank waits, and not on the speed of another rank.
///
/// If a rank drops a transfer without waiting, the other ranks still receive their data.
#[must_use = "what is under way is waited for"]
pub struct Transfer<B: Backend, T = Vec<<B as Backend>::Buf<f32>>>(Box<Finish<B, T>>);

type Finish<B, T> = dyn FnOnce(&B) -> Result<T> + Send;

impl<B: Backend, T> Transfer<B, T> {
    /// Creates a transfer that `finish` completes. The closure `finish` owns the buffers of the transfer. After `finish` is dropped,
    /// nothing may read or write these buffers.
    pub fn new(finish: impl FnOnce(&B) -> Result<T> + Send + 'static) -> Self {
        Self(Box::new(finish))
    }

    /// Waits for the transfer, and returns its results, which are in the buffers that the caller passed in. Device work that is issued
    /// after this call runs after the transfer.
    ///
    /// # Errors
    /// Any error of the backend or of another rank.
    pub fn wait(self, b: &B) -> Result<T> {
        (self.0)(b)
    }
}

impl<B: Backend, T> Debug for Transfer<B, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Transfer")
    }
}

/// The ranks of a run, with a communicator for each axis along which something is sharded. Code that needs the index of this rank or the
/// number of ranks must choose one of these axes.
///
/// There are dp · ep ranks in total. The index of a rank is its dp index · ep + its ep index. The experts of every layer are sharded over
/// the ep ranks of a replica. Each of the dp replicas has all experts. All other weights are replicated on every rank. F32 master weights
/// and moments are sharded by rows over the ranks that have the same weights. The tokens of a batch are divided among all ranks in the
/// order of the ranks, so that the tokens of a replica are consecutive.
#[derive(Debug)]
pub struct Mesh<'a, B: Backend> {
    /// The communicator of all ranks. This communicator reduces losses, expert loads, reports and the gradients of replicated weights,
    /// because each rank computes these for its own part of the batch. Saving a checkpoint uses this communicator to gather values.
    pub all: &'a dyn Comm<B>,
    /// The communicator of the ranks over which the experts of a layer are sharded. Dispatch and combine use this communicator.
    pub ep: &'a dyn Comm<B>,
    /// The communicator of the ranks that have the same experts. This communicator reduces the gradients of these experts, and gathers
    /// their weights before a step.
    pub dp: &'a dyn Comm<B>,
}

/// The number of ranks along each axis of a [`Mesh`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct MeshShape {
    /// The number of replicas of the experts.
    pub dp: usize,
    /// The number of ranks over which the experts of a replica are sharded.
    pub ep: usize,
}

impl MeshShape {
    /// The shape of a mesh with one rank.
    pub const ONE: Self = Self { dp: 1, ep: 1 };

    /// Number of ranks.
    pub fn ranks(&self) -> usize {
        self.dp * self.ep
    }

    /// The indices of rank `rank` along both axes, as (dp index, ep index).
    pub fn place(&self, rank: usize) -> (usize, usize) {
        (rank / self.ep, rank % self.ep)
    }

    /// The ranks of the replica with dp index `dp_rank`, over which its experts are sharded.
    pub fn replica(&self, dp_rank: usize) -> Vec<usize> {
        (0..self.ep).map(|e| dp_rank * self.ep + e).collect()
    }

    /// The ranks that have the same experts as the rank with ep index `ep_rank`, one per replica.
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
    /// A mesh with a single replica: experts are sharded over all ranks, so that no two ranks have the same expert.
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
    /// The communicator of all ranks.
    pub all: C,
    /// The communicator of the ranks over which the experts are sharded.
    pub ep: C,
    /// The communicator of the ranks that have the same experts.
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

/// The communicator of a run with one rank, in which every collective operation returns its input.
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

/// Checks that the part of the only rank covers all `len` values.
fn all_of(call: &'static str, parts: &[Range<usize>], len: usize) -> Result<()> {
    match parts {
        [all] if *all == (0..len) => Ok(()),
        _ => Err(Error::shape(call, "parts", format!("{parts:?}"), format!("all {len} in one"))),
    }
}
