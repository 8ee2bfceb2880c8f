//! `state.json`: the position of a run, and the checksums of the other files.

use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::config::is_default;
use crate::error::{Error, Result};
use crate::files::sha256_hex;
use crate::schedule::Schedule;
use nibble_core::Recipe;

/// Name of the checkpoint's last file. A directory without this file is no checkpoint.
pub(crate) const STATE_FILE: &str = "state.json";

/// Version of the layout. A program reads only checkpoints of its own version.
const LAYOUT: u32 = 2;

/// The training progress of a run: numbers of completed steps, tokens and sequences, and the settings of the run. Random number generators
/// have no stored state, because each random number is a function of the seed, the step and the element's index.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Position {
    /// Number of completed optimizer steps, which is also the index of the next step.
    pub step: u64,
    /// Number of completed steps that changed no weight because their batch had no target token. AdamW's bias corrections do not count
    /// steps whose batch had no target.
    #[serde(default, skip_serializing_if = "is_default")]
    pub passed_over: u64,
    /// Number of tokens in all completed steps.
    pub tokens: u64,
    /// Seed of the run.
    pub seed: u64,
    /// Global sample cursor: the index of the next training sequence, over all ranks and micro-batches.
    pub cursor: u64,
    /// The learning-rate schedule. The field `step` is a position in the learning-rate schedule.
    pub schedule: Schedule,
    /// Name of the precision recipe.
    pub recipe: String,
    /// The full recipe as TOML. The run has its own copy, so later changes of the recipe's file do not affect the run.
    #[serde(default)]
    // with a default, a file of an older layout is rejected because of its layout, not because of this field
    pub recipe_toml: String,
    /// SHA-256 of the data, including the held-out part.
    pub data_sha256: String,
    /// The resolved configuration as TOML text. Parsing the TOML text restores the configuration exactly.
    pub config: String,
}

impl Position {
    /// The precision recipe of the run.
    ///
    /// # Errors
    /// Returns [`nibble_core::Error::Recipe`] for a recipe that this program does not support.
    pub fn resolved_recipe(&self) -> Result<Recipe> {
        Ok(Recipe::parse(&self.recipe, &self.recipe_toml)?)
    }
}

/// A file of a checkpoint, with its checksum.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileEntry {
    /// The file's name inside the checkpoint's directory.
    pub name: String,
    /// The file's length in bytes.
    pub bytes: u64,
    /// SHA-256 of the file's contents, in hexadecimal.
    pub sha256: String,
}

/// The contents of `state.json`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct State {
    /// Version of the layout.
    layout: u32,
    /// The training progress of the run when the checkpoint was written.
    pub position: Position,
    /// All files of the checkpoint, except the file in which the list itself is stored.
    pub files: Vec<FileEntry>,
    /// SHA-256 of `state.json` with 64 zeros in place of this value. The hash protects the other fields.
    sha256: String,
}

impl State {
    pub(super) fn new(position: Position, files: Vec<FileEntry>) -> Self {
        Self { layout: LAYOUT, position, files, sha256: unsigned() }
    }

    /// The text of `state.json`, including its own checksum.
    pub(super) fn to_json(&self, path: &Path) -> Result<String> {
        let blank = Self { sha256: unsigned(), ..self.clone() };
        let mut text =
            serde_json::to_string_pretty(&blank).map_err(|e| Error::checkpoint(path, e.to_string()))?;
        text.push('\n');
        let signature = sha256_hex(text.as_bytes());
        // The last occurrence is the checksum's, because a name or the configuration may also contain 64 zeros.
        let at = text.rfind(&blank.sha256).unwrap_or(0);
        text.replace_range(at..at + signature.len(), &signature);
        Ok(text)
    }

    /// Parses the output of [`State::to_json`]. Any changed byte causes an error.
    pub(super) fn from_json(text: &str, path: &Path) -> Result<Self> {
        // The layout's version is checked first, because a newer layout may have unknown fields.
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
