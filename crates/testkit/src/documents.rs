//! The starts of documents that are packed into sequences.

use crate::input::stream;
use nibble_core::ops::Positions;
use nibble_core::{Backend, Result};

/// How the document boundaries lie in the sequences of a test.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Documents {
    /// One document per sequence.
    Whole,
    /// One document per token.
    Tokens,
    /// Documents of random lengths, four tokens on average.
    Random,
    /// Invalid starts, which are out of range or decrease.
    Wild,
}

impl Documents {
    /// All kinds of boundaries, and `None` for sequences without documents.
    pub const ALL: [Option<Self>; 5] =
        [None, Some(Self::Random), Some(Self::Tokens), Some(Self::Whole), Some(Self::Wild)];

    /// For each token, the position in its sequence at which its document starts.
    pub fn starts(self, sequences: usize, seq_len: usize) -> Vec<i32> {
        let (bits, mut start) = (stream("documents"), 0);
        let of = |token: usize| {
            let at = (token % seq_len) as i32;
            let bits = bits.u32_at(token as u64);
            if at == 0 || self == Self::Tokens || self == Self::Random && bits.is_multiple_of(4) {
                start = at;
            }
            match self {
                Self::Whole => 0,
                Self::Tokens | Self::Random => start,
                Self::Wild => [-1, i32::MIN, i32::MAX, at, at + 1, at / 2, 0][bits as usize % 7],
            }
        };
        (0..sequences * seq_len).map(of).collect()
    }

    /// The positions of rows within these documents; `first` is the position of the first row of each sequence.
    ///
    /// # Errors
    /// Returns the error of the backend.
    pub fn positions<B: Backend>(
        of: Option<Self>,
        b: &B,
        (sequences, seq_len): (usize, usize),
        first: usize,
    ) -> Result<Positions<B>> {
        let starts = of.map(|documents| b.upload(&documents.starts(sequences, seq_len))).transpose()?;
        Ok(Positions { seq_len, first, starts })
    }
}
