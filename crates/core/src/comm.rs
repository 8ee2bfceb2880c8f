//! What ranks need from each other, and how they are arranged.
//!
//! [`Comm`] has an all-to-all of counts and of rows of bytes, sums by a tree of which each rank gets its part, gathers, a barrier, and
//! `abort`. Rows, sums and gathers of parts are asynchronous: they return a [`Transfer`] that owns its buffers and is awaited later.
//!
//! A [`Mesh`] has a communicator for each axis along which something is sharded. A caller that asks for a rank names the axis.
//!
//! | axis | ranks | what is exchanged |
//! |---|---|---|
//! | `all` | every rank | losses, loads, reports; gradients of what every rank holds: attention, norms, routers, embedding |
//! | `ep` | those that shard the experts of a layer | tokens to experts and back |
//! | `dp` | those that hold the same experts | gradients of experts |
//!
//! In Megatron's and torchtitan's words: dense parameters are data-parallel over all ranks; experts are expert-parallel over `ep`, with
//! `dp` replicas. Tokens are divided among all ranks in order, so the tokens of a replica are consecutive, and so are its parts of a
//! micro-batch.
//!
//! If a rank fails, panics or leaves, pending and later calls of all others return an error, along every axis. A collective that was cut
//! short may have left anything in its buffers: whoever reads a result asks [`Comm::check`] before believing it. So no metrics,
//! checkpoint or held-out loss comes from such numbers.
//!
//! Three kinds of parallelism are not built. Each has a place here:
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
    /// Tells all ranks how many rows go where. `send` has as many counts, n, for each rank, those for rank `p` from `p · n` on; the
    /// answer is every rank's, in rank order: `[world, world · n]`. A rank's own line of it says what it sends, and column `p` what
    /// comes to rank `p`, so that its host learns both by one read.
    fn counts(&self, b: &B, send: &B::Buf<i32>) -> Result<B::Buf<i32>>;
    /// Begins to send rows of `row_bytes` bytes, `send_rows[p]` of them to rank `p`, in order; the `recv_rows[p]` rows from each rank, in rank
    /// order, become the first of `into`, which the transfer brings. Both buffers may be longer: what is beyond these rows is not sent, and stays
    /// as it is. Does not wait for others: several transfers may be under way, and other collectives may be called meanwhile.
    ///
    /// # Errors
    /// Those of the backend and of other ranks; for rows that the buffers have no room for, here; for rows that come otherwise than `recv_rows`
    /// says, where the transfer is waited for.
    fn begin_all_to_all_v(
        &self,
        b: &B,
        send: B::Buf<u8>,
        row_bytes: usize,
        send_rows: &[usize],
        recv_rows: &[usize],
        into: B::Buf<u8>,
    ) -> Result<Transfer<B, B::Buf<u8>>>;
    /// Begins sums over ranks, each by a balanced tree, ((0+1)+(2+3))…, of which each rank gets its part. Does not wait for others: several
    /// transfers may be under way, and other collectives may be called meanwhile. All ranks give as many sums, with the same parts.
    ///
    /// # Errors
    /// Those of the backend and of other ranks; for parts that the values or `into` do not have, here or where the transfer is waited for.
    fn begin_reduce_scatter_tree(&self, b: &B, sums: Vec<TreeSum<B>>) -> Result<Transfer<B>>;
    /// Begins to bring parts together on every rank: the bytes of rank `p` go to `parts[p]` of `into`, to its ranges one after the other. Bytes of
    /// `into` that are in nobody's part stay as they are. All ranks give the same parts. Waits for others as little as
    /// [`Comm::begin_reduce_scatter_tree`]. Where `into` has another handle, what it brings lies in a copy.
    ///
    /// # Errors
    /// Those of the backend and of other ranks; for parts that `mine` or `into` does not have, here or where the transfer is waited for.
    fn begin_all_gather_parts(
        &self,
        b: &B,
        mine: B::Buf<u8>,
        parts: &[Vec<Range<usize>>],
        into: B::Buf<u8>,
    ) -> Result<Transfer<B, B::Buf<u8>>>;
    /// Every rank's values one after the other, in rank order. All ranks send the same number.
    fn all_gather(&self, b: &B, values: &B::Buf<f32>) -> Result<B::Buf<f32>>;
    /// [`Comm::all_gather`] of F64, bit for bit.
    fn all_gather_f64(&self, b: &B, values: &B::Buf<f64>) -> Result<B::Buf<f64>>;
    /// Waits for all ranks.
    fn barrier(&self) -> Result<()>;
    /// Tells all ranks that this one failed; their pending and later calls return this error.
    fn abort(&self, why: &str);
    /// Whether a rank has failed, without waiting for anybody. Ask it after reading what a collective gave and before believing it: a collective that
    /// was cut short may have left anything.
    ///
    /// # Errors
    /// [`Error::Comm`] if one has.
    fn check(&self) -> Result<()> {
        Ok(())
    }
    /// How long this rank has waited for others, in all of its collectives so far, along every axis of the mesh.
    fn waited(&self) -> Duration {
        Duration::ZERO
    }
    /// How many of the ranks run on this rank's host, itself among them.
    fn host_ranks(&self) -> usize {
        self.world()
    }
    /// Whether an exchange is to be taken for as large as there is room for, whatever comes: where memory is predicted.
    fn fills_room(&self) -> bool {
        false
    }
}

/// The ranks of a communicator as their hosts know each other, whatever carries their rows: by this a device's communicator comes about, and ends.
pub trait Peers: Debug + Send + Sync {
    /// This rank, from 0.
    fn rank(&self) -> usize;
    /// Number of ranks.
    fn world(&self) -> usize;
    /// Every rank's bytes, in rank order. Waits for all ranks, which call this in the same order among their collectives.
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

/// What [`Comm::begin_reduce_scatter_tree`] sums.
#[derive(Debug)]
pub struct TreeSum<B: Backend> {
    /// This rank's.
    pub values: B::Buf<f32>,
    /// Which of them go to each rank; a part may be empty.
    pub parts: Vec<Range<usize>>,
    /// Where the sum of this rank's part goes: as long as that.
    pub into: B::Buf<f32>,
}

/// Messages under way, which bring `T`: sums, if nothing else is said. It owns every buffer that they read and write until it is waited for, so that how
/// long memory is held depends on when the rank waits, and not on how fast another one is.
///
/// Dropped without that, it keeps nobody from going on: the other ranks get what is theirs.
#[must_use = "what is under way is waited for"]
pub struct Transfer<B: Backend, T = Vec<<B as Backend>::Buf<f32>>>(Box<Finish<B, T>>);

type Finish<B, T> = dyn FnOnce(&B) -> Result<T> + Send;

impl<B: Backend, T> Transfer<B, T> {
    /// One that `finish` completes. It owns the buffers, and when it is dropped it must see to it that nothing reads or writes them any more.
    pub fn new(finish: impl FnOnce(&B) -> Result<T> + Send + 'static) -> Self {
        Self(Box::new(finish))
    }

    /// What they bring, in the buffers it was to go to. What is issued on the device after this comes after them.
    ///
    /// # Errors
    /// From the backend and other ranks, as a call that is pending has them.
    pub fn wait(self, b: &B) -> Result<T> {
        (self.0)(b)
    }
}

impl<B: Backend, T> Debug for Transfer<B, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Transfer")
    }
}

/// The ranks of a run, by what is divided among them: a communicator for each axis. Whoever asks for a rank or a number of ranks says along
/// which axis.
///
/// There are dp · ep ranks; rank = dp rank · ep + ep rank. Of every layer with experts, the ep ranks of one replica hold all of them, each its
/// part; the dp replicas hold the same. With all else that is trained, each rank computes. F32 masters and moments are divided among the ranks
/// that compute with the same weights: each keeps its rows. The tokens of a batch are divided among all ranks, in order, so that a replica's are
/// consecutive.
#[derive(Debug)]
pub struct Mesh<'a, B: Backend> {
    /// Every rank. Each has its own part of a batch, so losses, loads, reports and the gradients of what each rank computes with meet here; so do
    /// the values that a checkpoint writes.
    pub all: &'a dyn Comm<B>,
    /// The ranks that a layer's experts are divided among: rows go to their experts over it.
    pub ep: &'a dyn Comm<B>,
    /// The ranks that compute with the same experts: their gradients meet here, and before a step their weights.
    pub dp: &'a dyn Comm<B>,
}

/// How many ranks there are along each axis of a [`Mesh`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct MeshShape {
    /// Replicas of the experts.
    pub dp: usize,
    /// Ranks that experts are divided among.
    pub ep: usize,
}

impl MeshShape {
    /// One rank.
    pub const ONE: Self = Self { dp: 1, ep: 1 };

    /// All of them.
    pub fn ranks(&self) -> usize {
        self.dp * self.ep
    }

    /// Where a rank stands along both axes: (dp rank, ep rank).
    pub fn place(&self, rank: usize) -> (usize, usize) {
        (rank / self.ep, rank % self.ep)
    }

    /// The ranks of a replica, which divide its experts.
    pub fn replica(&self, dp_rank: usize) -> Vec<usize> {
        (0..self.ep).map(|e| dp_rank * self.ep + e).collect()
    }

    /// The ranks that hold the same experts, one of each replica.
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
    /// Experts divided among all ranks: no two hold the same.
    pub fn new(all: &'a dyn Comm<B>) -> Self {
        Self { all, ep: all, dp: &SoloComm }
    }

    /// How many ranks there are along each axis.
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
    /// The ranks that experts are divided among.
    pub ep: C,
    /// The ranks that hold the same experts.
    pub dp: C,
}

impl<C> Axes<C> {
    /// The mesh that they make.
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

/// Checks that the part of a rank alone is everything: there is nobody to have another.
fn all_of(call: &'static str, parts: &[Range<usize>], len: usize) -> Result<()> {
    match parts {
        [all] if *all == (0..len) => Ok(()),
        _ => Err(Error::shape(call, "parts", format!("{parts:?}"), format!("all {len} in one"))),
    }
}
