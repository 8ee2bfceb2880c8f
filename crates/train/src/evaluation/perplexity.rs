//! Perplexity of whole documents, which are scored window by window.

use super::{Beginning, Request};
use crate::data::Encoded;
use crate::error::{Error, Result};

/// The losses of documents.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Perplexity {
    /// Number of non-empty documents.
    pub documents: u64,
    /// Number of predicted tokens.
    pub tokens: u64,
    /// Number of bytes of the predicted text; 0 if this number is unknown.
    pub bytes: u64,
    /// Sum of the losses of the predicted tokens, in nats.
    pub nats: f64,
}

impl Perplexity {
    /// The perplexity per token: e to the power of the mean loss in nats per token.
    #[must_use]
    pub fn by_token(&self) -> f64 {
        (self.nats / self.tokens as f64).exp()
    }

    /// The perplexity per byte: e to the power of the loss in nats per byte. The perplexity per byte can be compared between models with
    /// different tokenizers. Returns `None` if the number of bytes is unknown.
    #[must_use]
    pub fn by_byte(&self) -> Option<f64> {
        (self.bytes > 0).then(|| (self.nats / self.bytes as f64).exp())
    }

    /// Loss in bits per byte; `None` if the number of bytes is unknown.
    #[must_use]
    pub fn bits_per_byte(&self) -> Option<f64> {
        (self.bytes > 0).then(|| self.nats / self.bytes as f64 / std::f64::consts::LN_2)
    }
}

/// Cuts documents into windows that are scored separately. Every token of a document is predicted in exactly one window.
///
/// The first window of a document contains `seq_len` tokens and one more token, which is the last target. Each later window predicts the
/// next `stride` tokens, or the tokens that remain. As context, a window contains as many earlier tokens of the document as fit into a
/// sequence. If `stride` equals the sequence length, the windows are the same as those of `get_rolling_token_windows` in
/// lm-evaluation-harness.
#[derive(Debug)]
pub struct Windows {
    seq_len: usize,
    stride: usize,
    /// The tokens before a document.
    beginning: Beginning,
    /// The tokens of the current document that are still needed. Each token has a flag that says whether it is a target.
    ids: Vec<i32>,
    is_target: Vec<bool>,
    /// Number of tokens in `ids` that are already predicted, or that are never predicted.
    done: usize,
    /// Number of tokens at which a window is complete.
    whole: usize,
}

impl Windows {
    /// Creates the windows for a model whose sequences have `seq_len` tokens. Each window after the first predicts at most `stride` new
    /// tokens.
    ///
    /// # Errors
    /// Returns [`Error::Config`] with the key `stride` if the stride is 0 or longer than a sequence. The error has the key `data.seq_len`
    /// if a sequence is shorter than the tokens before a document.
    pub fn new(beginning: Beginning, seq_len: usize, stride: usize) -> Result<Self> {
        if stride == 0 || stride > seq_len {
            let why =
                format!("is {stride}, expected 1 to {seq_len}, the tokens of a sequence (data.seq_len)");
            return Err(Error::config("stride", why));
        }
        if beginning.len() > seq_len {
            let why = format!("is {seq_len}, and what stands before a text has {} tokens", beginning.len());
            return Err(Error::config("data.seq_len", why));
        }
        let (ids, is_target) = (Vec::new(), Vec::new());
        Ok(Self { seq_len, stride, beginning, ids, is_target, done: 0, whole: seq_len + 1 })
    }

    /// Adds a piece that begins or continues a document, and passes complete windows to `give`.
    ///
    /// # Errors
    /// The errors of `give`.
    pub(crate) fn add(&mut self, piece: &Encoded, give: &mut dyn FnMut(Request) -> Result<()>) -> Result<()> {
        if piece.begins {
            self.end(give)?;
        }
        if self.ids.is_empty() {
            let first: Vec<i32> = piece.ids.first().map(|id| *id as i32).into_iter().collect();
            self.ids = self.beginning.of_document(&first).to_vec();
            self.is_target = vec![false; self.ids.len()];
            self.done = self.ids.len().max(1);
        }
        let mut unlearnt = piece.unlearnt.iter().peekable();
        for (at, id) in piece.ids.iter().enumerate() {
            while unlearnt.next_if(|run| run.end <= at).is_some() {}
            self.ids.push(*id as i32);
            self.is_target.push(unlearnt.peek().is_none_or(|run| at < run.start));
            if self.ids.len() == self.whole {
                self.window(give)?;
            }
        }
        Ok(())
    }

    /// Ends the last document.
    ///
    /// # Errors
    /// The errors of `give`.
    pub(crate) fn end(&mut self, give: &mut dyn FnMut(Request) -> Result<()>) -> Result<()> {
        if self.ids.len() > self.done {
            self.window(give)?;
        }
        self.ids.clear();
        self.whole = self.seq_len + 1;
        Ok(())
    }

    /// Passes the unpredicted tokens to `give`, and keeps the tokens that the next window may need.
    fn window(&mut self, give: &mut dyn FnMut(Request) -> Result<()>) -> Result<()> {
        let len = self.ids.len();
        let from = len.saturating_sub(self.seq_len + 1);
        let targets = self.is_target[self.done..].chunk_by(|a, b| a == b);
        let mut at = self.done - from;
        let mut scored = Vec::new();
        for run in targets {
            if run[0] {
                scored.push(at..at + run.len());
            }
            at += run.len();
        }
        if !scored.is_empty() {
            give(Request { ids: self.ids[from..].to_vec(), scored })?;
        }
        let past = len.saturating_sub(self.seq_len);
        self.ids.drain(..past);
        self.is_target.drain(..past);
        self.done = self.ids.len();
        self.whole = self.done + self.stride;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::ops::Range;

    fn piece(ids: Range<u32>, unlearnt: &[Range<usize>], begins: bool) -> Encoded {
        Encoded { ids: ids.collect(), unlearnt: unlearnt.to_vec(), begins, ..Encoded::default() }
    }

    fn windows(seq_len: usize, stride: usize, pieces: &[Encoded]) -> Vec<Request> {
        let mut windows = Windows::new(Beginning::of(vec![10], false, None), seq_len, stride).unwrap();
        let mut all = Vec::new();
        let give = &mut |request| {
            all.push(request);
            Ok(())
        };
        pieces.iter().for_each(|piece| windows.add(piece, give).unwrap());
        windows.end(give).unwrap();
        all
    }

    /// The windows that `get_rolling_token_windows` of lm-evaluation-harness returns for ten tokens, four tokens at a time.
    #[test]
    fn a_stride_of_a_sequence_is_the_harness_s() {
        let all = windows(4, 4, &[piece(100..110, &[], true)]);
        let ids: Vec<&[i32]> = all.iter().map(|one| one.ids.as_slice()).collect();
        assert_eq!(ids, [&[10, 100, 101, 102, 103], &[103, 104, 105, 106, 107], &[105, 106, 107, 108, 109]]);
        let scored: Vec<_> = all.iter().map(|one| one.scored[0].clone()).collect();
        assert_eq!(scored, [1..5, 1..5, 3..5]);
    }

    /// Every target is predicted once, from as much of the preceding text as fits, for every stride and for every way of splitting
    /// documents into pieces.
    #[test]
    fn every_target_is_predicted_once() {
        for (seq_len, stride) in [(1, 1), (4, 1), (4, 3), (7, 7), (16, 5), (100, 9)] {
            let lengths = [1, 2, 3, 4, 5, 8, 9, 40];
            let mut pieces = Vec::new();
            let mut wanted = Vec::new();
            for (number, length) in lengths.into_iter().enumerate() {
                let first = 1000 * (number as u32 + 1);
                let cut = length / 2;
                // The tokens between a third and a half of the document are no targets.
                let unlearnt = cut * 2 / 3..cut;
                let all = std::slice::from_ref(&unlearnt);
                let all = if unlearnt.is_empty() { &[] } else { all };
                pieces.push(piece(first..first + cut as u32, all, true));
                pieces.push(piece(first + cut as u32..first + length as u32, &[], false));
                let targets = (0..length).filter(|at| !unlearnt.contains(at));
                wanted.extend(targets.map(|at| first as i32 + at as i32));
            }
            let all = windows(seq_len, stride, &pieces);
            let mut found = Vec::new();
            for Request { ids, scored } in &all {
                for at in scored.iter().flat_map(Clone::clone) {
                    let (id, at_all) = (ids[at], (ids[at] % 1000) as usize);
                    let before: Vec<i32> = ids[..at].to_vec();
                    let own = (id - at_all as i32..id).collect::<Vec<_>>();
                    let whole = [&[10][..], &own].concat();
                    assert!(whole.ends_with(&before), "{before:?} before {id}");
                    assert!(
                        before.len() >= whole.len().min(seq_len + 1 - stride),
                        "{} before {id}",
                        before.len()
                    );
                    found.push(id);
                }
                assert!(ids.len() <= seq_len + 1);
            }
            assert_eq!(found, wanted, "{seq_len} by {stride}");
        }
    }

    /// Ids and conversations may already begin with the token before a text. This token is then not added again. Before any other token,
    /// the token before a text is added.
    #[test]
    fn a_document_has_one_beginning() {
        for (is_control, wanted) in [(false, vec![10, 10, 11]), (true, vec![10, 11])] {
            for bytes in [None, Some(2)] {
                let mut all = Vec::new();
                let give = &mut |request: Request| {
                    all.push(request);
                    Ok(())
                };
                let mut windows = Windows::new(Beginning::of(vec![10], is_control, None), 8, 8).unwrap();
                windows.add(&Encoded { bytes, ..piece(10..12, &[], true) }, give).unwrap();
                windows.end(give).unwrap();
                assert_eq!(all, [Request::behind(1, wanted.clone())], "{is_control}, {bytes:?}");
            }
        }
    }

    #[test]
    fn a_stride_past_a_sequence_is_refused() {
        for stride in [0, 9] {
            let error =
                Windows::new(Beginning::of(vec![10], false, None), 8, stride).unwrap_err().to_string();
            assert!(error.contains(&format!("is {stride}, expected 1 to 8")), "{error}");
        }
    }
}
