//! What a decoder layer does after attention: a mixture of experts, with the expert that every token passes if there is one, or
//! one dense MLP. t tokens, d model.

use crate::cx::Cx;
use crate::layers::{Layer, Mlp, MlpSaved};
use crate::ledger::{Ledger, Saved};
use crate::moe::{BatchLoad, Moe, MoeSaved, Routed};
use crate::param::Param;
use crate::recompute::Scope;
use nibble_core::ops::{Add, Routing};
use nibble_core::{Kernels, Result, Tensor};

/// Experts, or one MLP.
#[derive(Debug, Clone)]
// A decoder layer has one of them, in place: there is nothing to gain from a box.
#[allow(clippy::large_enum_variant)]
pub enum Feed<B: Kernels> {
    /// Some experts for each token.
    Experts {
        /// Router and experts.
        moe: Moe<B>,
        /// The expert every token passes, if there is one.
        shared: Option<Mlp<B>>,
    },
    /// One MLP for all of them.
    Dense(Mlp<B>),
}

/// What is kept of it.
#[derive(Debug)]
#[allow(clippy::large_enum_variant)]
pub(super) enum FeedSaved<B: Kernels> {
    Experts {
        /// The router's input, unless it is made again.
        n_td: Option<Tensor<B>>,
        moe: MoeSaved<B>,
        shared: Option<MlpSaved<B>>,
    },
    /// An MLP keeps its input itself.
    Dense(MlpSaved<B>),
}

impl<B: Kernels> FeedSaved<B> {
    /// What a router chose, if there is one.
    pub fn routing(&self) -> Option<&Routing<B>> {
        match self {
            Self::Experts { moe, .. } => Some(moe.routing()),
            Self::Dense(_) => None,
        }
    }

    /// For the step's record, if there are experts.
    pub fn routed(&self) -> Option<Routed<B>> {
        match self {
            Self::Experts { moe, .. } => Some(moe.routed()),
            Self::Dense(_) => None,
        }
    }

    /// Says what the load-balancing loss is taken over, if there are experts.
    pub fn balance_over(&mut self, batch: Option<BatchLoad<B>>) {
        if let Self::Experts { moe, .. } = self {
            moe.balance_over(batch);
        }
    }

    /// Lists what is kept; `norm` is the name of the norm before.
    pub fn list(&self, ledger: &mut Ledger, norm: &str) {
        match self {
            Self::Experts { n_td, moe, shared } => {
                if let Some(n_td) = n_td {
                    ledger.tensor(norm, "y", n_td);
                }
                moe.ledger(ledger);
                if let Some(shared) = shared {
                    shared.ledger(ledger);
                }
            }
            Self::Dense(mlp) => mlp.ledger(ledger),
        }
    }
}

impl<B: Kernels> Feed<B> {
    /// Says what the backward passes to come make again. An MLP keeps what its products read, as every linear layer does.
    pub(super) fn recompute(&mut self, scopes: &[Scope]) {
        if let Self::Experts { moe, .. } = self {
            let has = |scope| scopes.contains(&scope);
            moe.experts.keep_a = !has(Scope::Swiglu);
            moe.remake_x = has(Scope::ExpertInput) && !has(Scope::Experts) && !has(Scope::Layers);
        }
    }

    /// Makes the weights' copies for this step.
    pub fn prepare(&mut self, cx: &Cx<'_, B>) -> Result<()> {
        match self {
            Self::Experts { moe, shared } => {
                moe.prepare(cx)?;
                shared.iter_mut().try_for_each(|shared| shared.prepare(cx))
            }
            Self::Dense(mlp) => mlp.prepare(cx),
        }
    }

    /// Its parameters, in canonical order.
    pub fn params(&mut self) -> Vec<&mut Param<B>> {
        match self {
            Self::Experts { moe, shared } => {
                let mut params = moe.params();
                params.extend(shared.iter_mut().flat_map(Mlp::params));
                params
            }
            Self::Dense(mlp) => mlp.params(),
        }
    }

    /// The forward pass of the normed residual stream. The router's input is kept if `keep` says so.
    pub(super) fn forward(
        &self,
        cx: &Cx<'_, B>,
        n_td: Tensor<B>,
        keep: bool,
    ) -> Result<(Tensor<B>, FeedSaved<B>)> {
        let (moe, shared) = match self {
            Self::Experts { moe, shared } => (moe, shared),
            Self::Dense(mlp) => {
                let (y_td, saved) = mlp.forward(cx, n_td)?;
                return Ok((y_td, FeedSaved::Dense(saved)));
            }
        };
        let (mut y_td, moe) = moe.forward(cx, &n_td)?;
        let kept = keep.then(|| n_td.clone());
        let mut shared_saved = None;
        if let Some(mlp) = shared {
            let (s_td, saved) = mlp.forward(cx, n_td)?;
            y_td = Add::new(&y_td, &s_td).run(cx.b)?;
            shared_saved = Some(saved);
        }
        Ok((y_td, FeedSaved::Experts { n_td: kept, moe, shared: shared_saved }))
    }

    /// What a forward pass keeps, made again.
    pub(super) fn again(&self, cx: &Cx<'_, B>, n_td: Tensor<B>, keep: bool) -> Result<FeedSaved<B>> {
        match self {
            Self::Experts { moe, shared } => {
                let moe = moe.again(cx, &n_td)?;
                let kept = keep.then(|| n_td.clone());
                let shared = shared.as_ref().map(|mlp| mlp.again(cx, n_td)).transpose()?;
                Ok(FeedSaved::Experts { n_td: kept, moe, shared })
            }
            Self::Dense(mlp) => Ok(FeedSaved::Dense(mlp.again(cx, n_td)?)),
        }
    }

    /// The backward pass; `normed` makes the input again.
    pub(super) fn backward(
        &mut self,
        cx: &Cx<'_, B>,
        saved: FeedSaved<B>,
        dy_td: &Tensor<B>,
        normed: impl FnOnce() -> Result<Tensor<B>>,
    ) -> Result<Tensor<B>> {
        match (self, saved) {
            (
                Self::Experts { moe, shared },
                FeedSaved::Experts { n_td, moe: moe_saved, shared: shared_saved },
            ) => {
                let n_td = match n_td {
                    Some(n_td) => n_td,
                    None => normed()?,
                };
                let mut dn_td = moe.backward(cx, moe_saved, &n_td, dy_td)?;
                if let (Some(mlp), Some(saved)) = (shared, shared_saved) {
                    let ds_td = mlp.backward(cx, saved, dy_td.clone())?;
                    dn_td = Add::new(&dn_td, &ds_td).run(cx.b)?;
                }
                Ok(dn_td)
            }
            (Self::Dense(mlp), FeedSaved::Dense(saved)) => mlp.backward(cx, saved, dy_td.clone()),
            _ => Err(nibble_core::Error::shape("feed", "what is kept", "of another layer", "of this one")),
        }
    }
}
