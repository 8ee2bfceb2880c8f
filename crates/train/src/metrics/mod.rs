//! What a run tells about itself: one JSON object a step, and a picture of its losses.

mod jsonl;
mod plot;

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

pub use jsonl::{MetricsLog, read_metrics};
pub use plot::{LossCurve, draw_loss_curve};

/// What is known after a step. Field names in the file are torchtitan's, where it has one.
///
/// A step's own line has `loss`; an evaluation writes a line with `valid_loss` under the number of steps done.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Metrics {
    /// Optimizer steps done, so 1 is the first step's line.
    pub step: u64,
    /// Training loss: mean cross-entropy over the step's tokens, nats.
    #[serde(rename = "loss_metrics/global_avg_loss", skip_serializing_if = "Option::is_none", default)]
    pub loss: Option<f64>,
    /// Held-out loss, nats a token.
    #[serde(rename = "validation_metrics/loss", skip_serializing_if = "Option::is_none", default)]
    pub valid_loss: Option<f64>,
    /// Global gradient norm before clipping.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub grad_norm: Option<f64>,
    /// Learning rate of the step.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub lr: Option<f64>,
    /// Tokens trained on since the beginning.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub n_tokens_seen: Option<u64>,
    /// Tokens a second, over all ranks.
    #[serde(rename = "throughput(tps)", skip_serializing_if = "Option::is_none", default)]
    pub tps: Option<f64>,
    /// Seconds of the step.
    #[serde(rename = "time_metrics/end_to_end(s)", skip_serializing_if = "Option::is_none", default)]
    pub seconds: Option<f64>,
    /// Load-balancing loss, summed over layers, before its coefficient.
    #[serde(rename = "moe/aux_loss", skip_serializing_if = "Option::is_none", default)]
    pub aux_loss: Option<f64>,
    /// Router z-loss, summed over layers, before its coefficient.
    #[serde(rename = "moe/z_loss", skip_serializing_if = "Option::is_none", default)]
    pub z_loss: Option<f64>,
    /// Rows of the fullest expert over the mean, the largest of any layer.
    #[serde(rename = "moe/load_max_over_mean", skip_serializing_if = "Option::is_none", default)]
    pub load_max_over_mean: Option<f64>,
    /// Share of (layer, expert) pairs that got no row.
    #[serde(rename = "moe/dead_expert_fraction", skip_serializing_if = "Option::is_none", default)]
    pub dead_expert_fraction: Option<f64>,
    /// Share of 32-blocks that the lift from MXFP4 to FP8 changed, of those with a non-zero code; a tensor lifted both to
    /// rows and to columns counts twice. Of the first rank.
    #[serde(rename = "quantization/inexact_fraction", skip_serializing_if = "Option::is_none", default)]
    pub inexact_fraction: Option<f64>,
    /// Share of FP8 blocks that the exponent shift from rows to columns changed, of those with a non-zero code.
    #[serde(
        rename = "quantization/shift_inexact_fraction",
        skip_serializing_if = "Option::is_none",
        default
    )]
    pub shift_inexact_fraction: Option<f64>,
    /// Anything else, by name.
    #[serde(flatten)]
    pub other: BTreeMap<String, f64>,
}
