//! One decoder layer computes x + attention(norm(x)), then x + feed(norm(x)), where the feed is a layer of experts or an MLP. Legend: t
//! tokens, d model.
//!
//! Either half, or both, may be recomputed in the backward pass (`kept.rs`).
//!
//! A half of the layer does not add its output to the residual stream; it returns x and the output as two terms ([`Residual`]). The next
//! norm adds the two terms when it reads them, and saves the sum. In the backward pass a norm likewise adds the gradient of the residual
//! stream to its own gradient. The results have the same bits as with separate ops that round in between, but memory is read and written
//! fewer times.

use super::kept::Kept;
use super::{Attention, AttentionCache, AttentionSaved, Feed, FeedSaved};
use crate::cx::Cx;
use crate::layers::{Layer, Norm, NormSaved, Residual};
use crate::ledger::{Ledger, Saved};
use crate::moe::Routed;
use crate::param::{Param, Wanted};
use crate::recompute::Scope;
use crate::spec::BlockSpec;
use nibble_core::ops::Routing;
use nibble_core::{Kernels, Result, Tensor};

/// One decoder layer.
#[derive(Debug, Clone)]
pub struct Block<B: Kernels> {
    /// The norm before attention.
    pub attn_norm: Norm<B>,
    /// The attention layer.
    pub attn: Attention<B>,
    /// The norm before the experts or the MLP.
    pub mlp_norm: Norm<B>,
    /// The feed-forward part of the decoder layer: experts, or one MLP.
    pub feed: Feed<B>,
    /// The scopes that the backward pass recomputes, as of [`Recompute::of_layer`](crate::recompute::Recompute::of_layer).
    /// [`Layer::recompute`] sets this field here and in the layer's parts.
    recompute: Vec<Scope>,
}

/// Saved activations of a decoder layer.
#[derive(Debug)]
pub struct BlockSaved<B: Kernels> {
    /// The values that a layer with experts contributes to the step's record.
    pub routed: Option<Routed<B>>,
    halves: Kept<B, Halves<B>>,
}

/// Saved activations of both halves of a decoder layer.
#[derive(Debug)]
struct Halves<B: Kernels> {
    attend: Kept<B, HalfSaved<B, AttentionSaved<B>>>,
    feed: Kept<B, HalfSaved<B, FeedSaved<B>>>,
}

/// Saved activations of one half of a decoder layer: those of the norm, and of attention or the feed.
#[derive(Debug)]
struct HalfSaved<B: Kernels, S> {
    norm: NormSaved<B>,
    inner: S,
}

impl<B: Kernels> BlockSaved<B> {
    /// The router's choice, if there is a router and its choice was saved.
    pub(super) fn routing(&self) -> Option<&Routing<B>> {
        match &self.halves {
            Kept::All(Halves { feed: Kept::All(second), .. }) => second.inner.routing(),
            _ => None,
        }
    }
}

impl<B: Kernels> Saved for BlockSaved<B> {
    fn ledger(&self, ledger: &mut Ledger) {
        self.halves.ledger(ledger);
        if let Some(routed) = &self.routed {
            routed.ledger(ledger);
        }
    }
}

impl<B: Kernels> Saved for Halves<B> {
    fn ledger(&self, ledger: &mut Ledger) {
        self.attend.ledger(ledger);
        self.feed.ledger(ledger);
    }
}

impl<B: Kernels, S: Saved> Saved for HalfSaved<B, S> {
    fn ledger(&self, ledger: &mut Ledger) {
        self.norm.ledger(ledger);
        self.inner.ledger(ledger);
    }
}

impl<B: Kernels> Block<B> {
    /// Creates this rank's part of the layer with random weights; `rope` has one row per position of a sequence.
    pub(super) fn new(cx: &Cx<'_, B>, spec: &BlockSpec, rope: Tensor<B>) -> Result<Self> {
        let norm = |part| Norm::new(cx, part, spec.eps);
        let mut block = Self {
            attn_norm: norm(&spec.attn_norm)?,
            attn: Attention::new(cx, &spec.attn, rope)?,
            mlp_norm: norm(&spec.mlp_norm)?,
            feed: Feed::new(cx, &spec.feed)?,
            recompute: Vec::new(),
        };
        block.recompute(&Scope::DEFAULT);
        Ok(block)
    }

    fn makes_again(&self, scope: Scope) -> bool {
        self.recompute.contains(&scope)
    }

    /// Runs the forward pass for tokens that follow the tokens in the cache; see [`Attention::cached`].
    pub fn cached(
        &self,
        cx: &Cx<'_, B>,
        x: Residual<B>,
        cache: &mut AttentionCache<B>,
    ) -> Result<Residual<B>> {
        let (n_td, norm) = self.attn_norm.of(cx, x)?;
        let y_td = self.attn.cached(cx, &n_td, cache)?;
        Ok(half(cx, (&self.mlp_norm, &self.feed), Residual { x: norm.x, plus: Some(y_td) })?.0)
    }
}

/// A half's output, and its saved activations.
type Half<B, S> = (Residual<B>, HalfSaved<B, S>);

/// Computes x + layer(norm(x)), as two terms that are not yet added.
fn half<B: Kernels, L: Layer<B, In = Tensor<B>, Out = Tensor<B>>>(
    cx: &Cx<'_, B>,
    (norm, layer): (&Norm<B>, &L),
    x: Residual<B>,
) -> Result<Half<B, L::Saved>> {
    let (n_td, norm) = norm.of(cx, x)?;
    let (y_td, inner) = layer.forward(cx, n_td)?;
    let y = Residual { x: norm.x.clone(), plus: Some(y_td) };
    Ok((y, HalfSaved { norm, inner }))
}

/// Recomputes the activations that [`half()`] saves.
fn half_again<B: Kernels, L: Layer<B, In = Tensor<B>>>(
    cx: &Cx<'_, B>,
    (norm, layer): (&Norm<B>, &L),
    x: Residual<B>,
) -> Result<HalfSaved<B, L::Saved>> {
    let (n_td, norm) = norm.of(cx, x)?;
    Ok(HalfSaved { norm, inner: layer.again(cx, n_td)? })
}

fn half_backward<B: Kernels, L: Layer<B>>(
    cx: &Cx<'_, B>,
    (norm, layer): (&mut Norm<B>, &mut L),
    saved: HalfSaved<B, L::Saved>,
    dy_td: &Tensor<B>,
) -> Result<Tensor<B>> {
    let dn_td = layer.backward(cx, saved.inner, dy_td.clone())?;
    norm.gradient(cx, saved.norm, &dn_td, Some(dy_td))
}

impl<B: Kernels> Layer<B> for Block<B> {
    type In = Residual<B>;
    type Out = Residual<B>;
    type Saved = BlockSaved<B>;

    fn wanted(&self, cx: &Cx<'_, B>) -> Vec<Wanted<'_, B>> {
        let mut wanted = self.attn_norm.wanted(cx);
        wanted.extend(self.attn.wanted(cx));
        wanted.extend(self.mlp_norm.wanted(cx));
        wanted.extend(self.feed.wanted(cx));
        wanted
    }

    fn params(&mut self) -> Vec<&mut Param<B>> {
        let mut params = self.attn_norm.params();
        params.extend(self.attn.params());
        params.extend(self.mlp_norm.params());
        params.extend(self.feed.params());
        params
    }

    fn recompute(&mut self, scopes: &[Scope]) {
        self.recompute = scopes.to_vec();
        self.attn.recompute(scopes);
        self.feed.recompute(scopes);
    }

    fn forward(&self, cx: &Cx<'_, B>, x: Residual<B>) -> Result<(Residual<B>, BlockSaved<B>)> {
        let [attention, experts, mlp, layers] = [Scope::Attention, Scope::Experts, Scope::Mlp, Scope::Layers]
            .map(|scope| self.makes_again(scope));
        let [first, second] = [&self.attn_norm, &self.mlp_norm].map(Norm::layer);
        let (mid, attend) = half(cx, (&self.attn_norm, &self.attn), x)?;
        let x_td = attend.norm.x.clone();
        let attend = Kept::of(attention || layers, first.clone(), &x_td, attend);
        let (y, feed) = half(cx, (&self.mlp_norm, &self.feed), mid)?;
        let (mid_td, routed) = (feed.norm.x.clone(), feed.inner.routed());
        let feed = Kept::of(experts || mlp || layers, second, &mid_td, feed);
        let halves = Kept::of(layers, first, &x_td, Halves { attend, feed });
        Ok((y, BlockSaved { routed, halves }))
    }

    /// Computes the gradient of the residual stream before the layer from the gradient after the layer.
    fn backward(&mut self, cx: &Cx<'_, B>, saved: BlockSaved<B>, dy_td: Tensor<B>) -> Result<Tensor<B>> {
        let Self { attn_norm, attn, mlp_norm, feed: layer, .. } = self;
        let Halves { attend, feed } = saved.halves.all(cx, |x_td| {
            let (mid, attend) = half(cx, (&*attn_norm, &*attn), x_td.clone().into())?;
            let feed = half_again(cx, (&*mlp_norm, &*layer), mid)?;
            Ok(Halves { attend: Kept::All(attend), feed: Kept::All(feed) })
        })?;
        let mut feed = feed.all(cx, |x_td| half_again(cx, (&*mlp_norm, &*layer), x_td.clone().into()))?;
        feed.inner.balance_over(saved.routed.and_then(|routed| routed.batch));
        feed.inner.give_input(|| mlp_norm.output(cx, &feed.norm))?;
        let dx_td = half_backward(cx, (mlp_norm, layer), feed, &dy_td)?;
        drop(dy_td);
        let attend = attend.all(cx, |x_td| half_again(cx, (&*attn_norm, &*attn), x_td.clone().into()))?;
        half_backward(cx, (attn_norm, attn), attend, &dx_td)
    }
}
