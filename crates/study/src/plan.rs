//! The cost of a study and the differences that it can resolve, before it starts.

use crate::cell::{Cell, Kind};
use crate::results::{ALPHA, POWER, Results};
use crate::row::Outcome;
use crate::rows::Rows;
use crate::statistics::minimum_detectable;
use crate::study::Study;
use serde::Serialize;
use std::fmt;

/// The source from which the seconds of a cell are estimated.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Basis {
    /// Finished rows of the same configuration and recipe: the median of their seconds per step.
    Rows,
    /// An estimate from the caller.
    Estimate,
    /// No estimate exists.
    Nothing,
}

/// The cost of all cells with one configuration, one recipe and one kind.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Cost {
    /// The configuration.
    pub config: String,
    /// The recipe.
    pub recipe: String,
    /// The kind of the cells: `run`, `floor`, `trunk` or `branch`.
    pub kind: String,
    /// Number of steps of one cell.
    pub steps: u64,
    /// Number of cells.
    pub cells: usize,
    /// Number of cells that already have a row.
    pub done: usize,
    /// Estimated seconds of one cell.
    pub seconds: Option<f64>,
    /// The source from which the seconds are estimated.
    pub from: Basis,
}

/// The standard deviation of paired differences, together with its source.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
#[serde(rename_all = "snake_case", tag = "is", content = "percent")]
pub enum Spread {
    /// From rows of this study: [`Results::pooled_sd`].
    Rows(f64),
    /// From a pilot study.
    Pilot(f64),
    /// The standard deviation is unknown.
    Unknown,
}

/// The cost of a study, and the sizes of the differences that the study can detect.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Plan {
    /// The study's name.
    pub study: String,
    /// The cost of each kind of cell, in the order in which the first cells of the kinds run.
    pub costs: Vec<Cost>,
    /// The expected standard deviation of paired differences.
    pub spread: Spread,
    /// Number of planned seeds.
    pub seeds: usize,
    /// Number of comparisons with the baseline within a configuration.
    pub family: usize,
    /// For several numbers of seeds, the smallest true difference that this number of seeds detects with probability [`POWER`]. The unit of
    /// the differences is per cent of the baseline's loss; if the spread is unknown, it is the standard deviation of the differences. The
    /// planned number of seeds is included.
    pub detectable: Vec<(usize, Option<f64>)>,
}

impl Plan {
    /// Computes the plan of this study from the rows that exist. `seconds_per_step` gives the estimate for a cell if no row gives one.
    /// `pilot` is the standard deviation of paired differences in per cent, which another study measured ([`Results::pooled_sd`]). `pilot`
    /// is used only if the rows do not give this standard deviation.
    ///
    /// Detectable differences are those of a two-sided paired t test at the level [`ALPHA`] / number of comparisons, which is the strictest
    /// step of Holm's correction.
    #[must_use]
    pub fn of(
        study: &Study,
        rows: &Rows,
        seconds_per_step: &dyn Fn(&Cell) -> Option<f64>,
        pilot: Option<f64>,
    ) -> Self {
        let cells = study.cells();
        let mut costs: Vec<Cost> = Vec::new();
        for cell in &cells {
            let kind = kind(cell);
            let done = usize::from(rows.get(&cell.id).is_some());
            let same = |cost: &&mut Cost| {
                (&*cost.config, &*cost.recipe, &*cost.kind, cost.steps)
                    == (&*cell.config, &*cell.recipe, kind, cell.steps)
            };
            if let Some(cost) = costs.iter_mut().find(same) {
                cost.cells += 1;
                cost.done += done;
                continue;
            }
            let (per_step, from) = match (measured(cell, &cells, rows), seconds_per_step(cell)) {
                (Some(seconds), _) => (Some(seconds), Basis::Rows),
                (None, Some(seconds)) => (Some(seconds), Basis::Estimate),
                (None, None) => (None, Basis::Nothing),
            };
            costs.push(Cost {
                config: cell.config.clone(),
                recipe: cell.recipe.clone(),
                kind: kind.to_owned(),
                steps: cell.steps,
                cells: 1,
                done,
                seconds: per_step.map(|seconds| seconds * cell.steps as f64),
                from,
            });
        }
        let spread = match (Results::of(study, rows).pooled_sd(), pilot) {
            (Some(sd), _) => Spread::Rows(sd),
            (None, Some(sd)) => Spread::Pilot(sd),
            (None, None) => Spread::Unknown,
        };
        let (seeds, family) = (study.seeds.len(), study.comparisons());
        let mut shown = vec![2, 3, 5, 8, 16, seeds];
        shown.sort_unstable();
        shown.dedup();
        let sd = match spread {
            Spread::Rows(sd) | Spread::Pilot(sd) => sd,
            Spread::Unknown => 1.0,
        };
        let alpha = ALPHA / family.max(1) as f64;
        let detectable = shown.into_iter().map(|n| (n, minimum_detectable(sd, n, alpha, POWER))).collect();
        Self { study: study.name.clone(), costs, spread, seeds, family, detectable }
    }

    /// Estimated seconds of all cells without a row, run one after the other; `None` if the estimate of any cell is unknown.
    #[must_use]
    pub fn seconds_left(&self) -> Option<f64> {
        let left = self.costs.iter().filter(|cost| cost.done < cost.cells);
        left.map(|cost| cost.seconds.map(|seconds| seconds * (cost.cells - cost.done) as f64)).sum()
    }
}

fn kind(cell: &Cell) -> &'static str {
    match cell.kind {
        _ if cell.repeat > 0 => "floor",
        Kind::Run => "run",
        Kind::Trunk => "trunk",
        Kind::Branch { .. } => "branch",
    }
}

/// The median of seconds per step over finished rows of the same configuration and recipe.
fn measured(of: &Cell, cells: &[Cell], rows: &Rows) -> Option<f64> {
    let same = cells.iter().filter(|cell| cell.config == of.config && cell.recipe == of.recipe);
    let mut seconds: Vec<f64> = same
        .filter_map(|cell| Some((cell, rows.get(&cell.id)?)))
        .filter(|(_, row)| row.outcome == Outcome::Done && row.seconds > 0.0)
        .map(|(cell, row)| row.seconds / cell.steps as f64)
        .collect();
    seconds.sort_by(f64::total_cmp);
    seconds.get(seconds.len() / 2).copied()
}

impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let cells: usize = self.costs.iter().map(|cost| cost.cells).sum();
        let done: usize = self.costs.iter().map(|cost| cost.done).sum();
        writeln!(f, "{}: {cells} runs, {done} done, {} left", self.study, cells - done)?;
        let wide = |of: fn(&Cost) -> &str, least: usize| {
            self.costs.iter().map(|cost| of(cost).chars().count()).max().unwrap_or(0).max(least)
        };
        let (config, recipe) = (wide(|cost| &cost.config, 6), wide(|cost| &cost.recipe, 6));
        writeln!(f, "\n  {:config$}  {:recipe$}  kind    steps  runs  left  each", "config", "recipe")?;
        for cost in &self.costs {
            let each = match (cost.seconds, cost.from) {
                (Some(seconds), Basis::Rows) => format!("{}, from finished runs", duration(seconds)),
                (Some(seconds), _) => format!("{}, estimated", duration(seconds)),
                (None, _) => "unknown".into(),
            };
            let Cost { kind, steps, cells, done, .. } = cost;
            let left = cells - done;
            writeln!(
                f,
                "  {:config$}  {:recipe$}  {kind:6}  {steps:>5}  {cells:>4}  {left:>4}  {each}",
                cost.config, cost.recipe
            )?;
        }
        match self.seconds_left() {
            Some(seconds) => writeln!(f, "\nWhat is left takes about {} on one device.", duration(seconds))?,
            None => writeln!(f, "\nHow long the rest takes is unknown.")?,
        }
        self.resolution(f)
    }
}

impl Plan {
    fn resolution(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.family == 0 {
            return writeln!(f, "There is no recipe beside the baseline, so nothing is compared.");
        }
        let (about, unit) = match self.spread {
            Spread::Rows(sd) => (format!("{sd:.3} %, that of this study's finished pairs"), "%"),
            Spread::Pilot(sd) => (format!("{sd:.3} %, that of the pilot"), "%"),
            Spread::Unknown => ("unknown; run a pilot of two or three seeds".into(), "standard deviations"),
        };
        writeln!(f, "\nStandard deviation of paired loss differences: {about}.")?;
        writeln!(
            f,
            "Smallest true difference that is resolved with probability {POWER} (paired t test, level {ALPHA} over {} planned comparisons):\n",
            self.family
        )?;
        for (seeds, detectable) in &self.detectable {
            let planned = if *seeds == self.seeds { "  <- planned" } else { "" };
            match detectable {
                Some(difference) => writeln!(f, "  {seeds:>3} seeds  {difference:.3} {unit}{planned}")?,
                None => writeln!(f, "  {seeds:>3} seeds  none: a test needs two pairs{planned}")?,
            }
        }
        Ok(())
    }
}

/// Formats a duration, for example `40 s`, `12 min` or `3 h 20 min`.
fn duration(seconds: f64) -> String {
    let whole = seconds.round() as u64;
    match whole {
        0..100 => format!("{seconds:.0} s"),
        100..6000 => format!("{} min", (whole + 30) / 60),
        _ => format!("{} h {} min", (whole + 30) / 3600, (whole + 30) / 60 % 60),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations() {
        let said = [0.4, 40.0, 130.0, 12_345.0].map(duration);
        assert_eq!(said, ["0 s", "40 s", "2 min", "3 h 26 min"]);
    }
}
