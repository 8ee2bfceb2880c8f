//! Tests that apply to every kind of file.

mod caches;
mod chats;
mod damage;
mod kinds;
mod mutations;

use std::path::{Path, PathBuf};

use super::Dataset;
use crate::config::DataConfig;
use crate::error::Result;

/// The name of a file, and the file's bytes.
pub(super) type Written = (&'static str, Vec<u8>);

/// A kind of file, and a writer for this kind.
pub(super) struct Kind {
    pub name: &'static str,
    /// Returns the written files. The test reads the first of the returned files.
    pub write: fn(&[String]) -> Vec<Written>,
    /// Whether the file format marks the boundaries of documents.
    pub has_documents: bool,
}

/// Writes files into a folder, and returns the path of the first file.
pub(super) fn put(dir: &Path, files: &[Written]) -> PathBuf {
    for (name, bytes) in files {
        std::fs::write(dir.join(name), bytes).unwrap();
    }
    dir.join(files[0].0)
}

pub(super) fn config(source: &Path, seq_len: usize) -> DataConfig {
    let cache_dir = source.parent().unwrap().join("caches").display().to_string();
    DataConfig { source: source.display().to_string(), cache_dir, seq_len, ..DataConfig::default() }
}

pub(super) fn open(source: &Path) -> Result<Dataset> {
    Dataset::open(&config(source, 32), 5)
}

/// Creates documents that all differ.
pub(super) fn documents(count: usize) -> Vec<String> {
    (0..count).map(|i| format!("document {i}: «{}»\n", "word ".repeat(i % 7))).collect()
}

/// Every token of a dataset's complete windows and tail, with training tokens first.
pub(super) fn whole_text(data: &Dataset) -> Vec<u8> {
    let super::TokenSource::Files(corpus) = &data.source else { panic!("not of files") };
    corpus.tokens_of(0).unwrap().into_iter().map(|id| u8::try_from(id).unwrap()).collect()
}
