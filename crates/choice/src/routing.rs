//! Routing on a GPU: how slots are counted, and the partial sums of a router's losses.

use crate::Temporary;
use nibble_core::Backend;
use nibble_core::ops::Route;

/// Maximum number of slots per token of `combine_tree` on a GPU. A CPU has no limit.
pub const MOST_TREE_SLOTS: usize = 32;
/// Number of slots that a CTA of `plan_permute` sorts in one pass.
pub const PLAN_PASS: usize = 2048;
/// Maximum number of passes per chunk, because a chunk's counts have 16 bits.
const MOST_PASSES: usize = 16;
/// Maximum number of chunks, unless one chunk would need too many passes. Each CTA reads the counts of all chunks, so there should not be
/// many more chunks than multiprocessors.
const CHUNKS: usize = 256;

/// The division of slots into chunks in which `plan_permute` counts them. One CTA counts a chunk, in several passes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PlanChunks {
    /// The number of counts of a chunk, which is one per group, rounded up so that threads can load 16 bytes at a time.
    pub columns: usize,
    /// Number of passes per chunk, of [`PLAN_PASS`] slots each.
    pub passes: usize,
    /// Number of chunks.
    pub chunks: usize,
}

impl PlanChunks {
    /// The chunks for `slots` slots and `groups` groups.
    pub fn new(slots: usize, groups: usize) -> Self {
        let columns = groups.next_multiple_of(8);
        let passes = slots.div_ceil(PLAN_PASS * CHUNKS).clamp(1, MOST_PASSES);
        Self { columns, passes, chunks: slots.div_ceil(passes * PLAN_PASS) }
    }

    /// Number of counts: one per chunk and group.
    pub const fn counts(&self) -> usize {
        self.chunks * self.columns
    }

    /// Temporary memory of `plan_permute`.
    pub const fn temporary(&self) -> Temporary {
        Temporary::new("slots of each group in each chunk", self.counts() * size_of::<u16>())
    }
}

/// The division of tokens into chunks when the losses of a router are summed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RouteSums {
    /// Number of chunks of tokens per shard.
    pub chunks_of_shard: usize,
    /// Number of chunks of all shards together.
    pub chunks: usize,
    tokens: usize,
    experts: usize,
    shards: usize,
}

impl RouteSums {
    /// The chunks for `tokens` tokens in `shards` shards.
    pub fn new<B: Backend>(tokens: usize, shards: usize, experts: usize) -> Self {
        let chunks_of_shard = (tokens / shards.max(1)).div_ceil(Route::<B>::CHUNK);
        Self { chunks_of_shard, chunks: shards * chunks_of_shard, tokens, experts, shards }
    }

    /// The buffers of partial sums: probabilities per chunk and expert, squared log-sum-exps per chunk, numbers of slots per chunk and
    /// expert, and products per shard and expert.
    pub fn temporaries(&self) -> [Temporary; 4] {
        let Self { chunks, experts, shards, .. } = *self;
        [
            Temporary::new("probabilities", chunks * experts * size_of::<f32>()),
            Temporary::new("squares", chunks * size_of::<f32>()),
            Temporary::new("slots", chunks * experts * size_of::<i32>()),
            Temporary::new("products", shards * experts * size_of::<f64>()),
        ]
    }

    /// The number of values in the buffer that counts slots per document and expert. The buffer has one row per token, aligned to 16 bytes.
    pub const fn document_slots(&self) -> usize {
        self.tokens * self.experts.next_multiple_of(4)
    }

    /// The buffers for documents in the forward or backward pass: the number of slots per document and expert, and the number of tokens per
    /// document.
    pub fn of_documents(&self) -> [Temporary; 2] {
        [
            Temporary::new("slots of documents", self.document_slots() * size_of::<i32>()),
            Temporary::new("tokens of documents", self.tokens * size_of::<i32>()),
        ]
    }

    /// The additional buffer for documents in the forward pass, with one partial sum of document losses per chunk.
    pub fn of_document_losses(&self) -> Temporary {
        Temporary::new("losses of documents", self.chunks * size_of::<f32>())
    }
}
