//! Holm's correction for multiple comparisons: several recipes are compared with one baseline, and each comparison may give a false positive.

/// Adjusted p-values by Holm's step-down procedure (S. Holm, *A simple sequentially rejective multiple test procedure*, Scandinavian Journal of Statistics 6,
/// 1979): the k-th smallest of `family` p-values is multiplied by `family − k + 1`, each is at least the one before it, and none exceeds 1.
///
/// `family` is the number of planned comparisons, including those whose p-value is missing. A missing p-value counts as the largest
/// p-value, so that a result cannot become weaker when the missing p-value arrives. A `family` smaller than the number of p-values is
/// increased to that number. The result has the order of `p`.
#[must_use]
pub fn holm(p: &[Option<f64>], family: usize) -> Vec<Option<f64>> {
    let mut order: Vec<usize> = (0..p.len()).filter(|&i| p[i].is_some()).collect();
    order.sort_by(|&a, &b| p[a].unwrap_or(1.0).total_cmp(&p[b].unwrap_or(1.0)));
    let family = family.max(p.len());
    let mut adjusted = vec![None; p.len()];
    let mut before: f64 = 0.0;
    for (k, &i) in order.iter().enumerate() {
        let scaled = p[i].unwrap_or(1.0) * (family - k) as f64;
        before = before.max(scaled.min(1.0));
        adjusted[i] = Some(before);
    }
    adjusted
}

#[cfg(test)]
mod tests {
    use super::*;

    /// In R, `p.adjust(c(0.01, 0.04, 0.03, 0.005), "holm")` is 0.03 0.06 0.06 0.02. The example is from Wikipedia's "Holm–Bonferroni method".
    #[test]
    fn a_worked_example() {
        let adjusted = holm(&[0.01, 0.04, 0.03, 0.005].map(Some), 4);
        for (found, expected) in adjusted.into_iter().zip([0.03, 0.06, 0.06, 0.02]) {
            assert!((found.unwrap() - expected).abs() < 1e-12);
        }
    }

    #[test]
    fn what_is_missing_counts_as_the_largest() {
        assert_eq!(holm(&[Some(0.01), None], 2), [Some(0.02), None]);
        assert_eq!(holm(&[Some(0.01)], 4), [Some(0.04)]);
        assert_eq!(holm(&[Some(0.7), Some(0.9)], 2), [Some(1.0), Some(1.0)]);
        assert_eq!(holm(&[], 3), Vec::<Option<f64>>::new());
    }
}
