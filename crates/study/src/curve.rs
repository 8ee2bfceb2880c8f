//! A loss curve of at most two hundred points, and the values computed from loss curves.

use serde::{Deserialize, Serialize};

/// Maximum number of points that a stored curve has.
pub const MOST_POINTS: usize = 200;

/// Steps and training losses of a run, in the order of steps. For a long run, each point is the mean over neighbouring steps. Half of the
/// points cover the last tenth of the run, because the mean loss of the last tenth is the measure by which recipes are compared.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Curve {
    points: Vec<(f32, f32)>,
}

impl Curve {
    /// Creates the curve of these steps and losses, which must be in the order of steps. Losses that are not finite are left out.
    #[must_use]
    pub fn of(losses: &[(u64, f64)]) -> Self {
        let losses: Vec<(u64, f64)> = losses.iter().copied().filter(|(_, loss)| loss.is_finite()).collect();
        let single = |&(step, loss): &(u64, f64)| (step as f32, loss as f32);
        if losses.len() <= MOST_POINTS {
            return Self { points: losses.iter().map(single).collect() };
        }
        let (before, tail) = losses.split_at(losses.len() - tenth(losses.len()));
        let half = MOST_POINTS / 2;
        Self { points: thinned(before, half).chain(thinned(tail, half)).collect() }
    }

    /// The points of the curve: a step (or the mean of several steps) and a loss.
    #[must_use]
    pub fn points(&self) -> &[(f32, f32)] {
        &self.points
    }

    /// The loss at a step, by linear interpolation between neighbouring points; `None` outside of the curve.
    #[must_use]
    pub fn at(&self, step: f64) -> Option<f64> {
        let next = self.points.partition_point(|point| f64::from(point.0) < step);
        let &(right, high) = self.points.get(next)?;
        let (right, high) = (f64::from(right), f64::from(high));
        if right == step {
            return Some(high);
        }
        let &(left, low) = self.points.get(next.checked_sub(1)?)?;
        let (left, low) = (f64::from(left), f64::from(low));
        Some(low + (high - low) * (step - left) / (right - left))
    }

    /// Checks that [`Curve::of`] could have made the curve: few points, steps in order, finite losses.
    pub(crate) fn check(&self) -> Result<(), String> {
        if self.points.len() > MOST_POINTS {
            return Err(format!("`curve` has {} points, expected at most {MOST_POINTS}", self.points.len()));
        }
        if let Some(at) = self.points.iter().position(|(step, loss)| !step.is_finite() || !loss.is_finite()) {
            return Err(format!("`curve[{at}]` is not finite"));
        }
        match self.points.windows(2).position(|pair| pair[0].0 >= pair[1].0) {
            Some(at) => Err(format!("`curve[{}]` is not after the point before it", at + 1)),
            None => Ok(()),
        }
    }
}

/// Number of steps in the last tenth of `steps`, at least one.
fn tenth(steps: usize) -> usize {
    steps.div_ceil(10)
}

/// At most `most` means of neighbouring losses, or all losses if there are fewer.
fn thinned(losses: &[(u64, f64)], most: usize) -> impl Iterator<Item = (f32, f32)> {
    let number = most.min(losses.len());
    (0..number).map(move |i| {
        let part = &losses[i * losses.len() / number..(i + 1) * losses.len() / number];
        let n = part.len() as f64;
        let step = part.iter().map(|(step, _)| *step as f64).sum::<f64>() / n;
        let loss = part.iter().map(|(_, loss)| loss).sum::<f64>() / n;
        (step as f32, loss as f32)
    })
}

/// The mean training loss of the last tenth of a run, summed in the order of steps. `None` if there are no losses, or if a loss of the last tenth is not finite.
#[must_use]
pub fn last_tenth(losses: &[(u64, f64)]) -> Option<f64> {
    let tail = &losses[losses.len() - tenth(losses.len()).min(losses.len())..];
    let mean = tail.iter().map(|(_, loss)| loss).sum::<f64>() / tail.len() as f64;
    mean.is_finite().then_some(mean)
}

/// The step at which a run diverged, or `None` if it did not diverge. If a loss is not finite, the result is the first such step.
/// Otherwise, a run diverged if the mean loss of its last tenth is above `untrained`. The result is then the first step from which on all
/// losses were above `untrained`. `untrained` is the loss of an untrained model, which is ln(vocabulary size).
///
/// This rule is fixed before a study starts, so that the choice of excluded runs does not depend on the result.
#[must_use]
pub fn diverged_at(losses: &[(u64, f64)], untrained: f64) -> Option<u64> {
    if let Some((step, _)) = losses.iter().find(|(_, loss)| !loss.is_finite()) {
        return Some(*step);
    }
    last_tenth(losses).filter(|mean| *mean > untrained)?;
    let below = losses.iter().rposition(|(_, loss)| *loss <= untrained);
    let first = below.map_or(0, |below| below + 1).min(losses.len() - 1);
    Some(losses[first].0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn falling(steps: u64) -> Vec<(u64, f64)> {
        (1..=steps).map(|step| (step, 1.0 + 3.0 / step as f64)).collect()
    }

    #[test]
    fn a_short_curve_is_kept_and_a_long_one_thinned() {
        let short = Curve::of(&falling(200));
        assert_eq!((short.points().len(), short.points()[1]), (200, (2.0, 2.5)));
        let losses = falling(100_000);
        let long = Curve::of(&losses);
        long.check().unwrap();
        assert_eq!(long.points().len(), MOST_POINTS);
        let tail = &long.points()[100..];
        assert!(tail[0].0 > 90_000.0, "half of the points lie in the last tenth");
        let mean = tail.iter().map(|point| f64::from(point.1)).sum::<f64>() / 100.0;
        assert!((mean / last_tenth(&losses).unwrap() - 1.0).abs() < 1e-7, "{mean}");
        assert!(serde_json::to_string(&long).unwrap().len() < 6000);
        for steps in [0, 1, 2, 9, 201, 202, 399, 1000] {
            Curve::of(&falling(steps)).check().unwrap();
        }
    }

    #[test]
    fn a_curve_is_read_between_its_points() {
        let curve = Curve::of(&[(10, 4.0), (20, 2.0), (30, 1.0), (40, f64::NAN)]);
        let found = [10.0, 15.0, 20.0, 27.5, 30.0].map(|step| curve.at(step));
        assert_eq!(found, [4.0, 3.0, 2.0, 1.25, 1.0].map(Some));
        assert_eq!((curve.at(9.0), curve.at(31.0), Curve::default().at(1.0)), (None, None, None));
    }

    #[test]
    fn the_last_tenth_is_at_least_a_step() {
        assert_eq!(last_tenth(&[]), None);
        assert_eq!(last_tenth(&[(1, 3.0)]), Some(3.0));
        let steps: Vec<(u64, f64)> = (1..=20).map(|step| (step, step as f64)).collect();
        assert_eq!(last_tenth(&steps), Some(19.5));
        assert_eq!(last_tenth(&[(1, 3.0), (2, f64::INFINITY)]), None);
    }

    #[test]
    fn divergence_is_found_by_one_rule() {
        assert_eq!(diverged_at(&falling(50), 5.0), None);
        assert_eq!(diverged_at(&[(1, 4.0), (2, f64::NAN), (3, 4.0)], 5.0), Some(2));
        // The loss rose and fell again, which is not divergence; a spike in the last tenth is not sufficient, either.
        assert_eq!(diverged_at(&[(1, 4.0), (2, 9.0), (3, 4.0)], 5.0), None);
        assert_eq!(diverged_at(&[(1, 4.0), (2, 9.0), (3, 4.5), (4, 6.0), (5, 7.0)], 5.0), Some(4));
        assert_eq!(diverged_at(&[], 5.0), None);
    }
}
