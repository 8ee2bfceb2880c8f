//! Tensors split into files by size, in the layout of Hugging Face tools.

use super::files::TensorSpec;
use crate::error::{Error, Result};
use crate::files::{MOST_TEXT, read_text};
use nibble_core::shortened;
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Component, Path, PathBuf};

/// The extension of a tensor file.
const SUFFIX: &str = ".safetensors";

/// Groups tensors in order into files of at most `most_bytes` bytes of values (0: one file). A tensor that exceeds this limit has a file of
/// its own.
pub(crate) fn divided<T>(tensors: &[T], spec: impl Fn(&T) -> &TensorSpec, most_bytes: usize) -> Vec<&[T]> {
    let most = if most_bytes == 0 { usize::MAX } else { most_bytes };
    let bytes = |tensor| spec(tensor).num_bytes();
    let (mut files, mut first, mut held) = (Vec::new(), 0, 0usize);
    for (i, tensor) in tensors.iter().enumerate() {
        if i > first && held.saturating_add(bytes(tensor)) > most {
            files.push(&tensors[first..i]);
            (first, held) = (i, 0);
        }
        held = held.saturating_add(bytes(tensor));
    }
    files.push(&tensors[first..]);
    files
}

/// The name of file number `number` (from 0) of `files` files: `model.safetensors`, or `model-00002-of-00005.safetensors`.
pub(crate) fn name_of(kind: &str, number: usize, files: usize) -> String {
    match files {
        1 => format!("{kind}{SUFFIX}"),
        _ => format!("{kind}-{:05}-of-{files:05}{SUFFIX}", number + 1),
    }
}

/// Whether this is the name of a tensor file of this kind.
pub(crate) fn is_of_kind(name: &str, kind: &str) -> bool {
    let between = name.strip_prefix(kind).and_then(|name| name.strip_suffix(SUFFIX));
    between.is_some_and(|between| between.is_empty() || between.starts_with('-'))
}

/// The name of the index of the files of this kind.
pub(crate) fn index_name(kind: &str) -> String {
    format!("{kind}{SUFFIX}.index.json")
}

/// An index: the file of each tensor. All files are in the index's folder.
#[derive(Debug)]
pub(crate) struct Index {
    path: PathBuf,
    files: BTreeMap<String, String>,
}

impl Index {
    /// Reads an index.
    ///
    /// # Errors
    /// Returns [`Error::Io`] if the file cannot be read, and [`Error::Checkpoint`] if the index is invalid or names a file in another
    /// folder.
    pub fn open(path: &Path) -> Result<Self> {
        let wrong = |why: String| Error::checkpoint(path, why);
        let text = read_text(path, MOST_TEXT).map_err(Error::io(path))?;
        let index: Value = serde_json::from_str(&text).map_err(|e| wrong(format!("is no JSON: {e}")))?;
        let map = index.get("weight_map").and_then(Value::as_object);
        let map = map.ok_or_else(|| wrong("has no weight_map, which says what is where".into()))?;
        let mut files = BTreeMap::new();
        for (tensor, name) in map {
            let (tensor_name, is) = (shortened(tensor), name.to_string());
            let Some(name) = name.as_str() else {
                let is = shortened(&is);
                return Err(wrong(format!(
                    "says that `{tensor_name}` is in {is}, expected the name of a file"
                )));
            };
            // Only files in the index's folder are accepted, because an index is untrusted input.
            let mut parts = Path::new(name).components();
            if !matches!((parts.next(), parts.next()), (Some(Component::Normal(_)), None)) {
                return Err(wrong(format!("names `{}`, which is no file beside it", shortened(name))));
            }
            files.insert(tensor.clone(), name.to_owned());
        }
        if files.is_empty() {
            return Err(wrong("names no file".into()));
        }
        Ok(Self { path: path.to_owned(), files })
    }

    /// The distinct files that the index names.
    pub fn files(&self) -> BTreeSet<&str> {
        self.files.values().map(String::as_str).collect()
    }

    /// Checks that the files have exactly the tensors of the index. `has` yields the name of each tensor in the files, together with the
    /// path of the tensor's file.
    ///
    /// # Errors
    /// Returns [`Error::Checkpoint`], which names the first tensor for which files and index differ.
    pub fn check<'a>(&self, has: impl Iterator<Item = (&'a str, &'a Path)>) -> Result<()> {
        let has: BTreeMap<&str, &Path> = has.collect();
        for (tensor, file) in &self.files {
            let found = has.get(tensor.as_str()).and_then(|path| path.file_name());
            if found.is_none_or(|found| found != file.as_str()) {
                let elsewhere = found.map(|found| format!(": it is in {}", found.display()));
                let why = format!(
                    "says that {file} has the tensor `{}`, and it has no such tensor{}",
                    shortened(tensor),
                    elsewhere.unwrap_or_default()
                );
                return Err(Error::checkpoint(&self.path, why));
            }
        }
        match has.iter().find(|(tensor, _)| !self.files.contains_key(**tensor)) {
            None => Ok(()),
            Some((tensor, file)) => {
                let why = format!(
                    "has the tensor `{}`, of which {} says nothing",
                    shortened(tensor),
                    self.path.file_name().unwrap_or_default().display()
                );
                Err(Error::checkpoint(file, why))
            }
        }
    }

    /// Extends the message of an error about a tensor file: the new message also names the index, which lists the file.
    pub fn told(&self, error: Error) -> Error {
        match error {
            Error::Checkpoint { path, why } => {
                let index = self.path.file_name().unwrap_or_default().display();
                Error::Checkpoint { path, why: format!("{why}; {index} names it") }
            }
            other => other,
        }
    }
}

/// The text of an index.
pub(crate) fn index(kind: &str, files: &[&[TensorSpec]]) -> String {
    let mut map = BTreeMap::new();
    for (number, tensors) in files.iter().enumerate() {
        map.extend(tensors.iter().map(|tensor| (tensor.name.as_str(), name_of(kind, number, files.len()))));
    }
    let bytes: usize = files.iter().copied().flatten().map(TensorSpec::num_bytes).sum();
    let total = serde_json::json!({ "total_size": bytes });
    format!("{:#}\n", serde_json::json!({ "metadata": total, "weight_map": map }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_hold_whole_tensors_and_no_more_than_they_may() {
        let specs: Vec<TensorSpec> = [3, 1, 4, 1, 5, 9, 0, 2]
            .into_iter()
            .enumerate()
            .map(|(i, len)| TensorSpec::f32(format!("{i}"), [len]))
            .collect();
        let lens = |most: usize| -> Vec<Vec<usize>> {
            let files = divided(&specs, |spec| spec, most);
            files.iter().map(|file| file.iter().map(TensorSpec::num_values).collect()).collect()
        };
        assert_eq!(lens(0), [[3, 1, 4, 1, 5, 9, 0, 2]]);
        assert_eq!(lens(4 * 25), [[3, 1, 4, 1, 5, 9, 0, 2]]);
        assert_eq!(lens(4 * 5), [vec![3, 1], vec![4, 1], vec![5], vec![9], vec![0, 2]]);
        assert_eq!(lens(1), [vec![3], vec![1], vec![4], vec![1], vec![5], vec![9], vec![0], vec![2]]);
        assert_eq!(divided(&specs[..0], |spec| spec, 4), [&specs[..0]]);
        assert_eq!(
            (name_of("model", 0, 1), name_of("optim", 1, 12)),
            ("model.safetensors".into(), "optim-00002-of-00012.safetensors".into())
        );
        for name in ["model.safetensors", "model-00001-of-00002.safetensors"] {
            assert!(is_of_kind(name, "model") && !is_of_kind(name, "optim"));
        }
        assert!(!is_of_kind("model.safetensors.index.json", "model"));
    }
}
