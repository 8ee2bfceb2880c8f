//! The noise floor: the spread of baseline runs that differ only by a perturbation of the learning rate.

use super::compare::ALPHA;
use crate::cell::Cell;
use crate::row::Outcome;
use crate::rows::Rows;
use crate::statistics::two_sided_quantile;
use crate::study::Study;
use serde::Serialize;

/// The effect of chaos alone on the training loss averaged over the last tenth of a run.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct NoiseFloor {
    /// Number of runs of the baseline, with and without a perturbation, from which the floor is computed.
    pub runs: usize,
    /// Degrees of freedom: number of runs minus number of seeds.
    pub freedom: usize,
    /// The standard deviation of a run around the mean of the runs with its seed, in per cent of that mean, pooled over seeds.
    pub sd: f64,
    /// If two recipes differ by chaos alone, the 95 % bound of their mean difference over the planned seeds, in per cent: t(0.975, freedom)
    /// · √2 · sd / √seeds.
    pub bound: f64,
}

/// The noise floor of the runs `cells` of one configuration. `None` if no seed has two finished runs of the baseline.
pub(super) fn noise_floor(study: &Study, cells: &[&Cell], rows: &Rows) -> Option<NoiseFloor> {
    let (mut runs, mut freedom, mut squares) = (0, 0, 0.0);
    for &seed in &study.seeds {
        let of_seed = cells.iter().filter(|cell| cell.seed == seed && cell.recipe == study.baseline);
        let done = of_seed.filter_map(|cell| rows.get(&cell.id)).filter(|row| row.outcome == Outcome::Done);
        let losses: Vec<f64> = done.filter_map(|row| row.last_tenth).collect();
        if losses.len() < 2 {
            continue;
        }
        let mean = losses.iter().sum::<f64>() / losses.len() as f64;
        squares += losses.iter().map(|loss| (100.0 * (loss / mean - 1.0)).powi(2)).sum::<f64>();
        runs += losses.len();
        freedom += losses.len() - 1;
    }
    (freedom > 0).then(|| {
        let sd = (squares / freedom as f64).sqrt();
        let bound = two_sided_quantile(ALPHA, freedom) * std::f64::consts::SQRT_2 * sd;
        NoiseFloor { runs, freedom, sd, bound: bound / (study.seeds.len() as f64).sqrt() }
    })
}
