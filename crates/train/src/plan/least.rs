//! Finds the least recomputation with which a run fits a limit of memory, by rehearsals.
//!
//! A choice of recomputation is a set of scopes. The choices are, in layers that have the scope:
//!
//! * nothing, `swiglu`, `norms`, or both;
//! * with both, one of nothing, `mla_up`, `attention` for a layer's first half, and one of nothing, `expert_input`, `mlp_up`, both of these,
//!   `mlp` and `experts` for the second half;
//! * `norms`, `swiglu` and `layers`.
//!
//! Each choice is rehearsed in all layers: its memory, and its work. The additional work of a choice is the time that a step's ops need at
//! the peak rates of an H200 ([`Extra`]), compared with a step that recomputes nothing. Then every choice that fits is combined with
//! every cheaper choice that does not: the first n decoder layers have the one, the others the other. The first layers recompute more,
//! because their activations are saved for the longest time. For a pair, the smallest n that fits is found by bisection over rehearsals. Pairs
//! are tried in the order of their estimated work, with n by interpolation, until the estimate exceeds the best pair found.

use super::{Prediction, predict, work_of_step};
use crate::checks::checked_recipe;
use crate::config::{Config, ModelConfig};
use crate::error::{Error, Result};
use crate::recompute::{Entry, Recompute, Scope};
use nibble_core::recipe::{Layers, Share};
use nibble_core::{DeviceKind, MeshShape, Recipe};
use nibble_dry::Work;

/// The additional work that recomputation adds to a step, over all ranks.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Extra {
    /// Flops of the additional GEMMs and attention.
    pub flops: f64,
    /// Seconds at the data-sheet rates of an H200: the sum, over all ops, of the larger of bytes / memory rate and flops / tensor-core
    /// rate.
    pub seconds: f64,
}

/// A value of `train.recompute`, with the memory and the work that are predicted for this value.
#[derive(Debug, Clone, PartialEq)]
pub struct Recomputed {
    /// The value.
    pub recompute: Recompute,
    /// Bytes per device: [`Prediction::device_bytes`].
    pub bytes: usize,
    /// The additional work, compared with a step that recomputes nothing.
    pub extra: Extra,
}

/// The result of the search for the least recomputation.
#[derive(Debug, Clone, PartialEq)]
pub struct Least {
    /// A run that recomputes nothing.
    pub nothing: Recomputed,
    /// The cheapest choice with which the run fits in memory; `None` if no choice fits.
    pub fits: Option<Recomputed>,
    /// The choice that needs the least memory.
    pub smallest: Recomputed,
    /// Flops of a step that recomputes nothing, over all ranks.
    pub step_flops: f64,
    /// Seconds of a step that recomputes nothing, estimated in the same way as [`Extra::seconds`].
    pub step_seconds: f64,
    /// Number of rehearsals.
    pub rehearsals: usize,
}

/// Finds the least recomputation with which a run needs at most `limit` bytes per device. `train.recompute` of the configuration is ignored.
///
/// # Errors
/// Returns the errors of [`predict`], except that a choice whose sizes overflow does not fit.
pub fn least_recompute(kind: DeviceKind, mesh: MeshShape, config: &Config, limit: usize) -> Result<Least> {
    let recipe = checked_recipe(config)?;
    let mut search = Search { kind, mesh, config: config.begun_on(kind, &recipe), recipe, rehearsals: 0 };
    let base = search.work(&Recompute::of(&[]))?;
    let mut choices = Vec::new();
    for scopes in choices_of(&config.model) {
        choices.push((search.of(Recompute::of(&scopes), base)?, scopes));
    }
    let nothing = choices[0].0.clone();
    let mut fits: Option<Recomputed> = None;
    let mut smallest = nothing.clone();
    for (choice, _) in &choices {
        if choice.bytes < smallest.bytes {
            smallest = choice.clone();
        }
        if choice.bytes <= limit && fits.as_ref().is_none_or(|best| cost(choice) < cost(best)) {
            fits = Some(choice.clone());
        }
    }
    for pair in pairs(&choices, config.model.layers, limit) {
        let Some(best) = &fits else { break };
        if pair.estimate >= cost(best) {
            break;
        }
        let found = search.fewest_layers(&pair, base, limit)?;
        if found.bytes <= limit && cost(&found) < cost(best) {
            fits = Some(found);
        }
    }
    let (step_flops, step_seconds) = (base.flops, base.seconds);
    Ok(Least { nothing, fits, smallest, step_flops, step_seconds, rehearsals: search.rehearsals })
}

/// The sets of scopes that are tried in all layers, without scopes that the model does not have; nothing first.
fn choices_of(model: &ModelConfig) -> Vec<Vec<Scope>> {
    use Scope::{Attention, ExpertInput, Experts, Layers, MlaUp, Mlp, MlpUp, Norms, Swiglu};
    const FIRST: [&[Scope]; 3] = [&[], &[MlaUp], &[Attention]];
    const SECOND: [&[Scope]; 5] = [&[], &[ExpertInput], &[MlpUp], &[ExpertInput, MlpUp], &[Mlp, Experts]];
    let cheap = [&[][..], &[Swiglu], &[Norms]].map(<[Scope]>::to_vec);
    let halves = FIRST
        .iter()
        .flat_map(|first| SECOND.iter().map(|second| [&[Norms, Swiglu], *first, second].concat()));
    let mut choices: Vec<Vec<Scope>> =
        cheap.into_iter().chain(halves).chain([vec![Norms, Swiglu, Layers]]).collect();
    for choice in &mut choices {
        // In a model without experts, `experts` means `mlp`.
        choice.retain(|scope| scope.is_of(model) && (*scope != Experts || model.experts > 0));
    }
    let mut distinct: Vec<Vec<Scope>> = Vec::new();
    for choice in choices {
        if !distinct.contains(&choice) {
            distinct.push(choice);
        }
    }
    distinct
}

fn cost(choice: &Recomputed) -> f64 {
    choice.extra.seconds
}

/// Two choices, of which `less` does not fit and `more` does.
struct Pair<'a> {
    less: &'a [Scope],
    more: &'a [Scope],
    /// A lower estimate of the additional seconds of a step.
    estimate: f64,
}

/// The pairs of choices, in the order of their estimates.
fn pairs(choices: &[(Recomputed, Vec<Scope>)], layers: usize, limit: usize) -> Vec<Pair<'_>> {
    let mut pairs = Vec::new();
    for (less, less_scopes) in choices.iter().filter(|(choice, _)| choice.bytes > limit) {
        let dearer = |more: &Recomputed| more.bytes <= limit && cost(more) > cost(less);
        for (more, more_scopes) in choices.iter().filter(|(choice, _)| dearer(choice)) {
            let share = (less.bytes - limit) as f64 / (less.bytes - more.bytes) as f64;
            // Memory is not quite linear in the number of layers.
            let in_layers = ((share * layers as f64).floor() - 1.0).max(1.0) / layers as f64;
            let estimate = cost(less) + in_layers * (cost(more) - cost(less));
            pairs.push(Pair { less: less_scopes, more: more_scopes, estimate });
        }
    }
    pairs.sort_by(|a, b| a.estimate.total_cmp(&b.estimate));
    pairs
}

/// `more` in the first `n` of the model's decoder layers, `less` in the others.
fn mixed(model: &ModelConfig, less: &[Scope], more: &[Scope], n: usize) -> Recompute {
    let all = Recompute::of(more);
    let is_covered = |scope: Scope| {
        let with = all.with(&[scope]);
        (0..model.layers).all(|layer| with.of_layer(model, layer) == all.of_layer(model, layer))
    };
    let first = |scope: &Scope| Entry { scope: *scope, layers: Some(Layers::First(Share::Layers(n))) };
    let of_less = less.iter().map(|scope| match more.contains(scope) || is_covered(*scope) {
        true => Entry::from(*scope),
        false => Entry { scope: *scope, layers: Some(Layers::Last(Share::Layers(model.layers - n))) },
    });
    let of_more = more.iter().filter(|scope| !less.contains(scope)).map(first);
    let mixed: Recompute = of_less.chain(of_more).filter(|entry| entry.fault(model).is_none()).collect();
    mixed.normal()
}

struct Search {
    kind: DeviceKind,
    mesh: MeshShape,
    config: Config,
    recipe: Recipe,
    rehearsals: usize,
}

impl Search {
    fn with(&self, recompute: &Recompute) -> Config {
        let mut config = self.config.clone();
        config.train.recompute = recompute.clone();
        config
    }

    fn of(&mut self, recompute: Recompute, base: Extra) -> Result<Recomputed> {
        let (bytes, work) = (self.bytes(&recompute)?, self.work(&recompute)?);
        let extra = Extra { flops: work.flops - base.flops, seconds: work.seconds - base.seconds };
        Ok(Recomputed { recompute, bytes, extra })
    }

    fn bytes(&mut self, recompute: &Recompute) -> Result<usize> {
        self.rehearsals += 1;
        match predict(self.kind, self.mesh, &self.with(recompute), &self.recipe) {
            Ok(prediction) => Ok(Prediction::device_bytes(&prediction)),
            Err(Error::Memory { needed, .. }) => Ok(needed),
            Err(error) => Err(error),
        }
    }

    /// The work of a whole step.
    fn work(&mut self, recompute: &Recompute) -> Result<Extra> {
        self.rehearsals += 1;
        let calls = work_of_step(self.kind, &self.with(recompute), &self.recipe, 0)?;
        Ok(calls.iter().fold(Extra::default(), |sum, call| Extra {
            flops: sum.flops + call.work.flops.total(),
            seconds: sum.seconds + seconds(&call.work),
        }))
    }

    /// The pair with the fewest layers of `more` that fit the limit.
    fn fewest_layers(&mut self, pair: &Pair<'_>, base: Extra, limit: usize) -> Result<Recomputed> {
        // `low` layers do not fit, `high` do.
        let (mut low, mut high) = (0, self.config.model.layers);
        while high - low > 1 {
            let middle = low.midpoint(high);
            let tried = mixed(&self.config.model, pair.less, pair.more, middle);
            match self.bytes(&tried)? <= limit {
                true => high = middle,
                false => low = middle,
            }
        }
        let recompute = match high == self.config.model.layers {
            true => Recompute::of(pair.more).normal(),
            false => mixed(&self.config.model, pair.less, pair.more, high),
        };
        self.of(recompute, base)
    }
}

/// The least seconds of an op on an H200, by its data sheet: 4.8 TB/s, and dense 989.5 Tflop/s in BF16 and 1979 in FP8. F32 products count
/// at the rate of BF16.
fn seconds(work: &Work) -> f64 {
    const MEMORY: f64 = 4.8e12;
    const BF16: f64 = 989.5e12;
    const FP8: f64 = 1979e12;
    let multiplying = (work.flops.f32 + work.flops.bf16) / BF16 + work.flops.fp8 / FP8;
    multiplying.max((work.read + work.written) as f64 / MEMORY)
}

#[cfg(test)]
mod tests {
    use super::*;
    use nibble_testkit::Breadth;

    const LATENT: [&str; 5] = [
        "model.kv_rank=32",
        "model.rope_dim=8",
        "model.kv_heads=4",
        "model.qk_norm=false",
        "model.shared_ffn=64",
    ];
    const FIRST_DENSE: [&str; 2] = ["model.dense_layers=1", "model.ffn=96"];

    fn config(name: &str, sets: &[&str]) -> Config {
        let sets: Vec<String> =
            [&["model.layers=3"], sets].concat().iter().map(|set| (*set).into()).collect();
        Config::load(name, &sets).unwrap()
    }

    /// Every choice in all layers, and every pair with every number of layers.
    fn every_choice(config: &Config, kind: DeviceKind) -> Vec<Recomputed> {
        let recipe = checked_recipe(config).unwrap();
        let mut search = Search { kind, mesh: MeshShape::ONE, config: config.clone(), recipe, rehearsals: 0 };
        let base = search.work(&Recompute::of(&[])).unwrap();
        let choices = choices_of(&config.model);
        let mut all: Vec<Recompute> = choices.iter().map(|scopes| Recompute::of(scopes)).collect();
        for (less, more) in choices.iter().flat_map(|less| choices.iter().map(move |more| (less, more))) {
            all.extend((1..config.model.layers).map(|n| mixed(&config.model, less, more, n)));
        }
        let mut distinct: Vec<Recompute> = Vec::new();
        for recompute in all {
            if !distinct.contains(&recompute) {
                distinct.push(recompute);
            }
        }
        let some = distinct.into_iter().step_by(Breadth::of_tests().either(1, 7));
        some.map(|recompute| search.of(recompute, base).unwrap()).collect()
    }

    #[test]
    fn the_cheapest_choice_that_fits_is_found() {
        for (config, kind) in [
            (config("tiny", &["recipe=bf16"]), DeviceKind::Gpu),
            (config("tiny", &[&["recipe=bf16"], &LATENT[..], &FIRST_DENSE].concat()), DeviceKind::Gpu),
            (config("tiny", &["recipe=mxfp4-hopper", "train.grad_accum=2"]), DeviceKind::Host),
            (config("tiny-dense", &["recipe=fp8-block"]), DeviceKind::Gpu),
        ] {
            let all = every_choice(&config, kind);
            let [least, most] = [all.iter().map(|of| of.bytes).min(), all.iter().map(|of| of.bytes).max()];
            let (least, most) = (least.unwrap(), most.unwrap());
            for part in 0..=6 {
                let limit = least + (most - least) * part / 6;
                let found = least_recompute(kind, MeshShape::ONE, &config, limit).unwrap();
                let fitting = all.iter().filter(|of| of.bytes <= limit);
                let best = fitting.map(cost).min_by(f64::total_cmp).unwrap();
                // Memory is not monotonic in the number of layers where a wider scope needs more temporaries than it frees.
                let Some(fits) = &found.fits else {
                    assert!(found.smallest.bytes > limit, "{limit}");
                    continue;
                };
                assert!(
                    fits.bytes <= limit && cost(fits) <= best + 0.02 * found.step_seconds,
                    "{limit}: {fits:?}, {best}"
                );
                // The setting is accepted, and means what was rehearsed.
                let set = [fits.recompute.setting()];
                let text = config.resolved_toml().unwrap();
                let set = Config::from_text(&text, std::path::Path::new("text"), &set).unwrap();
                assert_eq!(set.train.recompute, fits.recompute);
                let recipe = checked_recipe(&set).unwrap();
                assert_eq!(predict(kind, MeshShape::ONE, &set, &recipe).unwrap().device_bytes(), fits.bytes);
            }
            let nothing = least_recompute(kind, MeshShape::ONE, &config, least - 1).unwrap();
            assert_eq!(nothing.fits, None);
            let enough = least_recompute(kind, MeshShape::ONE, &config, usize::MAX).unwrap();
            assert!(cost(&enough.fits.unwrap()) <= 0.0);
        }
    }

    #[test]
    fn a_part_of_the_layers_recomputes_more() {
        use Scope::{Attention, ExpertInput, Experts, MlaUp, Mlp, MlpUp, Norms};
        let config = config("tiny", &[&LATENT[..], &FIRST_DENSE, &["model.layers=4"]].concat());
        let of = |less: &[Scope], more: &[Scope], n| mixed(&config.model, less, more, n).to_string();
        assert_eq!(of(&[Norms], &[Norms, MlpUp], 2), r#"["norms", "mlp_up@first:2"]"#);
        // Attention includes its projections from latents, and both kinds of halves their first product.
        assert_eq!(of(&[MlaUp], &[Attention], 1), r#"["mla_up", "attention@first:1"]"#);
        assert_eq!(of(&[MlpUp], &[Mlp, Experts], 3), r#"["mlp_up", "mlp@first:3", "experts@first:3"]"#);
        // The first layer is dense.
        assert_eq!(of(&[Norms], &[Norms, Mlp, Experts], 1), r#"["norms", "mlp@first:1"]"#);
        assert_eq!(of(&[ExpertInput], &[MlpUp], 3), r#"["expert_input@last:1", "mlp_up@first:3"]"#);
    }
}
