//! Rows that are JSON: objects of which a key holds the text, two hold a prompt and its answer, or one holds a conversation.

use std::collections::VecDeque;
use std::fmt;

use serde::de::{DeserializeSeed, Deserializer, IgnoredAny, MapAccess, SeqAccess, Visitor};

use super::{Asked, Chat, Content, DataFile, Piece, Pieces, Row, no_such_key};
use crate::error::{Error, Result};
use crate::json_rows::{RowKey, no_json};

/// The mark that some programs begin a text in UTF-8 with.
pub(super) const MARK: &[u8] = b"\xef\xbb\xbf";

/// The number of a row, and its text, or why that cannot be read.
pub(super) type RowText<'a> = (u64, Result<&'a [u8], String>);

/// The texts of a file's rows, in order.
pub(super) trait RowTexts: Send {
    /// What rows are counted in, from 1: `line`.
    fn unit(&self) -> &'static str;

    /// The next one; none at the end.
    ///
    /// # Errors
    /// [`Error::Data`] where the file is damaged, so that nothing behind that place can be trusted.
    fn next(&mut self) -> Result<Option<RowText<'_>>>;
}

/// The documents of rows.
pub(super) struct JsonRows<T> {
    texts: T,
    file: DataFile,
    asked: Asked,
    /// Those of the row that was read last.
    waiting: VecDeque<Row>,
}

impl<T: RowTexts> JsonRows<T> {
    /// Begins a file.
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

/// The documents of a row, one at least, or what is wrong with it.
fn documents(row: &[u8], asked: &Asked) -> Result<Vec<Piece>, String> {
    if let Some(chat) = &asked.chat {
        return chat.documents(row);
    }
    document(row, asked).map(|piece| vec![piece])
}

/// The document of a row that is no conversation.
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
    if let Some(why) = refused {
        return Err(why);
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
    /// Why it is refused for a key that says something which is not read; none where such keys say nothing to anybody.
    refused: Option<&'a mut Option<String>>,
}

impl<'de> DeserializeSeed<'de> for Object<'_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, json: D) -> Result<(), D::Error> {
        json.deserialize_any(self)
    }
}

/// The rest of a visitor that expects one kind of value: what others are called.
fn other<T, E: serde::de::Error>(kind: &str) -> Result<T, E> {
    Err(E::custom(format!("is {kind}, expected an object: a row is one")))
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
                    let value = map.next_value_seed(Held)?;
                    if self.found[at].replace(value).is_some() {
                        *self.twice = Some(key);
                    }
                }
                None => {
                    match (&mut self.refused, RowKey::of_pair(&key)) {
                        (Some(refused), Some(known)) => {
                            let value = map.next_value::<serde_json::Value>()?;
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
