//! The saved activations of a half of a decoder layer, which the backward pass may recompute: either everything that the half's backward
//! pass reads, or only the half's input.
//!
//! `Kept::all` returns all of these activations. If only the input was saved, `Kept::all` runs the half's forward pass again up to the last
//! product, because the backward pass does not read that product's output. A wider scope of recomputation replaces the scopes inside it, so
//! nothing is computed three times.

use crate::cx::Cx;
use crate::ledger::{Ledger, Saved};
use nibble_core::{Backend, Kernels, Result, Tensor};

/// The saved activations of a part of the model: everything that its backward pass reads, or only its input.
#[derive(Debug)]
pub(super) enum Kept<B: Backend, S> {
    /// All activations that the backward pass reads.
    All(S),
    /// The input from which all activations are recomputed.
    Input {
        /// The name of the first layer of the part.
        layer: String,
        /// The residual stream, `[t, d]`.
        x_td: Tensor<B>,
    },
}

impl<B: Kernels, S> Kept<B, S> {
    /// The activations to save of a forward pass from `x_td`: only the input if `input_alone`.
    pub(super) fn of(input_alone: bool, layer: String, x_td: &Tensor<B>, saved: S) -> Self {
        if input_alone { Self::Input { layer, x_td: x_td.clone() } } else { Self::All(saved) }
    }

    /// Returns all activations. If only the input was saved, `again` recomputes the activations from it.
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
