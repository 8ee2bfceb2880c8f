//! Spearman's rank correlation, which measures whether two columns have the same order.

use serde::{Deserialize, Serialize};

/// A rank correlation and its confidence interval.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct RankCorrelation {
    /// Number of pairs.
    pub pairs: usize,
    /// Spearman's rank correlation ρ, from −1 to 1.
    pub rho: f64,
    /// The 95 % confidence interval; `None` for fewer than four pairs.
    pub interval: Option<(f64, f64)>,
}

/// Spearman's rank correlation of two columns of the same length: Pearson's correlation of their ranks, in which equal values share the mean of their ranks.
///
/// The interval is Fisher's, tanh(artanh ρ ± 1.96 s), with the standard error s = √((1 + ρ²/2) / (n − 3)) of Bonett and Wright (*Sample size requirements for estimating Pearson,
/// Kendall and Spearman correlations*, Psychometrika 65, 2000). `None` if the columns differ in length, have fewer than two values, contain a NaN, or are constant.
#[must_use]
pub fn spearman(a: &[f64], b: &[f64]) -> Option<RankCorrelation> {
    const Z: f64 = 1.959_963_984_540_054;
    let pairs = a.len();
    if pairs < 2 || pairs != b.len() || a.iter().chain(b).any(|value| value.is_nan()) {
        return None;
    }
    let (a, b) = (ranks(a), ranks(b));
    // Every column of ranks has this mean.
    let mean = (pairs as f64 + 1.0) / 2.0;
    let product = |x: &[f64], y: &[f64]| x.iter().zip(y).map(|(x, y)| (x - mean) * (y - mean)).sum::<f64>();
    let scale = (product(&a, &a) * product(&b, &b)).sqrt();
    if scale == 0.0 {
        return None;
    }
    let rho = (product(&a, &b) / scale).clamp(-1.0, 1.0);
    let interval = (pairs > 3).then(|| {
        let error = ((1.0 + rho * rho / 2.0) / (pairs as f64 - 3.0)).sqrt();
        ((rho.atanh() - Z * error).tanh(), (rho.atanh() + Z * error).tanh())
    });
    Some(RankCorrelation { pairs, rho, interval })
}

/// The rank of each value, from 1; equal values share the mean of their ranks.
fn ranks(values: &[f64]) -> Vec<f64> {
    let mut order: Vec<usize> = (0..values.len()).collect();
    order.sort_by(|&a, &b| values[a].total_cmp(&values[b]));
    let mut ranks = vec![0.0; values.len()];
    let mut first = 0;
    for equal in order.chunk_by(|&a, &b| values[a] == values[b]) {
        let shared = first as f64 + (equal.len() as f64 + 1.0) / 2.0;
        equal.iter().for_each(|&i| ranks[i] = shared);
        first += equal.len();
    }
    ranks
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The example is Wikipedia's ("Spearman's rank correlation coefficient"): IQ and hours of television; ρ = −29/165.
    #[test]
    fn a_worked_example() {
        let iq = [106.0, 100.0, 86.0, 101.0, 99.0, 103.0, 97.0, 113.0, 112.0, 110.0];
        let hours = [7.0, 27.0, 2.0, 50.0, 28.0, 29.0, 20.0, 12.0, 6.0, 17.0];
        let found = spearman(&iq, &hours).unwrap();
        assert!((found.rho + 29.0 / 165.0).abs() < 1e-15);
        let (low, high) = found.interval.unwrap();
        assert!(low < -0.7 && high > 0.5, "{low} {high}");
    }

    #[test]
    fn ties_share_their_rank_and_order_decides() {
        assert_eq!(ranks(&[3.0, 1.0, 3.0, 2.0]), [3.5, 1.0, 3.5, 2.0]);
        assert_eq!(ranks(&[0.0, -0.0]), [1.5, 1.5]);
        assert_eq!(
            spearman(&[1.0, 2.0, 9.0], &[0.1, 0.2, 0.3]).map(|r| (r.rho, r.interval)),
            Some((1.0, None))
        );
        assert_eq!(spearman(&[1.0, 2.0, 3.0, 4.0], &[4.0, 3.0, 2.0, 1.0]).map(|r| r.rho), Some(-1.0));
        for (a, b) in [
            (&[1.0][..], &[1.0][..]),
            (&[1.0, 2.0], &[1.0]),
            (&[1.0, 1.0], &[1.0, 2.0]),
            (&[f64::NAN, 1.0], &[1.0, 2.0]),
        ] {
            assert_eq!(spearman(a, b), None);
        }
    }
}
