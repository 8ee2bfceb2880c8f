//! Statistics of files without a cache: counts, lengths, sample documents, and every unreadable row.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use super::cache::LeftOut;
use super::encode::{Encoded, Encoder};
use super::reading::{BadRow, ReadTo, Reading, Sink, Watch};
use super::source::{DataFile, kind_of};
use crate::config::{Config, OnError};
use crate::error::Result;

/// A surveyed file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Surveyed {
    /// The file's path.
    pub path: PathBuf,
    /// The file's kind, for example `JSON lines, gzip`.
    pub kind: String,
    /// The file's size on the disk.
    pub bytes: u64,
}

/// Statistics of files.
#[derive(Debug, Clone, Default)]
pub struct Survey {
    /// The files, in the order in which they are read.
    pub files: Vec<Surveyed>,
    /// Number of non-empty documents.
    pub documents: u64,
    /// Number of tokens in all documents.
    pub tokens: u64,
    /// Number of tokens that are not training targets.
    pub unlearnt: u64,
    /// Whether some files contain token ids of a tokenizer that the configuration does not name.
    pub has_ids: bool,
    /// The largest token id.
    pub largest_id: u32,
    /// Length of the longest document in tokens.
    pub longest: u64,
    /// Histogram of document lengths, with one bin for each number of binary digits of the length. Bin 0 is always empty, bin 1 counts
    /// documents of length 1, and bin 2 counts documents of lengths 2 and 3.
    pub lengths: Vec<u64>,
    /// The first tokens of some sampled documents. Each sample also has the number of its document, counted from 1.
    pub samples: Vec<(u64, Vec<i32>)>,
    /// The rows that could not be read, and the documents without tokens.
    pub left_out: LeftOut,
}

/// Number of tokens of a sample document that are shown.
const SAMPLE_TOKENS: usize = 400;

/// Number of sample documents that are shown.
const SAMPLES: usize = 3;

/// Options of a survey.
#[derive(Debug, Clone, Copy)]
pub struct Look {
    /// Whether unreadable rows are only reported and left out, even if the configuration treats them as errors.
    pub checks: bool,
    /// Upper bound of token ids: every id is less than this number.
    pub vocab_size: usize,
}

impl Survey {
    /// Computes statistics of the files that the paths, folders and globs denote, with the data settings of the configuration. `tell` is
    /// called for every row that is left out, and `watch` receives the progress.
    ///
    /// # Errors
    /// Returns [`crate::Error::Data`] for files that cannot be read. Unless unreadable rows are left out, also returns
    /// [`crate::Error::Data`] for the first unreadable row.
    pub fn of(
        config: &Config,
        sources: &[String],
        look: Look,
        tell: &mut dyn FnMut(&BadRow),
        watch: &mut dyn Watch,
    ) -> Result<Self> {
        let encoder = Encoder::of(config, look.vocab_size)?;
        let mut counting = Counting { survey: Self::default(), length: 0, sample: None, tell };
        for source in sources {
            let mut reading = Reading::of(source, &config.data, &encoder)?;
            if look.checks {
                reading.on_error = OnError::Skip;
            }
            for path in &reading.files {
                let file = DataFile::open(path, &reading.asked, &Arc::new(AtomicU64::new(0)))?;
                let packing = file.packing.map(|packing| format!(", {}", packing.name())).unwrap_or_default();
                let kind = format!("{}{packing}", kind_of(&file, &reading.asked).name());
                counting.survey.files.push(Surveyed { path: path.clone(), kind, bytes: file.size });
                reading.piped = file.is_piped().then_some(file);
            }
            reading.read(ReadTo::default(), &mut counting, watch)?;
            counting.document_ends();
        }
        Ok(counting.survey)
    }
}

/// A sink that counts documents and tokens.
struct Counting<'a> {
    survey: Survey,
    /// Number of tokens of the current document.
    length: u64,
    /// The first tokens of the current document, if the document is a sample.
    sample: Option<Vec<i32>>,
    tell: &'a mut dyn FnMut(&BadRow),
}

impl Counting<'_> {
    /// Finishes the statistics of the current document.
    fn document_ends(&mut self) {
        let (length, survey) = (std::mem::take(&mut self.length), &mut self.survey);
        if length == 0 {
            return;
        }
        survey.longest = survey.longest.max(length);
        let digits = (u64::BITS - length.leading_zeros()) as usize;
        if survey.lengths.len() <= digits {
            survey.lengths.resize(digits + 1, 0);
        }
        survey.lengths[digits] += 1;
        if let Some(sample) = self.sample.take() {
            // Keeps the first sample and the most recent samples.
            if survey.samples.len() == SAMPLES {
                survey.samples.remove(1);
            }
            survey.samples.push((survey.documents, sample));
        }
    }
}

impl Sink for Counting<'_> {
    fn take(&mut self, encoded: Vec<Encoded>, bad: Vec<BadRow>, _: ReadTo) -> Result<()> {
        for piece in encoded {
            if piece.begins {
                self.document_ends();
            }
            if piece.ids.is_empty() {
                self.survey.left_out.empty += u64::from(piece.begins);
                continue;
            }
            if piece.begins {
                self.survey.documents += 1;
                self.sample = self.survey.documents.is_power_of_two().then(Vec::new);
            }
            self.survey.has_ids |= piece.bytes.is_none();
            self.length += piece.ids.len() as u64;
            self.survey.tokens += piece.ids.len() as u64;
            self.survey.unlearnt += piece.unlearnt.iter().map(|run| run.len() as u64).sum::<u64>();
            let largest = piece.ids.iter().copied().max().unwrap_or(0);
            self.survey.largest_id = self.survey.largest_id.max(largest);
            if let Some(sample) = &mut self.sample {
                let room = SAMPLE_TOKENS.saturating_sub(sample.len());
                sample.extend(piece.ids.iter().take(room).map(|id| *id as i32));
            }
        }
        bad.iter().for_each(&mut *self.tell);
        self.survey.left_out.add(bad);
        Ok(())
    }
}
