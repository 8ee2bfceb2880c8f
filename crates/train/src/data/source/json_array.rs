//! A JSON array whose items are rows. The array is read item by item.

use std::io::BufRead;

use serde::de::IgnoredAny;

use super::json_row::{JsonRows, MARK, RowText, RowTexts};
use super::{Asked, DataFile, MOST_ROW_BYTES, Pieces, Source, damaged, too_long};
use crate::error::{Error, Result};

/// A file that consists of one array of objects.
pub(super) struct JsonArray;

impl Source for JsonArray {
    fn name(&self) -> &'static str {
        "JSON array"
    }

    fn is_of(&self, file: &DataFile) -> bool {
        let head = file.head.strip_prefix(MARK).unwrap_or(&file.head).trim_ascii_start();
        let Some(items) = head.strip_prefix(b"[") else { return false };
        if file.is_named(&[".json"]) {
            return true;
        }
        let mut stream = serde_json::Deserializer::from_slice(items).into_iter::<IgnoredAny>();
        items.trim_ascii_start().starts_with(b"{")
            && match stream.next() {
                Some(Ok(_)) => {
                    let behind = items[stream.byte_offset()..].trim_ascii_start().first();
                    behind.is_none_or(|byte| matches!(byte, b',' | b']'))
                }
                // The item continues beyond the bytes that were read.
                Some(Err(error)) => error.is_eof() && items.len() > 1024,
                None => false,
            }
    }

    fn open(&self, file: &DataFile, asked: &Asked) -> Result<Box<dyn Pieces>> {
        let items =
            Items { reader: file.reader()?, file: file.clone(), item: Vec::new(), number: 0, is_over: false };
        Ok(Box::new(JsonRows::begin(items, file, asked)))
    }
}

/// The items of an array.
struct Items {
    reader: Box<dyn BufRead + Send>,
    file: DataFile,
    item: Vec<u8>,
    /// Number of the last item that was read.
    number: u64,
    is_over: bool,
}

impl Items {
    /// Returns the next byte that is not white space, without consuming the byte; `None` at the end of the file.
    fn peek(&mut self) -> Result<Option<u8>> {
        loop {
            let buffer = self.reader.fill_buf().map_err(|e| self.file.broken(&e))?;
            let Some(first) = buffer.first() else { return Ok(None) };
            match buffer.iter().position(|byte| !byte.is_ascii_whitespace()) {
                Some(0) => return Ok(Some(*first)),
                Some(at) => self.reader.consume(at),
                None => {
                    let all = buffer.len();
                    self.reader.consume(all);
                }
            }
        }
    }

    /// Consumes the opening bracket of the array.
    fn begin(&mut self) -> Result<()> {
        let buffer = self.reader.fill_buf().map_err(|e| self.file.broken(&e))?;
        if buffer.starts_with(MARK) {
            self.reader.consume(MARK.len());
        }
        match self.peek()? {
            Some(b'[') => self.reader.consume(1),
            _ => return Err(damaged(&self.file.path, "is no JSON array: it does not begin with [")),
        }
        Ok(())
    }

    /// Whether there is another item. The reader is then at the beginning of this item.
    fn has_next(&mut self) -> Result<bool> {
        let broken = |items: &Self, why: &str| {
            Err(damaged(&items.file.path, format!("is damaged JSON: behind row {} {why}", items.number)))
        };
        match (self.peek()?, self.number) {
            (None, _) => return broken(self, "the array has no end"),
            (Some(b']'), _) => {
                self.reader.consume(1);
                return match self.peek()? {
                    None => Ok(false),
                    Some(_) => broken(self, "something stands after the array"),
                };
            }
            (Some(b','), 1..) => self.reader.consume(1),
            (Some(_), 1..) => return broken(self, "there is no comma"),
            (Some(_), 0) => return Ok(true),
        }
        match self.peek()? {
            Some(b']' | b',') => broken(self, "a comma is followed by no row"),
            _ => Ok(true),
        }
    }

    /// Reads an item to its end. An item that is too long is discarded and reported as an error.
    fn read_item(&mut self) -> Result<Result<(), String>> {
        let (mut depth, mut in_text, mut escaped) = (0u64, false, false);
        let (mut is_closed, mut is_long) = (false, false);
        self.item.clear();
        loop {
            let buffer = self.reader.fill_buf().map_err(|e| self.file.broken(&e))?;
            if buffer.is_empty() {
                let why = format!("is damaged JSON: row {} has no end", self.number);
                return Err(damaged(&self.file.path, why));
            }
            let end = buffer.iter().position(|byte| {
                match byte {
                    _ if escaped => escaped = false,
                    b'\\' if in_text => escaped = true,
                    b'"' => in_text = !in_text,
                    _ if in_text => {}
                    b'{' | b'[' => depth += 1,
                    b'}' | b']' if depth > 0 => {
                        depth -= 1;
                        is_closed = depth == 0;
                        return is_closed;
                    }
                    b',' | b']' | b'}' if depth == 0 => return true,
                    _ => {}
                }
                false
            });
            let count = end.map_or(buffer.len(), |at| at + usize::from(is_closed));
            is_long |= self.item.len() + count > MOST_ROW_BYTES;
            match is_long {
                true => self.item = Vec::new(),
                false => self.item.extend_from_slice(&buffer[..count]),
            }
            self.reader.consume(count);
            if end.is_some() {
                return Ok(if is_long { Err(too_long()) } else { Ok(()) });
            }
        }
    }
}

impl RowTexts for Items {
    fn unit(&self) -> &'static str {
        "row"
    }

    fn next(&mut self) -> Result<Option<RowText<'_>>> {
        if self.is_over {
            return Ok(None);
        }
        if self.number == 0 {
            self.begin()?;
        }
        if !self.has_next()? {
            self.is_over = true;
            return match self.number {
                0 => Err(Error::data(&self.file.path, "is empty: the array has no rows")),
                _ => Ok(None),
            };
        }
        self.number += 1;
        let read = self.read_item()?;
        Ok(Some((self.number, read.map(|()| self.item.trim_ascii()))))
    }
}
