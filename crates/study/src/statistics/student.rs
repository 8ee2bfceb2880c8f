//! Student's t distribution, by the incomplete beta function.

/// Two-sided p-value of a t statistic: the probability that |T| is at least |t| with `freedom` degrees of freedom.
///
/// P(|T| ≥ |t|) = I_x(ν/2, 1/2) with x = ν / (ν + t²) (Abramowitz and Stegun, *Handbook of Mathematical Functions*, 26.7.1 and 26.5.27). The result is NaN if `freedom` is 0 or `t`
/// is NaN.
#[must_use]
pub fn two_sided_p(t: f64, freedom: usize) -> f64 {
    if freedom == 0 || t.is_nan() {
        return f64::NAN;
    }
    let nu = freedom as f64;
    let square = t * t;
    if square.is_infinite() {
        return 0.0;
    }
    incomplete_beta(freedom, nu / (nu + square), square / (nu + square)).clamp(0.0, 1.0)
}

/// The value that |T| exceeds with probability `alpha`, which is the half width of a `1 − alpha` confidence interval in standard errors.
///
/// The value is computed by bisection of [`two_sided_p`], to the last bit. The result is NaN if `freedom` is 0 or `alpha` is not between 0 and 1.
#[must_use]
pub fn two_sided_quantile(alpha: f64, freedom: usize) -> f64 {
    if freedom == 0 || !(alpha > 0.0 && alpha < 1.0) {
        return f64::NAN;
    }
    let (mut low, mut high) = (0.0, 1.0);
    while two_sided_p(high, freedom) > alpha && high < f64::MAX / 2.0 {
        low = high;
        high *= 2.0;
    }
    loop {
        let middle = low + (high - low) / 2.0;
        if middle <= low || middle >= high {
            return middle;
        }
        if two_sided_p(middle, freedom) > alpha { low = middle } else { high = middle }
    }
}

/// I_x(ν/2, 1/2), the regularised incomplete beta function. The function is computed by its continued fraction (Abramowitz and Stegun, 26.5.8) with Lentz's method. `rest` is 1 −
/// x, passed separately because the subtraction would round.
fn incomplete_beta(freedom: usize, x: f64, rest: f64) -> f64 {
    if x <= 0.0 {
        return 0.0;
    }
    if rest <= 0.0 {
        return 1.0;
    }
    let (a, b) = (freedom as f64 / 2.0, 0.5);
    let ln_beta = ln_gamma_half(freedom) + ln_gamma_half(1) - ln_gamma_half(freedom + 1);
    let front = (a * x.ln() + b * rest.ln() - ln_beta).exp();
    // The fraction converges fast below the mean of the distribution. Above the mean, I_x(a, b) = 1 − I_{1−x}(b, a) is used.
    if x < (a + 1.0) / (a + b + 2.0) {
        front * continued_fraction(a, b, x) / a
    } else {
        1.0 - front * continued_fraction(b, a, rest) / b
    }
}

fn continued_fraction(a: f64, b: f64, x: f64) -> f64 {
    const TINY: f64 = 1e-300;
    let away_from_zero = |value: f64| if value.abs() < TINY { TINY } else { value };
    let mut c = 1.0;
    let mut d = 1.0 / away_from_zero(1.0 - (a + b) * x / (a + 1.0));
    let mut fraction = d;
    for m in 1..10_000 {
        let m = f64::from(m);
        let even = m * (b - m) * x / ((a + 2.0 * m - 1.0) * (a + 2.0 * m));
        let odd = -(a + m) * (a + b + m) * x / ((a + 2.0 * m) * (a + 2.0 * m + 1.0));
        let mut change = 1.0;
        for term in [even, odd] {
            d = 1.0 / away_from_zero(1.0 + term * d);
            c = away_from_zero(1.0 + term / c);
            change = c * d;
            fraction *= change;
        }
        if (change - 1.0).abs() < 1e-16 {
            break;
        }
    }
    fraction
}

/// ln Γ(n/2) for `n` ≥ 1. Below 200, it starts from Γ(1/2) = √π or Γ(1) = 1 and applies Γ(z + 1) = z Γ(z); from 200 on, it uses Stirling's series.
pub(super) fn ln_gamma_half(n: usize) -> f64 {
    if n >= 200 {
        let z = n as f64 / 2.0;
        let correction = 1.0 / (12.0 * z) - 1.0 / (360.0 * z.powi(3)) + 1.0 / (1260.0 * z.powi(5));
        return (z - 0.5) * z.ln() - z + 0.5 * (2.0 * std::f64::consts::PI).ln() + correction;
    }
    let first = if n % 2 == 1 { 0.5 * std::f64::consts::PI.ln() } else { 0.0 };
    let begin = if n % 2 == 1 { 1 } else { 2 };
    (begin..n).step_by(2).map(|twice| (twice as f64 / 2.0).ln()).fold(first, |sum, ln| sum + ln)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The percentage points are from published tables: Fisher and Yates; NIST/SEMATECH e-Handbook of Statistical Methods, 1.3.6.7.2.
    #[test]
    fn quantiles_are_those_of_published_tables() {
        let table = [
            // Columns: degrees of freedom, then two-sided 0.10, 0.05, 0.02, 0.01, 0.002.
            (1, [6.314, 12.706, 31.821, 63.657, 318.309]),
            (2, [2.920, 4.303, 6.965, 9.925, 22.327]),
            (3, [2.353, 3.182, 4.541, 5.841, 10.215]),
            (4, [2.132, 2.776, 3.747, 4.604, 7.173]),
            (5, [2.015, 2.571, 3.365, 4.032, 5.893]),
            (7, [1.895, 2.365, 2.998, 3.499, 4.785]),
            (10, [1.812, 2.228, 2.764, 3.169, 4.144]),
            (20, [1.725, 2.086, 2.528, 2.845, 3.552]),
            (30, [1.697, 2.042, 2.457, 2.750, 3.385]),
            (60, [1.671, 2.000, 2.390, 2.660, 3.232]),
            (100, [1.660, 1.984, 2.364, 2.626, 3.174]),
        ];
        for (freedom, expected) in table {
            for (alpha, expected) in [0.10, 0.05, 0.02, 0.01, 0.002].into_iter().zip(expected) {
                let t = two_sided_quantile(alpha, freedom);
                assert!((t - expected).abs() <= 0.000_51, "{freedom} {alpha}: {t}, expected {expected}");
            }
        }
        // The limit is the normal distribution.
        assert!((two_sided_quantile(0.05, 10_000_000) - 1.959_964).abs() < 1e-5);
    }

    /// For one and two degrees of freedom, closed forms exist.
    #[test]
    fn probabilities_are_those_of_closed_forms() {
        for t in [0.0f64, 1e-6, 0.1, 0.5, 1.0, 2.0, 5.0, 12.7, 1e3, 1e8] {
            let one = 1.0 - 2.0 * t.atan() / std::f64::consts::PI;
            let two = 2.0 / (t * t + 2.0) / (1.0 + t / (t * t + 2.0).sqrt());
            assert!((two_sided_p(t, 1) - one).abs() < 1e-14, "{t}");
            assert!((two_sided_p(t, 2) / two - 1.0).abs() < 1e-12, "{t}: {} {two}", two_sided_p(t, 2));
            assert_eq!(two_sided_p(-t, 3), two_sided_p(t, 3));
        }
    }

    #[test]
    fn impossible_arguments_are_nan_and_infinite_ones_are_not() {
        assert!(two_sided_p(1.0, 0).is_nan() && two_sided_p(f64::NAN, 3).is_nan());
        assert!(two_sided_quantile(0.0, 3).is_nan() && two_sided_quantile(0.05, 0).is_nan());
        assert_eq!(two_sided_p(f64::INFINITY, 3), 0.0);
    }

    #[test]
    fn gamma_functions_meet_where_the_series_begins() {
        let by_recurrence = |n: usize| ln_gamma_half(n - 2) + ((n - 2) as f64 / 2.0).ln();
        for n in [200, 201, 1001] {
            assert!((ln_gamma_half(n) / by_recurrence(n) - 1.0).abs() < 1e-14, "{n}");
        }
        assert!((ln_gamma_half(10) - 24f64.ln()).abs() < 1e-14);
    }
}
