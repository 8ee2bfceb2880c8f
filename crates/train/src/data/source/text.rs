//! Plain text: one document, which is read piece by piece.

use std::io::{BufRead, Read};

use super::{Asked, Content, DataFile, PIECE_BYTES, Piece, Pieces, Row, Source, to_rows};
use crate::data::signature;
use crate::error::{Error, Result};

/// Text, unless the file begins like a binary format.
pub(super) struct PlainText;

/// Files with any contents, read as bytes.
pub(super) struct AnyBytes;

impl Source for PlainText {
    fn name(&self) -> &'static str {
        "text"
    }

    fn is_of(&self, _: &DataFile) -> bool {
        true
    }

    fn is_its_bytes(&self) -> bool {
        true
    }

    fn open(&self, file: &DataFile, asked: &Asked) -> Result<Box<dyn Pieces>> {
        if let Some(kind) = signature::kind_of(&file.head) {
            let why = format!("{kind}; if its bytes are what is to be learnt, set data.bytes=true");
            return Err(Error::data(&file.path, why));
        }
        asked.require_no_keys(file, "taken for plain text")?;
        if file.is_named(&[".csv", ".tsv", ".json"]) {
            let why = format!(
                "is neither JSON lines nor a JSON array, and its name says rows. {} If its bytes are what is to be learnt, set data.bytes=true",
                to_rows(file)
            );
            return Err(Error::data(&file.path, why));
        }
        AnyBytes.open(file, asked)
    }
}

impl Source for AnyBytes {
    fn name(&self) -> &'static str {
        "bytes"
    }

    fn is_of(&self, _: &DataFile) -> bool {
        true
    }

    fn is_its_bytes(&self) -> bool {
        true
    }

    fn open(&self, file: &DataFile, asked: &Asked) -> Result<Box<dyn Pieces>> {
        asked.require_no_keys(file, "taken as its bytes (data.bytes)")?;
        if file.head.is_empty() {
            return Err(Error::data(&file.path, "is empty"));
        }
        let (reader, file) = (file.reader()?, file.clone());
        Ok(Box::new(TextPieces { reader, file, rest: Vec::new(), given: 0 }))
    }
}

/// The pieces of a text.
struct TextPieces {
    reader: Box<dyn BufRead + Send>,
    file: DataFile,
    /// Bytes that have been read, but belong to the next piece.
    rest: Vec<u8>,
    /// Number of bytes of the earlier pieces.
    given: u64,
}

impl Pieces for TextPieces {
    fn unit(&self) -> &'static str {
        "byte"
    }

    fn next(&mut self) -> Result<Option<Row>> {
        let mut text = std::mem::take(&mut self.rest);
        let wanted = (PIECE_BYTES - text.len()) as u64;
        let read = (&mut self.reader).take(wanted).read_to_end(&mut text);
        read.map_err(|e| self.file.broken(&e))?;
        let is_last = self.reader.fill_buf().map_err(|e| self.file.broken(&e))?.is_empty();
        if text.is_empty() {
            return Ok(None);
        }
        if !is_last {
            self.rest = text.split_off(end_of_piece(&text));
        }
        let (number, begins) = (self.given + 1, self.given == 0);
        self.given += text.len() as u64;
        let content = Content::Text(vec![(text, true)]);
        Ok(Some(Row { number, holds: Ok(Piece { begins, ends: is_last, content }) }))
    }
}

/// Where to cut a text so that the tokens of the pieces are the tokens of the whole text: after the last single newline, because tokenizers
/// that split text into words always split there. Without such a newline, the cut is after white space, or between two characters.
fn end_of_piece(text: &[u8]) -> usize {
    let space = |at: usize| text.get(at).is_none_or(u8::is_ascii_whitespace);
    let alone = |at: &usize| {
        let at = *at;
        at > 1 && text[at - 1] == b'\n' && !space(at - 2) && at < text.len() && !space(at)
    };
    let within = text.len().saturating_sub(PIECE_BYTES / 2).max(1)..text.len();
    if let Some(end) = within.clone().rev().find(alone) {
        return end;
    }
    if let Some(end) = within.clone().rev().find(|at| space(*at - 1) && !space(*at)) {
        return end;
    }
    // The cut is not before a UTF-8 continuation byte, because such a byte does not begin a character.
    within.rev().find(|at| text[*at] & 0xc0 != 0x80).unwrap_or(text.len())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_text_is_cut_where_words_are_whole() {
        assert_eq!(end_of_piece(b"one\ntwo\nthree"), 8);
        assert_eq!(end_of_piece(b"one\n\ntwo three"), 9);
        assert_eq!(end_of_piece("äöü".as_bytes()), 4);
        assert_eq!(end_of_piece(&[0x80; 7]), 7);
    }
}
