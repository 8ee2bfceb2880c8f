//! The embedding of tokens. Legend: t tokens, d model, v vocabulary.

use crate::cx::Cx;
use crate::ledger::{Ledger, Saved};
use crate::param::{Param, Wanted, Writes};
use crate::spec::Part;
use nibble_core::ops::{Embed, EmbedBackward, EmbedOut};
use nibble_core::{Kernels, Result, Tensor};

/// The embedding. The embedding is not a [`Layer`](super::Layer), because its input, token ids, has no gradient. The embedding reads its
/// weight directly; only a tied head makes copies of the weight for matrix products.
#[derive(Debug, Clone)]
pub struct Embedding<B: Kernels> {
    /// The weight `[v, d]`.
    pub weight: Param<B>,
}

/// The saved token ids.
#[derive(Debug)]
pub struct EmbeddingSaved<B: Kernels> {
    layer: String,
    ids: B::Buf<i32>,
}

impl<B: Kernels> Saved for EmbeddingSaved<B> {
    fn ledger(&self, ledger: &mut Ledger) {
        ledger.words::<B, i32>(&self.layer, "ids", &self.ids);
    }
}

impl<B: Kernels> Embedding<B> {
    /// Creates the embedding with random weights. This rank stores its own rows of the F32 master; every rank computes with all rows.
    pub fn new(cx: &Cx<'_, B>, part: &Part) -> Result<Self> {
        Ok(Self { weight: Param::only(cx, part)? })
    }

    /// See [`Layer::wanted`](super::Layer::wanted).
    pub fn wanted(&self) -> Vec<Wanted<'_, B>> {
        vec![self.weight.as_it_is()]
    }

    /// The embedding's parameter.
    pub fn params(&mut self) -> Vec<&mut Param<B>> {
        vec![&mut self.weight]
    }

    /// The vectors `[t, d]` of the tokens, and the number of tokens that are not in the vocabulary.
    pub fn forward(&self, cx: &Cx<'_, B>, ids: &B::Buf<i32>) -> Result<EmbedOut<B>> {
        Embed { table: self.weight.plain()?, ids, dtype: cx.activations() }.run(cx.b)
    }

    /// The token ids, which the backward pass needs.
    pub fn saved(&self, ids: B::Buf<i32>) -> EmbeddingSaved<B> {
        EmbeddingSaved { layer: self.weight.layer().to_owned(), ids }
    }

    /// Adds the gradient of the weight, computed from the gradient of the vectors.
    pub fn backward(&mut self, cx: &Cx<'_, B>, saved: EmbeddingSaved<B>, dy_td: &Tensor<B>) -> Result<()> {
        let shards = cx.shards.local;
        self.weight.add_gradient(cx, Writes::Adds, |grad, _| {
            EmbedBackward { ids: &saved.ids, dy: dy_td, grad, shards }.run(cx.b)
        })
    }
}
