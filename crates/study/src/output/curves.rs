//! The mean of several runs' curves, and how far the runs are from it.

use crate::cell::Kind;
use crate::row::{Outcome, Row};
use crate::rows::Rows;
use crate::statistics::sd;
use crate::study::{Group, Study};

/// Step, mean over seeds, and standard deviation: 0 of one seed.
pub(super) type Band = Vec<(f64, f64, f64)>;

/// A recipe's curves.
pub(super) struct Bands {
    pub recipe: String,
    /// How many seeds there are.
    pub seeds: usize,
    /// Training loss, nats.
    pub losses: Band,
    /// Relative difference from the baseline's loss, of pairs, per cent. Empty of the baseline.
    pub differences: Band,
}

/// The curves of the recipes of a group that have a finished run, in the study's order.
pub(super) fn bands(study: &Study, config: &str, group: Group, rows: &Rows) -> Vec<Bands> {
    let cells = study.cells();
    let done = |recipe: &str, seed: u64| {
        let cell = cells.iter().find(|cell| {
            cell.config == config
                && cell.recipe == recipe
                && cell.seed == seed
                && cell.group() == Some(group)
                && !matches!(cell.kind, Kind::Floor { .. })
        });
        cell.and_then(|cell| rows.get(&cell.id)).filter(|row| row.outcome == Outcome::Done)
    };
    let of = |recipe: &String| {
        let runs: Vec<&Row> = study.seeds.iter().filter_map(|&seed| done(recipe, seed)).collect();
        let is_baseline = *recipe == study.baseline;
        let pair = |&seed: &u64| Some((done(recipe, seed)?, done(&study.baseline, seed)?));
        let pairs: Vec<(&Row, &Row)> = study.seeds.iter().filter(|_| !is_baseline).filter_map(pair).collect();
        let losses = band(&runs, |row, step| row.curve.at(step), |row| row);
        let relative =
            |&(a, b): &(&Row, &Row), step: f64| Some(100.0 * (a.curve.at(step)? / b.curve.at(step)? - 1.0));
        let differences = band(&pairs, relative, |pair| pair.0);
        Bands { recipe: recipe.clone(), seeds: runs.len(), losses, differences }
    };
    study.recipes_of(group).iter().map(of).filter(|bands| !bands.losses.is_empty()).collect()
}

/// At the steps of the first curve at which all have a value.
fn band<T>(of: &[T], value: impl Fn(&T, f64) -> Option<f64>, row: impl Fn(&T) -> &Row) -> Band {
    let Some(first) = of.first() else { return Vec::new() };
    let at = |&(step, _): &(f32, f32)| {
        let step = f64::from(step);
        let values: Option<Vec<f64>> = of.iter().map(|one| value(one, step)).collect();
        let values = values?;
        let mean = values.iter().sum::<f64>() / values.len() as f64;
        mean.is_finite().then(|| (step, mean, sd(&values).unwrap_or(0.0)))
    };
    row(first).curve.points().iter().filter_map(at).collect()
}
