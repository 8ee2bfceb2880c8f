//! Sites where quantization loses most of a tensor: values that become zero, or that are cut off at the largest code.

use super::LayerMetrics;
use super::layers::without_number;
use std::fmt;

/// How values are lost.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Loss {
    /// They become zero: they lie below the smallest code under their block's scale, or below the smallest scale.
    Underflow,
    /// They are cut off at the largest code under their block's scale.
    Saturation,
}

/// A site (a tensor of a layer that is quantized) at which most values are lost in a step.
#[derive(Debug, Clone, PartialEq)]
pub struct Lost {
    /// The layer's name, with `*` for the number of its decoder layer.
    pub layer: String,
    /// The tensor's name.
    pub tensor: String,
    /// The decoder layers in which the site loses most of its values; empty outside decoder layers.
    pub numbers: Vec<usize>,
    /// How values are lost.
    pub kind: Loss,
    /// The fraction of lost values among the non-zero values, in the layer where this fraction is largest.
    pub share: f64,
}

impl Lost {
    /// A site of gradients (`dy`, `dh`, `dlogits`) is reported if at least this fraction of its values becomes zero. The built-in recipes
    /// reach a fraction of 0.45 in small models (the gradient `dh` of experts in MXFP4). An output head in MXFP4 exceeds a fraction of
    /// 0.65; such a head learns little in small models.
    pub const GRADIENTS: f64 = 0.6;

    /// A site of activations or weights is reported if at least this fraction of its values becomes zero. This limit is higher than the
    /// limit for gradients, because a few outliers may matter more than all other values. The built-in recipes reach a fraction of 0.58
    /// (the activation `a` of experts in MXFP4).
    pub const OTHERS: f64 = 0.9;

    /// A site is reported if at least this fraction of its values saturates. The built-in recipes reach a fraction of 0.06 (in HiFloat4).
    pub const SATURATED: f64 = 0.25;

    fn threshold(tensor: &str, kind: Loss) -> f64 {
        match kind {
            Loss::Underflow if tensor.starts_with('d') => Self::GRADIENTS,
            Loss::Underflow => Self::OTHERS,
            Loss::Saturation => Self::SATURATED,
        }
    }

    /// Finds the sites that lose most of their values in a step, among the sites whose quantization this step measures. Each site occurs
    /// once per kind of loss, in the order of the step.
    #[must_use]
    pub fn of_step(step: &LayerMetrics) -> Vec<Self> {
        let mut all: Vec<Self> = Vec::new();
        for site in &step.sites {
            let Some([values, _, underflowed, saturated]) = site.measured.filter(|counts| counts[0] > 0)
            else {
                continue;
            };
            let (layer, number) = without_number(&site.layer);
            for (kind, count) in [(Loss::Underflow, underflowed), (Loss::Saturation, saturated)] {
                let share = count as f64 / values as f64;
                if share < Self::threshold(&site.tensor, kind) {
                    continue;
                }
                let (layer, tensor, numbers) = (layer.clone(), site.tensor.clone(), Vec::from_iter(number));
                let new = Self { layer, tensor, numbers, kind, share };
                match all.iter_mut().find(|old| old.is_same(&new)) {
                    Some(old) => {
                        old.share = old.share.max(share);
                        old.numbers.extend(number.filter(|number| !old.numbers.contains(number)));
                        old.numbers.sort_unstable();
                    }
                    None => all.push(new),
                }
            }
        }
        all
    }

    /// The sites that lose most of their values in any of these steps. Each site occurs once per kind of loss, with the first step in which
    /// this loss occurs.
    pub fn of_run<'a>(steps: impl Iterator<Item = &'a LayerMetrics>) -> Vec<(u64, Self)> {
        let mut all: Vec<(u64, Self)> = Vec::new();
        for step in steps {
            let mut new = Self::of_step(step);
            new.retain(|new| all.iter().all(|(_, old)| !old.is_same(new)));
            all.extend(new.into_iter().map(|lost| (step.step, lost)));
        }
        all
    }

    /// The site's name in messages.
    #[must_use]
    pub fn site(&self) -> String {
        format!("{}.{}", self.layer, self.tensor)
    }

    /// Whether it is the same kind of loss at the same site.
    pub(super) fn is_same(&self, other: &Self) -> bool {
        (&self.layer, &self.tensor, self.kind) == (&other.layer, &other.tensor, other.kind)
    }

    /// What quantization does to the values: `makes 99.9 % of the values zero`.
    pub(super) fn what(&self) -> String {
        // Not rounded up to all of them.
        let percent = (1e4 * self.share).floor() / 100.0;
        match self.kind {
            Loss::Underflow => format!("makes {percent} % of the values zero"),
            Loss::Saturation => format!("cuts off {percent} % of the values at its largest code"),
        }
    }
}

impl LayerMetrics {
    /// Whether the step measured quantization.
    #[must_use]
    pub fn is_measured(&self) -> bool {
        self.sites.iter().any(|site| site.measured.is_some())
    }
}

impl fmt::Display for Lost {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (site, what) = (self.site(), self.what());
        let name = match self.kind {
            Loss::Underflow => "underflow_fraction",
            Loss::Saturation => "saturation_fraction",
        };
        let numbers: Vec<String> = self.numbers.iter().map(usize::to_string).collect();
        let layers = match &numbers[..] {
            [] => String::new(),
            [one] => format!(" in layer {one}"),
            all => format!(" in layers {}", all.join(", ")),
        };
        write!(
            f,
            "the quantization of {site} {what}{layers} ({name}, of values other than zero), and its products get little of this tensor; give it \
             a format, a scale rule or an outer scale with more range"
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::metrics::SiteMetrics;

    #[test]
    fn a_site_is_named_once_with_its_layers_and_the_largest_share() {
        let site = |layer: &str, tensor: &str, measured: [u64; 4]| SiteMetrics {
            layer: layer.into(),
            tensor: tensor.into(),
            measured: Some(measured),
            ..Default::default()
        };
        let step = |sites| LayerMetrics { step: 3, load: Vec::new(), sites };
        let o_proj = |number: usize, zeros| {
            site(&format!("model.layers.{number}.self_attn.o_proj"), "dy", [1000, 0, zeros, 0])
        };
        let first = step(vec![
            o_proj(0, 599),
            o_proj(3, 999),
            o_proj(1, 700),
            site("lm_head", "x", [1000, 0, 890, 250]),
            site("lm_head", "dlogits", [0, 0, 0, 0]),
        ]);
        let lost = Lost::of_step(&first);
        let told: Vec<String> = lost.iter().map(ToString::to_string).collect();
        assert_eq!(told.len(), 2, "{told:?}");
        let parts =
            ["model.layers.*.self_attn.o_proj.dy makes 99.9 % of the values zero in layers 1, 3 (underflow"];
        parts.iter().for_each(|part| assert!(told[0].contains(part), "{told:?}"));
        assert!(told[1].contains("lm_head.x cuts off 25 % of the values at its largest code ("), "{told:?}");
        let later =
            LayerMetrics { step: 4, ..step(vec![o_proj(2, 1000), site("lm_head", "x", [100, 0, 90, 0])]) };
        let of_run = Lost::of_run([first, later].iter());
        assert_eq!(
            of_run.iter().map(|(step, lost)| (*step, lost.kind)).collect::<Vec<_>>(),
            [(3, Loss::Underflow), (3, Loss::Saturation), (4, Loss::Underflow)]
        );
    }
}
