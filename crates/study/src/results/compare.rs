//! A recipe beside the baseline, seed by seed.

use super::GroupResults;
use super::lag::{self, Lag};
use crate::cell::Cell;
use crate::row::{Outcome, Row};
use crate::rows::Rows;
use crate::statistics::{Paired, holm, minimum_detectable};
use crate::study::{Group, Study};
use serde::Serialize;

/// The chance of calling any recipe of a configuration different that is not: the level of the tests, before Holm's correction divides it.
pub const ALPHA: f64 = 0.05;
/// The power for which detectable differences are told.
pub const POWER: f64 = 0.8;

/// What the seeds say of a recipe.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Verdict {
    /// Its expected loss is higher than the baseline's: the corrected p-value is below [`ALPHA`].
    Worse,
    /// Its expected loss is lower.
    Better,
    /// Neither is shown. That is no proof of equality: see [`Measure::detectable`].
    NotResolved,
    /// Fewer than two pairs of runs are done.
    TooFewPairs,
}

impl Verdict {
    /// As tables say it.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Worse => "worse",
            Self::Better => "better",
            Self::NotResolved => "not resolved",
            Self::TooFewPairs => "too few pairs",
        }
    }
}

/// One kind of loss, compared.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Measure {
    /// Seed, and relative difference of the losses in per cent: 100 · (L_recipe / L_baseline − 1), the relative loss of equation 4 in *HiFloat4 Format for Language Model Pre-training on
    /// Ascend NPUs* (arXiv 2604.08826). In the study's order of seeds.
    pub differences: Vec<(u64, f64)>,
    /// Their mean and spread, per cent.
    pub paired: Option<Paired>,
    /// The p-value after Holm's correction over the comparisons of the configuration.
    pub p_holm: Option<f64>,
    /// What follows.
    pub verdict: Verdict,
    /// The smallest true difference, per cent, that the planned number of seeds resolves with probability [`POWER`], if the standard deviation is the one that was found. At level [`ALPHA`] /
    /// family: the strictest step of Holm's correction.
    pub detectable: Option<f64>,
}

/// The spread of pairs over all recipes of a configuration: of few seeds it is known much better than that of one recipe.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Pooled {
    /// Standard deviation of the paired differences of training losses, per cent.
    pub sd: f64,
    /// Degrees of freedom. Recipes share their baseline's runs, so that these are fewer in truth.
    pub freedom: usize,
    /// As [`Measure::detectable`], with this standard deviation.
    pub detectable: Option<f64>,
}

/// How many of the planned pairs there are, and what became of the others.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct Counts {
    /// Seeds of the study.
    pub planned: usize,
    /// Pairs of which both runs are done.
    pub pairs: usize,
    /// Seeds whose run of this recipe diverged.
    pub diverged: usize,
    /// Other seeds whose run of the baseline diverged.
    pub baseline_diverged: usize,
    /// Other seeds of which a run failed.
    pub failed: usize,
    /// The remaining seeds: a run of the pair is missing.
    pub not_run: usize,
}

/// A recipe beside the baseline.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Comparison {
    /// The recipe.
    pub recipe: String,
    /// Which pairs there are.
    pub counts: Counts,
    /// Training loss, the mean of the last tenth of the steps. The verdict on the recipe is this measure's.
    pub training: Measure,
    /// Held-out loss, at the last step at which both runs of a pair were evaluated. Its correction is its own.
    pub held_out: Measure,
    /// The difference of training losses in steps of the baseline.
    pub lag: Lag,
    /// Tokens a second over the baseline's: the mean ratio of pairs that ran on one kind of device.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub speed: Option<f64>,
    /// Joules a token over the baseline's: the mean ratio of the same pairs.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub energy: Option<f64>,
}

/// The recipes of a group beside its baseline, before correction. `cells` are the group's of one configuration.
pub(super) fn comparisons(study: &Study, group: Group, cells: &[&Cell], rows: &Rows) -> Vec<Comparison> {
    let others = study.recipes_of(group).iter().filter(|recipe| **recipe != study.baseline);
    others.map(|recipe| compare(study, recipe, cells, rows)).collect()
}

fn compare(study: &Study, recipe: &str, cells: &[&Cell], rows: &Rows) -> Comparison {
    let row = |recipe: &str, seed: u64| {
        let is = |cell: &&&Cell| cell.recipe == recipe && cell.seed == seed && cell.repeat == 0;
        cells.iter().find(is).and_then(|cell| rows.get(&cell.id))
    };
    let mut counts = Counts { planned: study.seeds.len(), ..Counts::default() };
    let mut pairs: Vec<(u64, &Row, &Row)> = Vec::new();
    for &seed in &study.seeds {
        let (of, baseline) = (row(recipe, seed), row(&study.baseline, seed));
        let diverged =
            |row: Option<&Row>| row.is_some_and(|row| matches!(row.outcome, Outcome::Diverged { .. }));
        let failed = |row: Option<&Row>| row.is_some_and(|row| matches!(row.outcome, Outcome::Failed { .. }));
        match (of, baseline) {
            _ if diverged(of) => counts.diverged += 1,
            _ if diverged(baseline) => counts.baseline_diverged += 1,
            _ if failed(of) || failed(baseline) => counts.failed += 1,
            (Some(of), Some(baseline)) => pairs.push((seed, of, baseline)),
            _ => counts.not_run += 1,
        }
    }
    counts.pairs = pairs.len();
    let ratio = |of: fn(&Row) -> Option<f64>| {
        let same = pairs.iter().filter(|(_, a, b)| a.provenance.device == b.provenance.device);
        let ratios: Vec<f64> = same.filter_map(|(_, a, b)| Some(of(a)? / of(b)?)).collect();
        (!ratios.is_empty()).then(|| ratios.iter().sum::<f64>() / ratios.len() as f64)
    };
    let training = |a: &Row, b: &Row| Some((a.last_tenth?, b.last_tenth?));
    Comparison {
        recipe: recipe.to_owned(),
        counts,
        training: Measure::of(&pairs, training),
        held_out: Measure::of(&pairs, held_out),
        lag: lag::lag(&pairs),
        speed: ratio(|row| row.tokens_per_second),
        energy: ratio(|row| row.joules_per_token),
    }
}

/// The held-out losses of both at the last step at which both have one.
fn held_out(a: &Row, b: &Row) -> Option<(f64, f64)> {
    let same = |step: u64| b.held_out.iter().find(|(other, _)| *other == step);
    a.held_out.iter().rev().find_map(|(step, loss)| same(*step).map(|(_, other)| (*loss, *other)))
}

impl Measure {
    fn of(pairs: &[(u64, &Row, &Row)], losses: impl Fn(&Row, &Row) -> Option<(f64, f64)>) -> Self {
        let difference = |&(seed, a, b): &(u64, &Row, &Row)| {
            let (loss, baseline) = losses(a, b)?;
            Some((seed, 100.0 * (loss / baseline - 1.0)))
        };
        let differences: Vec<(u64, f64)> = pairs.iter().filter_map(difference).collect();
        let values: Vec<f64> = differences.iter().map(|(_, difference)| *difference).collect();
        let paired = Paired::of(&values);
        Self { differences, paired, p_holm: None, verdict: Verdict::TooFewPairs, detectable: None }
    }

    /// `unit` is what can be detected where the standard deviation is 1.
    fn conclude(&mut self, p_holm: Option<f64>, unit: Option<f64>) {
        self.p_holm = p_holm;
        self.verdict = match (self.paired, p_holm) {
            (Some(paired), Some(p)) if p < ALPHA && paired.mean > 0.0 => Verdict::Worse,
            (Some(_), Some(p)) if p < ALPHA => Verdict::Better,
            (_, Some(_)) => Verdict::NotResolved,
            (_, None) => Verdict::TooFewPairs,
        };
        let sd = self.paired.and_then(|paired| paired.sd);
        self.detectable = sd.zip(unit).map(|(sd, unit)| sd * unit);
    }
}

/// The smallest true difference that so many seeds resolve with probability [`POWER`] where the standard deviation of pairs is 1, at level [`ALPHA`] / family.
pub(super) fn detectable_of_unit(seeds: usize, family: usize) -> Option<f64> {
    minimum_detectable(1.0, seeds, ALPHA / family.max(1) as f64, POWER)
}

/// The standard deviation of paired differences of training losses, per cent, pooled over those comparisons that have two pairs or more: √(Σ (nᵢ − 1) sdᵢ² / Σ (nᵢ − 1)).
pub(super) fn pooled<'a>(all: impl Iterator<Item = &'a Comparison>) -> Option<Pooled> {
    let (mut squares, mut freedom) = (0.0, 0);
    for paired in all.filter_map(|one| one.training.paired) {
        if let Some(sd) = paired.sd {
            squares += (paired.pairs - 1) as f64 * sd * sd;
            freedom += paired.pairs - 1;
        }
    }
    (freedom > 0).then(|| Pooled { sd: (squares / freedom as f64).sqrt(), freedom, detectable: None })
}

/// Corrects the p-values of a configuration for so many planned comparisons, training and held-out losses each by themselves, and draws the conclusions. `unit` is what can be detected where
/// the standard deviation is 1.
pub(super) fn correct(groups: &mut [GroupResults], family: usize, unit: Option<f64>) {
    let measures: [fn(&mut Comparison) -> &mut Measure; 2] =
        [|one| &mut one.training, |one| &mut one.held_out];
    for measure in measures {
        let mut all: Vec<&mut Measure> =
            groups.iter_mut().flat_map(|group| &mut group.comparisons).map(measure).collect();
        let p: Vec<Option<f64>> =
            all.iter().map(|measure| measure.paired.and_then(|paired| paired.p)).collect();
        for (measure, adjusted) in all.iter_mut().zip(holm(&p, family)) {
            measure.conclude(adjusted, unit);
        }
    }
}
