//! Converts a difference of losses to a number of steps.

use crate::row::Row;
use serde::Serialize;

/// A difference of losses, expressed as the number of baseline steps that changes the loss as much.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
#[serde(rename_all = "snake_case", tag = "is", content = "steps")]
pub enum Lag {
    /// The recipe is behind: the baseline reached the recipe's loss this many steps before the end.
    Behind(f64),
    /// The recipe is ahead: the baseline would reach the recipe's loss this many steps after the end, if its loss continued to fall as at the end.
    Ahead(f64),
    /// The difference exceeds the steps of the run, or the baseline's loss does not fall at the end.
    MoreThanTheRun,
    /// There are no curves, or the curves are too short.
    Unknown,
}

/// The mean difference of the last tenths, divided by the slope of the baseline's mean curve at the end.
///
/// The slope is the difference between the means of the last tenth of the steps and of the tenth before, divided by the distance between the middles of the two tenths. So this is
/// the slope of a smoothed curve at the start of the last tenth. If the learning rate has decayed to zero, the loss hardly falls, and a small difference corresponds to many steps.
pub(super) fn lag(pairs: &[(u64, &Row, &Row)]) -> Lag {
    let of = |&(_, a, b): &(u64, &Row, &Row)| {
        let (slope, steps) = end_slope(b)?;
        Some((a.last_tenth? - b.last_tenth?, slope, steps))
    };
    let all: Vec<(f64, f64, f64)> = pairs.iter().filter_map(of).collect();
    if all.is_empty() || all.len() < pairs.len() {
        return Lag::Unknown;
    }
    let n = all.len() as f64;
    let difference = all.iter().map(|one| one.0).sum::<f64>() / n;
    // The slope of the mean curve equals the mean of the slopes.
    let slope = all.iter().map(|one| one.1).sum::<f64>() / n;
    let longest = all.iter().map(|one| one.2).fold(0.0, f64::max);
    let steps = difference.abs() / -slope;
    match (slope < 0.0 && steps <= longest, difference > 0.0) {
        (false, _) if difference == 0.0 => Lag::Behind(0.0),
        (false, _) => Lag::MoreThanTheRun,
        (true, true) => Lag::Behind(steps),
        (true, false) => Lag::Ahead(steps),
    }
}

/// The slope in nats per step at the end of a row's curve, and the number of steps that the curve spans. `None` if a tenth has no point.
fn end_slope(row: &Row) -> Option<(f64, f64)> {
    let points = row.curve.points();
    let (first, last) = (f64::from(points.first()?.0), f64::from(points.last()?.0));
    let span = last - first;
    let mean = |from: f64, to: f64| {
        let inside = points.iter().filter(|point| (from..to).contains(&f64::from(point.0)));
        let (n, step, loss) = inside.fold((0.0, 0.0, 0.0), |(n, step, loss), point| {
            (n + 1.0, step + f64::from(point.0), loss + f64::from(point.1))
        });
        (n > 0.0).then(|| (step / n, loss / n))
    };
    let before = mean(first + 0.8 * span, first + 0.9 * span)?;
    let after = mean(first + 0.9 * span, f64::INFINITY)?;
    (after.0 > before.0).then(|| ((after.1 - before.1) / (after.0 - before.0), span))
}
