use crate::error::expect_eq;
use crate::{Agreement, Backend, Error, Result};

/// A mask in addition to the causal mask of [`Attention`](crate::ops::Attention), which limits each query to the keys of its document or of
/// a sliding window.
///
/// `first_key` and `end_query` have one number per token of a batch of sequences. The positions i and j count from the start of a sequence.
/// Query i attends to the keys from `first_key[i]` to i. The queries from j to `end_query[j]` - 1 attend to key j. `first_key` and
/// `end_query` must describe the same mask. The numbers of either list never decrease within a sequence, `first_key[i]` ≤ i, and
/// `end_query[j]` ≥ j + 1. [`FindWindows`] computes both lists.
///
/// Operations cannot check these numbers, which are on the device. Operations clamp a number that is out of range. Lists that are invalid
/// in another way give meaningless results that differ between backends.
#[derive(Debug, Clone)]
pub struct Windows<B: Backend> {
    /// The first key to which each query attends. `[t]`
    pub first_key: B::Buf<i32>,
    /// For each key, one past the last query that attends to the key. `[t]`
    pub end_query: B::Buf<i32>,
    /// An upper bound of the number of keys to which a query attends: the length of the sliding window, or the length of a sequence if
    /// there is no sliding window. Results do not depend on this bound. Backends use it only to count their work.
    pub most_keys: usize,
}

/// The mean number of keys to which a query attends under a causal mask, in sequences of `seq_len` tokens and with at most `most_keys` keys
/// per query. With w = `most_keys`, the mean is w - w² / (2 · `seq_len`). Without a window, the mean is half of `seq_len`. As is usual when
/// flops are counted, a query and the key at the same position count as half a pair.
pub fn mean_keys(seq_len: usize, most_keys: usize) -> f64 {
    let (seq_len, most) = (seq_len.max(1) as f64, most_keys.min(seq_len) as f64);
    most - most * most / (2.0 * seq_len)
}

impl<B: Backend> Windows<B> {
    /// Checks that both lists have `tokens` numbers.
    pub(in crate::ops) fn check(&self, op: &'static str, tokens: usize) -> Result<()> {
        expect_eq(op, "windows.first_key.len()", B::len(&self.first_key), tokens)?;
        expect_eq(op, "windows.end_query.len()", B::len(&self.end_query), tokens)
    }
}

/// Computes the [`Windows`] of documents that are packed one after the other into sequences.
///
/// A document consists of consecutive tokens of one sequence that have the same number in `document`. A query attends to the keys of its
/// own document up to its own position. With `window`, a query attends only to the last `window` of these keys, including the key at its
/// own position: query i attends to key j only if i - j < `window`. This is the sliding window of Mistral 7B.
#[derive(Debug)]
pub struct FindWindows<'a, B: Backend> {
    /// The document number of each token, which never decreases within a sequence. `[t]`
    pub document: &'a B::Buf<i32>,
    /// Tokens of a sequence.
    pub seq_len: usize,
    /// Maximum number of keys to which a query attends, at least 1; `None` means no limit.
    pub window: Option<usize>,
}

impl<B: Backend> FindWindows<'_, B> {
    /// How closely the results of two backends must agree.
    pub const AGREEMENT: Agreement = Agreement::Bitwise;

    /// Checks sizes.
    pub fn check(&self) -> Result<()> {
        const OP: &str = "find_windows";
        let tokens = B::len(self.document);
        if tokens >= 1 << 31 {
            return Err(Error::shape(OP, "document.len()", tokens, "below 2^31"));
        }
        if self.seq_len == 0 || !tokens.is_multiple_of(self.seq_len) {
            let expected = format!("a multiple of seq_len = {}", self.seq_len);
            return Err(Error::shape(OP, "document.len()", tokens, expected));
        }
        match self.window {
            Some(0) => Err(Error::shape(OP, "window", 0, "at least 1")),
            _ => Ok(()),
        }
    }

    /// The largest number of keys to which a query attends: `window`, or the length of a sequence if there is no window. Call `check`
    /// first.
    pub fn most_keys(&self) -> usize {
        self.window.unwrap_or(self.seq_len).min(self.seq_len)
    }

    /// Allocates the result. Call `check` first.
    pub fn result(&self, b: &B) -> Result<Windows<B>> {
        let tokens = B::len(self.document);
        Ok(Windows { first_key: b.alloc(tokens)?, end_query: b.alloc(tokens)?, most_keys: self.most_keys() })
    }
}
