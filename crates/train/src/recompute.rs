//! Recomputation: what a backward pass makes again instead of finding it kept. Never a bit of the result.
//!
//! The forward pass is run again from what is still there, with the same random bits; its conversions have been counted.

use serde::{Deserialize, Serialize};

/// Something that can be made again. A wider scope takes the place of those within it: `layers` that of `attention` and
/// `experts`, `experts` that of `expert_input`, and `attention` that of `mla_up`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Scope {
    /// Outputs of norms, rotated queries and keys and normed latents among them.
    Norms,
    /// The input of the experts' second product, from the output of the first. Where a recipe keeps that output in another
    /// format, it is always made again: of what was kept.
    Swiglu,
    /// The experts' input, which has a row for each expert of a token: dispatched again.
    ExpertInput,
    /// Queries, keys and values of latent attention (`model.kv_rank`): projected up from the latents once more. Queries that come straight from
    /// the input are kept.
    MlaUp,
    /// Attention with its projections and the norm before it, from the residual stream.
    Attention,
    /// The mixture of experts, the shared one and the norm before them, from the residual stream: routed and dispatched again. Of a
    /// dense layer the MLP and its norm.
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

    /// What a run makes again unless it says otherwise: what costs next to nothing.
    pub const DEFAULT: [Self; 2] = [Self::Norms, Self::Swiglu];

    /// As a configuration names it.
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
    /// The scopes that this one takes the place of.
    const fn within(self) -> &'static [Self] {
        match self {
            Self::Experts => &[Self::ExpertInput],
            Self::Attention => &[Self::MlaUp],
            Self::Layers => &[Self::ExpertInput, Self::MlaUp, Self::Attention, Self::Experts],
            _ => &[],
        }
    }

    /// The same scopes in their order, each once, without those that another one takes the place of.
    pub fn normal(scopes: &[Self]) -> Vec<Self> {
        let is_covered = |scope: &Self| scopes.iter().any(|wider| wider.within().contains(scope));
        Self::ALL.into_iter().filter(|scope| scopes.contains(scope) && !is_covered(scope)).collect()
    }

    /// Scopes as TOML has a list of them: `["norms", "swiglu"]`.
    pub fn list(scopes: &[Self]) -> String {
        let names: Vec<String> = scopes.iter().map(|scope| format!("{:?}", scope.name())).collect();
        format!("[{}]", names.join(", "))
    }

    /// Scopes as an override of a configuration: `train.recompute=["norms", "swiglu"]`.
    pub fn setting(scopes: &[Self]) -> String {
        format!("train.recompute={}", Self::list(scopes))
    }
}
