//! Reads all documents of a source's files, in order, as token ids. One thread reads, a pool of threads tokenizes, and the caller gets the
//! ids.

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

/// Approximate number of bytes and rows of a batch. A few batches are in memory at once.
const BATCH_BYTES: usize = 8 << 20;
const BATCH_ROWS: usize = 4096;

/// The files to read, and the settings with which they are read.
#[derive(Debug, Clone)]
pub(super) struct Reading {
    pub files: Vec<PathBuf>,
    /// The data of the source in memory, if the source is a pipe; otherwise `None`.
    pub piped: Option<DataFile>,
    pub asked: Asked,
    pub encoder: Encoder,
    pub on_error: OnError,
}

/// Progress of reading: all earlier files, and this many rows of this file, have been read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub(super) struct ReadTo {
    pub file: usize,
    pub rows: u64,
}

/// A row that could not be read and was left out.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct BadRow {
    /// The file that contains the row.
    pub file: PathBuf,
    /// The row's position in the file, for example `line 7`.
    pub place: String,
    /// Why the row was left out.
    pub why: String,
}

impl std::fmt::Display for BadRow {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}: {}: {}", self.file.display(), self.place, self.why)
    }
}

/// The rows of a source that could not be read, and the documents without tokens.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct LeftOut {
    /// Number of rows that could not be read.
    pub rows: u64,
    /// The first rows that could not be read, with the reasons.
    pub first: Vec<BadRow>,
    /// Number of documents without tokens.
    pub empty: u64,
}

/// Number of unreadable rows that are listed; further unreadable rows are only counted.
const MOST_TOLD: usize = 20;

impl LeftOut {
    /// Counts rows that could not be read.
    pub(super) fn add(&mut self, bad: Vec<BadRow>) {
        self.rows += bad.len() as u64;
        let room = MOST_TOLD.saturating_sub(self.first.len());
        self.first.extend(bad.into_iter().take(room));
    }
}

/// Receives token ids.
pub(super) trait Sink {
    /// Takes the ids of consecutive pieces, the rows that were left out between these pieces, and the progress after the last piece.
    ///
    /// # Errors
    /// An error ends the reading.
    fn take(&mut self, encoded: Vec<Encoded>, bad: Vec<BadRow>, place: ReadTo) -> Result<()>;
}

/// Receives the progress of a long operation.
pub trait Watch {
    /// Reports that `done` of `of` bytes of the files have been read. Returns whether to continue; if not, finished parts stay on disk.
    fn read(&mut self, done: u64, of: u64) -> bool;

    /// Called repeatedly while another process builds the same cache. Returns whether to continue waiting.
    fn waits(&mut self) -> bool;

    /// Reports that a file of a cache is damaged, so that the cache is rebuilt.
    fn damaged(&mut self, file: &Path, why: &str);
}

/// Ignores all reports.
impl Watch for () {
    fn read(&mut self, _: u64, _: u64) -> bool {
        true
    }

    fn waits(&mut self) -> bool {
        true
    }

    fn damaged(&mut self, _: &Path, _: &str) {}
}

/// Passes the token ids of all files of a source to `take`. The files are read with the configuration's settings, but without tokens around
/// documents. Returns the rows and documents that were left out.
///
/// # Errors
/// [`Error::Data`] for files that cannot be read, and for a bad row unless bad rows are left out; the errors of `take`.
pub(crate) fn read_source(
    config: &Config,
    source: &str,
    take: &mut dyn FnMut(Encoded) -> Result<()>,
    watch: &mut dyn Watch,
) -> Result<LeftOut> {
    // The framing determines `Asked::end`, which separates documents of token ids, so the framing is cleared only afterwards.
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

/// A sink that passes on pieces one by one.
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

/// Rows that have been read but not tokenized.
struct Batch {
    rows: Vec<Row>,
    file: usize,
    unit: &'static str,
    place: ReadTo,
    /// Number of bytes of the file that have been read so far.
    read: u64,
}

impl Reading {
    /// Reads the source from the position `from` on, and passes encoded pieces to `sink`. If a file has an error, the error is returned
    /// only after the sink has received all pieces before the error.
    ///
    /// # Errors
    /// Returns [`Error::Data`] for files that cannot be read, and for the first bad row if bad rows are errors. Also returns the errors of
    /// the sink.
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
                    // If the sink has ended the reading, no thread receives this error.
                    let _ = sender.send(Err(error));
                }
            };
            let reader = std::thread::Builder::new().name("nibble-data".into());
            reader.spawn_scoped(scope, give).map_err(nibble_core::Error::not_started)?;
            // The receiver is dropped at the first error, which ends the reader.
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

    /// Passes the rows of all files to `give`, batch by batch, until `give` returns false.
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

    /// Checks that the integer type of the file's token ids can represent every id of the vocabulary. If the integer type is too narrow,
    /// the ids belong to another tokenizer, or are read with a smaller width than they were written with.
    ///
    /// # Errors
    /// Returns [`Error::Data`] if the integer type is too narrow.
    pub fn require_width(&self, kind: &dyn Source, file: &DataFile) -> Result<()> {
        let Some(bits) = kind.id_bits(file).filter(|bits| *bits < u32::BITS) else { return Ok(()) };
        let named = self.encoder.tokenizer.as_ref().filter(|tokenizer| tokenizer.has_text());
        let (key, vocabulary) = match named {
            Some(tokenizer) => ("data.tokenizer", tokenizer.vocab_size()),
            // A model's embedding may have extra rows, and `nibble data` sets no vocabulary.
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

    /// The ids of a batch, in order, and the batch's bad rows.
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
                // A document cannot be left out after the sink has taken a part of it.
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
