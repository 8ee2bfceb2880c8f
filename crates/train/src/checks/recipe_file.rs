//! Reads recipes from files, and adds path and line to the errors.

use crate::config::read_text;
use crate::error::{Error, Result};
use nibble_core::{Error as CoreError, Recipe};
use std::path::Path;
use toml::Spanned;
use toml::de::{DeTable, DeValue};

/// Loads a recipe from a file. The recipe's name is the file's stem.
pub(super) fn load(path: &Path) -> Result<Recipe> {
    let text = read_text(path)?;
    let name = path.file_stem().map_or_else(|| path.to_string_lossy(), |stem| stem.to_string_lossy());
    Recipe::parse(&name, &text).map_err(|error| located(error.into(), path, &text))
}

/// Adds the line of the key to an error about a recipe, if the file contains the key.
pub(super) fn in_file(error: Error, path: &Path) -> Error {
    match read_text(path) {
        Ok(text) => located(error, path, &text),
        Err(_) => error,
    }
}

fn located(error: Error, path: &Path, text: &str) -> Error {
    let Error::Core(CoreError::Recipe { key, why, .. }) = error else { return error };
    let (key, why, at) = match DeTable::parse(text) {
        Err(syntax) => (String::new(), syntax.message().to_owned(), syntax.span().map(|span| span.start)),
        Ok(table) => {
            let path: Vec<&str> = key.split('.').collect();
            let at = deepest(table.get_ref(), &path).map(|(_, at)| at);
            (key, why, at)
        }
    };
    // Lines are counted from 1.
    let line = at.map(|at| text.bytes().take(at).filter(|byte| *byte == b'\n').count() + 1);
    Error::Config { key, file: Some(path.to_owned()), line, why, suggestion: None }
}

/// The longest prefix of a dotted key that exists in a table: the number of names in this prefix, and the position of its last name. Keys
/// that a recipe inherits from another recipe are not in the file.
fn deepest(table: &DeTable<'_>, path: &[&str]) -> Option<(usize, usize)> {
    let (first, rest) = path.split_first()?;
    // `override[2]` is the second item of the list `override`.
    let (name, which) = match first.strip_suffix(']').and_then(|first| first.split_once('[')) {
        Some((name, which)) => (name, which.parse::<usize>().ok()?.checked_sub(1)),
        None => (*first, None),
    };
    let (key, value) = table.iter().find(|(key, _)| key.get_ref().as_ref() == name)?;
    let here = (1, key.span().start);
    let below = |value: &Spanned<DeValue<'_>>| {
        let found = value.get_ref().as_table().and_then(|table| deepest(table, rest));
        found.map(|(names, at)| (names + 1, at))
    };
    let found = match (value.get_ref(), which) {
        (DeValue::Array(list), Some(which)) => {
            list.get(which).map(|one| below(one).unwrap_or((1, one.span().start)))
        }
        // Takes the first item among the items with the longest prefix.
        (DeValue::Array(list), None) => {
            list.iter().filter_map(below).reduce(|best, one| if one.0 > best.0 { one } else { best })
        }
        _ => below(value),
    };
    Some(found.unwrap_or(here))
}
