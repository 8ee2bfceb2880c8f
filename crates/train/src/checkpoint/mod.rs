//! Checkpoints: each is either complete or absent.
//!
//! ```text
//! RUN/checkpoints/step-00001000/
//!   model.safetensors   F32 masters under the names of the model's family; for a large model model-00001-of-00003.safetensors and so on,
//!                       and model.safetensors.index.json with the file of each tensor
//!   optim.safetensors   NAME.exp_avg, NAME.exp_avg_sq; split like model.safetensors
//!   scales.safetensors  NAME.amax_history, if the recipe has delayed scales; split like model.safetensors
//!   config.json         the model's configuration in its family, for other tools; a resumed run reads state.json
//!   tokenizer.json      the tokenizer, as `tokenizers` reads it
//!   tokenizer_config.json   its settings for `transformers`; missing in checkpoints of earlier versions
//!   chat_template.jinja the chat template, if the tokenizer came with one
//!   state.json          step, tokens, seed, cursor, schedule, the full recipe; length and SHA-256 of the files above, and its own SHA-256
//! ```
//!
//! A checkpoint is written under a name `.tmp-…`. The files and the directory are synced, `state.json` last, and then the directory is
//! renamed. A kill at any instant leaves the earlier checkpoints untouched, and at worst a `.tmp-…` directory that the next writer removes.
//! Tensors are logical, so the number of ranks may change between runs. Each rank writes its own tensor files; the first rank writes all
//! other files and renames the directory.

pub(crate) mod divided;
mod files;
mod header;
mod state;
mod store;
mod stored;
mod tensors;

use crate::error::{Error, Result};
use crate::fault::{Point, reach};
use crate::tokenizer::{SETTINGS_FILE, TOKENIZER_FILE};
use files::OpenFile;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

pub use files::TensorSpec;
pub use header::{header, little_endian, metadata};
pub(crate) use state::STATE_FILE;
pub use state::{FileEntry, Position, State};
pub use store::{Outline, Store};
pub(crate) use store::{tensor_files, write_file};
pub(crate) use stored::{BLOCK, SCALE_SUFFIX, scale_shape};
pub(crate) use tensors::TensorAt;
pub use tensors::Tensors;

/// Names of the files in a small model's checkpoint, in the order in which the files are written.
pub const FILES: [&str; 6] = [MODEL_FILE, OPTIM_FILE, CONFIG_FILE, TOKENIZER_FILE, SETTINGS_FILE, STATE_FILE];
/// The directory of checkpoints within a run's directory.
pub(crate) const DIR: &str = "checkpoints";
const MODEL: &str = "model";
const OPTIM: &str = "optim";
const SCALES: &str = "scales";
const MODEL_FILE: &str = "model.safetensors";
const OPTIM_FILE: &str = "optim.safetensors";
const CONFIG_FILE: &str = "config.json";
const PREFIX: &str = "step-";
/// Largest number of values that are copied to or from a checkpoint at once: one rank's piece, or all concurrent pieces of several ranks
/// together.
pub(crate) const PIECE: usize = 4 << 20;
/// Number of threads that verify checksums.
const VERIFIERS: usize = 6;

/// The steps and directories of the checkpoints, oldest first. Incomplete checkpoints are included.
fn list(dir: &Path) -> Result<Vec<(u64, PathBuf)>> {
    let entries = match fs::read_dir(dir) {
        Ok(entries) => entries,
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(e) => return Err(Error::io(dir)(e)),
    };
    let mut all = Vec::new();
    for entry in entries {
        let entry = entry.map_err(Error::io(dir))?;
        let name = entry.file_name();
        let step = name.to_str().and_then(|name| name.strip_prefix(PREFIX)).and_then(|s| s.parse().ok());
        if let Some(step) = step {
            all.push((step, entry.path()));
        }
    }
    all.sort();
    Ok(all)
}

/// The directory name of a step's checkpoint.
fn name_of(step: u64) -> String {
    format!("{PREFIX}{step:08}")
}

/// Reads `state.json` of a checkpoint.
fn read_state(dir: &Path) -> Result<State> {
    let path = dir.join(STATE_FILE);
    let unreadable = |e| Error::checkpoint(&path, format!("cannot be read: {e}"));
    let bytes = crate::files::read_whole(&path, crate::files::MOST_LOG).map_err(unreadable)?;
    let text = String::from_utf8(bytes).map_err(|e| Error::checkpoint(&path, format!("is altered: {e}")))?;
    State::from_json(&text, &path)
}

/// The folders of a run's checkpoints, newest first. Incomplete checkpoints are included.
pub(crate) fn checkpoint_folders(run_dir: &Path) -> Result<Vec<PathBuf>> {
    Ok(list(&run_dir.join(DIR))?.into_iter().rev().map(|(_, path)| path).collect())
}

/// Whether a run's directory has a checkpoint. An incomplete checkpoint counts.
#[must_use]
pub fn has_checkpoints(run_dir: &Path) -> bool {
    list(&run_dir.join(DIR)).is_ok_and(|all| !all.is_empty())
}

/// A checkpoint of a run. An open checkpoint stays readable even after the run has deleted the checkpoint's directory.
#[derive(Debug)]
pub struct Checkpoint {
    path: PathBuf,
    state: State,
    /// The files that the checkpoint's state names, in the order of the state.
    files: Vec<OpenFile>,
    /// Whether files are also verified while they are read.
    checks: bool,
}

impl Checkpoint {
    /// Opens the checkpoint in directory `path` and verifies every file.
    ///
    /// # Errors
    /// Returns [`Error::Checkpoint`], which names the first file that is missing, truncated or altered.
    pub fn open(path: &Path) -> Result<Self> {
        let checkpoint = Self::opened(path, true)?;
        std::thread::scope(|scope| {
            let files: Vec<_> = checkpoint.state.files.iter().zip(&checkpoint.files).collect();
            let files = Arc::new(files);
            // There are at most as many threads as a small model has files. Each thread takes every `VERIFIERS`-th file.
            let start = |first| {
                let files = files.clone();
                let verify = move || {
                    files
                        .iter()
                        .skip(first)
                        .step_by(VERIFIERS)
                        .try_for_each(|(entry, file)| file.verify(entry))
                };
                std::thread::Builder::new().spawn_scoped(scope, verify)
            };
            let verifying: Vec<_> = (0..VERIFIERS.min(files.len())).map(start).collect();
            let join = |file: std::io::Result<std::thread::ScopedJoinHandle<'_, Result<()>>>| {
                file.map_err(nibble_core::Error::not_started)?
                    .join()
                    .unwrap_or_else(|panic| std::panic::resume_unwind(panic))
            };
            verifying.into_iter().try_for_each(join)
        })?;
        Ok(checkpoint)
    }

    /// Opens the checkpoint of this step of the run in `run_dir` without verification. Another rank verifies the checksums when it opens
    /// and reads the checkpoint.
    ///
    /// # Errors
    /// [`Error::Checkpoint`] if `state.json` is missing or altered.
    pub(crate) fn open_verified(run_dir: &Path, step: u64) -> Result<Self> {
        Self::opened(&run_dir.join(DIR).join(name_of(step)), false)
    }

    /// Opens the checkpoint in directory `path`. The checkpoint's files are verified only while they are read.
    ///
    /// # Errors
    /// [`Error::Checkpoint`] if `state.json` is missing or altered.
    pub(crate) fn open_unread(path: &Path) -> Result<Self> {
        Self::opened(path, true)
    }

    fn opened(path: &Path, checks: bool) -> Result<Self> {
        let state = read_state(path)?;
        let files = state.files.iter().map(|entry| OpenFile::open(path, entry)).collect::<Result<_>>()?;
        Ok(Self { path: path.to_path_buf(), state, files, checks })
    }

    /// The checkpoint's directory.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The training progress that the checkpoint stores: steps, tokens, data cursor and settings.
    #[must_use]
    pub fn position(&self) -> &Position {
        &self.state.position
    }

    /// The master weights.
    ///
    /// # Errors
    /// Returns [`Error::Checkpoint`] if the file of weights cannot be read, or contains a tensor whose type is not F32. Whether the
    /// contents match the checksum is known only when [`Tensors::finish`] returns.
    pub fn model(&self) -> Result<Tensors> {
        self.tensors(MODEL)?.ok_or_else(|| self.has_no(MODEL_FILE))
    }

    /// The optimizer's moments.
    ///
    /// # Errors
    /// The errors of [`Checkpoint::model`].
    pub fn optim(&self) -> Result<Tensors> {
        self.tensors(OPTIM)?.ok_or_else(|| self.has_no(OPTIM_FILE))
    }

    /// The amax histories of delayed scaling; `None` if the run uses no delayed scaling.
    ///
    /// # Errors
    /// The errors of [`Checkpoint::model`].
    pub fn scales(&self) -> Result<Option<Tensors>> {
        self.tensors(SCALES)
    }

    /// The bytes of a file of the checkpoint. Reading also verifies the file's checksum.
    ///
    /// # Errors
    /// Returns [`Error::Checkpoint`] if the file does not match its checksum.
    pub fn file(&self, name: &str) -> Result<Vec<u8>> {
        let (entry, file) = self.required(name)?;
        file.read_checked(entry)
    }

    /// Whether the checkpoint contains the file `name`.
    #[must_use]
    pub fn has(&self, name: &str) -> bool {
        self.state.files.iter().any(|entry| entry.name == name)
    }

    /// The tensors of this kind from all files of the kind; `None` if the checkpoint has no such file.
    fn tensors(&self, kind: &str) -> Result<Option<Tensors>> {
        let files = self.state.files.iter().zip(&self.files);
        let files: Vec<_> = files.filter(|(entry, _)| divided::is_of_kind(&entry.name, kind)).collect();
        if files.is_empty() { Ok(None) } else { Tensors::open(&self.path, &files, self.checks).map(Some) }
    }

    fn required(&self, name: &str) -> Result<(&FileEntry, &OpenFile)> {
        let mut files = self.state.files.iter().zip(&self.files);
        files.find(|(entry, _)| entry.name == name).ok_or_else(|| self.has_no(name))
    }

    fn has_no(&self, name: &str) -> Error {
        Error::checkpoint(&self.path, format!("has no file `{name}`"))
    }
}

/// A checkpoint that was rejected as damaged.
#[derive(Debug)]
pub struct Rejected {
    /// The checkpoint's directory.
    pub path: PathBuf,
    /// Why the checkpoint was rejected.
    pub why: Error,
}

/// The newest complete checkpoint of a run, and the damaged checkpoints that are newer.
#[derive(Debug)]
pub struct Latest {
    /// The checkpoint to resume from; `None` if the run has no complete checkpoint.
    pub checkpoint: Option<Checkpoint>,
    /// Damaged checkpoints that are newer than `checkpoint`, newest first. The caller should report the damaged checkpoints to the user.
    pub rejected: Vec<Rejected>,
}

/// Finds the newest checkpoint of the run in `run_dir` whose files all match their checksums. Changes nothing on disk. If the run deletes a
/// checkpoint during the search, the search restarts.
///
/// # Errors
/// Returns [`Error::Io`] if the directory exists but cannot be listed, or if a thread cannot be started. A damaged checkpoint causes no
/// error, but is listed in [`Latest::rejected`].
pub fn latest_valid(run_dir: &Path) -> Result<Latest> {
    latest_valid_until(run_dir, u64::MAX)
}

/// Like [`latest_valid`], but ignores checkpoints that were written after step `last`.
///
/// # Errors
/// The errors of [`latest_valid`].
pub fn latest_valid_until(run_dir: &Path, last: u64) -> Result<Latest> {
    loop {
        if let Some(latest) = look_for_latest(run_dir, last)? {
            return Ok(latest);
        }
    }
}

/// One pass of [`latest_valid`]; `None` if a checkpoint disappeared during the pass and no older checkpoint is complete.
fn look_for_latest(run_dir: &Path, last: u64) -> Result<Option<Latest>> {
    let mut latest = Latest { checkpoint: None, rejected: Vec::new() };
    let mut is_one_gone = false;
    for (step, path) in list(&run_dir.join(DIR))?.into_iter().rev().filter(|(step, _)| *step <= last) {
        reach(Point::CheckpointListed)?;
        let opened = Checkpoint::open(&path).and_then(|checkpoint| {
            let inside = checkpoint.position().step;
            if inside == step {
                return Ok(checkpoint);
            }
            Err(Error::checkpoint(&path, format!("is named for step {step} and holds step {inside}")))
        });
        match opened {
            Ok(checkpoint) => {
                latest.checkpoint = Some(checkpoint);
                return Ok(Some(latest));
            }
            Err(_) if fs::symlink_metadata(&path).is_err() => is_one_gone = true,
            // No thread could be started, or no file could be opened: the checkpoint may be undamaged.
            Err(why @ (Error::Core(_) | Error::Io { .. })) => return Err(why),
            Err(why) => latest.rejected.push(Rejected { path, why }),
        }
    }
    Ok((!is_one_gone).then_some(latest))
}
