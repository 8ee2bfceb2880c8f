//! How well held-out sequences are predicted.

/// Nats of the targets of held-out sequences.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct HeldOut {
    /// Of all targets together.
    pub nats: f64,
    /// How many there are.
    pub targets: u64,
}

impl HeldOut {
    /// Sequences of a batch of `eval.batches`, whatever `train.batch_size` is.
    pub const BATCH: usize = 16;

    /// The sum over sequences of which each has so many nats. Its order does not depend on how many are computed at once.
    pub(crate) fn of_sequences(nats: &[f32], targets: u64) -> Self {
        let sums = nats.chunks(Self::BATCH).map(|nats| nats.iter().copied().map(f64::from).sum::<f64>());
        Self { nats: sums.sum(), targets }
    }

    /// Nats a target. None where there is no target: a mean over nothing has no value.
    #[must_use]
    pub fn loss(&self) -> Option<f64> {
        (self.targets > 0).then(|| self.nats / self.targets as f64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mean_over_nothing_has_no_value() {
        assert_eq!(HeldOut::of_sequences(&[0.0; 3], 0).loss(), None);
        assert_eq!(HeldOut::of_sequences(&[1.5, 0.0, 3.0], 3).loss(), Some(1.5));
    }
}
