//! Files of data: which kinds there are, and the documents that each holds, one after the other.
//!
//! A kind is one file of this folder and one line of [`KINDS`]. Nothing is ever held whole: a kind gives pieces of bounded size.

mod chat;
mod files;
mod json_array;
mod json_lines;
mod json_row;
mod megatron;
mod packed;
mod parquet;
mod text;
mod token_file;

use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde::Serialize;

pub(super) use chat::Chat;
pub(super) use files::{DataFile, find};

use crate::config::USUAL_TEXT_KEY;
use crate::error::{Error, Result};

/// Kinds of files, the most particular first. The last one takes any file.
const KINDS: [&dyn Source; 6] = [
    &parquet::Parquet,
    &megatron::Megatron,
    &token_file::TokenFile,
    &json_lines::JsonLines,
    &json_array::JsonArray,
    &text::PlainText,
];

/// The text that is read as its bytes, whatever it begins with.
const BYTES: &dyn Source = &text::AnyBytes;

/// A kind of file.
pub(super) trait Source: Sync {
    /// What it is called: `JSON lines`.
    fn name(&self) -> &'static str;

    /// Whether a file is one, by what it holds, and where that says nothing by its name.
    fn is_of(&self, file: &DataFile) -> bool;

    /// Whether a file of this kind is one text, which is its bytes.
    fn is_its_bytes(&self) -> bool {
        false
    }

    /// Of a file of token ids, how many bits these have at most.
    fn id_bits(&self, _file: &DataFile) -> Option<u32> {
        None
    }

    /// The files beside it that belong to it.
    fn companions(&self, _path: &Path) -> Vec<PathBuf> {
        Vec::new()
    }

    /// Begins to read a file of this kind.
    ///
    /// # Errors
    /// [`Error::Data`] for one that is damaged, or holds nothing of what is asked for.
    fn open(&self, file: &DataFile, asked: &Asked) -> Result<Box<dyn Pieces>>;
}

/// What is asked of the files.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub(super) struct Asked {
    /// Whether files are taken as they are.
    pub bytes: bool,
    /// The key or column of texts.
    pub text_key: String,
    /// Those of prompts and answers, which are read instead.
    pub pair: Option<[String; 2]>,
    /// That of conversations, which are read instead of both, and how they are written.
    pub chat: Option<Chat>,
    /// The id that ends a document in files of ids.
    pub end: Option<u32>,
}

impl Asked {
    /// The keys that every row must have, each with whether its tokens are targets.
    fn keys(&self) -> Vec<(&str, bool)> {
        match &self.pair {
            None => vec![(&self.text_key, true)],
            Some([prompt, answer]) => vec![(prompt, false), (answer, true)],
        }
    }

    /// Refuses a file of what has no rows, if keys of rows are set: other tokens would be learnt than they say.
    ///
    /// # Errors
    /// [`Error::Data`] with the keys, and what has rows.
    fn require_no_keys(&self, file: &DataFile, what: &str) -> Result<()> {
        let set = match self {
            Self { chat: Some(_), .. } => "data.messages_key",
            Self { pair: Some(_), .. } => "data.prompt_key and data.answer_key",
            _ if self.text_key != USUAL_TEXT_KEY => "data.text_key",
            _ => return Ok(()),
        };
        let why =
            format!("is {what}, which has no rows, and {set} would say nothing of it. {}", to_rows(file));
        Err(Error::data(&file.path, why))
    }

    /// What to say of keys that are not there.
    fn setting(&self) -> &'static str {
        if self.pair.is_some() {
            "data.prompt_key and data.answer_key name others"
        } else {
            "data.text_key names another"
        }
    }
}

/// The pieces of a file, in order. After an error there are none.
pub(super) trait Pieces: Send {
    /// What its pieces are counted in, from 1: `line`.
    fn unit(&self) -> &'static str;

    /// The next one.
    ///
    /// # Errors
    /// [`Error::Data`] where the file is damaged, so that nothing behind that place can be trusted.
    fn next(&mut self) -> Result<Option<Row>>;
}

/// A row of a file.
#[derive(Debug)]
pub(super) struct Row {
    /// Its number, from 1, in the unit of the file; of a piece of a longer document, that of its first byte or token.
    pub number: u64,
    /// What it holds, or why it cannot be read. Others can.
    pub holds: Result<Piece, String>,
}

/// A document or a part of one.
#[derive(Debug)]
pub(super) struct Piece {
    /// Whether a document begins here.
    pub begins: bool,
    /// Whether a document ends here.
    pub ends: bool,
    pub content: Content,
}

/// What a piece consists of.
#[derive(Debug)]
pub(super) enum Content {
    /// Texts, one after the other, each with whether its tokens are targets.
    Text(Vec<(Vec<u8>, bool)>),
    /// The same of a conversation: it has its control tokens in it, and all that stands around a document.
    Chat(Vec<(String, bool)>),
    /// Token ids.
    Ids(Vec<u32>),
}

impl Piece {
    /// A document of its own.
    fn whole(content: Content) -> Self {
        Self { begins: true, ends: true, content }
    }

    /// Bytes that it takes.
    pub fn bytes(&self) -> usize {
        match &self.content {
            Content::Text(parts) => parts.iter().map(|(text, _)| text.len()).sum(),
            Content::Chat(parts) => parts.iter().map(|(text, _)| text.len()).sum(),
            Content::Ids(ids) => size_of_val(ids.as_slice()),
        }
    }
}

/// Bytes of a row, at most.
pub(in crate::data) const MOST_ROW_BYTES: usize = 64 << 20;

/// What is wrong with a longer one.
fn too_long() -> String {
    format!("is longer than {} MiB, which no row is", MOST_ROW_BYTES >> 20)
}

/// Bytes of a piece of a text, and of ids.
const PIECE_BYTES: usize = 4 << 20;

/// What a file is.
pub(super) fn kind_of(file: &DataFile, asked: &Asked) -> &'static dyn Source {
    if asked.bytes {
        return BYTES;
    }
    // The last one takes any.
    KINDS.into_iter().find(|kind| kind.is_of(file)).unwrap_or(&text::PlainText)
}

/// Whether a source holds token ids. Where its files are gone, or come through a pipe, their names tell.
pub(crate) fn holds_ids(source: &str) -> bool {
    let path = Path::new(source);
    let first = find(source).ok().and_then(|files| files.into_iter().next());
    let Some(first) = first.filter(|first| first.is_file()) else {
        return path.extension().is_some_and(|ending| ending.eq_ignore_ascii_case("bin"));
    };
    let asked = Asked::default();
    let opened = DataFile::open(&first, &asked, &Arc::default());
    opened.is_ok_and(|file| kind_of(&file, &asked).id_bits(&file).is_some())
}

/// What the kinds are called.
#[cfg(test)]
pub(super) fn kind_names() -> impl Iterator<Item = &'static str> {
    KINDS.iter().map(|kind| kind.name())
}

/// A row's text without an answer, or an answer without a prompt.
fn no_such_key(missing: &[&str], there: &str, asked: &Asked) -> String {
    let missing = missing.iter().map(|key| format!("\"{key}\"")).collect::<Vec<_>>().join(" and ");
    format!("has no {missing}, {there}; {}", asked.setting())
}

/// What has rows, and how a file gets them.
fn to_rows(file: &DataFile) -> String {
    let read = match () {
        () if file.is_named(&[".json"]) => "DataFrame(json.load(open(\"IN\"))[\"KEY\"])",
        () if file.is_named(&[".tsv"]) => "read_csv(\"IN\", sep=\"\\t\")",
        () => "read_csv(\"IN\")",
    };
    let what = if file.is_named(&[".json"]) { "a list under a key of an object" } else { "CSV" };
    let imported = if file.is_named(&[".json"]) { "json, pandas" } else { "pandas" };
    format!(
        "Rows are read of JSON lines, of a JSON array of objects and of Parquet; those of {what} become JSON lines by python3 -c 'import {imported}; \
         pandas.{read}.to_json(\"OUT.jsonl\", orient=\"records\", lines=True)'."
    )
}

/// Why a file of several pieces cannot go on.
fn damaged(path: &Path, why: impl std::fmt::Display) -> Error {
    Error::data(path, why.to_string())
}
