//! The tokens that a rank holds of a micro-batch: their shards, the parts of experts' rows, which keys they see, and the spans of tensors
//! with a scale each.
//!
//! A micro-batch is cut into a fixed number of shards (`train.shards`, a power of two that the number of ranks divides). The order of every
//! sum over tokens depends on these shards and not on the ranks. Every mesh therefore gives the same bits, unless `run.reductions = "nccl"`
//! leaves sums to NCCL.
//!
//! * Gradients of dense weights, norms, router and embedding: the rows of a shard are summed in order. (For norms, and for the tokens of
//!   one id, 64 rows are summed in order, then a tree sums the results.) Then the tree ((0+1)+(2+3))… sums the shards: first the shards of
//!   a rank, then the ranks.
//! * Gradients of expert weights: the rows of an expert within a part are summed in global order, micro-batch after micro-batch. Then the
//!   same tree sums the parts: first the parts of a replica, then the replicas.
//! * Combine: with `train.combine = "slots"`, a token's rows are summed in slot order, in F32, and rounded once. With `"tree"`, a binary
//!   tree over the layer's experts sums the rows; each node adds its two halves in F32 and rounds to the type of the rows.
//! * Loss and router losses: the losses of each shard (router losses under `model.balance = "sequence"`: of each sequence) are gathered,
//!   then added in a fixed order.
//! * Norm of the gradient: each tensor or expert is cut into chunks of fixed size. A chunk is summed on the rank that has its rows, and a
//!   tree sums the chunks. Then the sums of tensors and experts are added in the order of the parameters.
//!
//! Ranks hold consecutive shards, and replicas hold consecutive parts, so each sum is the same tree for any number of ranks or replicas. A
//! micro-batch has `train.expert_shards` equal parts (1 by default), over all ranks.
//!
//! If a step has one micro-batch, a BF16 gradient is rounded once, after the F32 sum over its shards (or parts) and ranks. With several
//! micro-batches, each shard's gradient is rounded after every micro-batch, and the shards are summed in F32 at the end of the step.
//!
//! Blocks cross no border of a shard or a part. Column blocks of dense tensors are 128 tokens of one shard, and the rows of an expert's
//! part begin at multiples of 128.
//!
//! `train.shards`, `train.expert_shards` and `train.combine` are therefore fixed properties of a run: other values give other bits. A
//! resumed run may change the last two settings, if the user explicitly asks for the change.

use crate::config::{Balance, ModelConfig};
use nibble_core::ops::{FindWindows, Windows};
use nibble_core::{Error, Groups, Kernels, MeshShape, Result};

/// This rank's tokens of a micro-batch, divided into shards.
#[derive(Debug, Clone)]
pub struct Shards<B: Kernels> {
    /// Number of shards on this rank.
    pub local: usize,
    /// Number of sequences on this rank, which all have the same length.
    pub sequences: usize,
    /// The shards as groups of rows of different lengths. The wgrad GEMMs of dense layers contract over the rows of each of these groups.
    pub groups: Groups<B>,
    /// How the rows of each expert are divided into parts.
    pub expert_parts: ExpertParts,
}

/// The parts into which a micro-batch is divided, over all ranks. An expert's weight gradient is computed for each part, and a tree sums
/// the results.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ExpertParts {
    /// Number of parts of this rank's replica of the experts.
    pub local: usize,
    /// Number of tokens of one part.
    pub tokens: usize,
}

impl ExpertParts {
    /// Describes micro-batches of `tokens` tokens (the sum over all ranks), which are divided into `parts` equal parts. Each of `dp` replicas
    /// has the same number of parts.
    pub fn of(tokens: usize, parts: usize, dp: usize) -> Self {
        Self { local: parts / dp.max(1), tokens: tokens / parts.max(1) }
    }
}

impl<B: Kernels> Shards<B> {
    /// Creates `local` shards of `rows_each` tokens on this rank, with one sequence per shard. Every rank has the same number of shards.
    /// `run` is the index of this block of `local · rows_each` tokens within a step: micro-batch · ranks + rank.
    ///
    /// # Errors
    /// Returns [`nibble_core::Error::Device`] from the backend.
    pub fn new(b: &B, local: usize, rows_each: usize, run: usize) -> Result<Self> {
        let align = if rows_each.is_multiple_of(128) { 128 } else { 1 };
        let tokens = local * rows_each;
        let groups = Groups::uniform(b, local, rows_each, align, run * tokens)?;
        Ok(Self { local, sequences: local, groups, expert_parts: ExpertParts { local: 1, tokens } })
    }

    /// The same shards, with the rows of experts divided into the given parts.
    pub fn with_expert_parts(self, expert_parts: ExpertParts) -> Self {
        Self { expert_parts, ..self }
    }

    /// The same shards, with their tokens divided into sequences of this length.
    pub fn with_sequences_of(self, seq_len: usize) -> Self {
        let sequences = self.tokens() / seq_len.max(1);
        Self { sequences, ..self }
    }

    /// Number of groups of this rank's tokens that have a separate load-balancing loss, or a share of a common loss: the shards, or the
    /// sequences.
    pub fn balance_runs(&self, balance: Balance) -> usize {
        if balance == Balance::Sequence { self.sequences } else { self.local }
    }

    /// Number of tokens on this rank.
    pub fn tokens(&self) -> usize {
        self.groups.capacity
    }
}

/// The masks that apply to a batch in addition to the causal mask: the masks of documents (`data.document_mask`) and of sliding windows.
#[derive(Debug, Clone)]
pub struct Sight<B: Kernels> {
    /// With document masking, the index within its sequence at which each token's document begins.
    pub starts: Option<B::Buf<i32>>,
    /// In layers without a sliding window; `None` if documents are not kept apart, or no layer needs it.
    full: Option<Windows<B>>,
    /// In layers with a sliding window; `None` if no layer has one that hides a key.
    sliding: Option<Windows<B>>,
}

/// Each query sees its sequence up to itself.
impl<B: Kernels> Default for Sight<B> {
    fn default() -> Self {
        Self { starts: None, full: None, sliding: None }
    }
}

impl<B: Kernels> Sight<B> {
    /// Computes the keys to which queries attend in this model's layers, in a batch of `tokens` tokens in sequences of `seq_len`
    /// tokens. `starts` becomes the field `starts` of the result. The windows of each kind of layer are computed once, and only if
    /// the model has such layers.
    ///
    /// # Errors
    /// Passes on errors of the backend, and returns an error if the tokens are not whole sequences.
    pub fn find(
        b: &B,
        model: &ModelConfig,
        starts: Option<&B::Buf<i32>>,
        (tokens, seq_len): (usize, usize),
    ) -> Result<Self> {
        // A window of a whole sequence hides nothing.
        let window = Some(model.sliding_window).filter(|window| (1..seq_len).contains(window));
        let has_full = window.is_none() || (0..model.layers).any(|layer| model.window_of(layer).is_none());
        let find = |document, window| FindWindows { document, seq_len, window }.run(b);
        let full = starts.filter(|_| has_full).map(|starts| find(starts, None)).transpose()?;
        let sliding = match (window, starts) {
            (None, _) => None,
            (Some(_), Some(starts)) => Some(find(starts, window)?),
            // Each sequence is one document.
            (Some(_), None) => Some(find(&b.zeros(tokens)?, window)?),
        };
        Ok(Self { starts: starts.cloned(), full, sliding })
    }

    /// The windows of a layer with this sliding window (or without one), in sequences of `seq_len` tokens. `None` if every query attends to
    /// all keys of its sequence up to the query's own position.
    ///
    /// # Errors
    /// Returns an error if the layer has a window that hides keys, but no such windows were computed.
    pub fn windows(&self, window: Option<usize>, seq_len: usize) -> Result<Option<&Windows<B>>> {
        match (window, &self.sliding) {
            (Some(window), Some(sliding)) if window < seq_len => Ok(Some(sliding)),
            (Some(window), None) if window < seq_len => {
                Err(Error::Defect { place: "attention", what: "sliding windows were not found" })
            }
            _ => Ok(self.full.as_ref()),
        }
    }
}

/// How a tensor is divided into spans, each of which has one delayed scale. The kind of division determines which of the spans a rank has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Spans {
    /// Dense weight: one span, which is the same on every rank.
    Whole,
    /// Dense activation or gradient: one span per shard, in the order of the ranks.
    Shards,
    /// Weights of experts: one span per expert. The span is the same on every rank that holds the expert.
    Experts,
    /// Activations and gradients of experts: one span per (expert, part) pair.
    ExpertParts,
}

/// Numbers of spans on one rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SpanCounts {
    /// Number of shards of a micro-batch.
    pub shards: usize,
    /// Number of experts of a layer.
    pub experts: usize,
    /// Number of parts of an expert's rows.
    pub expert_parts: usize,
}

impl Spans {
    /// Number of spans of a tensor on a rank.
    pub(crate) fn on_a_rank(self, of: SpanCounts) -> usize {
        match self {
            Self::Whole => 1,
            Self::Shards => of.shards,
            Self::Experts => of.experts,
            Self::ExpertParts => of.experts * of.expert_parts,
        }
    }

    /// The number of spans over all ranks, divided by the number on one rank.
    pub(crate) fn parts(self, mesh: MeshShape) -> usize {
        match self {
            Self::Whole => 1,
            Self::Experts => mesh.ep,
            Self::Shards | Self::ExpertParts => mesh.ranks(),
        }
    }

    /// The global number of each of a rank's `local` spans. `expert_parts` is the number of parts of an expert on a rank.
    pub(crate) fn of_rank(
        self,
        rank: usize,
        mesh: MeshShape,
        local: usize,
        expert_parts: usize,
    ) -> impl Iterator<Item = usize> {
        let ((d, e), parts) = (mesh.place(rank), expert_parts.max(1));
        (0..local).map(move |i| match self {
            Self::Whole => i,
            Self::Shards => rank * local + i,
            Self::Experts => e * local + i,
            Self::ExpertParts => {
                let expert = e * (local / parts) + i / parts;
                (expert * mesh.dp + d) * parts + i % parts
            }
        })
    }
}
