//! Attention of a decoder layer. A decoder layer chooses its kind of attention and its [`Feed`](super::Feed). Each kind of attention has
//! its own form of cache, for text that is generated token by token. Legend: t tokens, d model.

use crate::cx::Cx;
use crate::layers::{GroupedQuery, GroupedQuerySaved, KvCache, Latent, LatentSaved, Layer};
use crate::ledger::{Ledger, Saved};
use crate::param::{Param, Wanted};
use crate::recompute::Scope;
use crate::spec::AttentionSpec;
use nibble_core::{Error, Kernels, Result, Tensor};

/// The attention of one decoder layer.
#[derive(Debug, Clone)]
// A decoder layer stores one `Attention` in place, so a box would save nothing.
#[allow(clippy::large_enum_variant)]
pub enum Attention<B: Kernels> {
    /// Attention in which several query heads share keys and values (Qwen3, Llama).
    GroupedQuery(GroupedQuery<B>),
    /// Attention whose keys and values come from a latent (DeepSeek-V2, V3).
    Latent(Latent<B>),
}

/// The saved activations of attention.
#[derive(Debug)]
#[allow(clippy::large_enum_variant)] // as of `Attention`
pub enum AttentionSaved<B: Kernels> {
    /// The saved activations of heads that share keys and values.
    GroupedQuery(GroupedQuerySaved<B>),
    /// The saved activations of heads whose keys and values come from a latent.
    Latent(LatentSaved<B>),
}

/// The KV cache of one attention layer, for the tokens of a sequence so far.
#[derive(Debug)]
pub enum AttentionCache<B: Kernels> {
    /// The keys and values of each head.
    KeysValues(KvCache<B>),
}

impl<B: Kernels> AttentionCache<B> {
    /// Empties the cache, so that another sequence can use the cache.
    pub fn clear(&mut self) {
        let Self::KeysValues(cache) = self;
        cache.clear();
    }
}

impl<B: Kernels> Saved for AttentionSaved<B> {
    fn ledger(&self, ledger: &mut Ledger) {
        match self {
            Self::GroupedQuery(saved) => saved.ledger(ledger),
            Self::Latent(saved) => saved.ledger(ledger),
        }
    }
}

impl<B: Kernels> Attention<B> {
    /// Creates the attention layer with random weights; `rope` has one row per position of a sequence.
    pub fn new(cx: &Cx<'_, B>, spec: &AttentionSpec, rope: Tensor<B>) -> Result<Self> {
        Ok(match spec {
            AttentionSpec::GroupedQuery(spec) => Self::GroupedQuery(GroupedQuery::new(cx, spec, rope)?),
            AttentionSpec::Latent(spec) => Self::Latent(Latent::new(cx, spec, rope)?),
        })
    }

    /// A cache for one sequence.
    pub fn cache(&self, cx: &Cx<'_, B>) -> Result<AttentionCache<B>> {
        Ok(AttentionCache::KeysValues(match self {
            Self::GroupedQuery(layer) => layer.cache(cx.b, cx.activations())?,
            Self::Latent(layer) => layer.cache(cx.b, cx.activations())?,
        }))
    }

    /// Runs the forward pass for the next tokens of a sequence, and adds their keys and values to the cache. Several tokens at once are
    /// allowed only if the cache is empty.
    pub fn cached(
        &self,
        cx: &Cx<'_, B>,
        x_td: &Tensor<B>,
        cache: &mut AttentionCache<B>,
    ) -> Result<Tensor<B>> {
        let AttentionCache::KeysValues(cache) = cache;
        match self {
            Self::GroupedQuery(layer) => layer.cached(cx, x_td, cache),
            Self::Latent(layer) => layer.cached(cx, x_td, cache),
        }
    }
}

impl<B: Kernels> Layer<B> for Attention<B> {
    type In = Tensor<B>;
    type Out = Tensor<B>;
    type Saved = AttentionSaved<B>;

    fn wanted(&self, cx: &Cx<'_, B>) -> Vec<Wanted<'_, B>> {
        match self {
            Self::GroupedQuery(layer) => layer.wanted(cx),
            Self::Latent(layer) => layer.wanted(cx),
        }
    }

    fn params(&mut self) -> Vec<&mut Param<B>> {
        match self {
            Self::GroupedQuery(layer) => layer.params(),
            Self::Latent(layer) => layer.params(),
        }
    }

    fn recompute(&mut self, scopes: &[Scope]) {
        match self {
            Self::GroupedQuery(layer) => layer.recompute(scopes),
            Self::Latent(layer) => layer.recompute(scopes),
        }
    }

    fn forward(&self, cx: &Cx<'_, B>, x_td: Tensor<B>) -> Result<(Tensor<B>, AttentionSaved<B>)> {
        Ok(match self {
            Self::GroupedQuery(layer) => {
                let (y_td, saved) = layer.forward(cx, x_td)?;
                (y_td, AttentionSaved::GroupedQuery(saved))
            }
            Self::Latent(layer) => {
                let (y_td, saved) = layer.forward(cx, x_td)?;
                (y_td, AttentionSaved::Latent(saved))
            }
        })
    }

    fn again(&self, cx: &Cx<'_, B>, x_td: Tensor<B>) -> Result<AttentionSaved<B>> {
        Ok(match self {
            Self::GroupedQuery(layer) => AttentionSaved::GroupedQuery(layer.again(cx, x_td)?),
            Self::Latent(layer) => AttentionSaved::Latent(layer.again(cx, x_td)?),
        })
    }

    fn backward(&mut self, cx: &Cx<'_, B>, saved: AttentionSaved<B>, dy_td: Tensor<B>) -> Result<Tensor<B>> {
        match (self, saved) {
            (Self::GroupedQuery(layer), AttentionSaved::GroupedQuery(saved)) => {
                layer.backward(cx, saved, dy_td)
            }
            (Self::Latent(layer), AttentionSaved::Latent(saved)) => layer.backward(cx, saved, dy_td),
            _ => Err(Error::Defect { place: "attention", what: "what was kept is of another kind" }),
        }
    }
}
