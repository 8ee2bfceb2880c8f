//! Marks by which a command recognizes files that it has written.

use nibble_train::files::open_to_read;
use nibble_train::metrics::svg_beginning;
use serde::Deserialize;
use serde_json::Value;
use std::collections::BTreeMap;
use std::fmt;
use std::io::{self, BufReader, Read};
use std::path::Path;

/// The mark by which a command recognises a file as the output of a command.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Mark {
    /// An SVG picture that names the command in the attribute `data-generator`.
    Picture(&'static str),
    /// A JSON object that names the command under [`GENERATOR`](Mark::GENERATOR).
    Figures(&'static str),
    /// A safetensors file whose metadata name the command under the key [`GENERATOR`](Mark::GENERATOR).
    Tensors(&'static str),
    /// A page that starts with given bytes.
    Page {
        /// The first bytes of the page.
        beginning: String,
        /// The name of such a page in messages.
        what: &'static str,
    },
}

/// The part of a JSON object that names its writer.
#[derive(Deserialize)]
struct Generated {
    generator: String,
}

/// The part of a safetensors header that holds the metadata.
#[derive(Deserialize)]
struct Header {
    #[serde(rename = "__metadata__")]
    metadata: Generated,
}

impl Mark {
    /// The key that names the writer, in JSON objects and in metadata.
    pub const GENERATOR: &'static str = "generator";

    /// Converts an object to JSON text, with the mark added.
    pub fn json(&self, mut object: Value) -> String {
        if let (Self::Figures(by), Value::Object(keys)) = (self, &mut object) {
            keys.insert(Self::GENERATOR.to_owned(), Value::from(*by));
        }
        format!("{object:#}\n")
    }

    /// Returns the SVG image with the mark added.
    pub fn svg(&self, picture: &str) -> String {
        picture.replacen("<svg", &self.beginning(), 1)
    }

    /// Adds the mark to the metadata of tensors.
    pub fn tensors(&self, metadata: &mut BTreeMap<String, String>) {
        if let Self::Tensors(by) = self {
            metadata.insert(Self::GENERATOR.to_owned(), (*by).to_owned());
        }
    }

    /// The first bytes of a marked picture or page.
    fn beginning(&self) -> String {
        match self {
            Self::Picture(by) => svg_beginning(by),
            Self::Page { beginning, .. } => beginning.clone(),
            Self::Figures(_) | Self::Tensors(_) => String::new(),
        }
    }

    /// Whether a file has this mark.
    pub(super) fn is_on(&self, path: &Path) -> io::Result<bool> {
        let mut file = BufReader::new(open_to_read(path)?);
        let generated_by = |by: &str, found: Option<Generated>| found.is_some_and(|g| g.generator == by);
        Ok(match self {
            Self::Picture(_) | Self::Page { .. } => {
                let beginning = self.beginning().into_bytes();
                let mut there = Vec::new();
                file.take(beginning.len() as u64).read_to_end(&mut there)?;
                there == beginning
            }
            Self::Figures(by) => generated_by(by, serde_json::from_reader(file).ok()),
            Self::Tensors(by) => {
                let mut len = [0; size_of::<u64>()];
                let header = file.read_exact(&mut len).ok().and_then(|()| {
                    serde_json::from_reader::<_, Header>(file.take(u64::from_le_bytes(len))).ok()
                });
                generated_by(by, header.map(|header| header.metadata))
            }
        })
    }
}

impl fmt::Display for Mark {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Picture(by) => write!(f, "picture by `{by}`"),
            Self::Figures(by) => write!(f, "file of figures by `{by}`"),
            Self::Tensors(by) => write!(f, "file of tensors by `{by}`"),
            Self::Page { what, .. } => f.write_str(what),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mark_is_known_for_its_own_command() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("x");
        let header = r#"{"a":{"dtype":"F32","shape":[0],"data_offsets":[0,0]},"__metadata__":{"format":"pt","generator":"one"}}"#;
        let tensors = [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), b"\x00\x01"].concat();
        let page = |beginning: &str| Mark::Page { beginning: beginning.to_owned(), what: "page" };
        let cases = [
            (
                Mark::Picture("one").svg("<svg width=\"1\"/>").into_bytes(),
                Mark::Picture("one"),
                Mark::Picture("two"),
            ),
            (
                Mark::Figures("one").json(serde_json::json!({})).into(),
                Mark::Figures("one"),
                Mark::Figures("two"),
            ),
            (tensors, Mark::Tensors("one"), Mark::Tensors("two")),
            (b"<p>one".to_vec(), page("<p>o"), page("<p>t")),
        ];
        for (content, own, other) in cases {
            std::fs::write(&path, content).unwrap();
            assert!(own.is_on(&path).unwrap() && !other.is_on(&path).unwrap(), "{own}");
            for broken in [&b"{"[..], b"\xff\xff\xff\xff\xff\xff\xff\xff{}", b"[1]", b"mine"] {
                std::fs::write(&path, broken).unwrap();
                assert!(!own.is_on(&path).unwrap(), "{own}");
            }
        }
    }
}
