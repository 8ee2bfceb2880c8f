//! Detects slow failures: collapsing experts, loss spikes, a rising fraction of inexact blocks, quantization that zeroes or cuts off most of a
//! tensor, a rank that keeps the others waiting. The first rank checks every record. A finding is reported once when it begins, and again only
//! after it was over.

use super::{LayerMetrics, Lost, Metrics, RankTimes};
use crate::spikes::Usual;

/// Checks the metrics of every step.
#[derive(Debug, Clone, Default)]
pub struct Watchdog {
    steps: u64,
    loss: Usual,
    /// Of the lift and of the shift.
    inexact: [Usual; 2],
    /// Which of [`Watchdog::step`]'s findings are active.
    is_on: [bool; 5],
    /// Sites that lose most of their values, in the order in which they were found. Each is told once.
    lost: Vec<Lost>,
    /// Whether any step measured quantization.
    has_measured: bool,
    /// For how many consecutive steps each rank has been slow.
    slow: Vec<u64>,
}

/// The number of the finding of a loss spike.
const SPIKE: usize = 1;

/// What to do about experts without tokens if nothing else explains them.
const ROUTERS: &str = "look at moe/load_max_over_mean, and raise model.aux_loss_coef or lower train.lr";

impl Watchdog {
    /// Samples before anything is judged: means must settle, and a router starts unbalanced.
    const SETTLED: u64 = Usual::SETTLED;

    /// Records the loss of a step that an earlier process of the same run has executed.
    pub fn remember(&mut self, metrics: &Metrics) {
        metrics.loss.filter(|loss| loss.is_finite()).into_iter().for_each(|loss| self.loss.take(loss));
    }

    /// The running statistics of the loss over the steps so far.
    #[must_use]
    pub fn usual_loss(&self) -> Usual {
        self.loss
    }

    /// Whether a step with this loss would start a loss spike; the step has not been passed to [`Watchdog::step`] yet.
    #[must_use]
    pub fn begins_spike(&self, loss: f64) -> bool {
        !self.is_on[SPIKE] && self.is_spike(loss)
    }

    fn is_spike(&self, loss: f64) -> bool {
        self.loss.is_settled() && loss > self.loss.limit()
    }

    /// Checks a step's metrics, and returns one sentence for each problem that starts with this step.
    ///
    /// | finding | begins | is over |
    /// |---|---|---|
    /// | expert collapse | half of all experts had no row | a quarter |
    /// | loss spike | loss 8 mean distances and 0.2 nats above its mean | 4 distances |
    /// | inexact lift or shift | share above 10 % and twice its mean | 1.5 times its mean |
    /// | nothing to learn | none of the step's tokens is a target | never |
    pub fn step(&mut self, metrics: &Metrics) -> Vec<String> {
        let mut begun = Vec::new();
        let step = metrics.step;
        if let Some(dead) = metrics.dead_expert_fraction {
            let settled = self.steps >= Self::SETTLED;
            let advice = match (self.lost.first(), self.has_measured) {
                (Some(lost), _) => {
                    format!("the cause may be that the quantization of {} {}", lost.site(), lost.what())
                }
                (None, true) => ROUTERS.to_owned(),
                (None, false) => {
                    format!(
                        "{ROUTERS}; under a recipe that quantizes gradients, train.quantization_every finds those that become zero"
                    )
                }
            };
            let text = || {
                format!(
                    "step {step}: {:.0} % of the experts get no token (moe/dead_expert_fraction); {advice}",
                    100.0 * dead
                )
            };
            begun.extend(self.switch(0, settled && dead >= 0.5, dead < 0.25, text));
        }
        if let Some(loss) = metrics.loss.filter(|loss| loss.is_finite()) {
            let Usual { mean, distance, .. } = self.loss;
            let above = loss - mean;
            let is_spike = self.is_spike(loss);
            let text = || {
                format!(
                    "step {step}: the loss is {loss:.4}, and was {mean:.4} on average; look at grad_norm, and if it does not come \
                     down lower train.lr or train.clip_norm"
                )
            };
            begun.extend(self.switch(SPIKE, is_spike, above < 4.0 * distance, text));
            self.loss.take(loss);
        }
        let shares = [
            (metrics.inexact_fraction, "inexact_fraction", "lift to FP8"),
            (metrics.shift_inexact_fraction, "shift_inexact_fraction", "shift of FP8 exponents"),
        ];
        for (number, (share, name, what)) in shares.into_iter().enumerate() {
            let Some(share) = share else { continue };
            let usual = self.inexact[number];
            let mean = usual.mean;
            let text = || {
                format!(
                    "step {step}: the {what} changes {:.1} % of the blocks, and changed {:.1} % on average (quantization/{name}); values of one \
                     block lie further apart: look at grad_norm, or keep these layers in another format by an [[override]]",
                    100.0 * share,
                    100.0 * mean
                )
            };
            let has_risen = usual.is_settled() && share > 0.1 && share > 2.0 * mean;
            begun.extend(self.switch(2 + number, has_risen, share < 1.5 * mean, text));
            self.inexact[number].take(share);
        }
        let text = || {
            format!(
                "warning: step {step}: none of its tokens is a target (data/target_fraction), so it has no loss and changes nothing; this is told \
                 once, and at the end of the run how many such steps there were"
            )
        };
        begun.extend(self.switch(4, metrics.target_fraction == Some(0.0), false, text));
        self.steps += 1;
        begun
    }

    /// Checks the counts of a step's sites; callers must call this function before [`Watchdog::step`] for the same step. Returns one
    /// sentence for each site that loses most of its values ([`Lost`]) and was not reported before.
    pub fn layers(&mut self, layers: &LayerMetrics) -> Vec<String> {
        self.has_measured |= layers.is_measured();
        let mut found = Lost::of_step(layers);
        found.retain(|new| self.lost.iter().all(|old| !old.is_same(new)));
        let told = found.iter().map(|lost| format!("warning: step {}: {lost}", layers.step)).collect();
        self.lost.extend(found);
        told
    }

    /// Checks the times of all ranks in a step, and returns the findings that start with this step. A finding is a rank whose busy time was
    /// at least 1.25 times the median of all ranks in 50 consecutive steps. A finding ends with the first step in which the rank's busy
    /// time is below this limit.
    pub fn ranks(&mut self, times: &RankTimes) -> Vec<String> {
        const SLOW: f64 = 1.25;
        let Some(median) = times.median_busy() else { return Vec::new() };
        let mut begun = Vec::new();
        self.slow.resize(times.seconds.len(), 0);
        for (rank, (busy, slow)) in times.busy().into_iter().zip(&mut self.slow).enumerate() {
            *slow = if busy > 0.0 && busy >= SLOW * median { *slow + 1 } else { 0 };
            if *slow == Self::SETTLED {
                begun.push(format!(
                    "step {}: rank {rank} has kept the others waiting for {} steps: it was busy for {busy:.3} s, and half of all ranks for no more than \
                     {median:.3} s (ranks.jsonl); look at what else its processor, GPU or host does, and at its clock rate",
                    times.step,
                    Self::SETTLED
                ));
            }
        }
        begun
    }

    /// Updates a finding; returns its text if it begins.
    fn switch(
        &mut self,
        finding: usize,
        on: bool,
        off: bool,
        text: impl FnOnce() -> String,
    ) -> Option<String> {
        let was_on = self.is_on[finding];
        self.is_on[finding] = on || was_on && !off;
        (on && !was_on).then(text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::metrics::SiteMetrics;

    /// Reports for these steps after 300 normal ones.
    fn told(then: &[Metrics]) -> Vec<String> {
        let mut watchdog = Watchdog::default();
        let calm = |step: u64| Metrics {
            step,
            loss: Some(4.0 - 0.005 * step as f64 + 0.02 * (step % 5) as f64),
            dead_expert_fraction: Some(0.1),
            inexact_fraction: Some(0.02),
            // As in a default run: a rise without significance.
            shift_inexact_fraction: Some(1e-4 * step as f64),
            ..Metrics::default()
        };
        let all: Vec<String> = (1..=300).flat_map(|step| watchdog.step(&calm(step))).collect();
        assert_eq!(all, Vec::<String>::new(), "a calm run is told of");
        then.iter().flat_map(|metrics| watchdog.step(metrics)).collect()
    }

    #[test]
    fn a_share_that_appears_late_is_not_judged_at_once() {
        let share = |step| Metrics { step, inexact_fraction: Some(0.3), ..Metrics::default() };
        let mut watchdog = Watchdog::default();
        (1..=100).for_each(|step| drop(watchdog.step(&Metrics { step, ..Metrics::default() })));
        let all: Vec<String> = (101..=300).flat_map(|step| watchdog.step(&share(step))).collect();
        assert_eq!(all, Vec::<String>::new());
    }

    #[test]
    fn a_spike_is_told_when_it_begins_and_once() {
        let loss = |loss| Metrics { step: 301, loss: Some(loss), ..Metrics::default() };
        let all = told(&[loss(2.5), loss(4.5), loss(4.6), loss(2.5), loss(2.5)]);
        assert_eq!(all.len(), 1, "{all:?}");
        assert!(all[0].contains("the loss is 4.5000") && all[0].contains("grad_norm"), "{all:?}");
    }

    #[test]
    fn a_collapse_is_told_again_after_it_was_over() {
        let dead = |share| Metrics { step: 301, dead_expert_fraction: Some(share), ..Metrics::default() };
        assert_eq!(told(&[dead(0.5), dead(0.4), dead(0.6)]).len(), 1, "it was never over");
        let all = told(&[dead(0.5), dead(0.2), dead(0.6)]);
        assert_eq!(all.len(), 2, "{all:?}");
        assert!(all[0].contains("50 % of the experts") && all[0].contains("aux_loss_coef"), "{all:?}");
    }

    #[test]
    fn a_rising_share_of_inexact_blocks_is_told() {
        let lifted = Metrics { step: 301, inexact_fraction: Some(0.2), ..Metrics::default() };
        let shifted = Metrics { step: 301, shift_inexact_fraction: Some(0.2), ..Metrics::default() };
        let all = told(&[lifted, shifted]);
        assert_eq!(all.len(), 2, "{all:?}");
        assert!(all[0].contains("lift") && all[1].contains("shift"), "{all:?}");
    }

    #[test]
    fn a_site_that_loses_its_values_is_named_once_and_then_instead_of_the_router() {
        let site = |zeros| SiteMetrics {
            layer: "model.layers.0.self_attn.o_proj".into(),
            tensor: "dy".into(),
            measured: Some([100_000, 0, zeros, 0]),
            ..SiteMetrics::default()
        };
        let all = |zeros: u64| -> Vec<String> {
            let mut watchdog = Watchdog::default();
            let mut of = |step| {
                let mut told =
                    watchdog.layers(&LayerMetrics { step, load: Vec::new(), sites: vec![site(zeros)] });
                let dead = Some(0.6);
                told.extend(watchdog.step(&Metrics {
                    step,
                    dead_expert_fraction: dead,
                    ..Metrics::default()
                }));
                told
            };
            (1..=100).flat_map(&mut of).collect()
        };
        let [lost, collapse] = &all(99_999)[..] else { panic!("{:?}", all(99_999)) };
        assert!(lost.starts_with("warning: step 1: ") && lost.contains("self_attn.o_proj.dy"), "{lost}");
        assert!(collapse.contains("o_proj.dy") && !collapse.contains("aux_loss_coef"), "{collapse}");
        let [collapse] = &all(30_000)[..] else { panic!("{:?}", all(30_000)) };
        assert!(collapse.contains("aux_loss_coef") && !collapse.contains("quantization_every"), "{collapse}");
    }

    #[test]
    fn the_beginning_of_a_run_is_not_judged() {
        let mut watchdog = Watchdog::default();
        let dead =
            Metrics { step: 1, loss: Some(9.0), dead_expert_fraction: Some(0.9), ..Metrics::default() };
        assert!(watchdog.step(&dead).is_empty());
    }

    #[test]
    fn a_rank_that_is_slow_for_long_is_named_once_and_again_after_it_was_not() {
        let mut watchdog = Watchdog::default();
        let mut of = |steps: u64, busy: f64| -> Vec<String> {
            let times = |step| RankTimes { step, seconds: vec![2.0, 2.0, 1.0 + busy], waiting: vec![1.0; 3] };
            (1..=steps).flat_map(|step| watchdog.ranks(&times(step))).collect()
        };
        assert_eq!(of(100, 1.2), Vec::<String>::new());
        assert_eq!(of(49, 1.25), Vec::<String>::new(), "not long enough");
        assert_eq!(of(1, 1.0), Vec::<String>::new());
        let begun = of(200, 1.25);
        assert_eq!(begun.len(), 1, "{begun:?}");
        assert!(begun[0].starts_with("step 50: rank 2 has kept the others waiting"), "{begun:?}");
        assert_eq!((of(1, 1.0).len(), of(50, 1.5).len()), (0, 1));
    }
}
