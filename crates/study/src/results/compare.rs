//! Compares a recipe with the baseline, seed by seed.

use super::GroupResults;
use super::lag::{self, Lag};
use crate::cell::Cell;
use crate::row::{Outcome, Row};
use crate::rows::Rows;
use crate::statistics::{Paired, holm, minimum_detectable};
use crate::study::{Group, Study};
use serde::Serialize;

/// The significance level of the tests before Holm's correction: the probability that at least one recipe of a configuration is called
/// different although none is.
pub const ALPHA: f64 = 0.05;
/// The statistical power for which detectable differences are reported.
pub const POWER: f64 = 0.8;

/// The conclusion about a recipe, compared with the baseline.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Verdict {
    /// The recipe's expected loss is higher than the baseline's: the corrected p-value is below [`ALPHA`].
    Worse,
    /// The recipe's expected loss is lower than the baseline's, by the same criterion.
    Better,
    /// The runs show neither a higher nor a lower loss. An unresolved difference is no proof of equality; see [`Measure::detectable`].
    NotResolved,
    /// Fewer than two pairs of runs are finished.
    TooFewPairs,
}

impl Verdict {
    /// The text in tables.
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

/// The comparison of a recipe with the baseline by one kind of loss.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Measure {
    /// For each seed, in the study's order, the relative difference of the losses in per cent: 100 · (L_recipe / L_baseline − 1). These
    /// relative losses are defined in equation 4 of *HiFloat4 Format for Language Model Pre-training on Ascend NPUs* (arXiv 2604.08826).
    pub differences: Vec<(u64, f64)>,
    /// The mean and the spread of the differences, in per cent.
    pub paired: Option<Paired>,
    /// The p-value after Holm's correction for all comparisons of the configuration.
    pub p_holm: Option<f64>,
    /// The conclusion that follows from the corrected p-value.
    pub verdict: Verdict,
    /// The smallest true difference, in per cent, that the planned number of seeds detects with probability [`POWER`] if the standard
    /// deviation is the measured one. The significance level is [`ALPHA`] / family, which is the strictest step of Holm's correction.
    pub detectable: Option<f64>,
}

/// The spread of paired differences, pooled over all recipes of a configuration. With few seeds, this pooled estimate is much more precise
/// than the estimate for a single recipe.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Pooled {
    /// Standard deviation of the paired differences of training losses, in per cent.
    pub sd: f64,
    /// Degrees of freedom of `sd`. The true number is smaller, because recipes share the runs of their baseline.
    pub freedom: usize,
    /// The value of [`Measure::detectable`], computed with this pooled standard deviation.
    pub detectable: Option<f64>,
}

/// The number of finished pairs of runs, and the numbers of planned pairs that are missing, by reason.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct Counts {
    /// Number of seeds of the study.
    pub planned: usize,
    /// Number of pairs (recipe and baseline with the same seed) in which both runs are finished.
    pub pairs: usize,
    /// Number of seeds for which the run of this recipe diverged.
    pub diverged: usize,
    /// Number of seeds for which the baseline's run diverged but the run of this recipe did not.
    pub baseline_diverged: usize,
    /// Number of seeds for which at least one of the two runs failed and neither diverged.
    pub failed: usize,
    /// Number of remaining seeds, for which at least one run of the pair has not been run.
    pub not_run: usize,
}

/// The comparison of a recipe with the baseline.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Comparison {
    /// The recipe.
    pub recipe: String,
    /// The numbers of finished and missing pairs of runs.
    pub counts: Counts,
    /// The comparison of the training loss, averaged over the last tenth of the steps. The verdict on the recipe is the verdict of this
    /// comparison.
    pub training: Measure,
    /// Comparison of the held-out loss at the last step at which both runs of a pair were evaluated. The p-values of the held-out loss are
    /// corrected separately from those of the training loss.
    pub held_out: Measure,
    /// The difference of training losses, converted to a number of steps of the baseline.
    pub lag: Lag,
    /// Tokens per second relative to the baseline: the mean ratio over the pairs that ran on the same kind of device.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub speed: Option<f64>,
    /// Joules per token relative to the baseline: the mean ratio over the pairs that ran on the same kind of device.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub energy: Option<f64>,
}

/// Compares the recipes of a group with the baseline, before Holm's correction. `cells` are the group's cells in one configuration.
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

/// The held-out losses of both rows at the last step at which both have a held-out loss.
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

    /// Sets the conclusion; `unit` is the detectable difference for a standard deviation of 1.
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

/// The smallest true difference that this number of seeds resolves with probability [`POWER`], for a standard deviation of pairs of 1, at level [`ALPHA`] / family.
pub(super) fn detectable_of_unit(seeds: usize, family: usize) -> Option<f64> {
    minimum_detectable(1.0, seeds, ALPHA / family.max(1) as f64, POWER)
}

/// The standard deviation of paired differences of training losses, in per cent, pooled over all comparisons with at least two pairs: √(Σ (nᵢ − 1) sdᵢ² / Σ (nᵢ − 1)).
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

/// Corrects the p-values of a configuration for `family` planned comparisons, separately for training and held-out losses, and sets the conclusions. `unit` is the detectable
/// difference for a standard deviation of 1.
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
