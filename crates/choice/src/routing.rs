//! Routing: how slots are counted, and the partial sums of a router's losses.

use crate::Temporary;
use nibble_core::Backend;
use nibble_core::ops::Route;

/// Most slots per token of `combine_tree` on a GPU. A CPU has no limit.
pub const MOST_TREE_SLOTS: usize = 32;
/// Slots that a CTA of `plan_permute` sorts at once.
pub const PLAN_PASS: usize = 2048;
/// Most passes per chunk: its counts have 16 bits.
const MOST_PASSES: usize = 16;
/// Most chunks, unless one chunk would need too many passes. Each CTA reads the counts of all chunks, so there should not be many more than
/// multiprocessors.
const CHUNKS: usize = 256;

/// How `plan_permute` counts slots: in chunks. One CTA counts a chunk, in several passes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PlanChunks {
    /// Counts of a chunk: one for each group, rounded up for loads of 16 bytes.
    pub columns: usize,
    /// Passes per chunk, of [`PLAN_PASS`] slots each.
    pub passes: usize,
    /// Number of chunks.
    pub chunks: usize,
}

impl PlanChunks {
    /// For `slots` slots and `groups` groups.
    pub fn new(slots: usize, groups: usize) -> Self {
        let columns = groups.next_multiple_of(8);
        let passes = slots.div_ceil(PLAN_PASS * CHUNKS).clamp(1, MOST_PASSES);
        Self { columns, passes, chunks: slots.div_ceil(passes * PLAN_PASS) }
    }

    /// Number of counts: one per chunk and group.
    pub const fn counts(&self) -> usize {
        self.chunks * self.columns
    }

    /// Temporary memory of the plan.
    pub const fn temporary(&self) -> Temporary {
        Temporary::new("slots of each group in each chunk", self.counts() * size_of::<u16>())
    }
}

/// Partial sums of a router's losses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RouteSums {
    /// Chunks of tokens per shard.
    pub chunks_of_shard: usize,
    /// Chunks of all shards.
    pub chunks: usize,
    tokens: usize,
    experts: usize,
    shards: usize,
}

impl RouteSums {
    /// For `tokens` tokens in `shards` shards.
    pub fn new<B: Backend>(tokens: usize, shards: usize, experts: usize) -> Self {
        let chunks_of_shard = (tokens / shards.max(1)).div_ceil(Route::<B>::CHUNK);
        Self { chunks_of_shard, chunks: shards * chunks_of_shard, tokens, experts, shards }
    }

    /// Memory, in order: probabilities by chunk and expert, squares by chunk, slots by chunk and expert, products by shard and expert.
    pub fn temporaries(&self) -> [Temporary; 4] {
        let Self { chunks, experts, shards, .. } = *self;
        [
            Temporary::new("probabilities", chunks * experts * size_of::<f32>()),
            Temporary::new("squares", chunks * size_of::<f32>()),
            Temporary::new("slots", chunks * experts * size_of::<i32>()),
            Temporary::new("products", shards * experts * size_of::<f64>()),
        ]
    }

    /// Slots of each document's experts: a row per token, aligned to 16 bytes.
    pub const fn document_slots(&self) -> usize {
        self.tokens * self.experts.next_multiple_of(4)
    }

    /// Temporary memory for documents in either pass: slots of their experts, and their tokens.
    pub fn of_documents(&self) -> [Temporary; 2] {
        [
            Temporary::new("slots of documents", self.document_slots() * size_of::<i32>()),
            Temporary::new("tokens of documents", self.tokens * size_of::<i32>()),
        ]
    }

    /// More of it in the forward pass: a partial sum of document losses per chunk.
    pub fn of_document_losses(&self) -> Temporary {
        Temporary::new("losses of documents", self.chunks * size_of::<f32>())
    }
}
