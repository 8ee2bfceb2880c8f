//! Finite differences against an analytic gradient, along random directions.

use crate::input::{Input, stream};
use std::fmt;

/// How hard to look, and what to accept.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct GradientCheck {
    /// Random directions, besides the gradient's own.
    pub directions: usize,
    /// Length of the larger step, relative to ‖x‖ (absolute below 1); the other one is half of it.
    pub step: f64,
    /// Largest accepted error of a directional derivative, relative to ‖gradient‖ (the direction has length 1).
    pub tolerance: f64,
}

impl Default for GradientCheck {
    /// For functions of F32 values: steps of about the cube root of their precision.
    fn default() -> Self {
        Self { directions: 8, step: 1e-2, tolerance: 2e-3 }
    }
}

/// One direction that was tried.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Slope {
    /// gradient · direction.
    pub analytic: f64,
    /// Extrapolated from both central differences.
    pub numeric: f64,
    /// |central difference at the larger step − at half of it|: what the truncated terms and rounding amount to.
    pub spread: f64,
}

/// What [`check_gradient`] found.
#[derive(Debug, Clone, PartialEq)]
pub struct GradientReport {
    /// The gradient's own direction first (where it is not zero), then random ones.
    pub slopes: Vec<Slope>,
    /// Length of the analytic gradient.
    pub norm: f64,
    /// Largest |numeric − analytic|, relative to the length of the gradient.
    pub error: f64,
    /// What was accepted.
    pub tolerance: f64,
}

impl GradientReport {
    /// Whether every direction agrees.
    pub fn passed(&self) -> bool {
        self.error <= self.tolerance
    }
}

impl fmt::Display for GradientReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let verdict = if self.passed() { "agrees with" } else { "differs from" };
        writeln!(
            f,
            "gradient of length {:.6e} {verdict} finite differences: error {:.3e}, accepted {:.3e}",
            self.norm, self.error, self.tolerance
        )?;
        writeln!(f, "  {:>15} {:>15} {:>12} {:>12}", "analytic", "numeric", "difference", "step spread")?;
        for s in &self.slopes {
            let difference = s.numeric - s.analytic;
            writeln!(
                f,
                "  {:>15.7e} {:>15.7e} {difference:>12.3e} {:>12.3e}",
                s.analytic, s.numeric, s.spread
            )?;
        }
        Ok(())
    }
}

/// Derivatives of `f` at `x` along random directions of length 1 and along `analytic` itself, by central differences at
/// steps h and h/2 and Richardson's extrapolation (4·D(h/2) − D(h))/3, which leaves an error of order h⁴, compared with
/// `analytic` · direction.
///
/// Perturbed coordinates are rounded to F32, so the step is measured on what `f` was really given: a direction's
/// derivative is that along the rounded displacement.
///
/// `name` chooses the random directions.
///
/// # Panics
/// If `x` and `analytic` differ in length.
pub fn gradient_report(
    name: &str,
    mut f: impl FnMut(&[f32]) -> f64,
    x: &[f32],
    analytic: &[f32],
    check: GradientCheck,
) -> GradientReport {
    assert_eq!(x.len(), analytic.len(), "{name}: values of x and of its gradient");
    let norm = length(analytic.iter().copied().map(f64::from));
    let step = check.step * length(x.iter().copied().map(f64::from)).max(1.0);
    let random = stream(name);
    let directions = (0..check.directions as u64).map(|d| {
        let normal = |i: u64| f64::from(Input::Normal.at(&random, d << 40 | i));
        (0..x.len() as u64).map(normal).collect::<Vec<f64>>()
    });
    let own: Vec<f64> = analytic.iter().copied().map(f64::from).collect();
    let own = (norm > 0.0 && norm.is_finite()).then_some(own);
    let mut slopes = Vec::new();
    for direction in own.into_iter().chain(directions) {
        let unit = 1.0 / length(direction.iter().copied());
        let direction: Vec<f64> = direction.into_iter().map(|d| d * unit).collect();
        let at_full = central_difference(&mut f, x, analytic, &direction, step);
        let at_half = central_difference(&mut f, x, analytic, &direction, step / 2.0);
        // Both the differences and what they are compared with are those of the rounded displacements, so the
        // extrapolation is of their difference, which has no term of order h⁰ if the gradient is right.
        let error = (4.0 * (at_half.numeric - at_half.analytic) - (at_full.numeric - at_full.analytic)) / 3.0;
        let spread = ((at_full.numeric - at_full.analytic) - (at_half.numeric - at_half.analytic)).abs();
        slopes.push(Slope { analytic: at_half.analytic, numeric: at_half.analytic + error, spread });
    }
    let worst = slopes
        .iter()
        .map(|s| (s.numeric - s.analytic).abs())
        .fold(0.0, |a, b| if b.is_nan() { f64::INFINITY } else { f64::max(a, b) });
    let error = if worst == 0.0 { 0.0 } else { worst / norm };
    let error = if norm.is_finite() && !error.is_nan() { error } else { f64::INFINITY };
    GradientReport { slopes, norm, error, tolerance: check.tolerance }
}

/// Asserts that an analytic gradient agrees with finite differences: [`gradient_report`].
///
/// # Panics
/// With the report, if it does not.
#[track_caller]
pub fn check_gradient(
    name: &str,
    f: impl FnMut(&[f32]) -> f64,
    x: &[f32],
    analytic: &[f32],
    check: GradientCheck,
) {
    let report = gradient_report(name, f, x, analytic, check);
    assert!(report.passed(), "{name}: {report}");
}

struct Difference {
    numeric: f64,
    analytic: f64,
}

fn central_difference(
    f: &mut impl FnMut(&[f32]) -> f64,
    x: &[f32],
    gradient: &[f32],
    direction: &[f64],
    h: f64,
) -> Difference {
    let moved = |h: f64| -> Vec<f32> {
        x.iter().zip(direction).map(|(&x, d)| (f64::from(x) + h * d) as f32).collect()
    };
    let (forth, back) = (moved(h), moved(-h));
    let displaced = forth.iter().zip(&back).map(|(&a, &b)| f64::from(a) - f64::from(b));
    let analytic: f64 = displaced.zip(gradient).map(|(d, &g)| d * f64::from(g)).sum();
    Difference { numeric: (f(&forth) - f(&back)) / (2.0 * h), analytic: analytic / (2.0 * h) }
}

fn length(values: impl Iterator<Item = f64>) -> f64 {
    values.map(|v| v * v).sum::<f64>().sqrt()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Σ sin(xᵢ) · xᵢ₊₁, and its gradient.
    fn wave(x: &[f32]) -> f64 {
        x.windows(2).map(|w| f64::from(w[0]).sin() * f64::from(w[1])).sum()
    }

    fn wave_gradient(x: &[f32]) -> Vec<f32> {
        let mut gradient = vec![0.0f64; x.len()];
        for i in 0..x.len() - 1 {
            gradient[i] += f64::from(x[i]).cos() * f64::from(x[i + 1]);
            gradient[i + 1] += f64::from(x[i]).sin();
        }
        gradient.into_iter().map(|g| g as f32).collect()
    }

    fn point() -> Vec<f32> {
        Input::Normal.values(&stream("gradient point"), 50)
    }

    #[test]
    fn a_right_gradient_passes_by_far() {
        let x = point();
        let report = gradient_report("wave", wave, &x, &wave_gradient(&x), GradientCheck::default());
        assert!(report.error < 2e-6, "{report}");
        assert_eq!(report.slopes.len(), 9);
    }

    #[test]
    fn one_wrong_coordinate_of_fifty_is_found() {
        let x = point();
        for i in [0, 17, 49] {
            let mut wrong = wave_gradient(&x);
            wrong[i] = -wrong[i];
            let report = gradient_report("wave", wave, &x, &wrong, GradientCheck::default());
            assert!(!report.passed(), "coordinate {i}: {report}");
        }
        let scaled: Vec<f32> = wave_gradient(&x).iter().map(|g| 1.005 * g).collect();
        assert!(!gradient_report("wave", wave, &x, &scaled, GradientCheck::default()).passed());
    }

    #[test]
    fn degenerate_gradients_are_judged_too() {
        let check = GradientCheck::default();
        assert!(gradient_report("constant", |_| 3.0, &[1.0, 2.0], &[0.0, 0.0], check).passed());
        assert!(!gradient_report("slope", |x| f64::from(x[0]), &[1.0, 2.0], &[0.0, 0.0], check).passed());
        assert!(!gradient_report("nan", |_| f64::NAN, &[1.0], &[1.0], check).passed());
        assert!(!gradient_report("nan", |x| f64::from(x[0]), &[1.0], &[f32::NAN], check).passed());
    }

    #[test]
    #[should_panic(expected = "wave: gradient of length")]
    fn the_assertion_reports() {
        let x = point();
        check_gradient("wave", wave, &x, &vec![1.0; x.len()], GradientCheck::default());
    }
}
