//! The feed-forward part of a decoder layer: a mixture of experts, with a shared expert if there is one, or one dense MLP. Legend: t
//! tokens, d model.

use crate::cx::Cx;
use crate::layers::{Layer, Mlp, MlpSaved};
use crate::ledger::{Ledger, Saved};
use crate::moe::{BatchLoad, Moe, MoeSaved, Routed};
use crate::param::{Param, Wanted};
use crate::recompute::Scope;
use crate::spec::{FeedSpec, MlpSpec};
use nibble_core::ops::{Add, Routing};
use nibble_core::{Error, Kernels, Result, Tensor};

/// The feed-forward part of a decoder layer: experts, or one MLP.
#[derive(Debug, Clone)]
// A decoder layer stores one `Feed` in place, so a box would save nothing.
#[allow(clippy::large_enum_variant)]
pub enum Feed<B: Kernels> {
    /// A mixture of experts, of which each token uses some.
    Experts {
        /// The router and the experts.
        moe: Moe<B>,
        /// The shared expert, which processes every token, if there is one.
        shared: Option<Mlp<B>>,
    },
    /// One MLP for all tokens.
    Dense(Mlp<B>),
}

/// Saved activations of the experts or the MLP.
#[derive(Debug)]
#[allow(clippy::large_enum_variant)]
pub enum FeedSaved<B: Kernels> {
    /// The saved activations of a mixture of experts.
    Experts {
        /// The saved activations of router and experts.
        moe: MoeSaved<B>,
        /// The saved activations of the shared expert.
        shared: Option<MlpSaved<B>>,
    },
    /// The saved activations of an MLP, which include the MLP's input.
    Dense(MlpSaved<B>),
}

impl<B: Kernels> FeedSaved<B> {
    /// The router's choice of experts, if the layer has a router.
    pub fn routing(&self) -> Option<&Routing<B>> {
        match self {
            Self::Experts { moe, .. } => Some(moe.routing()),
            Self::Dense(_) => None,
        }
    }

    /// The values that the layer contributes to the step's record, if the layer has experts.
    pub fn routed(&self) -> Option<Routed<B>> {
        match self {
            Self::Experts { moe, .. } => Some(moe.routed()),
            Self::Dense(_) => None,
        }
    }

    /// Calls `again` to recompute the input, if the backward pass needs the input and the input was not saved.
    pub fn give_input(&mut self, again: impl FnOnce() -> Result<Tensor<B>>) -> Result<()> {
        match self {
            Self::Experts { moe, shared } => {
                let x_td = moe.give_input(again)?;
                shared.iter_mut().try_for_each(|shared| shared.give_input(|| Ok(x_td.clone())))
            }
            Self::Dense(mlp) => mlp.give_input(again),
        }
    }

    /// Sets the batch over which the load-balancing loss is computed, if the layer has experts.
    pub fn balance_over(&mut self, batch: Option<BatchLoad<B>>) {
        if let Self::Experts { moe, .. } = self {
            moe.balance_over(batch);
        }
    }
}

impl<B: Kernels> Saved for FeedSaved<B> {
    fn ledger(&self, ledger: &mut Ledger) {
        match self {
            Self::Experts { moe, shared } => {
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
    /// Creates this rank's part of the experts or the MLP, with random weights.
    pub fn new(cx: &Cx<'_, B>, spec: &FeedSpec) -> Result<Self> {
        let mlp = |spec: &MlpSpec| Mlp::new(cx, spec);
        Ok(match spec {
            FeedSpec::Dense(spec) => Self::Dense(mlp(spec)?),
            FeedSpec::Experts { moe, shared } => {
                Self::Experts { moe: Moe::new(cx, moe)?, shared: shared.as_ref().map(mlp).transpose()? }
            }
        })
    }
}

impl<B: Kernels> Layer<B> for Feed<B> {
    type In = Tensor<B>;
    type Out = Tensor<B>;
    type Saved = FeedSaved<B>;

    fn wanted(&self, cx: &Cx<'_, B>) -> Vec<Wanted<'_, B>> {
        match self {
            Self::Experts { moe, shared } => {
                let mut wanted = moe.wanted(cx);
                wanted.extend(shared.iter().flat_map(|shared| shared.wanted(cx)));
                wanted
            }
            Self::Dense(mlp) => mlp.wanted(cx),
        }
    }

    fn params(&mut self) -> Vec<&mut Param<B>> {
        match self {
            Self::Experts { moe, shared } => {
                let mut params = moe.params();
                params.extend(shared.iter_mut().flat_map(Mlp::params));
                params
            }
            Self::Dense(mlp) => mlp.params(),
        }
    }

    fn recompute(&mut self, scopes: &[Scope]) {
        match self {
            Self::Experts { moe, shared } => {
                moe.recompute(scopes);
                shared.iter_mut().for_each(|shared| shared.recompute(scopes));
            }
            Self::Dense(mlp) => mlp.recompute(scopes),
        }
    }

    fn forward(&self, cx: &Cx<'_, B>, n_td: Tensor<B>) -> Result<(Tensor<B>, FeedSaved<B>)> {
        match self {
            Self::Experts { moe, shared } => {
                let x_td = n_td.clone();
                let beside = move || shared.as_ref().map(|mlp| mlp.forward(cx, n_td)).transpose();
                let (mut y_td, moe, shared) = moe.forward_beside(cx, x_td, beside)?;
                let mut shared_saved = None;
                if let Some((s_td, saved)) = shared {
                    y_td = Add::new(&y_td, &s_td).run(cx.b)?;
                    shared_saved = Some(saved);
                }
                Ok((y_td, FeedSaved::Experts { moe, shared: shared_saved }))
            }
            Self::Dense(mlp) => {
                let (y_td, saved) = mlp.forward(cx, n_td)?;
                Ok((y_td, FeedSaved::Dense(saved)))
            }
        }
    }

    fn again(&self, cx: &Cx<'_, B>, n_td: Tensor<B>) -> Result<FeedSaved<B>> {
        match self {
            Self::Experts { moe, shared } => {
                let moe = moe.again(cx, n_td.clone())?;
                let shared = shared.as_ref().map(|mlp| mlp.again(cx, n_td)).transpose()?;
                Ok(FeedSaved::Experts { moe, shared })
            }
            Self::Dense(mlp) => Ok(FeedSaved::Dense(mlp.again(cx, n_td)?)),
        }
    }

    fn backward(&mut self, cx: &Cx<'_, B>, saved: FeedSaved<B>, dy_td: Tensor<B>) -> Result<Tensor<B>> {
        match (self, saved) {
            (Self::Experts { moe, shared }, FeedSaved::Experts { moe: saved, shared: shared_saved }) => {
                let shared = shared.as_mut().zip(shared_saved);
                let moe_dy_td = dy_td.clone();
                let beside = move || shared.map(|(mlp, saved)| mlp.backward(cx, saved, dy_td)).transpose();
                match moe.backward_beside(cx, saved, moe_dy_td, beside)? {
                    (dn_td, Some(ds_td)) => Add::new(&dn_td, &ds_td).run(cx.b),
                    (dn_td, None) => Ok(dn_td),
                }
            }
            (Self::Dense(mlp), FeedSaved::Dense(saved)) => mlp.backward(cx, saved, dy_td),
            _ => Err(Error::Defect { place: "feed", what: "what is kept is of another layer" }),
        }
    }
}
