//! Reads a table of a study file key by key; every error names the file and the full key.

use crate::error::{Error, Result, nearest};
use std::path::Path;
use toml::{Table, Value};

/// A table of the file, with its position.
pub(super) struct Keys<'a> {
    file: &'a Path,
    /// The prefix of the table's keys: empty, or for example `branch[0].`.
    before: String,
    table: &'a Table,
}

impl<'a> Keys<'a> {
    /// Reads the keys of this table; a key that is not in `known` is an error.
    pub fn of(file: &'a Path, before: String, table: &'a Table, known: &[&str]) -> Result<Self> {
        let keys = Self { file, before, table };
        match table.keys().find(|key| !known.contains(&key.as_str())) {
            None => Ok(keys),
            Some(key) => Err(Error::Study {
                file: file.to_owned(),
                key: format!("{}{key}", keys.before),
                why: format!("unknown key, expected one of {}", known.join(", ")),
                suggestion: nearest(key, known.iter().copied()),
            }),
        }
    }

    /// Creates an error about a key of this table.
    pub fn wrong(&self, key: &str, why: impl Into<String>) -> Error {
        Error::Study {
            file: self.file.to_owned(),
            key: format!("{}{key}", self.before),
            why: why.into(),
            suggestion: None,
        }
    }

    /// Creates an error about an unknown key of this table, and suggests a similar name.
    pub fn unknown<'n>(
        &self,
        key: &str,
        why: String,
        name: &str,
        known: impl IntoIterator<Item = &'n str>,
    ) -> Error {
        let suggestion = nearest(name, known).filter(|near| near != name);
        Error::Study { file: self.file.to_owned(), key: format!("{}{key}", self.before), why, suggestion }
    }

    fn kind(value: &Value) -> String {
        format!("{value} ({})", value.type_str())
    }

    fn missing(&self, key: &str) -> Error {
        self.wrong(key, "is missing")
    }

    pub fn text(&self, key: &str) -> Result<String> {
        match self.table.get(key).ok_or_else(|| self.missing(key))? {
            Value::String(text) if !text.trim().is_empty() => Ok(text.clone()),
            other => {
                Err(self.wrong(key, format!("is {}, expected a text that is not empty", Self::kind(other))))
            }
        }
    }

    /// Reads an integer from `least` to `most`; `None` if the key is absent.
    pub fn number(&self, key: &str, least: u64, most: u64) -> Result<Option<u64>> {
        let Some(value) = self.table.get(key) else { return Ok(None) };
        self.whole(key, value, least, most).map(Some)
    }

    fn whole(&self, key: &str, value: &Value, least: u64, most: u64) -> Result<u64> {
        let number = value.as_integer().and_then(|number| u64::try_from(number).ok());
        number.filter(|number| (least..=most).contains(number)).ok_or_else(|| {
            self.wrong(
                key,
                format!("is {}, expected a whole number from {least} to {most}", Self::kind(value)),
            )
        })
    }

    /// Reads a list of distinct texts; `None` if the key is absent.
    pub fn texts(&self, key: &str) -> Result<Option<Vec<String>>> {
        let Some(value) = self.table.get(key) else { return Ok(None) };
        let list = value.as_array();
        let list = list
            .ok_or_else(|| self.wrong(key, format!("is {}, expected a list of texts", Self::kind(value))))?;
        let mut texts: Vec<String> = Vec::new();
        for (i, value) in list.iter().enumerate() {
            let key = format!("{key}[{i}]");
            match value {
                Value::String(text) if !text.trim().is_empty() => {
                    if let Some(first) = texts.iter().position(|before| before == text) {
                        return Err(self.wrong(&key, format!("{text:?} is listed twice, first at [{first}]")));
                    }
                    texts.push(text.clone());
                }
                other => {
                    let why = format!("is {}, expected a text that is not empty", Self::kind(other));
                    return Err(self.wrong(&key, why));
                }
            }
        }
        Ok(Some(texts))
    }

    /// Reads a list of distinct texts; the key must be present and the list not empty.
    pub fn names(&self, key: &str) -> Result<Vec<String>> {
        let names = self.texts(key)?.ok_or_else(|| self.missing(key))?;
        if names.is_empty() {
            Err(self.wrong(key, "is empty, expected at least one name"))
        } else {
            Ok(names)
        }
    }

    /// Reads the seeds: either a list of distinct numbers, or a count n, which stands for the numbers from 1 to n.
    pub fn seeds(&self, key: &str) -> Result<Vec<u64>> {
        const MOST: u64 = 1000;
        // TOML has no larger integers.
        const LARGEST: u64 = i64::MAX as u64;
        let value = self.table.get(key).ok_or_else(|| self.missing(key))?;
        let Some(list) = value.as_array() else {
            return self.whole(key, value, 1, MOST).map(|number| (1..=number).collect());
        };
        if list.is_empty() || list.len() as u64 > MOST {
            return Err(self.wrong(key, format!("has {} seeds, expected 1 to {MOST}", list.len())));
        }
        let mut seeds = Vec::new();
        for (i, value) in list.iter().enumerate() {
            let seed = self.whole(&format!("{key}[{i}]"), value, 0, LARGEST)?;
            if seeds.contains(&seed) {
                return Err(self.wrong(&format!("{key}[{i}]"), format!("seed {seed} is listed twice")));
            }
            seeds.push(seed);
        }
        Ok(seeds)
    }

    /// Reads a table that may have these keys.
    pub fn table(&self, key: &str, known: &[&str]) -> Result<Keys<'a>> {
        match self.table.get(key).ok_or_else(|| self.missing(key))? {
            Value::Table(table) => Keys::of(self.file, format!("{}{key}.", self.before), table, known),
            other => Err(self.wrong(key, format!("is {}, expected a table", Self::kind(other)))),
        }
    }

    /// Reads a list of tables that may have these keys; the list is empty if the key is absent.
    pub fn tables(&self, key: &str, known: &[&str]) -> Result<Vec<Keys<'a>>> {
        let Some(value) = self.table.get(key) else { return Ok(Vec::new()) };
        let list =
            value.as_array().and_then(|list| list.iter().map(Value::as_table).collect::<Option<Vec<_>>>());
        let list = list
            .ok_or_else(|| self.wrong(key, format!("is {}, expected [[{key}]] tables", value.type_str())))?;
        let of = |(i, table)| Keys::of(self.file, format!("{}{key}[{i}].", self.before), table, known);
        list.into_iter().enumerate().map(of).collect()
    }
}
