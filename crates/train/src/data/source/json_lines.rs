//! JSON Lines: each line is a row.

use std::io::{self, BufRead, Read};

use serde::de::IgnoredAny;

use super::json_row::{JsonRows, MARK, RowText, RowTexts};
use super::{Asked, DataFile, MOST_ROW_BYTES, Pieces, Source, too_long};
use crate::error::{Error, Result};

/// A file whose lines are JSON objects.
pub(super) struct JsonLines;

impl Source for JsonLines {
    fn name(&self) -> &'static str {
        "JSON lines"
    }

    fn is_of(&self, file: &DataFile) -> bool {
        let head = file.head.strip_prefix(MARK).unwrap_or(&file.head);
        let first = head.split(|byte| *byte == b'\n').find(|line| !line.trim_ascii().is_empty());
        let Some(first) = first.filter(|line| line.trim_ascii_start().starts_with(b"{")) else {
            return !file.head.is_empty() && file.is_named(&[".jsonl", ".ndjson"]);
        };
        match serde_json::from_slice::<IgnoredAny>(first) {
            Ok(_) => true,
            // The row continues beyond the bytes that were read, or the file's name says that the file is JSON Lines.
            Err(error) => error.is_eof() && first.len() > 1024 || file.is_named(&[".jsonl", ".ndjson"]),
        }
    }

    fn open(&self, file: &DataFile, asked: &Asked) -> Result<Box<dyn Pieces>> {
        let lines = Lines { reader: file.reader()?, file: file.clone(), line: Vec::new(), number: 0 };
        Ok(Box::new(JsonRows::begin(lines, file, asked)))
    }
}

struct Lines {
    reader: Box<dyn BufRead + Send>,
    file: DataFile,
    line: Vec<u8>,
    number: u64,
}

impl Lines {
    /// Reads a line; `None` at the end of the file. A line that is too long is skipped and reported as an error.
    fn read_line(&mut self) -> io::Result<Option<Result<(), String>>> {
        self.line.clear();
        let most = MOST_ROW_BYTES as u64;
        (&mut self.reader).take(most + 1).read_until(b'\n', &mut self.line)?;
        if self.line.is_empty() {
            return Ok(None);
        }
        self.number += 1;
        if self.line.len() as u64 <= most || self.line.ends_with(b"\n") {
            return Ok(Some(Ok(())));
        }
        self.line = Vec::new();
        loop {
            let buffer = self.reader.fill_buf()?;
            let end = buffer.iter().position(|byte| *byte == b'\n');
            let (count, is_end) = (end.map_or(buffer.len(), |at| at + 1), end.is_some() || buffer.is_empty());
            self.reader.consume(count);
            if is_end {
                return Ok(Some(Err(too_long())));
            }
        }
    }
}

impl RowTexts for Lines {
    fn unit(&self) -> &'static str {
        "line"
    }

    fn next(&mut self) -> Result<Option<RowText<'_>>> {
        loop {
            let Some(read) = self.read_line().map_err(|e| self.file.broken(&e))? else {
                return match self.number {
                    0 => Err(Error::data(&self.file.path, "is empty")),
                    _ => Ok(None),
                };
            };
            let without_mark = self.line.strip_prefix(MARK).filter(|_| self.number == 1);
            let skipped = without_mark.map_or(0, |_| MARK.len());
            if read.is_ok() && self.line[skipped..].trim_ascii().is_empty() {
                continue;
            }
            return Ok(Some((self.number, read.map(|()| &self.line[skipped..]))));
        }
    }
}
