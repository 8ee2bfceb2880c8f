//! Recomputation (`train.recompute`): what a backward pass computes again instead of reading it from what the forward pass saved. It
//! changes memory and time, and no bit of a loss, a weight or a metric.
//!
//! | scope | no longer saved | the backward pass runs again |
//! |---|---|---|
//! | `norms` | the input of the experts; normed and rotated queries and keys; normed latents | norms, RoPE |
//! | `swiglu` | the experts' a, where the forward pass has what wgrad reads | nothing more: `swiglu_backward` reads h anyway |
//! | `expert_input` | x of the experts: a row for each expert of a token | conversion and dispatch |
//! | `mla_up` | queries, keys and values of latent attention | their projections from the latents |
//! | `attention` | all of a layer's first half but its input | norm, projections, attention |
//! | `experts` | all of a layer's second half but its input | norm; router, dispatch, first products, SwiGLU; shared expert or MLP |
//! | `layers` | all of a layer but its input | all that `attention` and `experts` run, and attention's output projection |
//!
//! Why no bit changes:
//!
//! * The copies of weights live until the end of the step, and ops are deterministic. So a recomputed router makes the same choices, and
//!   the exchange plan is the same.
//! * Random bits are a function of tensor, element and step, so a recomputed tensor gets the same random bits.
//! * `Cx::again` drops what conversions count meanwhile. Loads and losses for the record are those of the first pass (`Routed`).
//! * Several ranks exchange rows again. All of them run the same layers, so they make the same collective calls in the same order.
//!
//! Under `mxfp4-hopper`, wgrad's a is computed from the saved MXFP4 h, and fprop's a from h in BF16; so a is always recomputed there. The
//! a of a shared expert, or of a dense layer's MLP, is the input of a linear layer and is saved like any input. Queries and keys without
//! a norm are saved after the rotation, whose backward pass needs the gradient alone. On one rank, `expert_input` converts rows for fprop
//! once a token, before they are copied to their experts, and multiplies the counts by the number of experts of a token.

use serde::{Deserialize, Serialize};

/// What a backward pass can recompute. A wider scope includes narrower ones: `layers` includes `attention` and `experts`, `experts`
/// includes `expert_input`, and `attention` includes `mla_up`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Scope {
    /// Outputs of norms, including rotated queries and keys, and normed latents.
    Norms,
    /// The input of the experts' second product, computed from the first product's output. A recipe that saves that output in another
    /// format always recomputes the input, from the saved copy.
    Swiglu,
    /// The experts' input, which has one row for each (token, expert): dispatched again.
    ExpertInput,
    /// Queries, keys and values of latent attention (`model.kv_rank`): projected up from the latents again. Queries that are projected
    /// straight from the layer's input are saved.
    MlaUp,
    /// Attention with its projections and the norm before it, from the residual stream.
    Attention,
    /// The experts, the shared expert and the norm before them, from the residual stream: routed and dispatched again. In a dense
    /// layer, the MLP and its norm.
    Experts,
    /// Whole decoder layers, from their input.
    Layers,
}

impl Scope {
    /// Every scope.
    pub const ALL: [Self; 7] = [
        Self::Norms,
        Self::Swiglu,
        Self::ExpertInput,
        Self::MlaUp,
        Self::Attention,
        Self::Experts,
        Self::Layers,
    ];

    /// The scopes of a run that sets none. Their recomputation costs next to nothing.
    pub const DEFAULT: [Self; 2] = [Self::Norms, Self::Swiglu];

    /// Its name in a configuration.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Norms => "norms",
            Self::Swiglu => "swiglu",
            Self::ExpertInput => "expert_input",
            Self::MlaUp => "mla_up",
            Self::Attention => "attention",
            Self::Experts => "experts",
            Self::Layers => "layers",
        }
    }
}

impl Scope {
    /// The scopes that this one includes.
    const fn within(self) -> &'static [Self] {
        match self {
            Self::Experts => &[Self::ExpertInput],
            Self::Attention => &[Self::MlaUp],
            Self::Layers => &[Self::ExpertInput, Self::MlaUp, Self::Attention, Self::Experts],
            _ => &[],
        }
    }

    /// The scopes in canonical order, without duplicates and without those that another one includes.
    pub fn normal(scopes: &[Self]) -> Vec<Self> {
        let is_covered = |scope: &Self| scopes.iter().any(|wider| wider.within().contains(scope));
        Self::ALL.into_iter().filter(|scope| scopes.contains(scope) && !is_covered(scope)).collect()
    }

    /// Scopes as a TOML list: `["norms", "swiglu"]`.
    pub fn list(scopes: &[Self]) -> String {
        let names: Vec<String> = scopes.iter().map(|scope| format!("{:?}", scope.name())).collect();
        format!("[{}]", names.join(", "))
    }

    /// Scopes as an override of a configuration: `train.recompute=["norms", "swiglu"]`.
    pub fn setting(scopes: &[Self]) -> String {
        format!("train.recompute={}", Self::list(scopes))
    }
}
