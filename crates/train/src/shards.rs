//! The tokens that a rank holds of a micro-batch: their shards, the parts of experts' rows, their documents, and the spans of tensors with a scale each.

use crate::config::Balance;
use nibble_core::ops::{FindWindows, Windows};
use nibble_core::{Groups, Kernels, MeshShape, Result};

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

/// The parts of a micro-batch, over all ranks, that an expert's weight gradient is a tree over.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ExpertParts {
    /// How many of them this rank's replica of the experts has.
    pub local: usize,
    /// Tokens of each.
    pub tokens: usize,
}

impl ExpertParts {
    /// Of micro-batches of so many tokens over all ranks, which are cut into `parts` of which `dp` replicas have as many each.
    pub fn of(tokens: usize, parts: usize, dp: usize) -> Self {
        Self { local: parts / dp.max(1), tokens: tokens / parts.max(1) }
    }
}

impl<B: Kernels> Shards<B> {
    /// `local` shards of `rows_each` tokens on this rank, each of them one sequence; every rank has as many. `run` says which run of so many tokens
    /// of the step this is: micro-batch · ranks + rank.
    ///
    /// # Errors
    /// [`nibble_core::Error::Device`] from the backend.
    pub fn new(b: &B, local: usize, rows_each: usize, run: usize) -> Result<Self> {
        let align = if rows_each.is_multiple_of(128) { 128 } else { 1 };
        let tokens = local * rows_each;
        let groups = Groups::uniform(b, local, rows_each, align, run * tokens)?;
        Ok(Self { local, sequences: local, groups, expert_parts: ExpertParts { local: 1, tokens } })
    }

    /// The same with the rows of experts divided so.
    pub fn with_expert_parts(self, expert_parts: ExpertParts) -> Self {
        Self { expert_parts, ..self }
    }

    /// The same tokens in sequences of this length.
    pub fn with_sequences_of(self, seq_len: usize) -> Self {
        let sequences = self.tokens() / seq_len.max(1);
        Self { sequences, ..self }
    }

    /// Runs of this rank's tokens that have a load-balancing loss of their own, or a part of the one of all: shards, or sequences.
    pub fn balance_runs(&self, balance: Balance) -> usize {
        if balance == Balance::Sequence { self.sequences } else { self.local }
    }

    /// Tokens on this rank.
    pub fn tokens(&self) -> usize {
        self.groups.capacity
    }
}

/// Documents that are kept apart.
#[derive(Debug, Clone)]
pub struct Documents<B: Kernels> {
    /// Of each token the index within its sequence at which its document begins.
    pub starts: B::Buf<i32>,
    /// Which keys each query sees: those of its document.
    pub windows: Windows<B>,
}

impl<B: Kernels> Documents<B> {
    /// Those of sequences of this length.
    ///
    /// # Errors
    /// From the backend; for tokens that are no whole sequences.
    pub fn find(b: &B, starts: &B::Buf<i32>, seq_len: usize) -> Result<Self> {
        let windows = FindWindows { document: starts, seq_len, window: None, chunk: None }.run(b)?;
        Ok(Self { starts: starts.clone(), windows })
    }
}

/// What the spans of a tensor are, and so which of all ranks' a rank has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Spans {
    /// A dense weight: one, the same on every rank.
    Whole,
    /// A dense activation or gradient: its shards, those of each rank behind those of the one before.
    Shards,
    /// Weights of experts: the experts, the same on the ranks that hold them.
    Experts,
    /// Activations and gradients of experts: (expert, part).
    ExpertParts,
}

/// What a rank has of everything that has spans.
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

    /// How often this rank's spans make up those of all ranks.
    pub(crate) fn parts(self, mesh: MeshShape) -> usize {
        match self {
            Self::Whole => 1,
            Self::Experts => mesh.ep,
            Self::Shards | Self::ExpertParts => mesh.ranks(),
        }
    }

    /// The number among all ranks' spans of each of a rank's `local` spans, of which an expert has `expert_parts`.
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
