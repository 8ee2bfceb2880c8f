//! The norms and activations of a model's layers, as a configuration writes them.

use serde::{Deserialize, Serialize};

/// The kind of normalization of the residual stream: RMSNorm or LayerNorm.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum NormKind {
    /// RMSNorm, with a weight.
    #[default]
    Rms,
    /// LayerNorm, with a weight and a bias, as in GPT-2 and vision transformers.
    Layer,
}

/// The nonlinearity between the two projections of an MLP: SwiGLU or GELU.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Activation {
    /// silu(g)·u of two projections g and u, as in Llama.
    #[default]
    Swiglu,
    /// GELU of one projection, with the error function, as in vision transformers (`torch.nn.GELU()`).
    Gelu,
}
