//! All documents of some files, in order, as token ids: one thread reads, the others make ids, and whoever asked takes them.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::sync_channel;

use rayon::prelude::*;
use rayon::{ThreadPool, ThreadPoolBuilder};
use serde::{Deserialize, Serialize};

use super::encode::{Encoded, Encoder};
use super::source::{Asked, DataFile, Row, Source, kind_of};
use crate::config::{Config, OnError};
use crate::error::{Error, Result};
use crate::tokenizer::Framing;

/// Bytes and rows of a batch, about: what is held of a file at once, some times over.
const BATCH_BYTES: usize = 8 << 20;
const BATCH_ROWS: usize = 4096;

/// What is read, and how.
#[derive(Debug, Clone)]
pub(super) struct Reading {
    pub files: Vec<PathBuf>,
    /// The only one, where it comes through a pipe and is held in memory.
    pub piped: Option<DataFile>,
    pub asked: Asked,
    pub encoder: Encoder,
    pub on_error: OnError,
}

/// How far a reading has come: so many rows of this file, and all of those before.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub(super) struct ReadTo {
    pub file: usize,
    pub rows: u64,
}

/// A row that was left out.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct BadRow {
    /// The file.
    pub file: PathBuf,
    /// Where in it: `line 7`.
    pub place: String,
    /// What was wrong.
    pub why: String,
}

impl std::fmt::Display for BadRow {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}: {}: {}", self.file.display(), self.place, self.why)
    }
}

/// What of the rows of a source is not among its tokens.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct LeftOut {
    /// Rows that could not be read.
    pub rows: u64,
    /// The first of them.
    pub first: Vec<BadRow>,
    /// Documents without a token.
    pub empty: u64,
}

/// Rows that could not be read, of which it is remembered which they were.
const MOST_TOLD: usize = 20;

impl LeftOut {
    /// Counts rows that could not be read.
    pub(super) fn add(&mut self, bad: Vec<BadRow>) {
        self.rows += bad.len() as u64;
        let room = MOST_TOLD.saturating_sub(self.first.len());
        self.first.extend(bad.into_iter().take(room));
    }
}

/// Takes what is read.
pub(super) trait Sink {
    /// The ids of pieces that follow one another, the rows that had to be left out among them, and how far that is.
    ///
    /// # Errors
    /// What ends the reading.
    fn take(&mut self, encoded: Vec<Encoded>, bad: Vec<BadRow>, place: ReadTo) -> Result<()>;
}

/// Tells somebody how far long work has come.
pub trait Watch {
    /// So many bytes of files are read, of these. Returns whether to go on; what is made stays where it does not.
    fn read(&mut self, done: u64, of: u64) -> bool;

    /// Another process makes the same cache, and is waited for: told again and again. Returns whether to go on waiting.
    fn waits(&mut self) -> bool;

    /// A file of a cache is not as it was written, so that the cache is made anew.
    fn damaged(&mut self, file: &Path, why: &str);
}

/// Nobody watches.
impl Watch for () {
    fn read(&mut self, _: u64, _: u64) -> bool {
        true
    }

    fn waits(&mut self) -> bool {
        true
    }

    fn damaged(&mut self, _: &Path, _: &str) {}
}

/// Gives all that the files of a source hold, as the configuration reads its own, with nothing before and behind a document. Returns what is left
/// out of it.
///
/// # Errors
/// [`Error::Data`] for files that cannot be read, and for a bad row, unless such rows are left out; what `take` says.
pub(crate) fn read_source(
    config: &Config,
    source: &str,
    take: &mut dyn FnMut(Encoded) -> Result<()>,
    watch: &mut dyn Watch,
) -> Result<LeftOut> {
    // By the token that ends texts documents of token ids are told apart, so it is forgotten only then.
    let mut reading = Reading::of(source, &config.data, &Encoder::of(config, config.model.vocab_size)?)?;
    reading.encoder.framing = Framing::default();
    if let [path] = reading.files.as_slice() {
        let file = DataFile::open(path, &reading.asked, &Arc::default())?;
        reading.piped = file.is_piped().then_some(file);
    }
    let mut giving = Giving { take, left_out: LeftOut::default() };
    reading.read(ReadTo::default(), &mut giving, watch)?;
    Ok(giving.left_out)
}

/// Gives pieces one by one.
struct Giving<'a> {
    take: &'a mut dyn FnMut(Encoded) -> Result<()>,
    left_out: LeftOut,
}

impl Sink for Giving<'_> {
    fn take(&mut self, encoded: Vec<Encoded>, bad: Vec<BadRow>, _: ReadTo) -> Result<()> {
        encoded.into_iter().try_for_each(&mut *self.take)?;
        self.left_out.add(bad);
        Ok(())
    }
}

/// Rows that have been read and have no ids yet.
struct Batch {
    rows: Vec<Row>,
    file: usize,
    unit: &'static str,
    place: ReadTo,
    /// Bytes read of the file.
    read: u64,
}

impl Reading {
    /// Reads from a place on. Errors of the files leave nothing unsaid of what was taken before.
    ///
    /// # Errors
    /// [`Error::Data`] for files that cannot be read, and for the first bad row where these stop; what the sink says.
    pub fn read(&self, from: ReadTo, sink: &mut dyn Sink, watch: &mut dyn Watch) -> Result<()> {
        let sizes: Vec<u64> =
            self.files.iter().map(|file| std::fs::metadata(file).map_or(0, |about| about.len())).collect();
        let all = sizes.iter().sum();
        let pool = ThreadPoolBuilder::new().thread_name(|i| format!("nibble-data-{i}")).build();
        let pool = pool.map_err(|why| nibble_core::Error::not_started(std::io::Error::other(why)))?;
        std::thread::scope(|scope| {
            let (sender, batches) = sync_channel::<Result<Batch>>(1);
            let give = move || {
                let made = self.batches(from, &mut |batch| sender.send(Ok(batch)).is_ok());
                if let Err(error) = made {
                    // Nobody waits for it where the sink has ended the reading.
                    let _ = sender.send(Err(error));
                }
            };
            let reader = std::thread::Builder::new().name("nibble-data".into());
            reader.spawn_scoped(scope, give).map_err(nibble_core::Error::not_started)?;
            // Dropped at the first error, upon which the reader ends.
            for batch in batches {
                let batch = batch?;
                let number = batch.file;
                let before: u64 = sizes[..number].iter().sum();
                let (done, place) = (before + batch.read.min(sizes[number]), batch.place);
                let (encoded, bad) = self.encode(&pool, batch)?;
                sink.take(encoded, bad, place)?;
                if !watch.read(done, all) {
                    return Err(Error::data(
                        &self.files[number],
                        "was not read to its end: somebody stopped it",
                    ));
                }
            }
            Ok(())
        })
    }

    /// Gives the rows of all files, batch by batch, while they are taken.
    fn batches(&self, from: ReadTo, give: &mut dyn FnMut(Batch) -> bool) -> Result<()> {
        for (number, path) in self.files.iter().enumerate().skip(from.file) {
            let read = Arc::new(AtomicU64::new(0));
            let file = match &self.piped {
                Some(piped) => piped.clone(),
                None => DataFile::open(path, &self.asked, &read)?,
            };
            if file.head.is_empty() && self.on_error == OnError::Skip && self.files.len() > 1 {
                let rows = vec![Row { number: 0, holds: Err("is empty".into()) }];
                let place = ReadTo { file: number + 1, rows: 0 };
                if !give(Batch { rows, file: number, unit: "byte", place, read: 0 }) {
                    return Ok(());
                }
                continue;
            }
            let kind = kind_of(&file, &self.asked);
            self.require_width(kind, &file)?;
            let mut pieces = kind.open(&file, &self.asked)?;
            let mut count = 0;
            let skipped = if number == from.file { from.rows } else { 0 };
            let (mut rows, mut bytes) = (Vec::new(), 0);
            loop {
                let row = pieces.next()?;
                let is_last = row.is_none();
                if let Some(row) = row {
                    count += 1;
                    if count <= skipped {
                        continue;
                    }
                    bytes += row.holds.as_ref().map_or(0, super::source::Piece::bytes);
                    rows.push(row);
                }
                if is_last || bytes >= BATCH_BYTES || rows.len() >= BATCH_ROWS {
                    let place = match is_last {
                        true => ReadTo { file: number + 1, rows: 0 },
                        false => ReadTo { file: number, rows: count },
                    };
                    let (rows, read) = (std::mem::take(&mut rows), read.load(Ordering::Relaxed));
                    bytes = 0;
                    if !give(Batch { rows, file: number, unit: pieces.unit(), place, read }) {
                        return Ok(());
                    }
                }
                if is_last {
                    break;
                }
            }
        }
        Ok(())
    }

    /// Checks that the ids of a file of these can be all ids of the vocabulary: else another tokenizer has made them, or they are wider than they are read.
    ///
    /// # Errors
    /// [`Error::Data`] where they cannot.
    pub fn require_width(&self, kind: &dyn Source, file: &DataFile) -> Result<()> {
        let Some(bits) = kind.id_bits(file).filter(|bits| *bits < u32::BITS) else { return Ok(()) };
        let named = self.encoder.tokenizer.as_ref().filter(|tokenizer| tokenizer.has_text());
        let (key, vocabulary) = match named {
            Some(tokenizer) => ("data.tokenizer", tokenizer.vocab_size()),
            // A model may have rows to spare, and `nibble data` asks for no vocabulary.
            None if bits < 15 || self.encoder.vocab_size == i32::MAX as usize => return Ok(()),
            None => ("model.vocab_size", self.encoder.vocab_size),
        };
        if vocabulary <= 1 << bits {
            return Ok(());
        }
        let why = format!(
            "has ids of {bits} bits, and the vocabulary ({key}) has {vocabulary}, which is more than they can be: another tokenizer made them, or they are wider \
             than they are read; ids of 32 bits need llm.c's header or Megatron's index",
        );
        Err(Error::data(&file.path, why))
    }

    /// The ids of a batch, in order, and the rows that have none.
    fn encode(&self, pool: &ThreadPool, batch: Batch) -> Result<(Vec<Encoded>, Vec<BadRow>)> {
        let Batch { rows, file, unit, .. } = batch;
        let path = &self.files[file];
        let bad =
            |number: u64, why: String| BadRow { file: path.clone(), place: format!("{unit} {number}"), why };
        let encode = |row: Row| {
            let is_whole = row.holds.as_ref().map_or(true, |piece| piece.begins && piece.ends);
            let encoded = row.holds.and_then(|piece| self.encoder.encode(piece));
            (is_whole, encoded.map_err(|why| bad(row.number, why)))
        };
        let all: Vec<(bool, Result<Encoded, BadRow>)> =
            pool.install(|| rows.into_par_iter().map(encode).collect());
        let (mut encoded, mut left_out) = (Vec::with_capacity(all.len()), Vec::new());
        for (is_whole, one) in all {
            match one {
                Ok(one) => encoded.push(one),
                // Of a document of which a part is taken already nothing can be left out.
                Err(bad) if is_whole && self.on_error == OnError::Skip => left_out.push(bad),
                Err(bad) => {
                    let other = if is_whole { "; data.on_error=skip leaves such rows out" } else { "" };
                    return Err(Error::data(&bad.file, format!("{}: {}{other}", bad.place, bad.why)));
                }
            }
        }
        Ok((encoded, left_out))
    }
}
