//! Learning-rate schedules: linear warm-up, then cosine or warm-up–stable–decay (WSD).

use serde::{Deserialize, Serialize};

/// The shape of the learning rate after the warm-up.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ScheduleKind {
    /// Half a cosine from the peak to the minimum (Loshchilov and Hutter, 2017).
    #[default]
    Cosine,
    /// Constant, then a linear decay to the minimum over the last `decay_fraction` of the steps (Hu et al., 2024).
    Wsd,
}

/// The learning rate as a function of the step alone, so that a checkpoint need not store the learning rate.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Schedule {
    /// The schedule's shape after the warm-up.
    pub kind: ScheduleKind,
    /// Peak learning rate.
    pub lr: f64,
    /// Learning rate of the last step of the run.
    pub min_lr: f64,
    /// Number of steps of the linear warm-up; step `warmup_steps - 1` is the first step at the peak learning rate.
    pub warmup_steps: u64,
    /// Number of steps of the whole run.
    pub steps: u64,
    /// Fraction of all steps during which WSD decays the learning rate; ignored by the cosine schedule.
    pub decay_fraction: f64,
}

impl Schedule {
    /// The learning rate of `step`, counted from 0.
    ///
    /// Warm-up gives `lr · (step + 1) / warmup_steps`, which is never 0. The last step (`steps - 1`) runs at `min_lr`, and so does every
    /// step after it.
    #[must_use]
    pub fn lr(&self, step: u64) -> f64 {
        if step < self.warmup_steps {
            return self.lr * (step + 1) as f64 / self.warmup_steps as f64;
        }
        let last = self.steps.saturating_sub(1);
        let (start, shape): (u64, fn(f64) -> f64) = match self.kind {
            // The last step of the warm-up is already at the peak, so the decay starts from this step.
            ScheduleKind::Cosine => (self.warmup_steps.saturating_sub(1), |x| 0.5 * (1.0 + cos_pi(x))),
            ScheduleKind::Wsd => {
                let decay = (self.steps as f64 * self.decay_fraction).round() as u64;
                let start = last.saturating_sub(decay).max(self.warmup_steps.saturating_sub(1));
                (start, |x| 1.0 - x)
            }
        };
        if step >= last {
            return self.min_lr;
        }
        // Here start <= step < last, unless the decay has not begun yet.
        let progress = step.saturating_sub(start) as f64 / (last - start.min(step)) as f64;
        self.min_lr + (self.lr - self.min_lr) * shape(progress)
    }
}

/// cos(π·x) for x in [0, 1], from its Taylor series about x = 1/2.
///
/// The system's `cos` differs in the last bit between platforms, and the learning rate affects every weight. This function uses only
/// additions and products, so its bits are the same everywhere (error below 1e-15).
fn cos_pi(x: f64) -> f64 {
    let z = (0.5 - x) * std::f64::consts::PI; // cos(πx) = sin(π/2 − πx), |z| <= π/2
    let z2 = z * z;
    let mut term = z;
    let mut sum = z;
    for n in 1..=12 {
        let n = f64::from(n);
        term *= -z2 / ((2.0 * n) * (2.0 * n + 1.0));
        sum += term;
    }
    sum
}

#[cfg(test)]
mod tests {
    use super::*;

    fn schedule(kind: ScheduleKind) -> Schedule {
        Schedule { kind, lr: 1e-3, min_lr: 1e-4, warmup_steps: 10, steps: 110, decay_fraction: 0.2 }
    }

    fn near(got: f64, want: f64) {
        assert!((got - want).abs() < 1e-12, "{got} is not {want}");
    }

    #[test]
    fn warm_up_is_linear_and_starts_above_zero() {
        for kind in [ScheduleKind::Cosine, ScheduleKind::Wsd] {
            let s = schedule(kind);
            near(s.lr(0), 1e-4);
            near(s.lr(4), 5e-4);
            near(s.lr(9), 1e-3);
        }
    }

    #[test]
    fn cosine_passes_its_middle_and_ends_at_the_minimum() {
        let s = schedule(ScheduleKind::Cosine);
        near(s.lr(59), (1e-3 + 1e-4) / 2.0); // half-way between 9 (peak) and 109 (last)
        near(s.lr(34), 1e-4 + 9e-4 * 0.5 * (1.0 + (0.25 * std::f64::consts::PI).cos()));
        near(s.lr(109), 1e-4);
        near(s.lr(10_000), 1e-4);
        assert!((10..110).all(|step| s.lr(step) < s.lr(step - 1)), "not falling");
    }

    #[test]
    fn wsd_is_flat_then_linear() {
        let s = schedule(ScheduleKind::Wsd);
        for step in 10..=87 {
            near(s.lr(step), 1e-3); // decay starts 22 steps before the last one
        }
        near(s.lr(98), 1e-4 + 9e-4 * 0.5);
        near(s.lr(109), 1e-4);
    }

    #[test]
    fn degenerate_runs_have_a_rate() {
        for kind in [ScheduleKind::Cosine, ScheduleKind::Wsd] {
            for (warmup_steps, steps) in [(0, 1), (0, 2), (1, 1), (5, 3), (0, 0)] {
                for decay_fraction in [0.0, 0.5, 1.0] {
                    let s = Schedule { warmup_steps, steps, decay_fraction, ..schedule(kind) };
                    for step in 0..6 {
                        let lr = s.lr(step);
                        assert!(lr.is_finite() && lr > 0.0 && lr <= 1e-3, "{kind:?} {s:?} step {step}: {lr}");
                    }
                }
            }
        }
    }

    #[test]
    fn own_cosine_is_the_cosine() {
        for i in 0..=1000 {
            let x = f64::from(i) / 1000.0;
            assert!((cos_pi(x) - (x * std::f64::consts::PI).cos()).abs() < 1e-15, "x = {x}");
        }
    }
}
