//! Tensors divided among files by size, as the tools of the Hugging Face family write them and read them.

use super::files::TensorSpec;
use crate::error::{Error, Result};
use crate::files::{MOST_TEXT, read_text};
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

/// The end of a file of tensors.
const SUFFIX: &str = ".safetensors";

/// Tensors in files of so many bytes of values at most (0: all in one): whole ones, in their order. One that is larger has a file of its own.
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

/// What the file of this number, from 0, is called of so many: `model.safetensors`, or `model-00002-of-00005.safetensors`.
pub(crate) fn name_of(kind: &str, number: usize, files: usize) -> String {
    match files {
        1 => format!("{kind}{SUFFIX}"),
        _ => format!("{kind}-{:05}-of-{files:05}{SUFFIX}", number + 1),
    }
}

/// Whether this is the name of a file of tensors of this kind.
pub(crate) fn is_of_kind(name: &str, kind: &str) -> bool {
    let between = name.strip_prefix(kind).and_then(|name| name.strip_suffix(SUFFIX));
    between.is_some_and(|between| between.is_empty() || between.starts_with('-'))
}

/// The name of the index of these tensors' files.
pub(crate) fn index_name(kind: &str) -> String {
    format!("{kind}{SUFFIX}.index.json")
}

/// The files that an index names, each once.
pub(crate) fn files_of_index(path: &Path) -> Result<Vec<String>> {
    let text = read_text(path, MOST_TEXT).map_err(Error::io(path))?;
    let index: serde_json::Value =
        serde_json::from_str(&text).map_err(|e| Error::checkpoint(path, format!("is no JSON: {e}")))?;
    let map = index.get("weight_map").and_then(serde_json::Value::as_object);
    let map = map.ok_or_else(|| Error::checkpoint(path, "has no weight_map, which says what is where"))?;
    let names: BTreeSet<&str> = map.values().filter_map(serde_json::Value::as_str).collect();
    // Of this folder alone: an index is somebody else's.
    match names.iter().find(|name| Path::new(name).components().count() != 1 || name.starts_with("..")) {
        Some(name) => Err(Error::checkpoint(path, format!("names `{name}`, which is no file beside it"))),
        None if names.is_empty() => Err(Error::checkpoint(path, "names no file")),
        None => Ok(names.into_iter().map(str::to_owned).collect()),
    }
}

/// Says which file has which tensor.
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
