//! The training data: where tokens come from, and which tokens a step gets.
//!
//! A batch is a pure function of (seed, global sample cursor). So a resumed run sees the same sequences. Any number of ranks also see the
//! same sequences, because each rank takes its part of the cursor's range.
//!
//! Files become batches in four stages. Each stage depends only on the previous stage.
//!
//! | stage | where | what |
//! |---|---|---|
//! | source | `source/` | recognizes the kind of a file, and reads the file's documents piece by piece |
//! | ids | `reading.rs`, `encode.rs` | one thread reads; all threads tokenize batches of rows, in order |
//! | stream | `cache/`, `stream.rs`, `region.rs` | contiguous ids in a file, beginnings of documents, and ids that are no targets |
//! | batches | `corpus.rs`, `mixture.rs`, `cursor.rs` | a cursor's source and window, by two permutations that are computed, not stored |
//!
//! * A row without ids is an error with the row's number, or is left out and counted. A new kind of file needs a file in `source/`, an
//!   entry of `KINDS`, and a writer in `tests/kinds.rs`, which the tests of all kinds use.
//! * A single plain text with bytes as tokens is read in place; all other sources are read through a token cache (`cache/`).
//! * Images with labels (`images.rs`) are read as a whole, and a batch has rows of a table of pixels in place of token ids.
//! * A dataset's SHA-256 is the hash of the dataset's tokens. So a text has the same hash whether it is plain, compressed, or one line of
//!   JSON.
//! * Memory is bounded by the batches in flight (8 MiB of rows each) and by the longest row (at most 64 MiB; a longer row is an error).
//!   Only data from a pipe is completely in memory.
//! * `loader.rs` prepares the batches of the next steps on a thread that uses no device. `survey.rs` (`nibble data`) runs the first two
//!   stages and counts tokens, without a cache.

mod cache;
mod corpus;
mod cursor;
mod encode;
mod fingerprint;
mod images;
mod loader;
mod mixture;
mod reading;
mod region;
mod sealed;
mod signature;
mod source;
mod stream;
mod survey;
pub(crate) mod synthetic;
#[cfg(test)]
mod tests;

use nibble_formats::philox::{Purpose, Stream, fnv1a32};

use corpus::Corpus;

pub(crate) use encode::Encoded;
pub(crate) use images::{ImageCounts, Images};
pub(crate) use reading::read_source;
pub(crate) use source::holds_ids;

pub use cache::LeftOut;
pub use corpus::Given;
pub use cursor::WindowOrder;
pub use loader::{BatchPlan, Loader, StepBatches};
pub use reading::{BadRow, Watch};
pub use survey::{Look, Survey, Surveyed};
pub use synthetic::{Entropy, Language, RECORD_TOKENS, SYNTHETIC_VOCAB, Split, render_symbol, symbol_of};

use crate::config::{Config, DataConfig};
use crate::error::{Error, Result};
use std::path::PathBuf;

pub use crate::tokenizer::BYTE_VOCAB;

/// The value in [`Batch::targets`] of a position that has no target.
pub const NO_TARGET: i32 = -1;

/// Sequences of tokens with their targets. The target of a token is the next token.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Batch {
    /// Token ids \[sequences, seq_len\].
    pub inputs: Vec<i32>,
    /// Token ids \[sequences, seq_len\]. `targets[s, t]` is the token that follows `inputs[s, t]`, or [`NO_TARGET`].
    pub targets: Vec<i32>,
    /// With `data.document_mask`: for each token, the index within its sequence at which the token's document begins, \[sequences,
    /// seq_len\]. Without `data.document_mask`, the list is empty.
    pub starts: Vec<i32>,
    /// Number of sequences.
    pub sequences: usize,
    /// Number of tokens of a sequence.
    pub seq_len: usize,
}

impl Batch {
    /// A batch of zeros. `apart` says whether documents are separated; each sequence is then one document.
    pub(crate) fn zeroed(sequences: usize, seq_len: usize, apart: bool) -> Self {
        let tokens = vec![0; sequences * seq_len];
        let starts = if apart { tokens.clone() } else { Vec::new() };
        Self { inputs: tokens.clone(), targets: tokens, starts, sequences, seq_len }
    }

    /// Number of positions that have a target.
    #[must_use]
    pub fn counted(&self) -> usize {
        self.targets.iter().filter(|target| **target >= 0).count()
    }

    /// A new batch of the sequences `first .. first + count`, for one rank or one shard. If the range exceeds the batch, the new batch
    /// contains only the existing sequences.
    #[must_use]
    pub fn part(&self, first: usize, count: usize) -> Self {
        let first = first.min(self.sequences);
        let count = count.min(self.sequences - first);
        let range = first * self.seq_len..(first + count) * self.seq_len;
        Self {
            inputs: self.inputs[range.clone()].to_vec(),
            targets: self.targets[range.clone()].to_vec(),
            starts: self.starts.get(range).unwrap_or_default().to_vec(),
            sequences: count,
            seq_len: self.seq_len,
        }
    }

    /// Separates the documents of sequence `index`. `begins` contains the ascending indices, all above 0, at which documents begin among
    /// the sequence's inputs and last target. A document's first token is not predicted from the preceding document.
    fn separate(&mut self, index: usize, begins: impl IntoIterator<Item = usize>) {
        let of_sequence = index * self.seq_len..(index + 1) * self.seq_len;
        let (targets, starts) = (&mut self.targets[of_sequence.clone()], &mut self.starts[of_sequence]);
        for begin in begins {
            targets[begin - 1] = NO_TARGET;
            starts[begin..].fill(begin as i32);
        }
    }

    /// Fills sequence `index` from `seq_len + 1` consecutive tokens.
    fn set(&mut self, index: usize, mut tokens: impl Iterator<Item = i32>) {
        let range = index * self.seq_len..(index + 1) * self.seq_len;
        let Some(mut previous) = tokens.next() else { return };
        let slots = self.inputs[range.clone()].iter_mut().zip(&mut self.targets[range]);
        for ((input, target), token) in slots.zip(tokens) {
            *input = previous;
            *target = token;
            previous = token;
        }
    }
}

/// The tokens of a run, for training and for evaluation. A training sequence is addressed by its number (cursor) in the run. Held-out
/// sequences are in the order of the data.
#[derive(Debug, Clone)]
pub struct Dataset {
    source: TokenSource,
    seq_len: usize,
    seed: u64,
    /// Whether documents are separated.
    apart: bool,
}

#[derive(Debug, Clone)]
enum TokenSource {
    Synthetic(Box<Language>),
    Files(Corpus),
    /// Images with labels.
    Images(Images),
    /// Uniform ids below this number, for speed measurements.
    Random {
        vocab_size: usize,
    },
}

/// Number of held-out records of the built-in language. The records have 131,072 tokens, enough to measure a loss to about ±0.005 nats.
const HELD_OUT_RECORDS: usize = 4096;

/// Seed of the held-out records. The seed is the same for every run, so that losses of runs with different seeds are comparable.
const HELD_OUT_SEED: u64 = 0;

/// Number of held-out random tokens.
const HELD_OUT_RANDOM: usize = 32_768;

impl Dataset {
    /// Opens the data that a run's configuration names.
    ///
    /// # Errors
    /// The errors of [`Dataset::watched`].
    pub fn of(config: &Config) -> Result<Self> {
        Self::watched(config, &mut ())
    }

    /// Opens the data of a run, and reports to `watch` the progress of any token cache that must be built.
    ///
    /// # Errors
    /// Returns the errors of [`Dataset::open`], and [`Error::Io`] if a token cache cannot be written.
    pub fn watched(config: &Config, watch: &mut dyn Watch) -> Result<Self> {
        if config.model.sees_images() {
            let source = TokenSource::Images(Images::open(config)?);
            return Ok(Self { source, seq_len: config.data.seq_len, seed: config.seed, apart: false });
        }
        if config.data.source == crate::config::RANDOM {
            let source = TokenSource::Random { vocab_size: config.model.vocab_size };
            let DataConfig { seq_len, document_mask: apart, .. } = config.data;
            return Ok(Self { source, seq_len, seed: config.seed, apart });
        }
        let encoder = encode::Encoder::of(config, config.model.vocab_size.max(1))?;
        Self::opened(&config.data, config.seed, encoder, watch)
    }

    /// Builds the token caches of a run's data before the run starts, and returns statistics of the data's sources. Returns no statistics
    /// if the data have no files, or come from a pipe, which can be read only once.
    ///
    /// # Errors
    /// The errors of [`Dataset::watched`].
    pub fn prepare(config: &Config, watch: &mut dyn Watch) -> Result<Vec<Given>> {
        let is_piped =
            |source: &str| std::fs::metadata(source).is_ok_and(|about| !about.is_file() && !about.is_dir());
        if !config.is_text() || config.data.sources().iter().any(|one| is_piped(&one.source)) {
            return Ok(Vec::new());
        }
        let sequences = config.train.steps.saturating_mul(config.sequences_per_step());
        Ok(Self::watched(config, watch)?.given(sequences))
    }

    /// Opens the built-in language, or the configuration's files. In files, each byte is a token. `seed` determines the order of the
    /// training sequences, and the training records of the built-in language. The held-out data do not depend on `seed`.
    ///
    /// # Errors
    /// Returns [`Error::Data`] for a file that is missing, empty, damaged, or too short for one training and one held-out sequence. Returns
    /// [`Error::Config`] for a `seq_len` that the built-in language does not support.
    pub fn open(config: &DataConfig, seed: u64) -> Result<Self> {
        Self::opened(config, seed, encode::Encoder::of_bytes(), &mut ())
    }

    fn opened(
        config: &DataConfig,
        seed: u64,
        encoder: encode::Encoder,
        watch: &mut dyn Watch,
    ) -> Result<Self> {
        let seq_len = config.seq_len;
        if seq_len == 0 {
            return Err(Error::config("data.seq_len", "is 0, expected at least 1"));
        }
        let source = if config.source == crate::config::SYNTHETIC && config.mixture.is_empty() {
            if !seq_len.is_multiple_of(RECORD_TOKENS) || seq_len > HELD_OUT_RECORDS * RECORD_TOKENS {
                let most = HELD_OUT_RECORDS * RECORD_TOKENS;
                let why = format!(
                    "is {seq_len}, expected a multiple of {RECORD_TOKENS}, the record of the built-in language, \
                     up to {most}"
                );
                return Err(Error::config("data.seq_len", why));
            }
            TokenSource::Synthetic(Box::default())
        } else {
            TokenSource::Files(Corpus::open(config, seed, &encoder, watch)?)
        };
        Ok(Self { source, seq_len, seed, apart: config.document_mask })
    }

    /// Statistics of each source in a run with `sequences` training sequences, in the order of the mixture. The list is empty for tokens
    /// that do not come from files.
    #[must_use]
    pub fn given(&self, sequences: u64) -> Vec<Given> {
        match &self.source {
            TokenSource::Files(corpus) => corpus.given(sequences),
            TokenSource::Synthetic(_) | TokenSource::Random { .. } | TokenSource::Images(_) => Vec::new(),
        }
    }

    /// SHA-256 of the tokens, or of a description (such as a seed) that determines the tokens.
    #[must_use]
    pub fn sha256(&self) -> String {
        match &self.source {
            TokenSource::Synthetic(_) => crate::files::sha256_hex(crate::config::SYNTHETIC.as_bytes()),
            TokenSource::Files(corpus) => corpus.sha256().to_owned(),
            TokenSource::Images(images) => images.sha256().to_owned(),
            TokenSource::Random { vocab_size } => {
                let name = format!("{} below {vocab_size}", crate::config::RANDOM);
                crate::files::sha256_hex(name.as_bytes())
            }
        }
    }

    /// Upper bound of token ids: every id is less than this number.
    #[must_use]
    pub fn vocab_size(&self) -> usize {
        match &self.source {
            TokenSource::Synthetic(_) => SYNTHETIC_VOCAB,
            TokenSource::Files(corpus) => corpus.vocab_size(),
            TokenSource::Images(images) => images.classes(),
            TokenSource::Random { vocab_size } => *vocab_size,
        }
    }

    /// The table of pixels that the ids of images are rows of, and its number of columns; `None` for tokens.
    pub(crate) fn pixels(&self) -> Option<(Vec<f32>, usize)> {
        match &self.source {
            TokenSource::Images(images) => Some(images.pixels()),
            TokenSource::Synthetic(_) | TokenSource::Files(_) | TokenSource::Random { .. } => None,
        }
    }

    /// Number of tokens of a sequence.
    #[must_use]
    pub fn seq_len(&self) -> usize {
        self.seq_len
    }

    /// The entropy rate and the unigram entropy of the data, which are known only for the built-in language.
    #[must_use]
    pub fn entropy(&self) -> Option<Entropy> {
        match &self.source {
            TokenSource::Synthetic(language) => Some(language.entropy()),
            TokenSource::Files(_) | TokenSource::Random { .. } | TokenSource::Images(_) => None,
        }
    }

    /// The training sequences `cursor .. cursor + sequences`. Sequences are counted from the start of the run over all ranks, micro-batches
    /// and epochs.
    ///
    /// # Errors
    /// Returns [`Error::Data`] if a file has changed since it was opened, or cannot be read.
    pub fn train_batch(&self, cursor: u64, sequences: usize) -> Result<Batch> {
        let mut batch = Batch::zeroed(sequences, self.seq_len, self.apart);
        for index in 0..sequences {
            let cursor = cursor + index as u64;
            match &self.source {
                TokenSource::Synthetic(language) => {
                    let tokens = language.sequence(self.seed, Split::Train, cursor, self.seq_len);
                    batch.set(index, tokens.into_iter());
                    self.separate_records(&mut batch, index);
                }
                TokenSource::Files(corpus) => corpus.train(cursor, &mut batch, index)?,
                TokenSource::Images(images) => images.train(self.seed, cursor, &mut batch, index),
                TokenSource::Random { vocab_size } => {
                    batch.set(index, random(self.seed, "data.train", *vocab_size, cursor, self.seq_len));
                }
            }
        }
        Ok(batch)
    }

    /// The source of a training sequence, and the index of the sequence's first token within that source. The source is `None` if the data
    /// do not come from text files. For a text without a tokenizer, token indices are byte indices. Random and synthetic sequences are
    /// numbered consecutively, and images in the order of their file.
    #[must_use]
    pub fn place(&self, cursor: u64) -> (Option<&str>, u64) {
        match &self.source {
            TokenSource::Files(corpus) => {
                let (source, token) = corpus.place(cursor);
                (Some(source), token as u64)
            }
            TokenSource::Images(images) => {
                (None, images.image(self.seed, cursor) as u64 * self.seq_len as u64)
            }
            TokenSource::Synthetic(_) | TokenSource::Random { .. } => (None, cursor * self.seq_len as u64),
        }
    }

    /// Separates the records of the built-in language. Each record is a document.
    fn separate_records(&self, batch: &mut Batch, index: usize) {
        if self.apart {
            batch.separate(index, (RECORD_TOKENS..=self.seq_len).step_by(RECORD_TOKENS));
        }
    }

    /// Number of complete held-out sequences. Held-out sequences do not overlap.
    #[must_use]
    pub fn valid_windows(&self) -> usize {
        match &self.source {
            TokenSource::Synthetic(_) => HELD_OUT_RECORDS * RECORD_TOKENS / self.seq_len,
            TokenSource::Files(corpus) => corpus.valid_windows(),
            TokenSource::Images(images) => images.held_out(),
            TokenSource::Random { .. } => HELD_OUT_RANDOM.div_ceil(self.seq_len),
        }
    }

    /// The held-out sequences `first .. first + sequences`. The batch has fewer sequences at the end of the held-out data.
    ///
    /// # Errors
    /// The errors of [`Dataset::train_batch`].
    pub fn valid_batch(&self, first: usize, sequences: usize) -> Result<Batch> {
        let sequences = sequences.min(self.valid_windows().saturating_sub(first));
        let mut batch = Batch::zeroed(sequences, self.seq_len, self.apart);
        for index in 0..sequences {
            let window = first + index;
            match &self.source {
                TokenSource::Synthetic(language) => {
                    let tokens = language.sequence(HELD_OUT_SEED, Split::Valid, window as u64, self.seq_len);
                    batch.set(index, tokens.into_iter());
                    self.separate_records(&mut batch, index);
                }
                TokenSource::Files(corpus) => corpus.valid(window, &mut batch, index)?,
                TokenSource::Images(images) => images.valid(window, &mut batch, index),
                TokenSource::Random { vocab_size } => {
                    let tokens =
                        random(HELD_OUT_SEED, "data.valid", *vocab_size, window as u64, self.seq_len);
                    batch.set(index, tokens);
                }
            }
        }
        Ok(batch)
    }

    /// The held-out tokens after the last complete sequence, as one shorter sequence. Together, this function and [`Dataset::valid_batch`]
    /// return every held-out token except the first as a target. Returns `None` if no tokens remain. For a mixture, also returns `None`,
    /// because each source would have its own remaining tokens.
    ///
    /// # Errors
    /// The errors of [`Dataset::train_batch`].
    pub fn valid_tail(&self) -> Result<Option<Batch>> {
        let TokenSource::Files(corpus) = &self.source else { return Ok(None) };
        let Some(length) = corpus.valid_tail() else { return Ok(None) };
        let mut batch = Batch::zeroed(1, length, self.apart);
        corpus.tail(&mut batch)?;
        Ok(Some(batch))
    }
}

/// The files that a path, a folder or a glob denotes, in the order in which they are read.
///
/// # Errors
/// Returns [`Error::Data`] if there are no files, or if a folder cannot be read.
pub fn files_of(source: &str) -> Result<Vec<PathBuf>> {
    source::find(source)
}

/// The random sequence of this number, with one token more than the sequence length.
fn random(
    seed: u64,
    split: &str,
    vocab_size: usize,
    index: u64,
    seq_len: usize,
) -> impl Iterator<Item = i32> {
    let draw = Stream::new(seed, Purpose::Data, fnv1a32(split), 1);
    let first = index * (seq_len as u64 + 1);
    // An id is the high word of a product, so ids are uniform to one part in 2³² / vocab_size.
    (first..=first + seq_len as u64)
        .map(move |e| ((u64::from(draw.u32_at(e)) * vocab_size as u64) >> 32) as i32)
}
