//! The contents of [`Windows`], computed by brute force over all pairs of a query and a key.

use nibble_core::ops::Windows;
use nibble_core::{Backend, Result};

/// What hides keys from queries in a test: documents, sliding windows and chunks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Hiding {
    /// Lengths of documents, repeated in order through all sequences. A document ends at the latest with its sequence. If the list is
    /// empty, each sequence is one document.
    pub documents: &'static [usize],
    /// The sliding window, with the meaning that [`FindWindows`](nibble_core::ops::FindWindows) defines.
    pub window: Option<usize>,
}

impl Hiding {
    /// Hides keys by documents, without a sliding window.
    pub const fn documents(documents: &'static [usize]) -> Self {
        Self { documents, window: None }
    }

    /// Hides keys by a sliding window, without documents.
    pub const fn window(window: usize) -> Self {
        Self { documents: &[], window: Some(window) }
    }

    /// For each token, the number of its document. The numbers of successive documents are not consecutive.
    pub fn numbers(&self, sequences: usize, seq_len: usize) -> Vec<i32> {
        let (mut numbers, mut number, mut left) = (Vec::new(), -7i32, 0);
        let mut lengths = self.documents.iter().cycle();
        for token in 0..sequences * seq_len {
            if left == 0 || token % seq_len == 0 {
                left = lengths.next().copied().unwrap_or(seq_len);
                number += 1 + number.rem_euclid(3);
            }
            left -= 1;
            numbers.push(number);
        }
        numbers
    }

    /// The values `first_key` and `end_query` of each token, as [`FindWindows`](nibble_core::ops::FindWindows) computes them.
    pub fn lists(&self, sequences: usize, seq_len: usize) -> [Vec<i32>; 2] {
        let (mut first_key, mut end_query) = (Vec::new(), Vec::new());
        for document in self.numbers(sequences, seq_len).chunks(seq_len) {
            let sees = |i: usize, j: usize| {
                j <= i && document[j] == document[i] && self.window.is_none_or(|most| i - j < most)
            };
            // Each token attends to itself.
            let first = |i: usize| (0..=i).find(|&j| sees(i, j)).unwrap_or(i);
            let last = |j: usize| (j..seq_len).rev().find(|&i| sees(i, j)).unwrap_or(j);
            first_key.extend((0..seq_len).map(|i| first(i) as i32));
            end_query.extend((0..seq_len).map(|j| last(j) as i32 + 1));
        }
        [first_key, end_query]
    }

    /// Uploads the lists of `first_key` and `end_query` to the device.
    ///
    /// # Errors
    /// Returns the error of the backend.
    pub fn upload<B: Backend>(&self, b: &B, sequences: usize, seq_len: usize) -> Result<Windows<B>> {
        let [first_key, end_query] = self.lists(sequences, seq_len);
        let most_keys = self.window.unwrap_or(seq_len).min(seq_len);
        Ok(Windows { first_key: b.upload(&first_key)?, end_query: b.upload(&end_query)?, most_keys })
    }
}
