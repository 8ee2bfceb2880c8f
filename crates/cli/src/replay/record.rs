//! What a run has recorded of a step and of the steps before it.

use super::verdict::Before;
use nibble_command::error::{Error, Result};
use nibble_train::metrics::read_metrics;
use nibble_train::spikes::{Spike, read_spikes};
use nibble_train::trainer::{METRICS_FILE, Tried, has_begun};
use std::collections::BTreeMap;
use std::path::Path;

/// What a run has recorded about its steps.
#[derive(Debug, Default)]
pub struct Recorded {
    /// The loss of every step, by the step's number from 1.
    losses: BTreeMap<u64, f64>,
    norms: BTreeMap<u64, f64>,
    spikes: Vec<Spike>,
}

impl Recorded {
    /// Reads a run's records.
    pub fn read(dir: &Path) -> Result<Self> {
        if !has_begun(dir) {
            return Err(Error::usage(format!("{}: holds no run", dir.display())));
        }
        let (mut losses, mut norms) = (BTreeMap::new(), BTreeMap::new());
        for metrics in read_metrics(&dir.join(METRICS_FILE))?.metrics {
            metrics.loss.map(|loss| losses.insert(metrics.step, loss));
            metrics.grad_norm.map(|norm| norms.insert(metrics.step, norm));
        }
        Ok(Self { losses, norms, spikes: read_spikes(dir)? })
    }

    /// The step to repeat: the requested step, or the last recorded spike.
    pub fn step(&self, asked: Option<u64>, dir: &Path) -> Result<u64> {
        let spike = self.spikes.last().map(|spike| spike.step);
        let Some(step) = asked.or(spike) else {
            let why = format!("{}: the run has recorded no spike; name a step", dir.display());
            return Err(Error::usage(why));
        };
        // The step after the last one may be one that ended the run.
        let taken = self.losses.keys().next_back().copied().unwrap_or(0).max(spike.unwrap_or(0));
        match step > taken + 1 {
            true => Err(Error::usage(format!(
                "STEP: is {step}, and the run in {} has taken {taken} steps",
                dir.display()
            ))),
            false => Ok(step),
        }
    }

    /// The record of a step as a spike; if several processes took the step, the last of them counts.
    pub fn spike(&self, step: u64) -> Option<&Spike> {
        self.spikes.iter().rfind(|spike| spike.step == step)
    }

    /// The loss of a step, if the metrics file contains the step.
    pub fn loss(&self, step: u64) -> Option<f64> {
        self.losses.get(&step).copied()
    }

    /// The usual loss and gradient norm of the run before a step.
    pub fn before(&self, step: u64) -> Before {
        let mut before = Before::default();
        let finite = |all: &BTreeMap<u64, f64>| {
            all.range(..step).map(|(_, value)| *value).filter(|value| value.is_finite()).collect::<Vec<_>>()
        };
        finite(&self.losses).into_iter().for_each(|loss| before.loss.take(loss));
        finite(&self.norms).into_iter().for_each(|norm| before.norm.take(norm));
        before
    }

    /// Whether a repeated step agrees with the recorded step: the same tensor is not finite, or the loss has the same bits. `None` without
    /// a record.
    pub fn agrees(&self, step: u64, tried: &Tried) -> Option<bool> {
        let spike = self.spike(step);
        if let Some(site) = spike.and_then(|spike| spike.non_finite.as_ref()) {
            return Some(tried.non_finite.as_ref() == Some(site));
        }
        self.loss(step).or(spike.and_then(|spike| spike.loss)).map(|loss| is_same(tried.loss, loss))
    }
}

/// Whether a number equals the number that was written to a JSON Lines file. Both numbers are converted to JSON and read back, because
/// reading may change the last bit.
pub fn is_same(now: f64, recorded: f64) -> bool {
    let text = serde_json::to_string(&now).unwrap_or_default();
    serde_json::from_str::<f64>(&text).is_ok_and(|now| now == recorded)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_number_is_the_same_after_it_was_written() {
        let mut state = 1u64;
        for _ in 0..10_000 {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let value = 10.0 * (state >> 11) as f64 / (1u64 << 53) as f64;
            let read: f64 = serde_json::from_str(&serde_json::to_string(&value).unwrap()).unwrap();
            assert!(is_same(value, read) && !is_same(value * (1.0 + 1e-14), read), "{value:e}");
        }
        assert!(!is_same(f64::NAN, 1.0));
    }
}
