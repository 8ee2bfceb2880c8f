//! The noise floor: runs of the baseline that differ by a perturbation of the learning rate alone.

use super::compare::ALPHA;
use crate::cell::Cell;
use crate::row::Outcome;
use crate::rows::Rows;
use crate::statistics::two_sided_quantile;
use crate::study::Study;
use serde::Serialize;

/// What chaos alone does to the training loss of the last tenth.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct NoiseFloor {
    /// How many runs of the baseline, perturbed or not, it is measured with.
    pub runs: usize,
    /// Degrees of freedom: runs less seeds.
    pub freedom: usize,
    /// Standard deviation of one run around the mean of its seed, per cent of that mean, pooled over seeds.
    pub sd: f64,
    /// The 95 % bound of the mean difference between two recipes over the planned seeds if they differ by chaos alone, per cent: t(0.975, freedom) · √2 · sd / √seeds.
    pub bound: f64,
}

/// `cells` are the runs of one configuration. `None` where no seed has two finished runs of the baseline.
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
