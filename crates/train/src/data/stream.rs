//! The tokens of a source in order: their ids, the beginnings of documents, and the runs of non-target tokens.

use std::ops::Range;

use super::region::Region;
use crate::error::Result;

/// Densely packed tokens on disk.
#[derive(Debug)]
pub(super) struct TokenStream {
    ids: Region,
    /// Number of bytes per id: 1, 2 or 4.
    width: usize,
    /// The first token of each document, 64 bits each.
    documents: Region,
    /// First token and end of each run of non-target tokens, 64 bits each.
    unlearnt: Region,
    sha256: String,
}

/// Number of bytes per id for this vocabulary size.
pub(super) fn width_of(vocab_size: usize) -> usize {
    match vocab_size {
        0..=0x100 => 1,
        0x101..=0x1_0000 => 2,
        _ => 4,
    }
}

impl TokenStream {
    /// A stream of one document whose tokens are the bytes in `bytes`.
    pub fn of_bytes(bytes: Region, sha256: String) -> Self {
        let [documents, unlearnt] = [&[0; 8][..], &[]].map(|bytes| Region::Held(bytes.into()));
        Self { ids: bytes, width: 1, documents, unlearnt, sha256 }
    }

    /// Creates the token stream of a token cache from the parts of the cache.
    pub fn of_parts(ids: Region, width: usize, documents: Region, unlearnt: Region, sha256: String) -> Self {
        Self { ids, width, documents, unlearnt, sha256 }
    }

    /// SHA-256 of the tokens. If the stream is one document of bytes, the result is the SHA-256 of the bytes.
    pub fn sha256(&self) -> &str {
        &self.sha256
    }

    /// Number of tokens.
    pub fn len(&self) -> usize {
        self.ids.len() / self.width
    }

    /// Number of documents.
    pub fn documents(&self) -> usize {
        self.documents.len() / 8
    }

    /// The token ids at the positions `tokens`.
    ///
    /// # Errors
    /// Returns [`Error::Data`](crate::Error::Data) if the file cannot be read. All other methods of the stream that read from files return
    /// the same error.
    pub fn ids(&self, tokens: Range<usize>) -> Result<Vec<i32>> {
        let bytes = self.ids.read(tokens.start * self.width..tokens.end * self.width)?;
        let id = |id: &[u8]| match *id {
            [a] => i32::from(a),
            [a, b] => i32::from(u16::from_le_bytes([a, b])),
            [a, b, c, d] => i32::from_le_bytes([a, b, c, d]),
            // Other widths do not occur, because the width is 1, 2 or 4.
            _ => 0,
        };
        Ok(bytes.chunks_exact(self.width).map(id).collect())
    }

    /// The first token of a document. If another program writes to the file, the result may be any number.
    fn first(&self, document: usize) -> Result<usize> {
        Ok(self.documents.u64_at(8 * document)? as usize)
    }

    /// A run of non-target tokens.
    fn run(&self, number: usize) -> Result<Range<usize>> {
        Ok(self.unlearnt.u64_at(16 * number)? as usize..self.unlearnt.u64_at(16 * number + 8)? as usize)
    }

    /// Binary search for the first index at which `is_so` is true. `is_so` must also be true at all later indices.
    fn first_with(count: usize, is_so: impl Fn(usize) -> Result<bool>) -> Result<usize> {
        let (mut below, mut end) = (0, count);
        while below < end {
            let middle = below + (end - below) / 2;
            if is_so(middle)? {
                end = middle;
            } else {
                below = middle + 1;
            }
        }
        Ok(below)
    }

    /// The indices of the tokens within `tokens` at which documents begin.
    pub fn begins(&self, tokens: Range<usize>) -> Result<Vec<usize>> {
        let first = Self::first_with(self.documents(), |document| Ok(self.first(document)? >= tokens.start))?;
        let mut begins = Vec::new();
        for document in first..self.documents() {
            let at = self.first(document)?;
            if at >= tokens.end {
                break;
            }
            begins.extend(Some(at).filter(|at| *at >= tokens.start));
        }
        Ok(begins)
    }

    /// The ranges of tokens within `tokens` that are not training targets.
    pub fn unlearnt(&self, tokens: Range<usize>) -> Result<Vec<Range<usize>>> {
        let count = self.unlearnt.len() / 16;
        let first = Self::first_with(count, |number| Ok(self.run(number)?.end > tokens.start))?;
        let mut runs = Vec::new();
        for number in first..count {
            let run = self.run(number)?;
            if run.start >= tokens.end {
                break;
            }
            let within = run.start.max(tokens.start)..run.end.min(tokens.end);
            runs.extend(Some(within).filter(|run| !run.is_empty()));
        }
        Ok(runs)
    }

    /// Whether the range `tokens` contains a training target. If `apart` is set, documents are separated, so the first token of each
    /// document is not a target.
    pub fn has_target(&self, tokens: Range<usize>, apart: bool) -> Result<bool> {
        // Number of tokens per search step. The first step nearly always finds a target.
        const PART: usize = 1 << 16;
        for start in tokens.clone().step_by(PART) {
            let part = start..tokens.end.min(start + PART);
            let mut others = self.unlearnt(part.clone())?;
            if apart {
                others.extend(self.begins(part.clone())?.into_iter().map(|begin| begin..begin + 1));
                others.sort_unstable_by_key(|run| run.start);
            }
            let mut next = part.start;
            for run in others {
                if run.start > next {
                    return Ok(true);
                }
                next = next.max(run.end);
            }
            if next < part.end {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Index of the first token that is held out from training. If the stream is a single document, any token can be the first held-out
    /// token. If the stream has several documents, the first held-out token begins a document. With several documents, at most the fraction
    /// `valid_fraction` of the tokens is held out.
    pub fn split(&self, valid_fraction: f64) -> Result<usize> {
        let at = self.len() as f64 * (1.0 - valid_fraction);
        match self.documents() {
            0 | 1 => Ok((at as usize).min(self.len())),
            count => {
                let at = at.ceil() as usize;
                let document = Self::first_with(count, |document| Ok(self.first(document)? >= at))?;
                if document == count { Ok(self.len()) } else { Ok(self.first(document)?.min(self.len())) }
            }
        }
    }

    /// Checks that the files have not changed since the stream was opened.
    pub fn require_unchanged(&self) -> Result<()> {
        [&self.ids, &self.documents, &self.unlearnt].into_iter().try_for_each(Region::require_unchanged)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(numbers: &[u64]) -> Region {
        Region::Held(numbers.iter().flat_map(|n| n.to_le_bytes()).collect::<Vec<u8>>().into())
    }

    fn stream() -> TokenStream {
        let ids: Vec<u8> = (0..20u16).flat_map(|id| (1000 + id).to_le_bytes()).collect();
        TokenStream::of_parts(
            Region::Held(ids.into()),
            2,
            words(&[0, 5, 6, 15]),
            words(&[1, 3, 8, 12]),
            String::new(),
        )
    }

    #[test]
    fn tokens_documents_and_runs_are_found() {
        let stream = stream();
        assert_eq!((stream.len(), stream.documents()), (20, 4));
        assert_eq!(stream.ids(3..5).unwrap(), [1003, 1004]);
        assert_eq!(stream.begins(0..20).unwrap(), [0, 5, 6, 15]);
        assert_eq!(stream.begins(1..6).unwrap(), [5]);
        assert!(stream.begins(16..20).unwrap().is_empty());
        assert_eq!(stream.unlearnt(2..9).unwrap(), [2..3, 8..9]);
        assert!(stream.unlearnt(3..8).unwrap().is_empty());
        assert!(stream.unlearnt(12..20).unwrap().is_empty());
    }

    /// Compares `has_target` with a search that reads token by token.
    #[test]
    fn a_target_is_found_where_there_is_one() {
        let stream = stream();
        for (start, end) in (0..20).flat_map(|start| (start..=20).map(move |end| (start, end))) {
            for apart in [false, true] {
                let is_target = |at: usize| {
                    !((1..3).contains(&at) || (8..12).contains(&at) || apart && [0, 5, 6, 15].contains(&at))
                };
                let wanted = (start..end).any(is_target);
                assert_eq!(stream.has_target(start..end, apart).unwrap(), wanted, "{start}..{end}, {apart}");
            }
        }
        // The target is beyond the tokens of the first search step.
        let of = |runs: &[u64]| {
            TokenStream::of_parts(
                Region::Held(vec![0; 1 << 17].into()),
                1,
                words(&[0]),
                words(runs),
                String::new(),
            )
        };
        assert!(!of(&[0, 1 << 17]).has_target(1..1 << 17, false).unwrap());
        assert!(of(&[0, (1 << 17) - 1]).has_target(1..1 << 17, false).unwrap());
    }

    #[test]
    fn whole_documents_are_held_out() {
        let stream = stream();
        assert_eq!([0.1, 0.25, 0.3, 0.72].map(|share| stream.split(share).unwrap()), [20, 15, 15, 6]);
        let one = TokenStream::of_bytes(Region::Held(vec![7; 10].into()), String::new());
        assert_eq!((one.split(0.1).unwrap(), one.documents()), (9, 1));
    }
}
