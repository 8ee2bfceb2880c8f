//! One decoder layer: x + attention(norm(x)), then x + experts(norm(x)). Either half, or both, may be made again. What a half adds
//! is added by the norm that reads the sum ([`Residual`]), and in the backward pass by the norm that the half begins with.
//! t tokens, d model.

use crate::cx::Cx;
use crate::layers::{Attention, AttentionSaved, KvCache, Layer, Mlp, MlpSaved, Norm, NormSaved, Residual};
use crate::ledger::{Ledger, Saved};
use crate::moe::{Moe, MoeSaved, Routed};
use crate::recompute::{Kept, Scope};
use nibble_core::ops::{Add, Routing};
use nibble_core::{Kernels, Result, Tensor};

/// One decoder layer.
#[derive(Debug, Clone)]
pub struct Block<B: Kernels> {
    /// Before attention.
    pub attn_norm: Norm<B>,
    /// Self-attention.
    pub attn: Attention<B>,
    /// Before the experts.
    pub mlp_norm: Norm<B>,
    /// Router and experts.
    pub moe: Moe<B>,
    /// The expert every token passes, if there is one.
    pub shared: Option<Mlp<B>>,
    /// What the backward pass makes again. Set by [`Block::recompute`], which tells the parts, too.
    pub(super) recompute: Vec<Scope>,
}

/// What a decoder layer keeps.
#[derive(Debug)]
pub struct BlockSaved<B: Kernels> {
    /// For the step's record.
    pub routed: Routed<B>,
    halves: Kept<B, Halves<B>>,
}

/// What both halves of a decoder layer keep.
#[derive(Debug)]
struct Halves<B: Kernels> {
    attend: Kept<B, AttendSaved<B>>,
    feed: Kept<B, FeedSaved<B>>,
}

/// What the first half of a decoder layer keeps: norm and attention.
#[derive(Debug)]
struct AttendSaved<B: Kernels> {
    norm: NormSaved<B>,
    attn: AttentionSaved<B>,
}

/// What the second half keeps: norm and experts.
#[derive(Debug)]
struct FeedSaved<B: Kernels> {
    norm: NormSaved<B>,
    /// The norm's output, unless it is made again.
    n_td: Option<Tensor<B>>,
    moe: MoeSaved<B>,
    shared: Option<MlpSaved<B>>,
}

impl<B: Kernels> BlockSaved<B> {
    /// What the router chose, if that is kept.
    pub(super) fn routing(&self) -> Option<&Routing<B>> {
        match &self.halves {
            Kept::All(Halves { feed: Kept::All(feed), .. }) => Some(feed.moe.routing()),
            _ => None,
        }
    }
}

impl<B: Kernels> Saved for BlockSaved<B> {
    fn ledger(&self, ledger: &mut Ledger) {
        self.halves.ledger(ledger);
        self.routed.ledger(ledger);
    }
}

impl<B: Kernels> Saved for Halves<B> {
    fn ledger(&self, ledger: &mut Ledger) {
        self.attend.ledger(ledger);
        self.feed.ledger(ledger);
    }
}

impl<B: Kernels> Saved for AttendSaved<B> {
    fn ledger(&self, ledger: &mut Ledger) {
        self.norm.ledger(ledger);
        self.attn.ledger(ledger);
    }
}

impl<B: Kernels> Saved for FeedSaved<B> {
    fn ledger(&self, ledger: &mut Ledger) {
        self.norm.ledger(ledger);
        if let Some(n_td) = &self.n_td {
            ledger.tensor(&self.norm.layer, "y", n_td);
        }
        self.moe.ledger(ledger);
        if let Some(shared) = &self.shared {
            shared.ledger(ledger);
        }
    }
}

impl<B: Kernels> Block<B> {
    /// Says what the backward passes to come make again.
    pub fn recompute(&mut self, scopes: &[Scope]) {
        let has = |scope| scopes.contains(&scope);
        self.recompute = scopes.to_vec();
        self.attn.keep_heads = !has(Scope::Norms);
        self.moe.experts.keep_a = !has(Scope::Swiglu);
        self.moe.remake_x = has(Scope::ExpertInput) && !has(Scope::Experts) && !has(Scope::Layers);
    }

    fn makes_again(&self, scope: Scope) -> bool {
        self.recompute.contains(&scope)
    }

    /// x + attention(norm(x)), yet to be added.
    fn attend(&self, cx: &Cx<'_, B>, x: Residual<B>) -> Result<(Residual<B>, AttendSaved<B>)> {
        let (n_td, norm) = self.attn_norm.of(cx, x)?;
        let (y_td, attn) = self.attn.forward(cx, n_td)?;
        let y = Residual { x: norm.x.clone(), plus: Some(y_td) };
        Ok((y, AttendSaved { norm, attn }))
    }

    /// What [`Block::attend`] keeps, made again.
    fn attend_again(&self, cx: &Cx<'_, B>, x: Residual<B>) -> Result<AttendSaved<B>> {
        let (n_td, norm) = self.attn_norm.of(cx, x)?;
        Ok(AttendSaved { norm, attn: self.attn.again(cx, n_td)? })
    }

    fn attend_backward(
        &mut self,
        cx: &Cx<'_, B>,
        saved: AttendSaved<B>,
        dy_td: &Tensor<B>,
    ) -> Result<Tensor<B>> {
        let dn_td = self.attn.backward(cx, saved.attn, dy_td.clone())?;
        self.attn_norm.gradient(cx, saved.norm, &dn_td, Some(dy_td))
    }

    /// x + experts(norm(x)), yet to be added.
    fn feed(&self, cx: &Cx<'_, B>, x: Residual<B>) -> Result<(Residual<B>, FeedSaved<B>)> {
        let (n_td, norm) = self.mlp_norm.of(cx, x)?;
        let (mut y_td, moe) = self.moe.forward(cx, &n_td)?;
        let kept = self.kept_norm(&n_td);
        let mut shared = None;
        if let Some(mlp) = &self.shared {
            let (s_td, saved) = mlp.forward(cx, n_td)?;
            y_td = Add::new(&y_td, &s_td).run(cx.b)?;
            shared = Some(saved);
        }
        let y = Residual { x: norm.x.clone(), plus: Some(y_td) };
        Ok((y, FeedSaved { norm, n_td: kept, moe, shared }))
    }

    /// What [`Block::feed`] keeps, made again.
    fn feed_again(&self, cx: &Cx<'_, B>, x: Residual<B>) -> Result<FeedSaved<B>> {
        let (n_td, norm) = self.mlp_norm.of(cx, x)?;
        let moe = self.moe.again(cx, &n_td)?;
        let kept = self.kept_norm(&n_td);
        let shared = self.shared.as_ref().map(|mlp| mlp.again(cx, n_td)).transpose()?;
        Ok(FeedSaved { norm, n_td: kept, moe, shared })
    }

    fn kept_norm(&self, n_td: &Tensor<B>) -> Option<Tensor<B>> {
        (!self.makes_again(Scope::Norms)).then(|| n_td.clone())
    }

    fn feed_backward(&mut self, cx: &Cx<'_, B>, saved: FeedSaved<B>, dy_td: &Tensor<B>) -> Result<Tensor<B>> {
        let n_td = match saved.n_td {
            Some(n_td) => n_td,
            None => self.mlp_norm.again(cx, &saved.norm)?,
        };
        let mut dn_td = self.moe.backward(cx, saved.moe, &n_td, dy_td)?;
        if let (Some(mlp), Some(saved)) = (&mut self.shared, saved.shared) {
            let ds_td = mlp.backward(cx, saved, dy_td.clone())?;
            dn_td = Add::new(&dn_td, &ds_td).run(cx.b)?;
        }
        self.mlp_norm.gradient(cx, saved.norm, &dn_td, Some(dy_td))
    }

    /// The forward pass of tokens that follow those in the cache: see [`Attention::cached`].
    pub fn cached(&self, cx: &Cx<'_, B>, x: Residual<B>, cache: &mut KvCache<B>) -> Result<Residual<B>> {
        let (n_td, norm) = self.attn_norm.of(cx, x)?;
        let y_td = self.attn.cached(cx, &n_td, cache)?;
        Ok(self.feed(cx, Residual { x: norm.x, plus: Some(y_td) })?.0)
    }

    /// The forward pass.
    pub fn forward(&self, cx: &Cx<'_, B>, x: Residual<B>) -> Result<(Residual<B>, BlockSaved<B>)> {
        let [attention, experts, layers] =
            [Scope::Attention, Scope::Experts, Scope::Layers].map(|scope| self.makes_again(scope));
        let [first, second] = [&self.attn_norm, &self.mlp_norm].map(Norm::layer);
        let (mid, attend) = self.attend(cx, x)?;
        let x_td = attend.norm.x.clone();
        let attend = Kept::of(attention || layers, first.clone(), &x_td, attend);
        let (y, feed) = self.feed(cx, mid)?;
        let (mid_td, routed) = (feed.norm.x.clone(), feed.moe.routed());
        let feed = Kept::of(experts || layers, second, &mid_td, feed);
        let halves = Kept::of(layers, first, &x_td, Halves { attend, feed });
        Ok((y, BlockSaved { routed, halves }))
    }

    /// The backward pass: the gradient of the residual stream before the layer, from that behind it.
    pub fn backward(&mut self, cx: &Cx<'_, B>, saved: BlockSaved<B>, dy_td: Tensor<B>) -> Result<Tensor<B>> {
        let Halves { attend, feed } = saved.halves.all(cx, |x_td| {
            let (mid, attend) = self.attend(cx, x_td.clone().into())?;
            let feed = self.feed_again(cx, mid)?;
            Ok(Halves { attend: Kept::All(attend), feed: Kept::All(feed) })
        })?;
        let feed = feed.all(cx, |x_td| self.feed_again(cx, x_td.clone().into()))?;
        let dx_td = self.feed_backward(cx, feed, &dy_td)?;
        drop(dy_td);
        let attend = attend.all(cx, |x_td| self.attend_again(cx, x_td.clone().into()))?;
        self.attend_backward(cx, attend, &dx_td)
    }
}
