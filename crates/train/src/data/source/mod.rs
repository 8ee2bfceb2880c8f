//! The kinds of data files, and the documents in a file, which are read one after the other.
//!
//! A kind needs one file in this folder and one entry of [`KINDS`]. No file is completely in memory, because kinds return pieces of bounded
//! size.

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

/// Kinds of files, with the most specific kind first. The last kind accepts any file.
const KINDS: [&dyn Source; 6] = [
    &parquet::Parquet,
    &megatron::Megatron,
    &token_file::TokenFile,
    &json_lines::JsonLines,
    &json_array::JsonArray,
    &text::PlainText,
];

/// The kind that reads any file as plain bytes, even if the file begins like a binary format.
const BYTES: &dyn Source = &text::AnyBytes;

/// A kind of file.
pub(super) trait Source: Sync {
    /// The name of the kind: `JSON lines`.
    fn name(&self) -> &'static str;

    /// Whether a file is of this kind. The file's contents decide; if the contents are ambiguous, the file's name decides.
    fn is_of(&self, file: &DataFile) -> bool;

    /// Whether a file of this kind is one text, equal to the file's bytes.
    fn is_its_bytes(&self) -> bool {
        false
    }

    /// Number of bits of an id; `None` if files of this kind do not contain token ids.
    fn id_bits(&self, _file: &DataFile) -> Option<u32> {
        None
    }

    /// Other files that belong to the file at this path.
    fn companions(&self, _path: &Path) -> Vec<PathBuf> {
        Vec::new()
    }

    /// Starts reading a file of this kind.
    ///
    /// # Errors
    /// [`Error::Data`] for a file that is damaged, or that lacks a key or column in `asked`.
    fn open(&self, file: &DataFile, asked: &Asked) -> Result<Box<dyn Pieces>>;
}

/// Settings for reading files.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub(super) struct Asked {
    /// Whether files are read as plain bytes, whatever their format.
    pub bytes: bool,
    /// The key or column that contains the text of a document.
    pub text_key: String,
    /// The keys of prompt and answer. If the two keys are set, they replace `text_key`.
    pub pair: Option<[String; 2]>,
    /// The key and the chat template of conversations. If conversations are read, the key of conversations replaces `text_key` and `pair`.
    pub chat: Option<Chat>,
    /// The token id that ends a document in files of token ids.
    pub end: Option<u32>,
}

impl Asked {
    /// The keys that every row must have. Each key has a flag that says whether its tokens are targets.
    fn keys(&self) -> Vec<(&str, bool)> {
        match &self.pair {
            None => vec![(&self.text_key, true)],
            Some([prompt, answer]) => vec![(prompt, false), (answer, true)],
        }
    }

    /// Refuses a file without rows if keys of rows are set, because these keys would have no effect on the file.
    ///
    /// # Errors
    /// [`Error::Data`] with the keys, and with the formats that have rows.
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

    /// Advice about missing keys.
    fn setting(&self) -> &'static str {
        if self.pair.is_some() {
            "data.prompt_key and data.answer_key name others"
        } else {
            "data.text_key names another"
        }
    }
}

/// The pieces of a file, in order. There are no more pieces after an error.
pub(super) trait Pieces: Send {
    /// The unit in which pieces are counted from 1: `line`.
    fn unit(&self) -> &'static str;

    /// The next piece.
    ///
    /// # Errors
    /// [`Error::Data`] if the file is damaged and all following bytes are unreliable.
    fn next(&mut self) -> Result<Option<Row>>;
}

/// A row of a file.
#[derive(Debug)]
pub(super) struct Row {
    /// The row's number in the file, counted from 1 in the file format's unit, such as lines. For a piece of a longer document, `number` is
    /// the number of the piece's first byte or token.
    pub number: u64,
    /// The text or token ids of the row, or the reason why the row cannot be read. If a row cannot be read, later rows of the file can
    /// still be read.
    pub holds: Result<Piece, String>,
}

/// A document, or a contiguous part of a document.
#[derive(Debug)]
pub(super) struct Piece {
    /// Whether a document begins at the start of this piece.
    pub begins: bool,
    /// Whether a document ends at the end of this piece.
    pub ends: bool,
    pub content: Content,
}

/// The content of a piece.
#[derive(Debug)]
pub(super) enum Content {
    /// Consecutive texts. Each text has a flag that says whether its tokens are targets.
    Text(Vec<(Vec<u8>, bool)>),
    /// The texts of a rendered conversation. Each text has a flag that says whether its tokens are targets. The texts contain their control
    /// tokens and need no framing.
    Chat(Vec<(String, bool)>),
    /// The piece consists of token ids.
    Ids(Vec<u32>),
}

impl Piece {
    /// A piece that contains a whole document.
    fn whole(content: Content) -> Self {
        Self { begins: true, ends: true, content }
    }

    /// Size of the piece in bytes.
    pub fn bytes(&self) -> usize {
        match &self.content {
            Content::Text(parts) => parts.iter().map(|(text, _)| text.len()).sum(),
            Content::Chat(parts) => parts.iter().map(|(text, _)| text.len()).sum(),
            Content::Ids(ids) => size_of_val(ids.as_slice()),
        }
    }
}

/// Largest size of a row in bytes.
pub(in crate::data) const MOST_ROW_BYTES: usize = 64 << 20;

/// The error of a row that is longer than the limit.
fn too_long() -> String {
    format!("is longer than {} MiB, which no row is", MOST_ROW_BYTES >> 20)
}

/// Size of a piece of text or of ids, in bytes.
const PIECE_BYTES: usize = 4 << 20;

/// Determines the kind of a file.
pub(super) fn kind_of(file: &DataFile, asked: &Asked) -> &'static dyn Source {
    if asked.bytes {
        return BYTES;
    }
    // The last kind accepts any file.
    KINDS.into_iter().find(|kind| kind.is_of(file)).unwrap_or(&text::PlainText)
}

/// Whether a source consists of token ids. The names of the files decide if the files no longer exist, or come through a pipe.
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

/// The names of all kinds of files.
#[cfg(test)]
pub(super) fn kind_names() -> impl Iterator<Item = &'static str> {
    KINDS.iter().map(|kind| kind.name())
}

/// The error of a row that lacks the requested keys.
fn no_such_key(missing: &[&str], there: &str, asked: &Asked) -> String {
    let missing = missing.iter().map(|key| format!("\"{key}\"")).collect::<Vec<_>>().join(" and ");
    format!("has no {missing}, {there}; {}", asked.setting())
}

/// Advice on formats with rows and on conversion to these formats.
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

/// The error of a damaged file.
fn damaged(path: &Path, why: impl std::fmt::Display) -> Error {
    Error::data(path, why.to_string())
}
