//! Layer metrics of a step. They are large for a large model, so about a hundred steps of a run have them.

use crate::record::{ChangeKind, CountSite, Measured, Report, SiteCounts, planes_of};
use serde::{Deserialize, Serialize};

/// Expert loads and quantization counts of one step, over all ranks.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct LayerMetrics {
    /// Number of completed optimizer steps, with the same meaning as in [`super::Metrics`].
    pub step: u64,
    /// For each layer, the number of token rows of each expert; a dense layer has an empty list.
    pub load: Vec<Vec<u64>>,
    /// The counts of every site (a place where a tensor is quantized or converted), in the order of a step.
    pub sites: Vec<SiteMetrics>,
}

/// The counts of one site, which is a place in the model where a tensor is quantized or converted.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SiteMetrics {
    /// The layer's name.
    pub layer: String,
    /// The tensor's name.
    pub tensor: String,
    /// The conversion of the tensor at this site: `quantize`; a change of format such as `mxfp4 to rows`; or a lift inside of a product,
    /// such as `mxfp4 to columns in wgrad`, which only steps that measure quantization count.
    pub conversion: String,
    /// Number of blocks that contain a non-zero code.
    pub non_zero: u64,
    /// Number of blocks with a non-zero code in which the conversion changed at least one value. Absent for a site that quantizes, because
    /// rounding is expected there in every block.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub inexact: Option<u64>,
    /// Number of blocks with a NaN or an infinity.
    pub non_finite: u64,
    /// Number of values that exceeded the largest code under a delayed scale and saturated. Absent for a site without a delayed scale.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub saturated: Option<u64>,
    /// Number of values that were quantized with a delayed scale.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub delayed: Option<u64>,
    /// Four counts: the values other than zero, and how many of these values stayed exact, became zero, and exceeded the largest code.
    /// Absent if the step did not measure quantization, or if all values are zero.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub measured: Option<[u64; 4]>,
}

/// The name of a layer with `*` for the number of its decoder layer, and the number.
pub(super) fn without_number(layer: &str) -> (String, Option<usize>) {
    let number = layer.split('.').find_map(|part| part.parse().ok());
    let part = |part: &str| if part.parse::<usize>().is_ok() { "*".to_owned() } else { part.to_owned() };
    (layer.split('.').map(part).collect::<Vec<_>>().join("."), number)
}

impl SiteMetrics {
    /// The layer's name with `*` for the number of its decoder layer.
    #[must_use]
    pub fn layer_pattern(&self) -> String {
        without_number(&self.layer).0
    }
}

impl LayerMetrics {
    /// Approximate number of lines of a run.
    const LINES: u64 = 100;

    /// Whether the file of layer metrics gets a line for step `step` (counted from 1) of `steps` steps. The first step, the last step, and
    /// about a hundred steps in between get a line.
    #[must_use]
    pub fn is_due(step: u64, steps: u64) -> bool {
        step == 1 || step == steps || step.is_multiple_of(steps.div_ceil(Self::LINES).max(1))
    }

    /// The layer metrics of a step's record.
    pub(crate) fn of_step(report: &Report<'_>) -> Self {
        // A lift inside of a product is not counted unless the step measures its layer.
        let is_counted = |site: &CountSite, counts: &SiteCounts| {
            !matches!(site.conversion, ChangeKind::Lift { .. }) || counts.non_zero + counts.non_finite > 0
        };
        let counted = report.counts().filter(|(site, counts)| is_counted(site, counts));
        let sites = counted.map(|(site, counts)| {
            let (conversion, inexact) = match site.conversion {
                ChangeKind::Quantize => ("quantize".to_owned(), None),
                ChangeKind::Transcode { from, axis } => {
                    (format!("{from} to {}", planes_of(axis)), Some(counts.inexact))
                }
                ChangeKind::Lift { from, axis, product } => {
                    let conversion = format!("{from} to {} in {}", planes_of(axis), product.name());
                    (conversion, Some(counts.inexact))
                }
            };
            SiteMetrics {
                layer: site.layer.clone(),
                tensor: site.tensor.to_owned(),
                conversion,
                non_zero: counts.non_zero,
                inexact,
                non_finite: counts.non_finite,
                saturated: (counts.delayed > 0).then_some(counts.saturated),
                delayed: (counts.delayed > 0).then_some(counts.delayed),
                measured: (counts.measured.values > 0).then(|| {
                    let Measured { exact, underflowed, saturated, values } = counts.measured;
                    [values, exact, underflowed, saturated]
                }),
            }
        });
        let load =
            report.load().iter().map(|layer| layer.iter().map(|rows| *rows as u64).collect()).collect();
        Self { step: report.step() + 1, load, sites: sites.collect() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_run_has_about_a_hundred_lines_its_first_and_last_step_among_them() {
        let lines = |steps: u64| (1..=steps).filter(|step| LayerMetrics::is_due(*step, steps)).count();
        assert_eq!([1, 7, 100, 101, 300, 100_000].map(lines), [1, 7, 100, 52, 101, 101]);
        assert!(LayerMetrics::is_due(1, 1000) && LayerMetrics::is_due(999, 999));
    }

    #[test]
    fn a_line_comes_back_as_it_was() {
        let lifted =
            SiteMetrics { conversion: "mxfp4 to rows".into(), inexact: Some(0), ..Default::default() };
        let sites = vec![lifted, SiteMetrics { conversion: "quantize".into(), ..Default::default() }];
        let line = LayerMetrics { step: 3, load: vec![vec![5, 0], vec![2, 3]], sites };
        let text = serde_json::to_string(&line).unwrap();
        assert_eq!(text.matches("inexact").count(), 1, "{text}");
        assert_eq!(serde_json::from_str::<LayerMetrics>(&text).unwrap(), line);
    }
}
