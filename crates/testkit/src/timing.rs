//! Paired timing: A and B alternate, so that disturbances of the machine affect both.

use std::fmt;
use std::time::Instant;

/// The times of two pieces of code, A and B, that were run alternately.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Paired {
    /// Median time of A, in microseconds.
    pub a_us: f64,
    /// Median time of B, in microseconds.
    pub b_us: f64,
    /// Median over the rounds of the ratio (time of A) / (time of B). If the ratio is above 1, B is faster.
    pub ratio: f64,
    /// Half the interquartile range of these ratios, relative to the median ratio.
    pub spread: f64,
}

impl fmt::Display for Paired {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { a_us, b_us, ratio, spread } = self;
        write!(f, "{a_us:.1} us against {b_us:.1} us: {ratio:.3}x ± {:.1} %", 100.0 * spread)
    }
}

/// Runs A, B, A, B, … for this many rounds (at least one), after a warm-up round that does not count.
pub fn paired(rounds: usize, mut a: impl FnMut(), mut b: impl FnMut()) -> Paired {
    a();
    b();
    let times: Vec<(f64, f64)> = (0..rounds.max(1)).map(|_| (time_us(&mut a), time_us(&mut b))).collect();
    summary(&times)
}

fn time_us(f: &mut impl FnMut()) -> f64 {
    let start = Instant::now();
    f();
    start.elapsed().as_secs_f64() * 1e6
}

fn summary(times: &[(f64, f64)]) -> Paired {
    // A clock may not advance during a short call; the ratio is then 1.
    let ratios = sorted(times.iter().map(|(a, b)| if *b > 0.0 { a / b } else { 1.0 }));
    let ratio = quantile(&ratios, 0.5);
    Paired {
        a_us: quantile(&sorted(times.iter().map(|t| t.0)), 0.5),
        b_us: quantile(&sorted(times.iter().map(|t| t.1)), 0.5),
        ratio,
        spread: (quantile(&ratios, 0.75) - quantile(&ratios, 0.25)) / 2.0 / ratio,
    }
}

fn sorted(values: impl Iterator<Item = f64>) -> Vec<f64> {
    let mut values: Vec<f64> = values.collect();
    values.sort_by(f64::total_cmp);
    values
}

/// A quantile by linear interpolation between neighbours.
fn quantile(sorted: &[f64], q: f64) -> f64 {
    let at = q * (sorted.len() - 1) as f64;
    let (low, high) = (sorted[at.floor() as usize], sorted[at.ceil() as usize]);
    low + (high - low) * at.fract()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn medians_ratios_and_their_spread() {
        // The third round was disturbed: both times are longer, and the ratio is unchanged.
        let p = summary(&[(10.0, 5.0), (12.0, 6.0), (100.0, 50.0), (11.0, 5.0), (10.0, 5.0)]);
        assert_eq!((p.a_us, p.b_us, p.ratio, p.spread), (11.0, 5.0, 2.0, 0.0));
        let p = summary(&[(1.0, 1.0), (2.0, 1.0), (3.0, 1.0)]);
        assert_eq!((p.ratio, p.spread), (2.0, 0.25));
        assert_eq!(summary(&[(1.0, 0.0)]).ratio, 1.0);
    }

    #[test]
    fn both_run_in_turns_once_more_than_asked() {
        let order = std::cell::RefCell::new(String::new());
        let p = paired(2, || order.borrow_mut().push('a'), || order.borrow_mut().push('b'));
        assert_eq!(order.into_inner(), "ababab");
        assert!(p.a_us >= 0.0 && p.to_string().contains(" us against "));
    }
}
