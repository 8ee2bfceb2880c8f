//! What a half of a decoder layer saves where the backward pass may recompute it: everything that its backward pass reads, or the half's
//! input alone.
//!
//! `Kept::all` returns everything. If only the input was saved, it runs the half's forward pass again up to its last product, whose
//! output nobody reads. A wider scope of recomputation replaces those inside it, so nothing is computed three times.

use crate::cx::Cx;
use crate::ledger::{Ledger, Saved};
use nibble_core::{Backend, Kernels, Result, Tensor};

/// What a part of the model saves: everything that its backward pass reads, or its input alone.
#[derive(Debug)]
pub(super) enum Kept<B: Backend, S> {
    /// Everything.
    All(S),
    /// What everything is recomputed from.
    Input {
        /// The first layer of the part.
        layer: String,
        /// The residual stream, `[t, d]`.
        x_td: Tensor<B>,
    },
}

impl<B: Kernels, S> Kept<B, S> {
    /// What is saved of a forward pass from `x_td`.
    pub(super) fn of(input_alone: bool, layer: String, x_td: &Tensor<B>, saved: S) -> Self {
        if input_alone { Self::Input { layer, x_td: x_td.clone() } } else { Self::All(saved) }
    }

    /// Everything. If only the input was saved, `again` recomputes everything from it.
    pub(super) fn all(self, cx: &Cx<'_, B>, again: impl FnOnce(&Tensor<B>) -> Result<S>) -> Result<S> {
        match self {
            Self::All(saved) => Ok(saved),
            Self::Input { x_td, .. } => cx.again(|| again(&x_td)),
        }
    }
}

impl<B: Backend, S: Saved> Saved for Kept<B, S> {
    fn ledger(&self, ledger: &mut Ledger) {
        match self {
            Self::All(saved) => saved.ledger(ledger),
            Self::Input { layer, x_td } => ledger.tensor(layer, "x", x_td),
        }
    }
}
