//! The tokens that a rank holds of a micro-batch: their shards, the parts of experts' rows, which keys they see, and the spans of tensors
//! with a scale each.
//!
//! A micro-batch is cut into a fixed number of shards (`train.shards`, a power of two that the number of ranks divides). Every sum over
//! tokens has an order that follows from these shards and not from the ranks, so every mesh gives the same bits, unless `run.reductions =
//! "nccl"` leaves sums to NCCL.
//!
//! * Gradients of dense weights, norms, router and embedding: the rows of a shard in order (for norms, and for the tokens of an id: 64 in
//!   order, then a tree), then the shards by the tree ((0+1)+(2+3))…: first those of a rank, then the ranks.
//! * Gradients of expert weights: the rows of an expert within a part, in global order, micro-batch after micro-batch; then the parts by
//!   the same tree: first those of a replica, then the replicas.
//! * Combine: with `train.combine = "slots"`, a token's rows in slot order, in F32, rounded once. With `"tree"`, a binary tree over the
//!   layer's experts; each node adds its two halves in F32 and rounds to the type of the rows.
//! * Loss and router losses: per shard (router losses under `model.balance = "sequence"`: per sequence), gathered, then added in a fixed
//!   order.
//! * Norm of the gradient: chunks of fixed size of each tensor or expert, each on the rank that has its rows, and a tree over them; then
//!   the sums of tensors and experts in the order of the parameters.
//!
//! Ranks hold consecutive shards, and replicas consecutive parts, so each sum is one tree for any number of them. A micro-batch has
//! `train.expert_shards` equal parts (1 by default), over all ranks.
//!
//! A BF16 gradient is rounded once, after its shards (or parts) and ranks are summed in F32, where a step has one micro-batch. With
//! several, each shard's gradient is rounded after every pass, and shards are summed in F32 at the end of the step.
//!
//! Blocks cross no border of a shard or a part: column blocks of dense tensors are 128 tokens of one shard, and the rows of an expert's
//! part begin at multiples of 128.
//!
//! `train.shards`, `train.expert_shards` and `train.combine` therefore belong to a run: other values give other bits. A run that resumes
//! may change the last two, where that is asked for.

use crate::config::{Balance, ModelConfig};
use nibble_core::ops::{FindWindows, Windows};
use nibble_core::{Error, Groups, Kernels, MeshShape, Result};

/// The tokens this rank holds of a micro-batch, in shards.
#[derive(Debug, Clone)]
pub struct Shards<B: Kernels> {
    /// Shards on this rank.
    pub local: usize,
    /// Sequences on this rank, all of one length.
    pub sequences: usize,
    /// The shards as ragged groups: the contraction of dense weight gradients.
    pub groups: Groups<B>,
    /// How the rows of experts are divided.
    pub expert_parts: ExpertParts,
}

/// The parts of a micro-batch, over all ranks. An expert's weight gradient is summed over them by a tree.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ExpertParts {
    /// Parts of this rank's replica of the experts.
    pub local: usize,
    /// Tokens of one part.
    pub tokens: usize,
}

impl ExpertParts {
    /// For micro-batches of `tokens` tokens over all ranks, cut into `parts` parts that `dp` replicas share equally.
    pub fn of(tokens: usize, parts: usize, dp: usize) -> Self {
        Self { local: parts / dp.max(1), tokens: tokens / parts.max(1) }
    }
}

impl<B: Kernels> Shards<B> {
    /// `local` shards of `rows_each` tokens on this rank, one sequence each; every rank has the same number. `run` numbers such blocks of
    /// `local · rows_each` tokens within a step: micro-batch · ranks + rank.
    ///
    /// # Errors
    /// [`nibble_core::Error::Device`] from the backend.
    pub fn new(b: &B, local: usize, rows_each: usize, run: usize) -> Result<Self> {
        let align = if rows_each.is_multiple_of(128) { 128 } else { 1 };
        let tokens = local * rows_each;
        let groups = Groups::uniform(b, local, rows_each, align, run * tokens)?;
        Ok(Self { local, sequences: local, groups, expert_parts: ExpertParts { local: 1, tokens } })
    }

    /// These shards with the given parts of experts' rows.
    pub fn with_expert_parts(self, expert_parts: ExpertParts) -> Self {
        Self { expert_parts, ..self }
    }

    /// These shards with their tokens in sequences of this length.
    pub fn with_sequences_of(self, seq_len: usize) -> Self {
        let sequences = self.tokens() / seq_len.max(1);
        Self { sequences, ..self }
    }

    /// Number of runs of this rank's tokens, each with its own load-balancing loss or its share of a common one: shards, or sequences.
    pub fn balance_runs(&self, balance: Balance) -> usize {
        if balance == Balance::Sequence { self.sequences } else { self.local }
    }

    /// Tokens on this rank.
    pub fn tokens(&self) -> usize {
        self.groups.capacity
    }
}

/// Which keys the queries of a batch see in a model's layers, in addition to the causal mask: documents that see only themselves
/// (`data.document_mask`), and sliding windows.
#[derive(Debug, Clone)]
pub struct Sight<B: Kernels> {
    /// If documents are kept apart: for each token, the index within its sequence at which its document begins.
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
    /// What queries see in this model's layers, in a batch of `tokens` tokens, in sequences of `seq_len`. `starts`: as in the result.
    /// Windows of each kind are found once, and only if there are layers of that kind.
    ///
    /// # Errors
    /// From the backend; if the tokens are not whole sequences.
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

    /// The windows of a layer with this sliding window, if it has one, in sequences of `seq_len` tokens; `None` if a query sees its
    /// sequence up to itself.
    ///
    /// # Errors
    /// If the layer has a window that hides keys, and none was found.
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

/// What the spans of a tensor are. This decides which of all ranks' spans a rank has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Spans {
    /// Dense weight: one span, the same on every rank.
    Whole,
    /// Dense activation or gradient: its shards, in the order of the ranks.
    Shards,
    /// Weights of experts: one span per expert, the same on every rank that holds the expert.
    Experts,
    /// Activations and gradients of experts: one span per (expert, part).
    ExpertParts,
}

/// Numbers of spans on one rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SpanCounts {
    /// Shards of a micro-batch.
    pub shards: usize,
    /// Experts of a layer.
    pub experts: usize,
    /// Parts of an expert's rows.
    pub expert_parts: usize,
}

impl Spans {
    /// Spans of a tensor on a rank.
    pub(crate) fn on_a_rank(self, of: SpanCounts) -> usize {
        match self {
            Self::Whole => 1,
            Self::Shards => of.shards,
            Self::Experts => of.experts,
            Self::ExpertParts => of.experts * of.expert_parts,
        }
    }

    /// The number of all ranks' spans, as a multiple of this rank's.
    pub(crate) fn parts(self, mesh: MeshShape) -> usize {
        match self {
            Self::Whole => 1,
            Self::Experts => mesh.ep,
            Self::Shards | Self::ExpertParts => mesh.ranks(),
        }
    }

    /// The number among all ranks' spans of each of a rank's `local` spans. `expert_parts`: parts of an expert on a rank.
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
