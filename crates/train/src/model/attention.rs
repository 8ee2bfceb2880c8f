//! How a decoder layer's tokens see those before them: the choice beside [`Feed`](super::Feed). What a kind of attention remembers of a sequence
//! while text is made token by token is its own affair. t tokens, d model.

use crate::cx::Cx;
use crate::layers::{GroupedQuery, GroupedQuerySaved, KvCache, Layer};
use crate::ledger::{Ledger, Saved};
use crate::param::{Param, Wanted};
use crate::recompute::Scope;
use crate::spec::AttentionSpec;
use nibble_core::{Kernels, Result, Tensor};

/// The attention of one decoder layer.
#[derive(Debug, Clone)]
pub enum Attention<B: Kernels> {
    /// Several heads of queries share keys and values (Qwen3, Llama).
    GroupedQuery(GroupedQuery<B>),
}

/// What is kept of it.
#[derive(Debug)]
pub enum AttentionSaved<B: Kernels> {
    /// Of heads that share keys and values.
    GroupedQuery(GroupedQuerySaved<B>),
}

/// What it remembers of a sequence's tokens so far, in one layer.
#[derive(Debug)]
pub enum AttentionCache<B: Kernels> {
    /// Keys and values.
    GroupedQuery(KvCache<B>),
}

impl<B: Kernels> AttentionCache<B> {
    /// Another sequence begins.
    pub fn clear(&mut self) {
        let Self::GroupedQuery(cache) = self;
        cache.clear();
    }
}

impl<B: Kernels> Saved for AttentionSaved<B> {
    fn ledger(&self, ledger: &mut Ledger) {
        let Self::GroupedQuery(saved) = self;
        saved.ledger(ledger);
    }
}

impl<B: Kernels> Attention<B> {
    /// Random weights; `rope` has a row for each position of a sequence.
    pub fn new(cx: &Cx<'_, B>, spec: &AttentionSpec, rope: Tensor<B>) -> Result<Self> {
        let AttentionSpec::GroupedQuery(spec) = spec;
        Ok(Self::GroupedQuery(GroupedQuery::new(cx, spec, rope)?))
    }

    /// A cache for one sequence.
    pub fn cache(&self, cx: &Cx<'_, B>) -> Result<AttentionCache<B>> {
        let Self::GroupedQuery(layer) = self;
        Ok(AttentionCache::GroupedQuery(layer.cache(cx.b, cx.activations())?))
    }

    /// The forward pass of tokens that follow those in the cache, one sequence, or of its first ones, which are put into the cache. Several tokens
    /// at once only where it is empty.
    pub fn cached(
        &self,
        cx: &Cx<'_, B>,
        x_td: &Tensor<B>,
        cache: &mut AttentionCache<B>,
    ) -> Result<Tensor<B>> {
        let (Self::GroupedQuery(layer), AttentionCache::GroupedQuery(cache)) = (self, cache);
        layer.cached(cx, x_td, cache)
    }
}

impl<B: Kernels> Layer<B> for Attention<B> {
    type In = Tensor<B>;
    type Out = Tensor<B>;
    type Saved = AttentionSaved<B>;

    fn wanted(&self, cx: &Cx<'_, B>) -> Vec<Wanted<'_, B>> {
        let Self::GroupedQuery(layer) = self;
        layer.wanted(cx)
    }

    fn params(&mut self) -> Vec<&mut Param<B>> {
        let Self::GroupedQuery(layer) = self;
        layer.params()
    }

    fn recompute(&mut self, scopes: &[Scope]) {
        let Self::GroupedQuery(layer) = self;
        layer.recompute(scopes);
    }

    fn forward(&self, cx: &Cx<'_, B>, x_td: Tensor<B>) -> Result<(Tensor<B>, AttentionSaved<B>)> {
        let Self::GroupedQuery(layer) = self;
        let (y_td, saved) = layer.forward(cx, x_td)?;
        Ok((y_td, AttentionSaved::GroupedQuery(saved)))
    }

    fn again(&self, cx: &Cx<'_, B>, x_td: Tensor<B>) -> Result<AttentionSaved<B>> {
        let Self::GroupedQuery(layer) = self;
        Ok(AttentionSaved::GroupedQuery(layer.again(cx, x_td)?))
    }

    fn backward(&mut self, cx: &Cx<'_, B>, saved: AttentionSaved<B>, dy_td: Tensor<B>) -> Result<Tensor<B>> {
        let (Self::GroupedQuery(layer), AttentionSaved::GroupedQuery(saved)) = (self, saved);
        layer.backward(cx, saved, dy_td)
    }
}
