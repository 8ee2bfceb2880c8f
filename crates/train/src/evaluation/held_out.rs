//! The loss of held-out sequences.

/// Sum of the losses of held-out targets, in nats.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct HeldOut {
    /// Sum over all targets.
    pub nats: f64,
    /// Number of targets.
    pub targets: u64,
}

impl HeldOut {
    /// Sequences per batch of `eval.batches`, whatever `train.batch_size` is.
    pub const BATCH: usize = 16;

    /// The sum of the sequences' nats, in an order that does not depend on the batch size.
    pub(crate) fn of_sequences(nats: &[f32], targets: u64) -> Self {
        let sums = nats.chunks(Self::BATCH).map(|nats| nats.iter().copied().map(f64::from).sum::<f64>());
        Self { nats: sums.sum(), targets }
    }

    /// Nats per target; `None` without targets, where a mean has no value.
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
