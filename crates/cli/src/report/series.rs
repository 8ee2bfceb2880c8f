//! The time series of a run's metrics over the steps.

use nibble_train::metrics::Metrics;
use std::collections::BTreeMap;

/// The values of one metric over the steps.
pub struct Series {
    /// The name of the metric in the metrics file.
    pub name: String,
    /// The description of the metric.
    pub title: String,
    /// Pairs of the number of completed steps and the value of the metric.
    pub points: Vec<(u64, f64)>,
}

/// The chart of the report in which a series is drawn.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Chart {
    Loss,
    Optimizer,
    Speed,
    Experts,
    Memory,
    Numerics,
    Other,
}

/// The series that any run may have, in the order of the report.
const KNOWN: [(&str, Chart, &str); 20] = [
    ("loss_metrics/global_avg_loss", Chart::Loss, "Training loss, nats"),
    ("validation_metrics/loss", Chart::Loss, "Held-out loss, nats"),
    ("lr", Chart::Optimizer, "Learning rate"),
    ("grad_norm", Chart::Optimizer, "Norm of the gradient, before clipping"),
    ("throughput(tps)", Chart::Speed, "Tokens a second"),
    ("time_metrics/end_to_end(s)", Chart::Speed, "Seconds a step"),
    ("time_metrics/data_loading(s)", Chart::Speed, "Seconds of waiting for a step's tokens"),
    ("tflops", Chart::Speed, "Teraflops a second"),
    ("mfu(%)", Chart::Speed, "Percent of the device's dense BF16 rate"),
    ("power(W)", Chart::Speed, "Watts of the device"),
    (
        "moe/load_max_over_mean",
        Chart::Experts,
        "Rows of the fullest expert over the mean, in the worst layer",
    ),
    ("moe/dead_expert_fraction", Chart::Experts, "Share of experts that got no row"),
    ("moe/aux_loss", Chart::Experts, "Load-balancing loss, before its coefficient"),
    ("moe/z_loss", Chart::Experts, "Router z-loss, before its coefficient"),
    ("memory/max_active(GiB)", Chart::Memory, "Peak memory so far, GiB"),
    ("memory/max_active(%)", Chart::Memory, "The same, percent of the device's"),
    ("quantization/inexact_fraction", Chart::Numerics, "Share of blocks that the lift to FP8 changed"),
    (
        "quantization/shift_inexact_fraction",
        Chart::Numerics,
        "Share of blocks that the shift to columns changed",
    ),
    (
        "quantization/saturated_fraction",
        Chart::Numerics,
        "Share of values beyond the range of their delayed scale",
    ),
    ("n_tokens_seen", Chart::Other, "Tokens trained on"),
];

/// All series of these metrics, each with its chart; the known series come first.
pub fn all(metrics: &[Metrics]) -> Vec<(Chart, Series)> {
    let mut points: BTreeMap<String, Vec<(u64, f64)>> = BTreeMap::new();
    for line in metrics {
        let Ok(serde_json::Value::Object(values)) = serde_json::to_value(line) else { continue };
        for (name, value) in values.into_iter().filter(|(name, _)| name != "step") {
            if let Some(value) = value.as_f64() {
                points.entry(name).or_default().push((line.step, value));
            }
        }
    }
    let known = KNOWN.iter().filter_map(|(name, place, title)| {
        let points = points.remove(*name)?;
        Some((*place, Series { name: (*name).into(), title: (*title).into(), points }))
    });
    let mut all: Vec<_> = known.collect();
    let unknown = points.into_iter().map(|(name, points)| {
        let title = name.clone();
        (Chart::Other, Series { name, title, points })
    });
    all.extend(unknown);
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_number_of_the_metrics_is_in_a_series() {
        let other = [("my/own".to_owned(), 7.0)].into();
        let step = Metrics { step: 1, loss: Some(4.0), lr: Some(0.1), other, ..Metrics::default() };
        let valid = Metrics { step: 1, valid_loss: Some(3.0), ..Metrics::default() };
        let names: Vec<String> = all(&[step, valid]).into_iter().map(|(_, series)| series.name).collect();
        assert_eq!(names, ["loss_metrics/global_avg_loss", "validation_metrics/loss", "lr", "my/own"]);
    }
}
