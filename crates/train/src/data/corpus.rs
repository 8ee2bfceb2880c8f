//! The tokens of one source or of a mixture, divided into sequences, with the held-out part.

use std::ops::Range;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use super::cache::{self, LeftOut};
use super::encode::Encoder;
use super::fingerprint::{remembering, sha256_of};
use super::mixture::{BLOCK, Mixture};
use super::reading::{Reading, Watch};
use super::region::Region;
use super::source::{Asked, Chat, DataFile, find, kind_of};
use super::stream::TokenStream;
use super::{Batch, NO_TARGET, WindowOrder};
use crate::config::DataConfig;
use crate::error::{Error, Result};
use crate::files::sha256_hex;

/// The sources of a run.
#[derive(Debug, Clone)]
pub(super) struct Corpus {
    sources: Vec<Tokens>,
    mixture: Mixture,
    seq_len: usize,
    vocab_size: usize,
    sha256: String,
}

/// Statistics of one data source in a run.
#[derive(Debug, Clone, PartialEq)]
pub struct Given {
    /// The name of the source, as written in the configuration.
    pub source: String,
    /// Number of documents, including held-out documents.
    pub documents: usize,
    /// Number of tokens, including held-out tokens.
    pub tokens: usize,
    /// Number of held-out tokens.
    pub held_out: usize,
    /// How many times the run reads the source's training tokens.
    pub epochs: f64,
    /// Rows that could not be read and were left out, and documents without tokens.
    pub left_out: LeftOut,
}

/// The tokens of a source, divided into windows.
#[derive(Debug, Clone)]
struct Tokens {
    name: String,
    stream: Arc<TokenStream>,
    /// Index of the first held-out token.
    split: usize,
    order: WindowOrder,
    left_out: Arc<LeftOut>,
}

impl Corpus {
    /// Opens the sources of the configuration.
    ///
    /// # Errors
    /// Returns [`Error::Data`] if files cannot be read or are too short, [`Error::Config`] if the weights give a source no sequence, and
    /// [`Error::Io`] if a token cache cannot be written.
    pub fn open(config: &DataConfig, seed: u64, encoder: &Encoder, watch: &mut dyn Watch) -> Result<Self> {
        let named = config.sources();
        let weights: Vec<f64> = named.iter().map(|one| one.weight).collect();
        let mixture = Mixture::new(&weights, seed);
        for (number, one) in named.iter().enumerate() {
            if mixture.share(number) == 0 {
                let why = format!(
                    "gives {} the weight {:?}, which is less than one sequence of {BLOCK}",
                    one.source, one.weight
                );
                return Err(Error::config("data.mixture", why));
            }
        }
        let open = |(number, source): (usize, &str)| {
            let (stream, left_out) = open_stream(source, config, encoder, watch)?;
            // Each source gets its own seed, so that sources with equal contents get different orders.
            let own_seed = seed.wrapping_add((number as u64) << 32);
            let split = stream.split(config.valid_fraction)?;
            require_long_enough(Path::new(source), &stream, split, config, encoder.unit())?;
            require_targets(Path::new(source), &stream, split, config, encoder.unit())?;
            Ok(Tokens {
                name: source.to_owned(),
                order: WindowOrder::new(split, config.seq_len, own_seed),
                stream: Arc::new(stream),
                split,
                left_out: Arc::new(left_out),
            })
        };
        let sources =
            named.iter().map(|one| one.source.as_str()).enumerate().map(open).collect::<Result<Vec<_>>>()?;
        let sha256 = match sources.as_slice() {
            [one] => one.stream.sha256().to_owned(),
            _ => {
                let shares = sources.iter().enumerate();
                let said =
                    shares.map(|(number, of)| format!("{} {}\n", mixture.share(number), of.stream.sha256()));
                sha256_hex(said.collect::<String>().as_bytes())
            }
        };
        let vocab_size = encoder.vocabulary();
        Ok(Self { sources, mixture, seq_len: config.seq_len, vocab_size, sha256 })
    }

    /// SHA-256 of the tokens. For a mixture, the hash covers the shares and the hashes of all sources.
    pub fn sha256(&self) -> &str {
        &self.sha256
    }

    /// Upper bound of token ids: every id is less than this number.
    pub fn vocab_size(&self) -> usize {
        self.vocab_size
    }

    /// All tokens of a source.
    #[cfg(test)]
    pub fn tokens_of(&self, source: usize) -> Result<Vec<i32>> {
        let stream = &self.sources[source].stream;
        stream.ids(0..stream.len())
    }

    /// Statistics of each source in a run with `sequences` training sequences.
    pub fn given(&self, sequences: u64) -> Vec<Given> {
        let of = |(number, one): (usize, &Tokens)| Given {
            source: one.name.clone(),
            documents: one.stream.documents(),
            tokens: one.stream.len(),
            held_out: one.stream.len() - one.split,
            epochs: self.mixture.sequences(number, sequences) as f64 / one.order.windows() as f64,
            left_out: LeftOut::clone(&one.left_out),
        };
        self.sources.iter().enumerate().map(of).collect()
    }

    /// Writes training sequence number `cursor` of the run into sequence `index` of a batch.
    ///
    /// # Errors
    /// Returns [`Error::Data`] if a file has changed since it was opened, or cannot be read. The other methods that read sequences return
    /// [`Error::Data`] in the same cases.
    pub fn train(&self, cursor: u64, batch: &mut Batch, index: usize) -> Result<()> {
        let (tokens, start) = self.window(cursor);
        tokens.fill(start..start + self.seq_len, batch, index)
    }

    /// The source of training sequence number `cursor`, and the index of the sequence's first token within that source.
    pub fn place(&self, cursor: u64) -> (&str, usize) {
        let (tokens, start) = self.window(cursor);
        (&tokens.name, start)
    }

    fn window(&self, cursor: u64) -> (&Tokens, usize) {
        let (source, own) = self.mixture.of(cursor);
        let tokens = &self.sources[source];
        (tokens, tokens.order.start(own))
    }

    /// Number of complete held-out sequences. Held-out sequences do not overlap. The held-out sequences of the first source have the first
    /// numbers, followed by those of the next source.
    pub fn valid_windows(&self) -> usize {
        self.sources.iter().map(|tokens| tokens.valid_windows(self.seq_len)).sum()
    }

    /// Writes held-out sequence number `window` into sequence `index` of a batch.
    pub fn valid(&self, mut window: usize, batch: &mut Batch, index: usize) -> Result<()> {
        for tokens in &self.sources {
            let own = tokens.valid_windows(self.seq_len);
            if window < own {
                let start = tokens.split + window * self.seq_len;
                return tokens.fill(start..start + self.seq_len, batch, index);
            }
            window -= own;
        }
        Ok(())
    }

    /// The held-out tokens after the last complete sequence. Only a single source has such a rest.
    fn rest(&self) -> Option<(&Tokens, Range<usize>)> {
        let [tokens] = self.sources.as_slice() else { return None };
        let start = tokens.split + tokens.valid_windows(self.seq_len) * self.seq_len;
        Some((tokens, start..tokens.stream.len() - 1)).filter(|(_, rest)| !rest.is_empty())
    }

    /// Length of the last held-out sequence, if this sequence is shorter than the others; `None` if there is no shorter sequence.
    pub fn valid_tail(&self) -> Option<usize> {
        Some(self.rest()?.1.len())
    }

    /// Writes the last held-out sequence, which is shorter than the others, into a batch.
    pub fn tail(&self, batch: &mut Batch) -> Result<()> {
        self.rest().map_or(Ok(()), |(tokens, rest)| tokens.fill(rest, batch, 0))
    }
}

/// Opens the tokens of a source. One plain text with bytes as tokens is read in place; all other sources are read from a cache.
fn open_stream(
    source: &str,
    config: &DataConfig,
    encoder: &Encoder,
    watch: &mut dyn Watch,
) -> Result<(TokenStream, LeftOut)> {
    let mut reading = Reading::of(source, config, encoder)?;
    if let [path] = reading.files.as_slice() {
        let file = DataFile::open(path, &reading.asked, &Arc::new(AtomicU64::new(0)))?;
        let kind = kind_of(&file, &reading.asked);
        if kind.is_its_bytes() && file.packing.is_none() && encoder.is_bytes() {
            // Refuses binary and empty files.
            kind.open(&file, &reading.asked)?;
            let (bytes, sha256) = match file.held() {
                None => {
                    let caches = cache::folder(&config.cache_dir).ok();
                    let (stamp, sha256) = sha256_of(path, remembering(caches.as_deref(), file.size))?;
                    (Region::open(path)?.known(&stamp, &sha256)?, sha256)
                }
                Some(held) => (Region::Held(held.clone()), sha256_hex(held)),
            };
            return Ok((TokenStream::of_bytes(bytes, sha256), LeftOut::default()));
        }
        reading.piped = file.is_piped().then_some(file);
    }
    cache::open(&reading, &cache::folder(&config.cache_dir)?, watch)
}

impl Reading {
    /// How to read a source with the configuration's settings.
    ///
    /// # Errors
    /// [`Error::Data`] if the source has no file.
    pub(super) fn of(source: &str, config: &DataConfig, encoder: &Encoder) -> Result<Self> {
        let pair =
            (!config.prompt_key.is_empty()).then(|| [config.prompt_key.clone(), config.answer_key.clone()]);
        let end = encoder.framing.eos.and_then(|id| u32::try_from(id).ok());
        let chat = Chat::of(config, encoder.tokenizer.as_ref())?;
        let asked = Asked { bytes: config.bytes, text_key: config.text_key.clone(), pair, chat, end };
        let (encoder, on_error) = (encoder.clone(), config.on_error);
        Ok(Self { files: find(source)?, piped: None, asked, encoder, on_error })
    }
}

impl Tokens {
    fn valid_windows(&self, seq_len: usize) -> usize {
        // The code subtracts one token because the last target needs one more token.
        (self.stream.len() - self.split - 1) / seq_len
    }

    /// Fills sequence `index` of a batch with these tokens. The next token after these tokens is the last target.
    fn fill(&self, inputs: Range<usize>, batch: &mut Batch, index: usize) -> Result<()> {
        let (first, end) = (inputs.start, inputs.end + 1);
        batch.set(index, self.stream.ids(first..end)?.into_iter());
        let targets = &mut batch.targets[index * batch.seq_len..(index + 1) * batch.seq_len];
        for run in self.stream.unlearnt(first + 1..end)? {
            targets[run.start - first - 1..run.end - first - 1].fill(NO_TARGET);
        }
        if !batch.starts.is_empty() {
            batch.separate(index, self.stream.begins(first + 1..end)?.into_iter().map(|begin| begin - first));
        }
        // The check comes after the read, so that any earlier write is detected.
        self.stream.require_unchanged()
    }
}

/// Checks that the training part and the held-out part have targets.
fn require_targets(
    path: &Path,
    stream: &TokenStream,
    split: usize,
    config: &DataConfig,
    unit: &str,
) -> Result<()> {
    let len = stream.len();
    // The first token of a part is never a target.
    for (part, tokens, what) in [("training", 1..split, "learn"), ("held-out", split + 1..len, "predict")] {
        if !stream.has_target(tokens.clone(), config.document_mask)? {
            let why = format!(
                "has nothing to {what}: none of the {} {unit} of its {part} part is a target; a prompt and what is around the answers of a \
                 conversation are none, nor is the first of a document under data.document_mask",
                tokens.len() + 1
            );
            return Err(Error::data(path, why));
        }
    }
    Ok(())
}

/// Checks that the training part and the held-out part are long enough for a sequence.
fn require_long_enough(
    path: &Path,
    stream: &TokenStream,
    split: usize,
    config: &DataConfig,
    unit: &str,
) -> Result<()> {
    let (needed, len, share) = (config.seq_len + 1, stream.len(), config.valid_fraction);
    let documents = match stream.documents() {
        0 | 1 => String::new(),
        count => format!(" in {count} documents, of which whole ones are held out"),
    };
    for (part, got, share) in [("training", split, 1.0 - share), ("held-out", len - split, share)] {
        if got < needed {
            let why = format!(
                "is too short: its {part} part ({:.0} % of {len} {unit}{documents}) has {got} {unit}, and one sequence \
                 (data.seq_len = {}) needs {needed}",
                100.0 * share,
                config.seq_len
            );
            return Err(Error::data(path, why));
        }
    }
    Ok(())
}
