//! The loss of held-out sequences.

/// The sum of the losses of held-out targets, in nats.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct HeldOut {
    /// Sum of the losses of all targets, in nats.
    pub nats: f64,
    /// Number of targets.
    pub targets: u64,
    /// Number of images for which the label has the largest logit; `None` for a language model.
    pub right: Option<u64>,
}

impl HeldOut {
    /// Number of sequences in each batch of `eval.batches`, regardless of `train.batch_size`.
    pub const BATCH: usize = 16;

    /// Adds the losses of the sequences, in an order that does not depend on the batch size.
    pub(crate) fn of_sequences(nats: &[f32], targets: u64) -> Self {
        let sums = nats.chunks(Self::BATCH).map(|nats| nats.iter().copied().map(f64::from).sum::<f64>());
        Self { nats: sums.sum(), targets, right: None }
    }

    /// The fraction of images that the model classifies correctly. Returns `None` for a language model, and if there are no targets.
    #[must_use]
    pub fn accuracy(&self) -> Option<f64> {
        self.right.filter(|_| self.targets > 0).map(|right| right as f64 / self.targets as f64)
    }

    /// The mean loss in nats per target; `None` if there are no targets.
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
