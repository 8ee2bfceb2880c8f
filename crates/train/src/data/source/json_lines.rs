//! JSON lines: one object a line, of which a key holds the text, or two hold a prompt and its answer.

use std::fmt;
use std::io::{self, BufRead, Read};

use serde::de::{DeserializeSeed, Deserializer, IgnoredAny, MapAccess, SeqAccess, Visitor};

use super::{Asked, Content, DataFile, MOST_ROW_BYTES, Piece, Pieces, Row, Source, no_such_key};
use crate::error::{Error, Result};
use crate::json_rows::no_json;

/// A file whose lines are JSON objects.
pub(super) struct JsonLines;

/// The mark that some programs begin a text in UTF-8 with.
const MARK: &[u8] = b"\xef\xbb\xbf";

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
            // It goes on beyond what has been looked at; or the name says what is meant.
            Err(error) => error.is_eof() && first.len() > 1024 || file.is_named(&[".jsonl", ".ndjson"]),
        }
    }

    fn open(&self, file: &DataFile, asked: &Asked) -> Result<Box<dyn Pieces>> {
        let (reader, line) = (file.reader()?, Vec::new());
        if let Some(chat) = &asked.chat {
            chat.begin_file();
        }
        Ok(Box::new(Lines { reader, file: file.clone(), asked: asked.clone(), line, number: 0 }))
    }
}

struct Lines {
    reader: Box<dyn BufRead + Send>,
    file: DataFile,
    asked: Asked,
    line: Vec<u8>,
    number: u64,
}

impl Lines {
    /// Reads a line; false at the end. One that is too long is left out to its end, and told.
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
                return Ok(Some(Err(format!("is longer than {} MiB, which no row is", most >> 20))));
            }
        }
    }
}

impl Pieces for Lines {
    fn unit(&self) -> &'static str {
        "line"
    }

    fn next(&mut self) -> Result<Option<Row>> {
        loop {
            let Some(read) = self.read_line().map_err(|e| self.file.broken(&e))? else {
                return match self.number {
                    0 => Err(Error::data(&self.file.path, "is empty")),
                    _ => Ok(None),
                };
            };
            let line = self.line.strip_prefix(MARK).filter(|_| self.number == 1).unwrap_or(&self.line);
            if read.is_ok() && line.trim_ascii().is_empty() {
                continue;
            }
            let holds = read.and_then(|()| document(line, &self.asked));
            if let (Err(why), Some(chat)) = (&holds, &self.asked.chat)
                && chat.is_spent()
            {
                return Err(Error::data(&self.file.path, format!("line {}: {why}", self.number)));
            }
            return Ok(Some(Row { number: self.number, holds }));
        }
    }
}

/// The document of a line, or what is wrong with it.
pub(in crate::data) fn document(line: &[u8], asked: &Asked) -> Result<Piece, String> {
    if let Some(chat) = &asked.chat {
        return chat.document(line);
    }
    let keys = asked.keys();
    let mut found: Vec<Option<Value>> = keys.iter().map(|_| None).collect();
    let (mut others, mut twice) = (Vec::new(), None);
    let mut json = serde_json::Deserializer::from_slice(line);
    let object = Object { keys: &keys, found: &mut found, others: &mut others, twice: &mut twice };
    let read = object.deserialize(&mut json).and_then(|()| json.end());
    read.map_err(|error| said_of_row(&error))?;
    if let Some(key) = twice {
        return Err(format!("has \"{key}\" twice"));
    }
    let missing: Vec<&str> =
        keys.iter().zip(&found).filter(|(_, found)| found.is_none()).map(|((key, _), _)| *key).collect();
    if !missing.is_empty() {
        let there = match others.is_empty() {
            true => "and no other key".to_owned(),
            false => format!("but {}", others.join(", ")),
        };
        return Err(no_such_key(&missing, &there, asked));
    }
    let mut parts = Vec::new();
    for ((key, is_target), value) in keys.iter().zip(found) {
        match value {
            Some(Value::Text(text)) => parts.push((text.into_bytes(), *is_target)),
            Some(Value::Other(kind)) => return Err(format!("\"{key}\" is {kind}, expected a text")),
            None => {}
        }
    }
    Ok(Piece::whole(Content::Text(parts)))
}

/// What serde says, without the line, which is one of this row alone.
fn said_of_row(error: &serde_json::Error) -> String {
    match error.is_data() {
        true => error.to_string().split(" at line ").next().unwrap_or_default().to_owned(),
        false => no_json(error),
    }
}

/// What a key holds.
enum Value {
    Text(String),
    /// Something else, of this kind.
    Other(&'static str),
}

/// Keys of a row that a message lists.
const MOST_OTHERS: usize = 8;

/// Takes of an object what is asked for, and nothing else into memory.
struct Object<'a> {
    keys: &'a [(&'a str, bool)],
    found: &'a mut [Option<Value>],
    others: &'a mut Vec<String>,
    twice: &'a mut Option<String>,
}

impl<'de> DeserializeSeed<'de> for Object<'_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, json: D) -> Result<(), D::Error> {
        json.deserialize_any(self)
    }
}

/// The rest of a visitor that expects one kind of value: what others are called.
fn other<T, E: serde::de::Error>(kind: &str) -> Result<T, E> {
    Err(E::custom(format!("is {kind}, expected an object: a line of JSON lines is one")))
}

impl<'de> Visitor<'de> for Object<'_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        while let Some(key) = map.next_key::<String>()? {
            match self.keys.iter().position(|(wanted, _)| *wanted == key) {
                Some(at) => {
                    let value = map.next_value_seed(Held)?;
                    if self.found[at].replace(value).is_some() {
                        *self.twice = Some(key);
                    }
                }
                None => {
                    map.next_value::<IgnoredAny>()?;
                    if self.others.len() < MOST_OTHERS {
                        self.others.push(format!("\"{}\"", key.chars().take(40).collect::<String>()));
                    }
                }
            }
        }
        Ok(())
    }

    fn visit_seq<A: SeqAccess<'de>>(self, _: A) -> Result<(), A::Error> {
        other("a list")
    }

    fn visit_str<E: serde::de::Error>(self, _: &str) -> Result<(), E> {
        other("a text")
    }

    fn visit_bool<E: serde::de::Error>(self, _: bool) -> Result<(), E> {
        other("true or false")
    }

    fn visit_f64<E: serde::de::Error>(self, _: f64) -> Result<(), E> {
        other("a number")
    }

    fn visit_i64<E: serde::de::Error>(self, _: i64) -> Result<(), E> {
        other("a number")
    }

    fn visit_u64<E: serde::de::Error>(self, _: u64) -> Result<(), E> {
        other("a number")
    }

    fn visit_unit<E: serde::de::Error>(self) -> Result<(), E> {
        other("null")
    }
}

/// A text, or of which kind a value is.
struct Held;

impl<'de> DeserializeSeed<'de> for Held {
    type Value = Value;

    fn deserialize<D: Deserializer<'de>>(self, json: D) -> Result<Value, D::Error> {
        json.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Held {
    type Value = Value;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a value")
    }

    fn visit_str<E: serde::de::Error>(self, text: &str) -> Result<Value, E> {
        Ok(Value::Text(text.to_owned()))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Value, A::Error> {
        while map.next_entry::<IgnoredAny, IgnoredAny>()?.is_some() {}
        Ok(Value::Other("an object"))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Value, A::Error> {
        while list.next_element::<IgnoredAny>()?.is_some() {}
        Ok(Value::Other("a list"))
    }

    fn visit_bool<E: serde::de::Error>(self, _: bool) -> Result<Value, E> {
        Ok(Value::Other("true or false"))
    }

    fn visit_f64<E: serde::de::Error>(self, _: f64) -> Result<Value, E> {
        Ok(Value::Other("a number"))
    }

    fn visit_i64<E: serde::de::Error>(self, _: i64) -> Result<Value, E> {
        Ok(Value::Other("a number"))
    }

    fn visit_u64<E: serde::de::Error>(self, _: u64) -> Result<Value, E> {
        Ok(Value::Other("a number"))
    }

    fn visit_unit<E: serde::de::Error>(self) -> Result<Value, E> {
        Ok(Value::Other("null"))
    }
}
