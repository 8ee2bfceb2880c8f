//! Metrics of a run: one JSON object per step, also for TensorBoard; the times of several ranks; layer metrics of some steps; and a plot of
//! the losses.

mod jsonl;
mod layers;
mod lost;
mod plot;
mod ranks;
mod tensorboard;
mod watchdog;

use std::collections::BTreeMap;

use crate::config::Config;
use crate::record::{ChangeKind, Measured, Report};
use nibble_core::formats::Format;
use serde::{Deserialize, Serialize};

pub use jsonl::{MetricsLog, StepFile, StepLine, StepLog, read_layers, read_metrics, read_rank_times};
pub use layers::{LayerMetrics, SiteMetrics};
pub use lost::{Loss, Lost};
pub use plot::{
    LOSSES_BY, LossCurve, PICTURE, Shown, draw_losses, losses_svg, plot_attribute, svg_beginning, thinned,
};
pub use ranks::RankTimes;
pub use tensorboard::{EVENTS_PREFIX, EventLog};
pub use watchdog::Watchdog;

/// The metrics of a training step or of an evaluation. Metrics that torchtitan also writes have torchtitan's names in the file.
///
/// The line of a training step has the field `loss`. An evaluation writes another line, with `valid_loss` and the number of completed
/// steps.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Metrics {
    /// Number of completed optimizer steps; the line of the first step has the value 1.
    pub step: u64,
    /// Training loss: mean cross-entropy over the step's targets, in nats. Absent for a step without a target, because such a step changes
    /// no weight.
    #[serde(rename = "loss_metrics/global_avg_loss", skip_serializing_if = "Option::is_none", default)]
    pub loss: Option<f64>,
    /// Held-out loss in nats per target; absent if no evaluated token is a target.
    #[serde(rename = "validation_metrics/loss", skip_serializing_if = "Option::is_none", default)]
    pub valid_loss: Option<f64>,
    /// The value 0 after an evaluation whose data contain no targets, so that there is no loss; otherwise absent.
    #[serde(rename = "validation_metrics/target_fraction", skip_serializing_if = "Option::is_none", default)]
    pub valid_target_fraction: Option<f64>,
    /// Fraction of the step's tokens that have a target; absent if all tokens have a target.
    #[serde(rename = "data/target_fraction", skip_serializing_if = "Option::is_none", default)]
    pub target_fraction: Option<f64>,
    /// Global gradient norm before clipping.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub grad_norm: Option<f64>,
    /// Learning rate of the step.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub lr: Option<f64>,
    /// Number of tokens trained on so far.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub n_tokens_seen: Option<u64>,
    /// Tokens per second over all ranks.
    #[serde(rename = "throughput(tps)", skip_serializing_if = "Option::is_none", default)]
    pub tps: Option<f64>,
    /// Teraflops per second, computed as [`Config::flops_per_token`] times tokens per second.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub tflops: Option<f64>,
    /// The value of `tflops` as a percentage of the device's dense BF16 peak, if the peak is known.
    #[serde(rename = "mfu(%)", skip_serializing_if = "Option::is_none", default)]
    pub mfu: Option<f64>,
    /// Peak memory so far of the buffers on the first rank's device, in GiB.
    #[serde(rename = "memory/max_active(GiB)", skip_serializing_if = "Option::is_none", default)]
    pub memory_gib: Option<f64>,
    /// The value of `memory_gib` as a percentage of the device's memory.
    #[serde(rename = "memory/max_active(%)", skip_serializing_if = "Option::is_none", default)]
    pub memory_percent: Option<f64>,
    /// Power draw of the device in watts, if known.
    #[serde(rename = "power(W)", skip_serializing_if = "Option::is_none", default)]
    pub watts: Option<f64>,
    /// Duration of the step in seconds.
    #[serde(rename = "time_metrics/end_to_end(s)", skip_serializing_if = "Option::is_none", default)]
    pub seconds: Option<f64>,
    /// Seconds that the first rank's host waited for the step's tokens before it issued the step. If the host issues steps ahead of the
    /// device, the device waits less or not at all.
    #[serde(rename = "time_metrics/data_loading(s)", skip_serializing_if = "Option::is_none", default)]
    pub data_seconds: Option<f64>,
    /// Load-balancing loss, summed over layers and not multiplied by its coefficient. The value is the loss computed per shard, whatever
    /// the setting of `model.balance`. Absent for a dense model, as are the other metrics of experts.
    #[serde(rename = "moe/aux_loss", skip_serializing_if = "Option::is_none", default)]
    pub aux_loss: Option<f64>,
    /// Router z-loss, summed over layers and not multiplied by its coefficient.
    #[serde(rename = "moe/z_loss", skip_serializing_if = "Option::is_none", default)]
    pub z_loss: Option<f64>,
    /// The number of rows of the fullest expert divided by the mean number of rows per expert, in the layer where this ratio is largest.
    #[serde(rename = "moe/load_max_over_mean", skip_serializing_if = "Option::is_none", default)]
    pub load_max_over_mean: Option<f64>,
    /// Fraction of (layer, expert) pairs in which the expert received no row.
    #[serde(rename = "moe/dead_expert_fraction", skip_serializing_if = "Option::is_none", default)]
    pub dead_expert_fraction: Option<f64>,
    /// Among blocks with a non-zero code, the fraction in which the lift from MXFP4 or MXFP6 to FP8 changed a value. Each lift of a tensor
    /// counts: a tensor that is lifted both to rows and to columns is counted twice. Lifts inside of products count only in steps that
    /// measure quantization.
    #[serde(rename = "quantization/inexact_fraction", skip_serializing_if = "Option::is_none", default)]
    pub inexact_fraction: Option<f64>,
    /// Fraction of FP8 blocks with a non-zero code that the exponent shift from rows to columns changed.
    #[serde(
        rename = "quantization/shift_inexact_fraction",
        skip_serializing_if = "Option::is_none",
        default
    )]
    pub shift_inexact_fraction: Option<f64>,
    /// Among values under delayed scales, the fraction that saturated; absent for a recipe without delayed scales.
    #[serde(rename = "quantization/saturated_fraction", skip_serializing_if = "Option::is_none", default)]
    pub saturated_fraction: Option<f64>,
    /// Other values by name: with several ranks, the values of [`RankTimes::summary`].
    #[serde(flatten)]
    pub other: BTreeMap<String, f64>,
}

impl Metrics {
    /// The same metrics, but without the times that [`Trainer::settle`](crate::trainer::Trainer::settle) measures.
    #[must_use]
    pub fn without_times(self) -> Self {
        Self { tps: None, tflops: None, seconds: None, data_seconds: None, ..self }
    }

    /// Whether these are the metrics of an evaluation and not of a step.
    #[must_use]
    pub fn is_evaluation(&self) -> bool {
        self.valid_loss.is_some() || self.valid_target_fraction.is_some()
    }

    /// The metrics of a step's record, with `counted` targets (at least one) over all ranks: independent of the number of ranks.
    pub(crate) fn of_step(report: &Report<'_>, config: &Config, counted: u64) -> Self {
        let tokens = config.tokens_per_step();
        // Each shard's sum is rounded to F32.
        let nats: Vec<f64> = report.nats().into_iter().map(|sum| f64::from(sum as f32)).collect();
        let shards = (config.train.shards * config.train.grad_accum) as f64;
        let [aux_loss, z_loss] = match report.router_losses() {
            Some(sums) => sums.map(|sum| Some(sum / shards)),
            None => [None; 2],
        };
        let load = report.load();
        let pairs: usize = load.iter().map(Vec::len).sum();
        let dead = load.iter().flatten().filter(|n| **n == 0.0).count();
        let fullest = load.iter().filter(|layer| !layer.is_empty()).map(|layer| {
            let mean = layer.iter().sum::<f64>() / layer.len() as f64;
            layer.iter().fold(0.0, |a: f64, b| a.max(*b)) / mean
        });
        Self {
            loss: Some(tree_sum(&nats) / counted as f64),
            target_fraction: (counted != tokens).then(|| counted as f64 / tokens as f64),
            grad_norm: Some(report.norm()),
            aux_loss,
            z_loss,
            load_max_over_mean: fullest.reduce(f64::max),
            dead_expert_fraction: (pairs > 0).then(|| dead as f64 / pairs as f64),
            inexact_fraction: inexact_fraction(report, is_lift),
            shift_inexact_fraction: inexact_fraction(report, is_shift),
            saturated_fraction: saturated_fraction(report),
            other: measured_fractions(report),
            ..Self::default()
        }
    }
}

/// Whether a conversion lifts codes to FP8, before or inside of a product.
fn is_lift(conversion: ChangeKind) -> bool {
    match conversion {
        ChangeKind::Quantize => false,
        ChangeKind::Transcode { from, .. } => from == Format::Mxfp4,
        ChangeKind::Lift { .. } => true,
    }
}

/// Whether a conversion shifts the exponents of FP8 codes.
fn is_shift(conversion: ChangeKind) -> bool {
    matches!(conversion, ChangeKind::Transcode { from, .. } if from == Format::E4m3)
}

/// Among the blocks that these conversions convert, the fraction that they changed.
fn inexact_fraction(report: &Report<'_>, is_one: impl Fn(ChangeKind) -> bool) -> Option<f64> {
    let counts = report.counts().filter(|(site, _)| is_one(site.conversion));
    let (blocks, inexact) = counts.fold((0, 0), |sum, (_, c)| (sum.0 + c.non_zero, sum.1 + c.inexact));
    (blocks > 0).then(|| inexact as f64 / blocks as f64)
}

/// The fraction of values under delayed scales that saturated.
fn saturated_fraction(report: &Report<'_>) -> Option<f64> {
    let sum = report.counts().fold((0, 0), |sum, (_, c)| (sum.0 + c.delayed, sum.1 + c.saturated));
    (sum.0 > 0).then(|| sum.1 as f64 / sum.0 as f64)
}

/// The fractions of quantized values that stayed exact, became zero, and were clipped, in a step that measures them: by site, over all
/// decoder layers.
fn measured_fractions(report: &Report<'_>) -> BTreeMap<String, f64> {
    let mut sites: BTreeMap<String, Measured> = BTreeMap::new();
    for (site, counts) in report.counts().filter(|(_, counts)| counts.measured.values > 0) {
        *sites.entry(site.in_any_layer()).or_default() += counts.measured;
    }
    let of_site = |(site, measured): (&String, &Measured)| {
        let named = |(name, share)| (format!("quantization/{site}/{name}"), share);
        measured.fractions().into_iter().flatten().map(named).collect::<Vec<_>>()
    };
    sites.iter().flat_map(of_site).collect()
}

/// ((0+1)+(2+3))…
fn tree_sum(values: &[f64]) -> f64 {
    match values {
        [] => 0.0,
        [one] => *one,
        _ => {
            let (left, right) = values.split_at(values.len().div_ceil(2));
            tree_sum(left) + tree_sum(right)
        }
    }
}
