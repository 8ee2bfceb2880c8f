//! Sums gradients over ranks, several weights at a time, while the backward pass computes the next gradients.
//!
//! A gradient is put into a bucket right after its GEMM, or at the end of a step with several micro-batches. There is one bucket for dense
//! weights and one for experts. A bucket is sent when it contains 25 MiB, after the previous bucket has been awaited; at most two buckets
//! of a kind are in memory. The assignment of gradients to buckets, and the time at which a bucket is sent, change no bit.
//!
//! `begin_reduce_scatter_tree` sends each rank the rows that it keeps of every other rank's sum, and adds these rows by the tree of the
//! shards. The collective sends as many bytes as a ring, but sums in one fixed order. A BF16 gradient is rounded afterwards. With
//! `run.reductions = "nccl"`, NCCL computes the sum in its own order; no other setting of a run fails to preserve bits.

use super::placement::Placement;
use crate::fault::{Point, exchanging};
use nibble_core::allocation::in_part;
use nibble_core::ops::SumShards;
use nibble_core::{Comm, Data, Error, Kernels, Mesh, Result, Tensor, Transfer, TreeSum};
use std::collections::BTreeMap;
use std::ops::Range;

/// Number of bytes of F32 gradients that are sent together. Smaller buckets would not reach the full rate of a link. Larger buckets would
/// make the last bucket slower, which no computation overlaps. PyTorch's DDP uses the same size.
const BUCKET_BYTES: usize = 25 << 20;

/// Buffers that collect this rank's gradients until the gradients are summed over ranks.
///
/// Gradients enter a bucket in the order in which they become ready; this order is the same on all ranks that sum these gradients. A full
/// bucket is sent after the previous bucket has been received. So at most two buckets are in memory: one bucket that is being filled, and
/// one bucket in flight. A gradient as large as a bucket is sent alone.
#[derive(Debug)]
pub struct Buckets<B: Kernels> {
    bytes: usize,
    /// The bucket for weights that every rank holds.
    replicated: Lane<B>,
    /// The bucket for experts' weights.
    experts: Lane<B>,
}

impl<B: Kernels> Default for Buckets<B> {
    fn default() -> Self {
        Self::of_bytes(BUCKET_BYTES)
    }
}

impl<B: Kernels> Buckets<B> {
    /// Creates buckets of this size in bytes. The size of the buckets does not change any bit of a sum.
    pub fn of_bytes(bytes: usize) -> Self {
        Self { bytes, replicated: Lane::default(), experts: Lane::default() }
    }

    /// Puts a gradient into its bucket, and sends the bucket if it is full.
    pub(super) fn put(
        &mut self,
        (b, ranks): (&B, &dyn Comm<B>),
        placement: Placement,
        gradient: Summand<B>,
    ) -> Result<()> {
        let full = self.bytes;
        let lane = self.lane(placement);
        let bytes = size_of::<f32>() * B::len(&gradient.values);
        if bytes >= full {
            lane.send(b, ranks)?;
        }
        lane.open.push(gradient);
        lane.open_bytes += bytes;
        if lane.open_bytes >= full { lane.send(b, ranks) } else { Ok(()) }
    }

    /// Sends the open buckets, even if they are not full.
    pub(super) fn send(&mut self, b: &B, mesh: Mesh<'_, B>) -> Result<()> {
        self.replicated.send(b, mesh.all)?;
        self.experts.send(b, mesh.dp)
    }

    /// Waits for the gradient sum of the weight with this name, and for all gradients that were put in earlier. All ranks call this
    /// function in the same order.
    pub(super) fn take(
        &mut self,
        (b, ranks): (&B, &dyn Comm<B>),
        placement: Placement,
        name: &str,
    ) -> Result<Tensor<B>> {
        let lane = self.lane(placement);
        if !lane.done.contains_key(name) {
            lane.send(b, ranks)?;
            lane.receive(b)?;
        }
        let unknown = || Error::shape("gradients", "parameter", name, "one whose sum has begun");
        lane.done.remove(name).ok_or_else(unknown)
    }

    fn lane(&mut self, placement: Placement) -> &mut Lane<B> {
        match placement {
            Placement::Replicated => &mut self.replicated,
            Placement::Experts(_) => &mut self.experts,
        }
    }
}

/// A gradient that must be summed over ranks.
#[derive(Debug)]
pub(super) struct Summand<B: Kernels> {
    /// The name of the weight.
    pub name: String,
    /// This rank's gradient of all rows of the weight.
    pub values: B::Buf<f32>,
    /// For each rank, the range of values that the rank receives.
    pub parts: Vec<Range<usize>>,
    /// The tensor that receives the sum of this rank's rows: F32, or BF16, in which case the sum is rounded once.
    pub into: Tensor<B>,
}

/// The buckets of gradients that are summed over the same ranks.
#[derive(Debug)]
struct Lane<B: Kernels> {
    /// Gradients that have not been sent yet.
    open: Vec<Summand<B>>,
    open_bytes: usize,
    under_way: Option<(Transfer<B>, Vec<Destination<B>>)>,
    /// Finished sums, by the weight's name.
    done: BTreeMap<String, Tensor<B>>,
}

/// The destination of a sum in flight.
#[derive(Debug)]
struct Destination<B: Kernels> {
    name: String,
    shape: (usize, usize),
    /// The tensor into which the sum is rounded; `None` if the sum stays in F32.
    rounded: Option<Tensor<B>>,
}

impl<B: Kernels> Default for Lane<B> {
    fn default() -> Self {
        Self { open: Vec::new(), open_bytes: 0, under_way: None, done: BTreeMap::new() }
    }
}

impl<B: Kernels> Lane<B> {
    /// Sends the open bucket, after the previous bucket has been received.
    fn send(&mut self, b: &B, ranks: &dyn Comm<B>) -> Result<()> {
        if self.open.is_empty() {
            return Ok(());
        }
        self.receive(b)?;
        in_part("reduce", || self.send_open(b, ranks))
    }

    fn send_open(&mut self, b: &B, ranks: &dyn Comm<B>) -> Result<()> {
        exchanging(Point::Reduce)?;
        self.open_bytes = 0;
        let (mut sums, mut destinations) = (Vec::new(), Vec::new());
        for Summand { name, values, parts, into } in self.open.drain(..) {
            let shape = into.shape();
            let (into, rounded) = match into.data {
                Data::F32(into) => (into, None),
                Data::Bf16(_) => (b.alloc(shape.0 * shape.1)?, Some(into)),
            };
            sums.push(TreeSum { values, parts, into });
            destinations.push(Destination { name, shape, rounded });
        }
        self.under_way = Some((ranks.begin_reduce_scatter_tree(b, sums)?, destinations));
        Ok(())
    }

    /// Waits for the bucket in flight.
    fn receive(&mut self, b: &B) -> Result<()> {
        let Some((transfer, destinations)) = self.under_way.take() else { return Ok(()) };
        for (sum, Destination { name, shape: (rows, cols), rounded }) in
            in_part("reduce", || transfer.wait(b))?.into_iter().zip(destinations)
        {
            let sum = Tensor::new(Data::F32(sum), rows, cols)?;
            let sum = match rounded {
                None => sum,
                Some(mut into) => {
                    SumShards { x: &sum, stack: 1, shards: 1, into: &mut into }.run(b)?;
                    into
                }
            };
            self.done.insert(name, sum);
        }
        Ok(())
    }
}
