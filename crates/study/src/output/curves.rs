//! The mean curve of several runs, and the spread of the runs around it.

use crate::row::{Outcome, Row};
use crate::rows::Rows;
use crate::statistics::sd;
use crate::study::{Group, Study};

/// Points of a band: step, mean over seeds, and standard deviation (0 for one seed).
pub(super) type Band = Vec<(f64, f64, f64)>;

/// The curves of one recipe.
pub(super) struct Bands {
    pub recipe: String,
    /// Number of seeds.
    pub seeds: usize,
    /// Training loss, in nats.
    pub losses: Band,
    /// The relative difference from the baseline's loss, over pairs of runs, in per cent. Empty for the baseline.
    pub differences: Band,
}

/// The curves of all recipes of a group that have a finished run, in the study's order.
pub(super) fn bands(study: &Study, config: &str, group: Group, rows: &Rows) -> Vec<Bands> {
    let cells = study.cells();
    let done = |recipe: &str, seed: u64| {
        let cell = cells.iter().find(|cell| {
            cell.config == config
                && cell.recipe == recipe
                && cell.seed == seed
                && cell.group() == Some(group)
                && cell.repeat == 0
        });
        cell.and_then(|cell| rows.get(&cell.id)).filter(|row| row.outcome == Outcome::Done)
    };
    let of = |recipe: &String| {
        let runs: Vec<&Row> = study.seeds.iter().filter_map(|&seed| done(recipe, seed)).collect();
        let is_baseline = *recipe == study.baseline;
        let pair = |&seed: &u64| Some((done(recipe, seed)?, done(&study.baseline, seed)?));
        let pairs: Vec<(&Row, &Row)> = study.seeds.iter().filter(|_| !is_baseline).filter_map(pair).collect();
        let losses = band(&runs, |row, middle, width| around(row, middle, width), |row| row);
        let relative = |&(a, b): &(&Row, &Row), middle: f64, width: f64| {
            Some(100.0 * (around(a, middle, width)? / around(b, middle, width)? - 1.0))
        };
        let differences = band(&pairs, relative, |pair| pair.0);
        Bands { recipe: recipe.clone(), seeds: runs.len(), losses, differences }
    };
    study.recipes_of(group).iter().map(of).filter(|bands| !bands.losses.is_empty()).collect()
}

/// Number of points of a band. With more points, the noise of single steps would dominate the plot.
const POINTS: u32 = 80;

/// Computes a band at the middles of equal parts of the first run's steps, or at the first run's points if there are fewer.
fn band<T>(of: &[T], value: impl Fn(&T, f64, f64) -> Option<f64>, row: impl Fn(&T) -> &Row) -> Band {
    let points = of.first().map_or(&[][..], |first| row(first).curve.points());
    let (Some(first), Some(last)) = (points.first(), points.last()) else { return Vec::new() };
    let (first, last) = (f64::from(first.0), f64::from(last.0));
    let width = (last - first) / f64::from(POINTS);
    let parts: Vec<(f64, f64)> = match points.len() > POINTS as usize {
        true => (0..POINTS).map(|i| (first + width * (f64::from(i) + 0.5), width)).collect(),
        false => points.iter().map(|point| (f64::from(point.0), 0.0)).collect(),
    };
    let at = |(middle, width): (f64, f64)| {
        let values: Option<Vec<f64>> = of.iter().map(|one| value(one, middle, width)).collect();
        let values = values?;
        let mean = values.iter().sum::<f64>() / values.len() as f64;
        mean.is_finite().then(|| (middle, mean, sd(&values).unwrap_or(0.0)))
    };
    parts.into_iter().filter_map(at).collect()
}

/// The mean of a run's points around a step. If no point is near the step, the loss is interpolated between neighbouring points.
fn around(row: &Row, middle: f64, width: f64) -> Option<f64> {
    let (from, to) = (middle - width / 2.0, middle + width / 2.0);
    let points = row.curve.points().iter().filter(|point| (from..to).contains(&f64::from(point.0)));
    let (number, sum) = points.fold((0, 0.0), |(number, sum), point| (number + 1, sum + f64::from(point.1)));
    if number > 0 { Some(sum / f64::from(number)) } else { row.curve.at(middle) }
}
