//! Tensors of a model as published: the files of a folder.

use super::divided::{Index, index_name};
use super::files::OpenFile;
use super::tensors::{Tensors, Types};
use super::{MODEL, MODEL_FILE};
use crate::error::{Error, Result};
use std::fs;
use std::path::Path;

impl Tensors {
    /// The tensors of a folder with a model, as published: those of the index, or of the one file.
    ///
    /// # Errors
    /// [`Error::Checkpoint`] for a file that is missing or damaged, [`Error::Io`] where there are too many.
    pub(crate) fn of_folder(dir: &Path) -> Result<Self> {
        let index = dir.join(index_name(MODEL));
        // A link to an index that is not there is no folder without one.
        if fs::symlink_metadata(&index).is_err() {
            require_safetensors(dir)?;
            return Self::of_files(dir, &[&OpenFile::named(dir, MODEL_FILE)?], Types::Published);
        }
        let index = Index::open(&index)?;
        let open = |name: &str| OpenFile::named(dir, name).map_err(|error| index.told(error));
        let files = index.files().into_iter().map(open).collect::<Result<Vec<_>>>()?;
        let tensors = Self::of_files(dir, &files.iter().collect::<Vec<_>>(), Types::Published)?;
        index.check(tensors.places())?;
        Ok(tensors)
    }
}

/// Says what a folder has instead of safetensors, and what makes them of it.
fn require_safetensors(dir: &Path) -> Result<()> {
    const KINDS: [&str; 7] = ["bin", "pt", "pth", "ckpt", "gguf", "h5", "msgpack"];
    // Optimizers and the like are no weights.
    const WEIGHTS: [&str; 5] = ["pytorch_model", "consolidated", "model", "tf_model", "flax_model"];
    if dir.join(MODEL_FILE).exists() {
        return Ok(());
    }
    let names = fs::read_dir(dir).into_iter().flatten().flatten().map(|entry| entry.file_name());
    let is_other = |name: &str| {
        let name = name.strip_suffix(".index.json").unwrap_or(name);
        let kind = Path::new(name).extension().and_then(|kind| kind.to_str()).unwrap_or_default();
        KINDS.contains(&kind) && (kind == "gguf" || WEIGHTS.iter().any(|weights| name.starts_with(weights)))
    };
    let mut others: Vec<String> =
        names.filter_map(|name| name.into_string().ok()).filter(|name| is_other(name)).collect();
    others.sort_unstable();
    let Some(other) = others.first() else { return Ok(()) };
    let (from, to) = (dir.display(), format!("{}-safetensors", dir.display()));
    let why = format!(
        "has {other} and no {MODEL_FILE}: weights are read from safetensors alone. transformers converts them: python3 -c \"from transformers import \
         AutoModelForCausalLM as M; M.from_pretrained('{from}', dtype='auto').save_pretrained('{to}')\"; its tokenizer goes the same way"
    );
    Err(Error::checkpoint(dir, why))
}
