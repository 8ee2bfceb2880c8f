//! Names the sequences of a batch with the highest loss.

use nibble_command::device::Device;
use nibble_command::error::Result;
use nibble_train::trainer::{ScoredSequence, Trainer};
use serde::Serialize;

/// A sequence with a high loss.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Sequence {
    /// Index of the sequence within the step's batch, from 0.
    pub in_batch: usize,
    /// Position of the sequence in the run's data.
    pub position: u64,
    /// The source of the data.
    pub source: String,
    /// Index of the sequence's first token within the source.
    pub first_token: u64,
    /// Mean loss of the targets in nats; null in JSON if the loss is not finite.
    pub loss: f64,
    /// Index, within the sequence, of the first of the [`WINDOW`] tokens with the highest loss.
    pub at: usize,
    /// The ids of these tokens.
    pub ids: Vec<i32>,
    /// The text of these tokens, if the text is known.
    pub text: Option<String>,
}

/// Number of tokens that are shown.
const WINDOW: usize = 16;
/// Number of sequences that are named.
const NAMED: usize = 3;

impl Sequence {
    /// Formats a line about the sequence.
    pub fn told(&self) -> String {
        let Self { in_batch, position, source, first_token, loss, at, ids, text } = self;
        let text = text.as_ref().map_or_else(String::new, |text| format!(" {text:?}"));
        format!(
            "sequence {in_batch} of the batch ({source}, from token {first_token}; position {position} of the run): {loss:.4} nats a target, most from its token {at} on: \
             {ids:?}{text}"
        )
    }
}

/// The sequences of step `data` (counted from 0) whose loss is above the limit, highest loss first. The list has at least one sequence and
/// at most three.
pub fn worst<B: Device>(trainer: &mut Trainer<'_, B>, data: u64, limit: f64) -> Result<Vec<Sequence>> {
    let mut scored: Vec<(usize, ScoredSequence)> =
        trainer.sequences_of(data)?.into_iter().enumerate().filter(|(_, one)| one.targets > 0).collect();
    // A loss that is not finite comes first.
    let key = |one: &ScoredSequence| if one.mean().is_nan() { f64::INFINITY } else { one.mean() };
    scored.sort_by(|(_, a), (_, b)| key(b).total_cmp(&key(a)));
    let high = scored.iter().take_while(|(_, one)| key(one) > limit).count();
    scored.truncate(high.clamp(1, NAMED));
    let tokenizer = trainer.tokenizer()?;
    let named = |(in_batch, one): (usize, ScoredSequence)| -> Result<Sequence> {
        let (source, first_token) = trainer.place_of(one.cursor)?;
        let at = window(&one.nats);
        let ids: Vec<i32> = one.wanted.iter().copied().skip(at).take(WINDOW).collect();
        let known: Vec<i32> = ids.iter().copied().filter(|id| *id >= 0).collect();
        Ok(Sequence {
            in_batch,
            position: one.cursor,
            source,
            first_token,
            loss: one.mean(),
            // The target of token `at` is the next token of the sequence.
            at: at + 1,
            text: tokenizer.has_text().then(|| tokenizer.decode(&known)),
            ids,
        })
    };
    scored.into_iter().map(named).collect()
}

/// The first of the consecutive tokens with the largest sum of losses.
fn window(nats: &[f32]) -> usize {
    let sum = |at: usize| nats[at..at + WINDOW].iter().map(|nats| f64::from(*nats)).sum::<f64>();
    let first = nats.iter().position(|nats| !nats.is_finite());
    let starts = 0..nats.len().saturating_sub(WINDOW - 1);
    first.or_else(|| starts.max_by(|a, b| sum(*a).total_cmp(&sum(*b)))).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_window_has_the_highest_losses() {
        let mut nats = vec![0.5; 100];
        nats[40..56].fill(3.0);
        assert_eq!(window(&nats), 40);
        assert_eq!(window(&nats[..5]), 0);
        nats[70] = f32::NAN;
        assert_eq!(window(&nats), 70);
    }
}
