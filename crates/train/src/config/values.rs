//! TOML values under dotted keys.

use crate::error::{Error, Result};
use serde::Serialize;
use std::collections::BTreeMap;
use toml::{Table, Value};

/// The dotted key of `name` in the table `prefix`.
pub(super) fn join(prefix: &str, name: &str) -> String {
    if prefix.is_empty() { name.to_owned() } else { format!("{prefix}.{name}") }
}

/// The value at a dotted key.
pub(super) fn lookup<'a>(value: &'a Value, key: &str) -> Option<&'a Value> {
    key.split('.').try_fold(value, |value, name| value.as_table()?.get(name))
}

/// Inserts `value` at a dotted key and creates missing tables.
pub(super) fn insert(table: &mut Table, key: &str, value: Value) {
    match key.split_once('.') {
        None => {
            table.insert(key.to_owned(), value);
        }
        Some((head, rest)) => {
            let child = table.entry(head).or_insert_with(|| Value::Table(Table::new()));
            if !child.is_table() {
                *child = Value::Table(Table::new());
            }
            if let Value::Table(child) = child {
                insert(child, rest, value);
            }
        }
    }
}

/// A value as TOML text. A number is written with the fewest possible digits.
pub(super) fn in_short(value: &Value) -> String {
    match value {
        Value::Float(number) => format!("{number:?}"),
        other => other.to_string(),
    }
}

/// Every serialized setting of `of`: its dotted key below `prefix`, and its value as TOML.
pub(super) fn settings(prefix: &str, of: &impl Serialize) -> Result<BTreeMap<String, String>> {
    let value = Value::try_from(of).map_err(|e| Error::config(prefix, e.to_string()))?;
    let mut settings = BTreeMap::new();
    flatten(prefix, &value, &mut settings);
    Ok(settings)
}

/// Adds every leaf below `value` to `into` under the leaf's dotted key.
fn flatten(prefix: &str, value: &Value, into: &mut BTreeMap<String, String>) {
    match value {
        Value::Table(table) => {
            for (name, value) in table {
                flatten(&join(prefix, name), value, into);
            }
        }
        leaf => {
            into.insert(prefix.to_owned(), in_short(leaf));
        }
    }
}
