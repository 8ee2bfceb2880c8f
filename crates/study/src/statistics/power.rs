//! The differences that a number of seeds can resolve.
//!
//! The power of a two-sided paired t test is exact here, up to the error of a numerical integral (below 1e-6). With S = √(χ²_ν / ν), ν = n − 1, and an effect of d standard
//! deviations, it is
//!
//! ```text
//! P(reject) = ∫ f_S(s) · [ Φ(d √n − t s) + Φ(−d √n − t s) ] ds,    t = t(1 − α/2, ν)
//! ```
//!
//! The integral is the distribution function of the noncentral t, conditioned on the estimated standard deviation (Johnson, Kotz and Balakrishnan, *Continuous Univariate
//! Distributions* 2, chapter 31).

use super::student::{ln_gamma_half, two_sided_quantile};

/// The probability that a two-sided paired t test at level `alpha` with this number of pairs rejects, if the expected difference is `effect` standard deviations of the
/// differences. 0 for fewer than two pairs.
#[must_use]
pub fn power(effect: f64, pairs: usize, alpha: f64) -> f64 {
    if pairs < 2 {
        return 0.0;
    }
    power_beyond(effect, pairs, two_sided_quantile(alpha, pairs - 1))
}

fn power_beyond(effect: f64, pairs: usize, t: f64) -> f64 {
    let nu = (pairs - 1) as f64;
    let shift = effect * (pairs as f64).sqrt();
    let ln_front = 2f64.ln() + nu / 2.0 * (nu / 2.0).ln() - ln_gamma_half(pairs - 1);
    let at = |s: f64| {
        // 0 to the power 0 is 1: for two pairs, the density is that of half a normal distribution.
        let ln_power = if nu == 1.0 { 0.0 } else { (nu - 1.0) * s.ln() };
        let density = (ln_front + ln_power - nu * s * s / 2.0).exp();
        density * (normal(shift - t * s) + normal(-shift - t * s))
    };
    // S has a mean near 1 and a standard deviation near 1 / √(2 ν).
    let reach = 9.0 / (2.0 * nu).sqrt();
    let (low, high) = ((1.0 - reach).max(0.0), 1.0 + reach);
    // The bracket changes from 2 Φ(..) to 0 within a few 1/t around this s, and this range is narrow if t is large.
    let (step, around) = (shift.abs() / t, 9.0 / t);
    let cuts = [low, step - around, step, step + around, high].map(|cut| cut.clamp(low, high));
    cuts.windows(2).map(|ends| simpson(at, ends[0], ends[1])).sum::<f64>().clamp(0.0, 1.0)
}

/// The smallest expected difference that a two-sided paired t test at level `alpha` detects with probability `power`, in the unit of `sd`, the standard deviation of the
/// differences. `None` for fewer than two pairs, or if an argument is out of range.
#[must_use]
pub fn minimum_detectable(sd: f64, pairs: usize, alpha: f64, wanted: f64) -> Option<f64> {
    let in_range = |value: f64| value > 0.0 && value < 1.0;
    if pairs < 2 || !in_range(alpha) || !in_range(wanted) || !sd.is_finite() || sd < 0.0 {
        return None;
    }
    let t = two_sided_quantile(alpha, pairs - 1);
    let excess = |effect: f64| power_beyond(effect, pairs, t) - wanted;
    let (mut low, mut below) = (0.0, excess(0.0));
    if below >= 0.0 {
        return Some(0.0);
    }
    let (mut high, mut above) = (1.0, excess(1.0));
    while above < 0.0 {
        (low, below) = (high, above);
        high *= 2.0;
        above = excess(high);
        if high > 1e9 {
            return None;
        }
    }
    // The search is the Illinois form of false position: an end of the interval that stays twice loses half of its weight.
    let mut was_low = None;
    for _ in 0..100 {
        let middle = high - above * (high - low) / (above - below);
        let found = excess(middle);
        if found.abs() < 1e-11 || high - low < 1e-13 * high {
            return Some(sd * middle);
        }
        if found < 0.0 {
            (low, below) = (middle, found);
            above /= if was_low == Some(true) { 2.0 } else { 1.0 };
        } else {
            (high, above) = (middle, found);
            below /= if was_low == Some(false) { 2.0 } else { 1.0 };
        }
        was_low = Some(found < 0.0);
    }
    Some(sd * high)
}

/// The smallest number of pairs with which a test detects an expected difference of `effect` with probability `power`; `None` if this
/// number is above `most`. `effect` and `sd` have the same unit.
#[must_use]
pub fn pairs_for(effect: f64, sd: f64, alpha: f64, wanted: f64, most: usize) -> Option<usize> {
    let effect = effect.abs() / sd;
    if effect.is_nan() {
        return None;
    }
    (2..=most).find(|&pairs| power(effect, pairs, alpha) >= wanted)
}

/// Φ, the distribution function of the standard normal, by its Taylor series (G. Marsaglia, *Evaluating the Normal Distribution*, Journal of
/// Statistical Software 11(4), 2004). The absolute error is below 1e-15.
fn normal(x: f64) -> f64 {
    if x.abs() > 8.5 {
        return if x > 0.0 { 1.0 } else { 0.0 };
    }
    let (mut sum, mut term, mut i) = (x, x, 1.0);
    loop {
        i += 2.0;
        term *= x * x / i;
        let next = sum + term;
        if next == sum {
            let density = (-x * x / 2.0).exp() / (2.0 * std::f64::consts::PI).sqrt();
            return (0.5 + sum * density).clamp(0.0, 1.0);
        }
        sum = next;
    }
}

/// Simpson's rule with 200 intervals.
fn simpson(f: impl Fn(f64) -> f64, low: f64, high: f64) -> f64 {
    const INTERVALS: u32 = 200;
    if high <= low {
        return 0.0;
    }
    let width = (high - low) / f64::from(INTERVALS);
    let weight = |i: u32| match i {
        0 | INTERVALS => 1.0,
        _ if i % 2 == 1 => 4.0,
        _ => 2.0,
    };
    (0..=INTERVALS).map(|i| weight(i) * f(low + width * f64::from(i))).sum::<f64>() * width / 3.0
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The values are those of the G*Power 3.1 manual for matched pairs (dz = 0.421637, 50 pairs, power 0.832114), and of R's `pwr.t.test(d = 0.5, power = 0.8, type = "paired")`,
    /// which gives n = 33.36713.
    #[test]
    fn power_is_that_of_published_examples() {
        let found = power(0.421_637, 50, 0.05);
        assert!((found - 0.832_114).abs() < 2e-6, "{found}");
        assert_eq!(pairs_for(0.5, 1.0, 0.05, 0.8, 100), Some(34));
        assert_eq!(pairs_for(0.5, 1.0, 0.05, 0.8, 33), None);
    }

    #[test]
    fn without_an_effect_the_power_is_the_level() {
        for pairs in [2, 3, 4, 8, 30, 400] {
            for alpha in [0.05, 0.05 / 6.0] {
                let found = power(0.0, pairs, alpha);
                assert!((found - alpha).abs() < 1e-6, "{pairs} {alpha}: {found}");
            }
        }
    }

    #[test]
    fn what_can_be_detected_is_found_as_often_as_said() {
        for (pairs, alpha) in [(2, 0.05), (3, 0.05), (3, 0.01), (8, 0.05), (64, 0.02)] {
            let effect = minimum_detectable(0.3, pairs, alpha, 0.8).unwrap();
            assert!((power(effect / 0.3, pairs, alpha) - 0.8).abs() < 1e-9, "{pairs} {alpha}: {effect}");
        }
        assert_eq!(minimum_detectable(0.3, 1, 0.05, 0.8), None);
        assert_eq!(minimum_detectable(f64::NAN, 5, 0.05, 0.8), None);
        assert_eq!(minimum_detectable(0.0, 5, 0.05, 0.8), Some(0.0));
    }

    #[test]
    fn the_normal_distribution() {
        assert_eq!(normal(0.0), 0.5);
        assert!((normal(1.959_963_984_540_054) - 0.975).abs() < 1e-15);
        assert!((normal(-1.0) - 0.158_655_253_931_457_05).abs() < 1e-15);
        assert_eq!((normal(9.0), normal(-9.0)), (1.0, 0.0));
    }
}
