//! Judges a repeated step: whether data, weights or formats made its loss or gradient abnormal.

use nibble_train::metrics::{Loss, Lost, SiteMetrics};
use nibble_train::spikes::Usual;
use nibble_train::trainer::Tried;
use serde::Serialize;

/// What made a step abnormal.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Blame {
    /// The step is normal.
    None,
    /// The step is abnormal in BF16 too, on this batch alone.
    Data,
    /// The step is abnormal in BF16 too, on other batches as well.
    Weights,
    /// The step is abnormal only under the recipe.
    Format,
}

impl Blame {
    /// The name of the cause, and a sentence that explains the cause.
    pub fn explained(self) -> &'static str {
        match self {
            Self::None => "nothing: the repeated step is normal",
            Self::Data => {
                "data: with the same weights, BF16 is abnormal on this batch too, and normal on others"
            }
            Self::Weights => {
                "weights: BF16 is abnormal too, and not because of the batch: the state before the step is bad, or a setting of the model"
            }
            Self::Format => {
                "format: with the same weights and the same batch, BF16 is normal and the recipe is abnormal"
            }
        }
    }
}

/// The values that were usual in a run before a step.
#[derive(Debug, Clone, Copy, Default)]
pub struct Before {
    /// Losses.
    pub loss: Usual,
    /// Norms of the gradient.
    pub norm: Usual,
}

/// A step computed with the recipe and in BF16, each on its own batch and on the batches of neighbouring steps. All these computations use
/// the same weights.
#[derive(Debug)]
pub struct Tries {
    pub recipe: Tried,
    pub bf16: Tried,
    pub recipe_others: Vec<Tried>,
    pub bf16_others: Vec<Tried>,
}

/// Which values are normal, and what caused the abnormal values.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Verdict {
    pub blame: Blame,
    /// The loss that was usual before the step.
    pub base: f64,
    /// The loss above which a loss is abnormal.
    pub limit: f64,
    /// The gradient norm above which a gradient norm is abnormal.
    pub norm_limit: f64,
}

/// Number of earlier steps from which the usual values are those of the run. With fewer steps, they are those of BF16 on other batches.
const ENOUGH: u64 = 10;

/// A gradient norm is abnormal above this multiple of the usual norm.
const NORMS: f64 = 10.0;

impl Verdict {
    /// Judges a step. A loss or a gradient norm is abnormal if it is not finite. A loss is also abnormal above the limit for the run's
    /// spikes, and a norm above 10 times the usual norm. BF16 counts as showing the same spike if its loss exceeds the usual loss by more
    /// than half as much as the recipe's loss does. A spike that the recipe only makes a little larger is therefore not blamed on the
    /// recipe.
    pub fn of(tries: &Tries, before: Before) -> Self {
        let known = |usual: Usual, of: fn(&Tried) -> f64| match usual.samples >= ENOUGH {
            true => usual,
            false => usual_of(tries.bf16_others.iter().map(of)),
        };
        let loss = known(before.loss, |tried| tried.loss);
        let norm = known(before.norm, |tried| tried.grad_norm);
        let mut verdict =
            Self { blame: Blame::None, base: loss.mean, limit: loss.limit(), norm_limit: NORMS * norm.mean };
        let (recipe, others) = (&tries.recipe, &tries.bf16_others);
        if verdict.is_out(recipe) {
            let sharing = others.iter().filter(|other| verdict.shares(other, recipe)).count();
            verdict.blame = match verdict.shares(&tries.bf16, recipe) {
                false => Blame::Format,
                true if 2 * sharing > others.len() => Blame::Weights,
                true => Blame::Data,
            };
        }
        verdict
    }

    /// Whether the loss or the gradient norm of a step is abnormal.
    pub fn is_out(&self, tried: &Tried) -> bool {
        tried.non_finite.is_some() || tried.loss > self.limit || tried.grad_norm > self.norm_limit
    }

    /// Whether `other` is abnormal in the same way as `recipe`, which is abnormal.
    fn shares(&self, other: &Tried, recipe: &Tried) -> bool {
        let excess = |tried: &Tried| tried.loss - self.base;
        match () {
            () if other.non_finite.is_some() => true,
            () if recipe.non_finite.is_some() => self.is_out(other),
            () if recipe.loss > self.limit => excess(other) > 0.5 * excess(recipe),
            () => other.grad_norm > 0.5 * recipe.grad_norm,
        }
    }
}

/// Whether a batch stands out among other batches under the same weights: a value is not finite, or the loss exceeds the mean of the others
/// by 0.2 nats and by 4 mean distances. A batch with tokens that no model can predict also stands out under earlier weights; other batches
/// do not.
pub fn stands_out(own: &Tried, others: &[Tried]) -> bool {
    let Usual { mean, distance, .. } = usual_of(others.iter().map(|other| other.loss));
    // Without a finite loss of another batch, any loss stands out.
    let mean = if mean.is_finite() { mean } else { 0.0 };
    own.non_finite.is_some() || own.loss - mean > (4.0 * distance).max(0.2)
}

/// The mean of the finite values, and their mean distance from it. Without a finite value the mean is infinite.
fn usual_of(values: impl Iterator<Item = f64>) -> Usual {
    let values: Vec<f64> = values.filter(|value| value.is_finite()).collect();
    let count = values.len().max(1) as f64;
    let mean = values.iter().sum::<f64>() / count;
    let distance = values.iter().map(|value| (value - mean).abs()).sum::<f64>() / count;
    Usual { samples: 0, mean: if values.is_empty() { f64::INFINITY } else { mean }, distance }
}

/// A site (a tensor that is quantized) whose quantization may have caused the spike.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Culprit {
    /// The layer, with `*` for the number of its decoder layer.
    pub layer: String,
    /// The operand.
    pub tensor: String,
    /// The decoder layers to which this applies; empty outside decoder layers.
    pub layers: Vec<usize>,
    /// `not finite`, `saturates` or `vanishes`.
    pub what: &'static str,
    /// The largest share among these layers: of the site's values, or of its blocks for `not finite`.
    pub share: f64,
    /// The corresponding share in the batches of neighbouring steps; absent for `not finite`.
    pub share_of_others: Option<f64>,
}

/// The number of sites that are named if none exceeds a threshold.
const NAMED: usize = 3;

/// The sites of a step under the recipe that may have caused a spike. The first site that is not finite comes first, then the sites that
/// saturate or vanish beyond the thresholds of [`Lost`], largest share first. If there are no such sites, the list contains the sites with
/// the largest shares.
pub fn culprits(tries: &Tries) -> Vec<Culprit> {
    let sites = &tries.recipe.layers.sites;
    if let Some(site) = sites.iter().find(|site| site.non_finite > 0) {
        let blocks = (site.non_zero + site.non_finite).max(site.non_finite) as f64;
        return vec![Culprit {
            layer: site.layer.clone(),
            tensor: site.tensor.clone(),
            layers: Vec::new(),
            what: "not finite",
            share: site.non_finite as f64 / blocks,
            share_of_others: None,
        }];
    }
    let of_others = |layer: &str, tensor: &str, kind: Loss| {
        let all = tries.recipe_others.iter().flat_map(|other| &other.layers.sites);
        let same = all.filter(|site| site.layer_pattern() == layer && site.tensor == tensor);
        same.filter_map(|site| share(site, kind)).reduce(f64::max)
    };
    let mut lost: Vec<Culprit> = Lost::of_step(&tries.recipe.layers)
        .into_iter()
        .map(|lost| Culprit {
            share_of_others: of_others(&lost.layer, &lost.tensor, lost.kind),
            layer: lost.layer,
            tensor: lost.tensor,
            layers: lost.numbers,
            what: word(lost.kind),
            share: lost.share,
        })
        .collect();
    if lost.is_empty() {
        let both = |site: &SiteMetrics| {
            [Loss::Saturation, Loss::Underflow].map(|kind| {
                Some(Culprit {
                    layer: site.layer.clone(),
                    tensor: site.tensor.clone(),
                    layers: Vec::new(),
                    what: word(kind),
                    share: share(site, kind).filter(|share| *share > 0.0)?,
                    share_of_others: of_others(&site.layer_pattern(), &site.tensor, kind),
                })
            })
        };
        lost = sites.iter().flat_map(both).flatten().collect();
    }
    // What saturates is worse than what vanishes: the largest values are cut off.
    let key = |culprit: &Culprit| (culprit.what == word(Loss::Saturation), culprit.share);
    lost.sort_by(|a, b| key(b).partial_cmp(&key(a)).unwrap_or(std::cmp::Ordering::Equal));
    lost.truncate(NAMED.max(lost.iter().filter(|lost| lost.share >= Lost::SATURATED).count()));
    lost
}

fn word(kind: Loss) -> &'static str {
    match kind {
        Loss::Saturation => "saturates",
        Loss::Underflow => "vanishes",
    }
}

/// The fraction of a site's values that are lost in this way.
fn share(site: &SiteMetrics, kind: Loss) -> Option<f64> {
    let [values, _, underflowed, saturated] = site.measured.filter(|counts| counts[0] > 0)?;
    let lost = if kind == Loss::Saturation { saturated } else { underflowed };
    Some(lost as f64 / values as f64)
}

#[cfg(test)]
mod tests {
    use super::*;
    use nibble_train::metrics::LayerMetrics;

    fn tried(loss: f64, grad_norm: f64) -> Tried {
        let non_finite = (!loss.is_finite()).then(|| "loss".to_owned());
        Tried { loss, grad_norm, non_finite, layers: LayerMetrics::default() }
    }

    /// The blame for these losses under the recipe and BF16, and under both on other batches.
    fn blame([recipe, bf16]: [f64; 2], others: [f64; 2], steps: u64) -> Blame {
        let mut before = Before::default();
        (0..steps).for_each(|step| before.loss.take(2.0 + 0.01 * (step % 3) as f64));
        (0..steps).for_each(|_| before.norm.take(1.0));
        let [recipe_others, bf16_others] = others.map(|loss| vec![tried(loss, 1.0); 4]);
        let tries = Tries { recipe: tried(recipe, 1.0), bf16: tried(bf16, 1.0), recipe_others, bf16_others };
        Verdict::of(&tries, before).blame
    }

    #[test]
    fn each_cause_has_its_pattern() {
        for steps in [0, 9, 200] {
            assert_eq!(blame([2.0, 2.0], [2.0, 2.0], steps), Blame::None);
            assert_eq!(blame([5.0, 4.9], [2.0, 2.0], steps), Blame::Data);
            assert_eq!(blame([f64::NAN, f64::INFINITY], [2.0, 2.0], steps), Blame::Data);
            assert_eq!(blame([5.0, 2.0], [2.0, 2.0], steps), Blame::Format);
            assert_eq!(blame([f64::NAN, 2.0], [f64::NAN, 2.0], steps), Blame::Format);
            assert_eq!(blame([f64::NAN, f64::NAN], [f64::NAN, f64::NAN], steps), Blame::Weights);
        }
        // What is usual is known from earlier steps only.
        assert_eq!(blame([5.0, 4.9], [4.0, 4.2], 200), Blame::Weights);
        assert_eq!(blame([2.3, 2.2], [2.0, 2.0], 200), Blame::Data);
        assert_eq!(blame([2.3, 2.1], [2.0, 2.0], 200), Blame::Format);
    }

    #[test]
    fn a_batch_stands_out_by_its_loss() {
        let others = [2.0, 2.1, 1.9, 2.0].map(|loss| tried(loss, 1.0));
        let found = [2.1, 2.3, f64::NAN].map(|loss| stands_out(&tried(loss, 1.0), &others));
        assert_eq!(found, [false, true, true]);
    }

    #[test]
    fn a_gradient_alone_can_be_out_of_order() {
        let mut before = Before::default();
        (0..200).for_each(|_| before.loss.take(2.0));
        (0..200).for_each(|_| before.norm.take(1.0));
        let usual = vec![tried(2.0, 1.0); 2];
        let of = |norms: [f64; 2]| {
            let [recipe, bf16] = norms.map(|norm| tried(2.0, norm));
            let (recipe_others, bf16_others) = (usual.clone(), usual.clone());
            Verdict::of(&Tries { recipe, bf16, recipe_others, bf16_others }, before).blame
        };
        assert_eq!(
            [of([9.0, 9.0]), of([30.0, 25.0]), of([30.0, 2.0])],
            [Blame::None, Blame::Data, Blame::Format]
        );
    }

    #[test]
    fn sites_are_named_with_the_worst_first() {
        let site = |layer: &str, tensor: &str, measured| SiteMetrics {
            layer: layer.into(),
            tensor: tensor.into(),
            non_zero: 10,
            measured: Some(measured),
            ..SiteMetrics::default()
        };
        let with = |sites| Tried { layers: LayerMetrics { sites, ..Default::default() }, ..tried(2.0, 1.0) };
        let tries = |sites: Vec<SiteMetrics>| Tries {
            recipe: with(sites),
            bf16: tried(2.0, 1.0),
            recipe_others: vec![with(vec![site("l.0.q", "x", [100, 0, 0, 3])])],
            bf16_others: Vec::new(),
        };
        let found = culprits(&tries(vec![
            site("l.0.o", "dy", [100, 0, 99, 0]),
            site("l.1.q", "x", [100, 0, 0, 60]),
            site("l.0.q", "x", [100, 0, 0, 80]),
        ]));
        let told: Vec<_> = found.iter().map(|of| (&*of.layer, &*of.tensor, of.what, of.share)).collect();
        assert_eq!(told, [("l.*.q", "x", "saturates", 0.8), ("l.*.o", "dy", "vanishes", 0.99)]);
        assert_eq!((found[0].layers.clone(), found[0].share_of_others), (vec![0, 1], Some(0.03)));
        let few = culprits(&tries(vec![site("l.0.o", "dy", [100, 0, 9, 0])]));
        assert_eq!(few[0].share, 0.09);
        let broken = SiteMetrics { non_finite: 2, ..site("l.1.o", "x", [1, 1, 0, 0]) };
        let found = culprits(&tries(vec![site("l.0.o", "dy", [100, 0, 99, 0]), broken]));
        assert_eq!((found.len(), &*found[0].layer, found[0].what), (1, "l.1.o", "not finite"));
    }
}
