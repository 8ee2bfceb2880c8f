//! Packs many short texts into few sequences. Each text is a separate document, so texts do not attend to each other.

use std::ops::Range;

use crate::data::{Batch, NO_TARGET};

/// The tokens of a text, some of which are scored.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Request {
    /// The token ids of the text, including the context.
    pub ids: Vec<i32>,
    /// Ranges of the ids whose losses are computed, in ascending order.
    pub scored: Vec<Range<usize>>,
}

impl Request {
    /// Creates a request that scores all ids from index `first` on.
    #[must_use]
    pub fn behind(first: usize, ids: Vec<i32>) -> Self {
        let scored = first.min(ids.len())..ids.len();
        Self { ids, scored: vec![scored] }
    }
}

/// Scored tokens of a request within a batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Placed {
    /// Index of the request.
    pub request: usize,
    /// Index in the batch of the token whose target is the request's first target.
    pub first: usize,
    /// Number of targets of the request.
    pub count: usize,
}

/// A batch of requests, and the place of each request in the batch.
#[derive(Debug)]
pub(crate) struct Packed {
    /// The packed requests as sequences. Each request is a separate document.
    pub batch: Batch,
    pub(super) placed: Vec<Placed>,
}

impl Packed {
    /// Adds the loss of each token to the sum of the request to which the token belongs. `nats` contains one loss per token of the batch.
    pub fn add_to(&self, nats: &[f32], sums: &mut [f64]) {
        for Placed { request, first, count } in &self.placed {
            sums[*request] += nats[*first..first + count].iter().map(|nats| f64::from(*nats)).sum::<f64>();
        }
    }
}

/// Number of leading ids to drop from a request so that the remaining ids fit into a sequence. The last id needs no space in the sequence,
/// because it is only a target.
pub(super) fn cut(request: &Request, seq_len: usize) -> usize {
    request.ids.len().saturating_sub(seq_len + 1)
}

/// Number of requests that are longer than a sequence of `seq_len` tokens plus its last target.
pub(super) fn num_cut(requests: &[Request], seq_len: usize) -> usize {
    requests.iter().filter(|request| cut(request, seq_len) > 0).count()
}

/// Packs requests, in their order, into batches. A batch has at most `sequences` sequences of `seq_len` tokens.
pub(crate) fn pack(requests: &[Request], (sequences, seq_len): (usize, usize)) -> Vec<Packed> {
    let mut batches = Vec::new();
    let mut next = 0;
    while next < requests.len() {
        let mut batch = Batch::zeroed(sequences, seq_len, true);
        batch.targets.fill(NO_TARGET);
        let mut placed = Vec::new();
        let (mut sequence, mut at) = (0, 0);
        while let Some(request) = requests.get(next) {
            let cut = cut(request, seq_len);
            let ids = &request.ids[cut..];
            let inputs = ids.len().saturating_sub(1);
            if at + inputs > seq_len {
                (sequence, at) = (sequence + 1, 0);
            }
            if sequence == sequences {
                break;
            }
            let place = sequence * seq_len + at;
            batch.inputs[place..place + inputs].copy_from_slice(&ids[..inputs]);
            let end = (sequence + 1) * seq_len;
            batch.starts[place..place + inputs].fill(at as i32);
            // The padding after the last request is a separate document.
            batch.starts[place + inputs..end].fill((at + inputs) as i32);
            for scored in request.scored.iter().filter(|scored| !scored.is_empty()) {
                // A scored token is predicted at the position of the preceding token.
                let [first, end] = [scored.start, scored.end].map(|at| at.saturating_sub(cut).max(1) - 1);
                batch.targets[place + first..place + end].copy_from_slice(&ids[first + 1..end + 1]);
                placed.push(Placed { request: next, first: place + first, count: end - first });
            }
            at += inputs;
            next += 1;
        }
        batches.push(Packed { batch, placed });
    }
    batches
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request(ids: std::ops::Range<i32>, first: usize) -> Request {
        Request::behind(first, ids.collect())
    }

    #[test]
    fn requests_are_documents_one_after_the_other() {
        let requests = [request(0..4, 2), request(10..13, 1), request(20..30, 9), request(40..43, 2)];
        let packed = pack(&requests, (2, 8));
        assert_eq!(packed.len(), 2);
        let Packed { batch, placed } = &packed[0];
        assert_eq!(batch.inputs[..8], [0, 1, 2, 10, 11, 0, 0, 0]);
        assert_eq!(batch.targets[..8], [-1, 2, 3, 11, 12, -1, -1, -1]);
        assert_eq!(batch.starts[..8], [0, 0, 0, 3, 3, 5, 5, 5]);
        // Ten ids are one more than a sequence plus its last target, so the first id is dropped.
        assert_eq!(batch.inputs[8..], [21, 22, 23, 24, 25, 26, 27, 28]);
        assert_eq!(batch.targets[8..], [-1, -1, -1, -1, -1, -1, -1, 29]);
        assert_eq!(placed.len(), 3);
        assert_eq!(pack(&requests[3..], (2, 8))[0].placed[0], Placed { request: 0, first: 1, count: 1 });
    }

    #[test]
    fn every_target_is_added_to_its_request_once() {
        let requests: Vec<Request> = (0..40).map(|i| request(0..3 + i % 9, 1 + i as usize % 2)).collect();
        let mut sums = vec![0.0; requests.len()];
        for packed in pack(&requests, (3, 16)) {
            let nats: Vec<f32> =
                packed.batch.targets.iter().map(|target| if *target < 0 { 1e6 } else { 1.0 }).collect();
            packed.add_to(&nats, &mut sums);
        }
        let wanted = requests.iter().map(|r| r.scored[0].len() as f64);
        assert!(sums.iter().copied().eq(wanted), "{sums:?}");
    }
}
