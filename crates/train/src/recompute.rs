//! Recomputation (`train.recompute`): the backward pass recomputes activations that the forward pass then does not save. Recomputation
//! changes memory and time, but no bit of a loss, a weight or a metric.
//!
//! | scope | activations that are not saved | work that the backward pass repeats |
//! |---|---|---|
//! | `norms` | the input of the experts; normed and rotated queries and keys; normed latents | norms, RoPE |
//! | `swiglu` | the experts' `a`, if wgrad reads the `a` of the forward pass | no additional op: `swiglu_backward` reads h anyway |
//! | `expert_input` | the experts' `x`, with one row per expert of a token | conversion and dispatch |
//! | `mla_up` | queries, keys and values of latent attention | their projections from the latents |
//! | `attention` | all of a layer's first half except its input | norm, projections, attention |
//! | `experts` | all of a layer's second half except its input | norm; router, dispatch, first products, SwiGLU; shared expert or MLP |
//! | `layers` | all of a layer except its input | all that `attention` and `experts` run, and attention's output projection |
//!
//! Why no bit changes:
//!
//! * The copies of weights live until the end of the step, and ops are deterministic. So a recomputed router makes the same choices, and
//!   the exchange plan is the same.
//! * Random bits are a function of tensor, element and step, so a recomputed tensor gets the same random bits.
//! * `Cx::again` drops the counts of recomputed conversions. The record contains the loads and losses of the forward pass (`Routed`).
//! * With several ranks, rows are exchanged again. All ranks run the same layers, so they make the same collective calls in the same order.
//!
//! Under `mxfp4-hopper`, wgrad's `a` is computed from the saved MXFP4 `h`, but fprop's `a` from `h` in BF16; so `a` is always recomputed in
//! this recipe. The `a` of a shared expert, or of a dense layer's MLP, is the input of a linear layer and is saved like any input. Without
//! QK norms, queries and keys are saved after the rotation, because the rotation's backward pass needs only the gradient. On one rank,
//! `expert_input` converts each token's row for fprop once, before the row is copied to the token's experts, and multiplies the counts by
//! the number of experts of a token.

use serde::{Deserialize, Serialize};

/// What a backward pass can recompute. A wider scope includes narrower ones: `layers` includes `attention` and `experts`, `experts`
/// includes `expert_input`, and `attention` includes `mla_up`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Scope {
    /// Outputs of norms, including rotated queries and keys, and normed latents.
    Norms,
    /// The input of the experts' second GEMM, computed from the first GEMM's output. A recipe that saves the first GEMM's output in another
    /// format always recomputes this input, from the saved copy.
    Swiglu,
    /// The experts' input, which has one row for each (token, expert) pair: tokens are dispatched again.
    ExpertInput,
    /// Queries, keys and values of latent attention (`model.kv_rank`), which are projected from the latents again. Queries that are
    /// projected directly from the layer's input are saved.
    MlaUp,
    /// Attention with its projections and the preceding norm, recomputed from the residual stream.
    Attention,
    /// The experts, the shared expert and the preceding norm, recomputed from the residual stream: tokens are routed and dispatched again.
    /// In a dense layer, the MLP and its norm.
    Experts,
    /// Whole decoder layers, recomputed from their input.
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

    /// The default scopes of a run, whose recomputation costs next to nothing.
    pub const DEFAULT: [Self; 2] = [Self::Norms, Self::Swiglu];

    /// The scope's name in a configuration.
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
    /// The scopes that this scope includes.
    const fn within(self) -> &'static [Self] {
        match self {
            Self::Experts => &[Self::ExpertInput],
            Self::Attention => &[Self::MlaUp],
            Self::Layers => &[Self::ExpertInput, Self::MlaUp, Self::Attention, Self::Experts],
            _ => &[],
        }
    }

    /// The scopes in canonical order, without duplicates and without scopes that another listed scope includes.
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
