//! JSON rows: objects with a key for the text, two keys for a prompt and its answer, or a key for a conversation.

use std::collections::VecDeque;
use std::fmt;

use serde::de::{Deserializer, IgnoredAny, MapAccess, Visitor};
use serde_json::Value;

use super::{Asked, Chat, Content, DataFile, Piece, Pieces, Row, no_such_key};
use crate::error::{Error, Result};
use crate::json_rows::{RowKey, no_json};

/// The byte order mark that some programs write at the beginning of UTF-8 text.
pub(super) const MARK: &[u8] = b"\xef\xbb\xbf";

/// The number of a row, and the row's text or the reason why the row cannot be read.
pub(super) type RowText<'a> = (u64, Result<&'a [u8], String>);

/// The texts of a file's rows, in order.
pub(super) trait RowTexts: Send {
    /// The unit in which rows are counted from 1: `line`.
    fn unit(&self) -> &'static str;

    /// The next row; `None` at the end of the file.
    ///
    /// # Errors
    /// [`Error::Data`] if the file is damaged and all following bytes are unreliable.
    fn next(&mut self) -> Result<Option<RowText<'_>>>;
}

/// The documents in the rows of a file.
pub(super) struct JsonRows<T> {
    texts: T,
    file: DataFile,
    asked: Asked,
    /// Remaining documents of the last row that was read.
    waiting: VecDeque<Row>,
}

impl<T: RowTexts> JsonRows<T> {
    /// Starts a file.
    pub fn begin(texts: T, file: &DataFile, asked: &Asked) -> Self {
        if let Some(chat) = &asked.chat {
            chat.begin_file();
        }
        Self { texts, file: file.clone(), asked: asked.clone(), waiting: VecDeque::new() }
    }
}

impl<T: RowTexts> Pieces for JsonRows<T> {
    fn unit(&self) -> &'static str {
        self.texts.unit()
    }

    fn next(&mut self) -> Result<Option<Row>> {
        if let Some(row) = self.waiting.pop_front() {
            return Ok(Some(row));
        }
        let Some((number, text)) = self.texts.next()? else { return Ok(None) };
        let documents = match text.and_then(|text| documents(text, &self.asked)) {
            Ok(documents) => documents,
            Err(why) => {
                if self.asked.chat.as_ref().is_some_and(Chat::is_spent) {
                    let unit = self.texts.unit();
                    return Err(Error::data(&self.file.path, format!("{unit} {number}: {why}")));
                }
                return Ok(Some(Row { number, holds: Err(why) }));
            }
        };
        self.waiting.extend(documents.into_iter().map(|piece| Row { number, holds: Ok(piece) }));
        Ok(self.waiting.pop_front())
    }
}

/// The documents of a row (at least one), or the reason why the row has none.
fn documents(row: &[u8], asked: &Asked) -> Result<Vec<Piece>, String> {
    if let Some(chat) = &asked.chat {
        return chat.documents(row);
    }
    document(row, asked).map(|piece| vec![piece])
}

/// The document of a row that is not a conversation.
fn document(row: &[u8], asked: &Asked) -> Result<Piece, String> {
    let keys = asked.keys();
    let mut found: Vec<Option<Value>> = keys.iter().map(|_| None).collect();
    let (mut others, mut twice, mut refused) = (Vec::new(), None, None);
    let mut json = serde_json::Deserializer::from_slice(row);
    let object = Object {
        keys: &keys,
        found: &mut found,
        others: &mut others,
        twice: &mut twice,
        refused: asked.pair.is_some().then_some(&mut refused),
    };
    let read = json.deserialize_map(object).and_then(|()| json.end());
    read.map_err(|error| match error.is_data() {
        true => format!("is {}, expected an object: a row is one", kind_of(row)),
        false => no_json(&error),
    })?;
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
    if let Some(why) = refused {
        return Err(why);
    }
    let mut parts = Vec::new();
    for ((key, is_target), value) in keys.iter().zip(found) {
        match value {
            Some(Value::String(text)) => parts.push((text.into_bytes(), *is_target)),
            Some(other) => {
                let kind = kind_of(other.to_string().as_bytes());
                return Err(format!("\"{key}\" is {kind}, expected a text"));
            }
            None => {}
        }
    }
    Ok(Piece::whole(Content::Text(parts)))
}

/// The type of a JSON value, according to the value's first byte.
fn kind_of(json: &[u8]) -> &'static str {
    match json.trim_ascii_start().first() {
        Some(b'{') => "an object",
        Some(b'[') => "a list",
        Some(b'"') => "a text",
        Some(b't' | b'f') => "true or false",
        Some(b'n') => "null",
        _ => "a number",
    }
}

/// Number of a row's keys that an error message lists.
const MOST_OTHERS: usize = 8;

/// Reads the requested keys of an object, and skips all other values without storing them.
struct Object<'a> {
    keys: &'a [(&'a str, bool)],
    found: &'a mut [Option<Value>],
    others: &'a mut Vec<String>,
    twice: &'a mut Option<String>,
    /// Why the row is refused: the row has a key that other trainers read and Nibble does not. `None` if such keys are not checked.
    refused: Option<&'a mut Option<String>>,
}

impl<'de> Visitor<'de> for Object<'_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object")
    }

    fn visit_map<A: MapAccess<'de>>(mut self, mut map: A) -> Result<(), A::Error> {
        while let Some(key) = map.next_key::<String>()? {
            match self.keys.iter().position(|(wanted, _)| *wanted == key) {
                Some(at) => {
                    if self.found[at].replace(map.next_value()?).is_some() {
                        *self.twice = Some(key);
                    }
                }
                None => {
                    match (&mut self.refused, RowKey::of_pair(&key)) {
                        (Some(refused), Some(known)) => {
                            let value = map.next_value::<Value>()?;
                            if refused.is_none() {
                                **refused = known.refuse_value(&value).err();
                            }
                        }
                        _ => drop(map.next_value::<IgnoredAny>()?),
                    }
                    if self.others.len() < MOST_OTHERS {
                        self.others.push(format!("\"{}\"", key.chars().take(40).collect::<String>()));
                    }
                }
            }
        }
        Ok(())
    }
}
