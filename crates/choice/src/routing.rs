//! Routing: how slots are counted, and the sums of a router's losses.

use crate::Temporary;
use nibble_core::Backend;
use nibble_core::ops::Route;

/// The most slots a token for which a GPU has `combine_tree`. A CPU has it for any number.
pub const MOST_TREE_SLOTS: usize = 32;
/// Slots that a CTA of `plan_permute` sorts at once.
pub const PLAN_PASS: usize = 2048;
/// The most passes of a chunk: its counts are 16 bits.
const MOST_PASSES: usize = 16;
/// The most chunks, unless the passes of one are not enough: each CTA reads the counts of all of them, so there should not be many more than
/// multiprocessors.
const CHUNKS: usize = 256;

/// How `plan_permute` counts: slots in chunks, each of which a CTA takes in some passes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PlanChunks {
    /// Counts of a chunk: one for each group, rounded up for loads of 16 bytes.
    pub columns: usize,
    /// A chunk has this many times [`PLAN_PASS`] slots.
    pub passes: usize,
    /// How many there are.
    pub chunks: usize,
}

impl PlanChunks {
    /// Of so many slots for so many groups.
    pub fn new(slots: usize, groups: usize) -> Self {
        let columns = groups.next_multiple_of(8);
        let passes = slots.div_ceil(PLAN_PASS * CHUNKS).clamp(1, MOST_PASSES);
        Self { columns, passes, chunks: slots.div_ceil(passes * PLAN_PASS) }
    }

    /// Slots of each group in each chunk.
    pub const fn counts(&self) -> usize {
        self.chunks * self.columns
    }

    /// What the plan takes beside its result.
    pub const fn temporary(&self) -> Temporary {
        Temporary::new("slots of each group in each chunk", self.counts() * size_of::<u16>())
    }
}

/// Sums of a router's losses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RouteSums {
    /// Chunks of tokens of a shard.
    pub chunks_of_shard: usize,
    /// Chunks of all shards.
    pub chunks: usize,
    tokens: usize,
    experts: usize,
    shards: usize,
}

impl RouteSums {
    /// Of so many tokens in so many shards.
    pub fn new<B: Backend>(tokens: usize, shards: usize, experts: usize) -> Self {
        let chunks_of_shard = (tokens / shards.max(1)).div_ceil(Route::<B>::CHUNK);
        Self { chunks_of_shard, chunks: shards * chunks_of_shard, tokens, experts, shards }
    }

    /// What the sums take, in this order: of each chunk an expert's probabilities, the squares, an expert's slots; of each shard an expert's products.
    pub fn temporaries(&self) -> [Temporary; 4] {
        let Self { chunks, experts, shards, .. } = *self;
        [
            Temporary::new("probabilities", chunks * experts * size_of::<f32>()),
            Temporary::new("squares", chunks * size_of::<f32>()),
            Temporary::new("slots", chunks * experts * size_of::<i32>()),
            Temporary::new("products", shards * experts * size_of::<f64>()),
        ]
    }

    /// Slots of each document's experts: a row for each token, which begins on 16 bytes.
    pub const fn document_slots(&self) -> usize {
        self.tokens * self.experts.next_multiple_of(4)
    }

    /// What documents take in either pass: slots of their experts, and their tokens.
    pub fn of_documents(&self) -> [Temporary; 2] {
        [
            Temporary::new("slots of documents", self.document_slots() * size_of::<i32>()),
            Temporary::new("tokens of documents", self.tokens * size_of::<i32>()),
        ]
    }

    /// What they take in the forward pass beside that: of each chunk the sum of parts of their losses.
    pub fn of_document_losses(&self) -> Temporary {
        Temporary::new("losses of documents", self.chunks * size_of::<f32>())
    }
}
