//! `state.json`: the position of a run, and the checksums of the other files.

use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::config::is_default;
use crate::error::{Error, Result};
use crate::files::sha256_hex;
use crate::schedule::Schedule;
use nibble_core::Recipe;

/// Name of the file, written last: a directory without it is no checkpoint.
pub(crate) const STATE_FILE: &str = "state.json";

/// Version of the layout; a program reads only its own.
const LAYOUT: u32 = 2;

/// The position of a run. Random numbers need no state: they are functions of seed, step and element.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Position {
    /// Completed optimizer steps, which is the next step's index.
    pub step: u64,
    /// Completed steps that had no target and changed nothing. AdamW's bias corrections do not count them.
    #[serde(default, skip_serializing_if = "is_default")]
    pub passed_over: u64,
    /// Tokens of the completed steps.
    pub tokens: u64,
    /// Seed of the run.
    pub seed: u64,
    /// Global sample cursor: the next training sequence, over all ranks and micro-batches.
    pub cursor: u64,
    /// The schedule that `step` indexes.
    pub schedule: Schedule,
    /// Name of the precision recipe.
    pub recipe: String,
    /// The full recipe as TOML: the run's own copy, independent of later changes of the recipe's file.
    #[serde(default)] // so that an older file is told by its layout
    pub recipe_toml: String,
    /// SHA-256 of the data, held-out part included.
    pub data_sha256: String,
    /// The resolved configuration as TOML text, which restores it exactly.
    pub config: String,
}

impl Position {
    /// The recipe of the run.
    ///
    /// # Errors
    /// [`nibble_core::Error::Recipe`] for a recipe that this program does not support.
    pub fn resolved_recipe(&self) -> Result<Recipe> {
        Ok(Recipe::parse(&self.recipe, &self.recipe_toml)?)
    }
}

/// A file of a checkpoint, with its checksum.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileEntry {
    /// Name inside the checkpoint's directory.
    pub name: String,
    /// Length in bytes.
    pub bytes: u64,
    /// SHA-256 of the content, hexadecimal.
    pub sha256: String,
}

/// The content of `state.json`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct State {
    /// Version of the layout.
    layout: u32,
    /// The position of the run.
    pub position: Position,
    /// Every other file of the checkpoint.
    pub files: Vec<FileEntry>,
    /// SHA-256 of this file with 64 zeros in place of this value: it protects the numbers above.
    sha256: String,
}

impl State {
    pub(super) fn new(position: Position, files: Vec<FileEntry>) -> Self {
        Self { layout: LAYOUT, position, files, sha256: unsigned() }
    }

    /// The text of the file, with its own checksum.
    pub(super) fn to_json(&self, path: &Path) -> Result<String> {
        let blank = Self { sha256: unsigned(), ..self.clone() };
        let mut text =
            serde_json::to_string_pretty(&blank).map_err(|e| Error::checkpoint(path, e.to_string()))?;
        text.push('\n');
        let signature = sha256_hex(text.as_bytes());
        // The last occurrence: a name or the configuration may also contain 64 zeros.
        let at = text.rfind(&blank.sha256).unwrap_or(0);
        text.replace_range(at..at + signature.len(), &signature);
        Ok(text)
    }

    /// Parses the output of [`State::to_json`]; any changed byte is an error.
    pub(super) fn from_json(text: &str, path: &Path) -> Result<Self> {
        // Checked first: a newer layout may have unknown fields.
        #[derive(Deserialize)]
        struct Layout {
            layout: u32,
        }
        match serde_json::from_str::<Layout>(text) {
            Ok(Layout { layout }) if layout > LAYOUT => {
                let why = format!("has layout {layout}, of a newer program; this one reads layout {LAYOUT}");
                return Err(Error::checkpoint(path, why));
            }
            _ => {}
        }
        let state: Self = serde_json::from_str(text)
            .map_err(|e| Error::checkpoint(path, format!("is truncated or altered: {e}")))?;
        let unsigned_text = text.rfind(&state.sha256).map(|at| {
            let mut text = text.to_owned();
            text.replace_range(at..at + state.sha256.len(), &unsigned());
            text
        });
        if unsigned_text.map(|text| sha256_hex(text.as_bytes())).as_ref() != Some(&state.sha256) {
            return Err(Error::checkpoint(path, "is altered: it does not match its own checksum"));
        }
        if state.layout != LAYOUT {
            let why = format!("has layout {}, and this program reads layout {LAYOUT}", state.layout);
            return Err(Error::checkpoint(path, why));
        }
        Ok(state)
    }
}

/// The checksum's placeholder.
fn unsigned() -> String {
    "0".repeat(64)
}
