//! The paired t test. Runs with the same seed share data and initial weights, so their difference is more precise than their values.

use super::student::{two_sided_p, two_sided_quantile};
use serde::{Deserialize, Serialize};

/// The mean and the spread of paired differences, and inferences about their expected value. All values have the unit of the differences.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Paired {
    /// Number of pairs.
    pub pairs: usize,
    /// Mean of the differences, which are summed in the given order.
    pub mean: f64,
    /// Standard deviation of the differences, with `pairs − 1` in the denominator. `None` for one pair.
    pub sd: Option<f64>,
    /// Half the width of the 95 % confidence interval: t(0.975, pairs − 1) · sd / √pairs. `None` for one pair.
    pub half_width: Option<f64>,
    /// Two-sided p-value of the hypothesis that the expected difference is 0. `None` for one pair.
    pub p: Option<f64>,
}

impl Paired {
    /// Computes the paired t test from these differences, one per pair; `None` if there are no differences.
    ///
    /// If all differences are equal, p is 1 if the differences are 0, and 0 otherwise.
    #[must_use]
    pub fn of(differences: &[f64]) -> Option<Self> {
        let pairs = differences.len();
        let n = pairs as f64;
        if pairs == 0 {
            return None;
        }
        let mean = differences.iter().sum::<f64>() / n;
        if pairs == 1 {
            return Some(Self { pairs, mean, sd: None, half_width: None, p: None });
        }
        let sd = sd(differences)?;
        let error = sd / n.sqrt();
        let p = match (error > 0.0, mean == 0.0) {
            (true, _) => two_sided_p(mean / error, pairs - 1),
            (false, true) => 1.0,
            (false, false) => 0.0,
        };
        let half_width = two_sided_quantile(0.05, pairs - 1) * error;
        Some(Self { pairs, mean, sd: Some(sd), half_width: Some(half_width), p: Some(p) })
    }

    /// The 95 % confidence interval of the expected difference.
    #[must_use]
    pub fn interval(&self) -> Option<(f64, f64)> {
        self.half_width.map(|half| (self.mean - half, self.mean + half))
    }
}

/// Standard deviation, with the number of values minus one in the denominator; `None` for fewer than two values. The values are summed in
/// the order in which they are given.
#[must_use]
pub fn sd(values: &[f64]) -> Option<f64> {
    let n = values.len() as f64;
    let mean = values.iter().sum::<f64>() / n;
    let squares = values.iter().map(|value| (value - mean).powi(2)).sum::<f64>();
    (values.len() > 1).then(|| (squares / (n - 1.0)).sqrt())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Student's own example (*Biometrika* 6, 1908): additional hours of sleep of ten patients. In R, `t.test(extra ~ group, data = sleep, paired = TRUE)` prints t = 4.0621, df =
    /// 9, p = 0.002833, interval 0.7001142 to 2.4598858.
    #[test]
    fn the_sleep_of_students_patients() {
        let differences = [1.2, 2.4, 1.3, 1.3, 0.0, 1.0, 1.8, 0.8, 4.6, 1.4];
        let paired = Paired::of(&differences).unwrap();
        let (low, high) = paired.interval().unwrap();
        assert!((paired.mean - 1.58).abs() < 1e-12);
        assert!((paired.p.unwrap() - 0.002833).abs() < 5e-7, "{paired:?}");
        assert!((low - 0.700_114_2).abs() < 1e-6 && (high - 2.459_885_8).abs() < 1e-6, "{low} {high}");
    }

    #[test]
    fn few_and_equal_differences() {
        assert_eq!(Paired::of(&[]), None);
        let one = Paired::of(&[0.5]).unwrap();
        assert_eq!((one.mean, one.sd, one.p, one.interval()), (0.5, None, None, None));
        assert_eq!(Paired::of(&[0.0; 3]).unwrap().p, Some(1.0));
        assert_eq!(Paired::of(&[0.5; 3]).unwrap().p, Some(0.0));
    }
}
