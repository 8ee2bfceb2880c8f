//! Checkpoints: whole or not there.
//!
//! ```text
//! RUN/checkpoints/step-00001000/
//!   model.safetensors   F32 masters under the names of the model's family; of a large model model-00001-of-00003.safetensors and so on,
//!                       and model.safetensors.index.json, which says what is where
//!   optim.safetensors   NAME.exp_avg, NAME.exp_avg_sq; likewise
//!   scales.safetensors  NAME.amax_history, where a recipe has scales of earlier steps; likewise
//!   config.json         the model's sizes, as its family says them, for others: a run goes on by state.json
//!   tokenizer.json      the tokenizer, as `tokenizers` reads it
//!   tokenizer_config.json   what `transformers` is told of it; checkpoints of before it was written have none
//!   chat_template.jinja how a conversation is written, where the tokenizer came with that
//!   state.json          step, tokens, seed, cursor, schedule, the recipe in full; length and SHA-256 of the files above, and its own
//! ```
//!
//! A checkpoint is written under `.tmp-…`, its files and the directory synced, `state.json` last, and then renamed. A
//! kill at any instant leaves the earlier checkpoints as they were, and at worst a `.tmp-…` that the next writer
//! removes. Tensors are logical, so the number of ranks may change between runs. Several ranks write files of tensors, each its own; the first one
//! writes all others and renames.

mod digest;
pub(crate) mod divided;
mod files;
mod header;
mod published;
mod state;
mod stored;
mod tensors;

use std::collections::BTreeMap;
use std::fs::{self, File, TryLockError};
use std::path::{Path, PathBuf};
use std::sync::Arc;

pub(crate) use digest::{hexadecimal, sha256_hex};
pub use files::TensorSpec;
pub use header::{header, little_endian, metadata};
pub(crate) use state::STATE_FILE;
pub use state::{FileEntry, Position, State};
pub(crate) use stored::{BLOCK, SCALE_SUFFIX, scale_shape};
pub(crate) use tensors::Stored;
pub use tensors::Tensors;

use crate::error::{Error, Result};
use crate::fault::{Point, reach};
use crate::files::remove_abandoned;
use crate::tokenizer::{SETTINGS_FILE, TOKENIZER_FILE};
use divided::divided;
use files::{OpenFile, sync_dir, write_synced, write_tensors};

/// The files that a checkpoint of a small model has, in the order they are written.
pub const FILES: [&str; 6] = [MODEL_FILE, OPTIM_FILE, CONFIG_FILE, TOKENIZER_FILE, SETTINGS_FILE, STATE_FILE];
/// The directory of the checkpoints in that of a run.
pub(crate) const DIR: &str = "checkpoints";
const MODEL: &str = "model";
const OPTIM: &str = "optim";
const SCALES: &str = "scales";
const MODEL_FILE: &str = "model.safetensors";
const OPTIM_FILE: &str = "optim.safetensors";
const CONFIG_FILE: &str = "config.json";
const PREFIX: &str = "step-";
const TMP_PREFIX: &str = ".tmp-";
/// A checkpoint moved aside while another of the same step takes its place.
const REPLACED_PREFIX: &str = ".tmp-replaced-";
const LOCK_FILE: &str = ".lock";
/// Threads that compare files with their checksums.
const VERIFIERS: usize = 6;

/// All that a checkpoint holds but the values of its tensors, which come while it is written.
#[derive(Debug, Clone)]
pub struct Outline {
    /// F32 master weights, in order of their names.
    pub model: Vec<TensorSpec>,
    /// Optimizer moments, in order of their names.
    pub optim: Vec<TensorSpec>,
    /// Histories of delayed scales, in order of their names; without any there is no such file.
    pub scales: Vec<TensorSpec>,
    /// Bytes of values in a file of tensors, at most; 0: all of a kind in one.
    pub file_bytes: usize,
    /// `config.json`.
    pub config_json: String,
    /// The tokenizer's files, by their names.
    pub tokenizer: Vec<(&'static str, String)>,
    /// Where the run stands.
    pub position: Position,
}

impl Outline {
    fn tensors(&self) -> [&[TensorSpec]; 3] {
        [&self.model, &self.optim, &self.scales]
    }

    /// The files of tensors.
    fn files(&self) -> Vec<(String, &[TensorSpec])> {
        tensor_files(self.tensors(), |spec| spec, self.file_bytes)
    }
}

/// The checkpoints of one run, open for writing by one process at a time. Clones share it.
#[derive(Debug, Clone)]
pub struct Store {
    dir: PathBuf,
    /// Locked as long as a clone lives; the system unlocks it when the process ends, however it ends.
    _lock: Arc<File>,
}

impl Store {
    /// Opens (and creates) the checkpoints of the run in `run_dir`, and removes what killed writers left.
    ///
    /// # Errors
    /// [`Error::Checkpoint`] where another process is writing here; [`Error::Io`].
    pub fn open(run_dir: &Path) -> Result<Self> {
        let in_use = || Error::checkpoint(&run_dir.join(DIR), "another process is writing checkpoints here");
        Self::try_open(run_dir)?.ok_or_else(in_use)
    }

    /// [`Store::open`]; none where another process is writing.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn try_open(run_dir: &Path) -> Result<Option<Self>> {
        let dir = run_dir.join(DIR);
        crate::files::make_folder(&dir).map_err(Error::io(&dir))?;
        sync_dir(run_dir)?;
        reach(Point::DirectoryMade)?;
        let lock_path = dir.join(LOCK_FILE);
        let lock =
            File::options().create(true).append(true).open(&lock_path).map_err(Error::io(&lock_path))?;
        reach(Point::LockMade)?;
        match lock.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => return Ok(None),
            Err(TryLockError::Error(source)) => return Err(Error::Io { path: lock_path, source }),
        }
        let store = Self { dir, _lock: Arc::new(lock) };
        remove_abandoned(run_dir).map_err(Error::io(run_dir))?;
        store.clean()?;
        Ok(Some(store))
    }

    /// Whether a run in this directory has ever opened its checkpoints.
    #[must_use]
    pub fn is_in(run_dir: &Path) -> bool {
        run_dir.join(DIR).join(LOCK_FILE).exists()
    }

    /// Writes a checkpoint whose tensors' values come from `next`: those of the model, of the optimizer, and of the scales, one tensor
    /// after the other as the outline has them, in pieces of any length that end where a file ends. Nothing more of them is
    /// held. Removes all but the newest `keep` (0 = keep all). Returns its directory.
    ///
    /// # Errors
    /// [`Error::Io`] (a full disk, say), [`Error::Checkpoint`] for tensors that contradict themselves, and what `next` returns; the earlier
    /// checkpoints are untouched then.
    pub fn save<P: AsRef<[f32]>>(
        &self,
        outline: &Outline,
        next: &mut dyn FnMut() -> Result<P>,
        keep: usize,
    ) -> Result<PathBuf> {
        let dir = self.begin(outline)?;
        let files = outline.files();
        let written =
            files.iter().map(|(name, tensors)| write_file(&dir, name, tensors, &mut *next)).collect();
        self.finish(outline, written, keep)
    }

    /// Makes the directory in which the files of a checkpoint are written before it has its name. Returns it.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub(crate) fn begin(&self, outline: &Outline) -> Result<PathBuf> {
        let dir = self.unnamed(outline);
        remove(&dir)?;
        reach(Point::CheckpointBegins)?;
        crate::files::make_folder(&dir).map_err(Error::io(&dir))?;
        Ok(dir)
    }

    /// Ends a checkpoint whose files of tensors are `written`, whoever wrote them and in whatever order: writes all others, `state.json` last,
    /// and gives it its name. Removes all but the newest `keep` (0 = keep all). Returns its directory.
    ///
    /// # Errors
    /// That of the files; [`Error::Io`]; [`Error::Checkpoint`] if a file is missing. The earlier checkpoints are untouched then, and nothing is
    /// left of this one.
    pub(crate) fn finish(
        &self,
        outline: &Outline,
        written: Result<Vec<FileEntry>>,
        keep: usize,
    ) -> Result<PathBuf> {
        let (dir, name) = (self.unnamed(outline), name_of(outline.position.step));
        let written = written.and_then(|entries| write_rest(&dir, outline, entries));
        let written = written.and_then(|()| self.publish(&dir, &name));
        if written.is_err() {
            // The first error is the one to tell; what cannot be removed now goes when the store is next opened.
            let _ = remove(&dir);
        }
        let path = written?;
        self.prune(keep, &path)?;
        reach(Point::CheckpointEnds)?;
        Ok(path)
    }

    /// Removes what there is of a checkpoint that will not be ended. What cannot be removed goes when the store is next opened.
    pub(crate) fn abandon(&self, outline: &Outline) {
        let _ = remove(&self.unnamed(outline));
    }

    /// The directory of a checkpoint before it has its name.
    fn unnamed(&self, outline: &Outline) -> PathBuf {
        self.dir.join(format!("{TMP_PREFIX}{}", name_of(outline.position.step)))
    }

    /// The error of a checkpoint whose values stop coming: whoever sent them has failed, and tells why.
    pub(crate) fn given_up(&self, outline: &Outline) -> Error {
        let path = self.dir.join(name_of(outline.position.step));
        Error::checkpoint(&path, "was given up before all of its values had come")
    }

    /// Renames a complete directory to its final name.
    fn publish(&self, tmp: &Path, name: &str) -> Result<PathBuf> {
        let path = self.dir.join(name);
        let replaced = self.dir.join(format!("{REPLACED_PREFIX}{name}"));
        if path.exists() {
            remove(&replaced)?;
            fs::rename(&path, &replaced).map_err(Error::io(&path))?;
        }
        let moved = || {
            if replaced.exists() {
                reach(Point::MovedAside)?;
            }
            fs::rename(tmp, &path).map_err(Error::io(&path))
        };
        if let Err(error) = moved() {
            // Back at once; where that fails, too, it is put back when the store is next opened.
            let _ = fs::rename(&replaced, &path);
            return Err(error);
        }
        reach(Point::Renamed)?;
        sync_dir(&self.dir)?;
        remove(&replaced)?;
        Ok(path)
    }

    /// Removes all but `keep` checkpoints, the one just saved and those before it. Later ones are of a run that this one
    /// went back from, damaged perhaps: they neither count nor go.
    fn prune(&self, keep: usize, saved: &Path) -> Result<()> {
        let mut all = list(&self.dir)?;
        all.truncate(all.iter().position(|(_, path)| path == saved).map_or(all.len(), |i| i + 1));
        let surplus = if keep == 0 { 0 } else { all.len().saturating_sub(keep) };
        for (_, path) in &all[..surplus] {
            // Under its own name it is whole or gone.
            let doomed = self.dir.join(format!("{TMP_PREFIX}pruned"));
            remove(&doomed)?;
            fs::rename(path, &doomed).map_err(Error::io(path))?;
            reach(Point::Pruned)?;
            remove(&doomed)?;
        }
        Ok(())
    }

    /// Removes what killed writers left behind, and puts back what one had moved aside.
    fn clean(&self) -> Result<()> {
        for entry in fs::read_dir(&self.dir).map_err(Error::io(&self.dir))? {
            let entry = entry.map_err(Error::io(&self.dir))?;
            let name = entry.file_name().to_string_lossy().into_owned();
            if let Some(original) = name.strip_prefix(REPLACED_PREFIX) {
                let original = self.dir.join(original);
                if !original.exists() {
                    fs::rename(entry.path(), &original).map_err(Error::io(&original))?;
                    continue;
                }
            }
            if name.starts_with(TMP_PREFIX) {
                remove(&entry.path())?;
            }
        }
        Ok(())
    }
}

/// Writes a file of tensors, whose values come from `next`, and waits until it is on the disk.
pub(crate) fn write_file<P: AsRef<[f32]>>(
    dir: &Path,
    name: &str,
    tensors: &[TensorSpec],
    next: &mut dyn FnMut() -> Result<P>,
) -> Result<FileEntry> {
    let entry = write_tensors(dir, name, tensors, next)?;
    reach(Point::FileWritten)?;
    Ok(entry)
}

/// Writes the files beside those of tensors, `state.json` last, all synced.
fn write_rest(dir: &Path, outline: &Outline, written: Vec<FileEntry>) -> Result<()> {
    let Outline { file_bytes, config_json, tokenizer, position, .. } = outline;
    let mut written: BTreeMap<String, FileEntry> =
        written.into_iter().map(|entry| (entry.name.clone(), entry)).collect();
    let mut entries = Vec::new();
    for (kind, tensors) in kinds(outline.tensors()) {
        let files = divided(tensors, |spec| spec, *file_bytes);
        for number in 0..files.len() {
            let name = divided::name_of(kind, number, files.len());
            let missing = || Error::checkpoint(&dir.join(&name), "was not written");
            entries.push(written.remove(&name).ok_or_else(missing)?);
        }
        if files.len() > 1 {
            let index = divided::index(kind, &files);
            entries.push(write_synced(dir, &divided::index_name(kind), index.as_bytes())?);
        }
    }
    let of_tokenizer = tokenizer.iter().map(|(name, text)| (*name, text));
    for (name, text) in std::iter::once((CONFIG_FILE, config_json)).chain(of_tokenizer) {
        entries.push(write_synced(dir, name, text.as_bytes())?);
        reach(Point::FileWritten)?;
    }
    let state = State::new(position.clone(), entries).to_json(&dir.join(STATE_FILE))?;
    write_synced(dir, STATE_FILE, state.as_bytes())?;
    reach(Point::ManifestWritten)?;
    sync_dir(dir)?;
    reach(Point::BeforeRename)
}

/// The kinds of tensors that have files, and their tensors. Where there are no scales there is no file of them.
fn kinds<T>(tensors: [&[T]; 3]) -> impl Iterator<Item = (&'static str, &[T])> {
    let all = [MODEL, OPTIM, SCALES].into_iter().zip(tensors);
    all.filter(|(kind, tensors)| *kind != SCALES || !tensors.is_empty())
}

/// The files of tensors of a checkpoint by name, each with its tensors, in the order in which `state.json` has them. `tensors`: those of the
/// model, of the optimizer, and of the scales; of so many bytes of values in a file at most (0: all of a kind in one).
pub(crate) fn tensor_files<T>(
    tensors: [&[T]; 3],
    spec: impl Fn(&T) -> &TensorSpec + Copy,
    most_bytes: usize,
) -> Vec<(String, &[T])> {
    let mut all = Vec::new();
    for (kind, tensors) in kinds(tensors) {
        let files = divided(tensors, spec, most_bytes);
        let named = |(number, tensors)| (divided::name_of(kind, number, files.len()), tensors);
        all.extend(files.iter().copied().enumerate().map(named));
    }
    all
}

/// Removes a directory or a file, if it is there.
fn remove(path: &Path) -> Result<()> {
    let removed = if path.is_dir() { fs::remove_dir_all(path) } else { fs::remove_file(path) };
    match removed {
        Err(e) if e.kind() != std::io::ErrorKind::NotFound => Err(Error::io(path)(e)),
        _ => Ok(()),
    }
}

/// The checkpoints' steps and directories, oldest first, whole or not.
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

/// The name of the checkpoint of a step.
fn name_of(step: u64) -> String {
    format!("{PREFIX}{step:08}")
}

/// What `state.json` of a checkpoint says.
fn read_state(dir: &Path) -> Result<State> {
    let path = dir.join(STATE_FILE);
    let unreadable = |e| Error::checkpoint(&path, format!("cannot be read: {e}"));
    let bytes = crate::files::read_whole(&path, crate::files::MOST_LOG).map_err(unreadable)?;
    let text = String::from_utf8(bytes).map_err(|e| Error::checkpoint(&path, format!("is altered: {e}")))?;
    State::from_json(&text, &path)
}

/// The folders of a run's checkpoints, whole or not, the newest first.
pub(crate) fn checkpoint_folders(run_dir: &Path) -> Result<Vec<PathBuf>> {
    Ok(list(&run_dir.join(DIR))?.into_iter().rev().map(|(_, path)| path).collect())
}

/// Whether a run's directory has a checkpoint, whole or not.
#[must_use]
pub fn has_checkpoints(run_dir: &Path) -> bool {
    list(&run_dir.join(DIR)).is_ok_and(|all| !all.is_empty())
}

/// A checkpoint every file of which matched its checksum when it was opened. What it holds can be read even after the run has removed it.
#[derive(Debug)]
pub struct Checkpoint {
    path: PathBuf,
    state: State,
    /// As many as the state names, in its order.
    files: Vec<OpenFile>,
    /// Whether files are compared with their checksums as they are read, too.
    checks: bool,
}

impl Checkpoint {
    /// Opens the checkpoint in directory `path` and verifies every file.
    ///
    /// # Errors
    /// [`Error::Checkpoint`] naming the first file that is missing, truncated or altered.
    pub fn open(path: &Path) -> Result<Self> {
        let checkpoint = Self::opened(path, true)?;
        std::thread::scope(|scope| {
            let files: Vec<_> = checkpoint.state.files.iter().zip(&checkpoint.files).collect();
            let files = Arc::new(files);
            // As many threads as a small model has files; each takes every so-manieth.
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

    /// Opens the checkpoint of this step of the run in `run_dir`, whose files another rank compares with their checksums: when it
    /// opens it, and as it reads them.
    ///
    /// # Errors
    /// [`Error::Checkpoint`] where `state.json` is missing or altered.
    pub(crate) fn open_verified(run_dir: &Path, step: u64) -> Result<Self> {
        Self::opened(&run_dir.join(DIR).join(name_of(step)), false)
    }

    /// Opens the checkpoint in directory `path`, whose files are compared with their checksums as they are read.
    ///
    /// # Errors
    /// [`Error::Checkpoint`] where `state.json` is missing or altered.
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

    /// Where the run stood.
    #[must_use]
    pub fn position(&self) -> &Position {
        &self.state.position
    }

    /// The master weights.
    ///
    /// # Errors
    /// [`Error::Checkpoint`] where the file cannot be read, or holds no tensors of F32. Whether it is what was written
    /// [`Tensors::finish`] says.
    pub fn model(&self) -> Result<Tensors> {
        self.tensors(MODEL)?.ok_or_else(|| self.has_no(MODEL_FILE))
    }

    /// The optimizer's moments.
    ///
    /// # Errors
    /// As [`Checkpoint::model`].
    pub fn optim(&self) -> Result<Tensors> {
        self.tensors(OPTIM)?.ok_or_else(|| self.has_no(OPTIM_FILE))
    }

    /// Histories of delayed scales, of a run that had any.
    ///
    /// # Errors
    /// As [`Checkpoint::model`].
    pub fn scales(&self) -> Result<Option<Tensors>> {
        self.tensors(SCALES)
    }

    /// The bytes of a file of the checkpoint, verified as they are read.
    ///
    /// # Errors
    /// [`Error::Checkpoint`] where the file is not, or no longer, what was written.
    pub fn file(&self, name: &str) -> Result<Vec<u8>> {
        let (entry, file) = self.required(name)?;
        file.read_checked(entry)
    }

    /// Whether it has a file of this name.
    #[must_use]
    pub fn has(&self, name: &str) -> bool {
        self.state.files.iter().any(|entry| entry.name == name)
    }

    /// The tensors of this kind, in whatever files they are; none where there is no such file.
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

/// A checkpoint that was passed over.
#[derive(Debug)]
pub struct Rejected {
    /// Its directory.
    pub path: PathBuf,
    /// What is wrong with it.
    pub why: Error,
}

/// The newest whole checkpoint of a run, and the newer ones that are not.
#[derive(Debug)]
pub struct Latest {
    /// The checkpoint to resume from; `None` where there is none.
    pub checkpoint: Option<Checkpoint>,
    /// Newer ones that are damaged, the newest first: to be reported.
    pub rejected: Vec<Rejected>,
}

/// Finds the newest checkpoint of the run in `run_dir` all of whose files match. Changes nothing on the disk. One that the run removes
/// meanwhile makes way for a newer one, which is looked for then.
///
/// # Errors
/// [`Error::Io`] where the directory exists but cannot be listed; where a thread cannot be started. Damage is no error: see [`Latest::rejected`].
pub fn latest_valid(run_dir: &Path) -> Result<Latest> {
    loop {
        if let Some(latest) = look_for_latest(run_dir)? {
            return Ok(latest);
        }
    }
}

/// [`latest_valid`], once; none where a checkpoint has gone meanwhile and no older one is whole.
fn look_for_latest(run_dir: &Path) -> Result<Option<Latest>> {
    let mut latest = Latest { checkpoint: None, rejected: Vec::new() };
    let mut is_one_gone = false;
    for (step, path) in list(&run_dir.join(DIR))?.into_iter().rev() {
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
            // No thread to read it with, or no file to be opened: it may be whole.
            Err(why @ (Error::Core(_) | Error::Io { .. })) => return Err(why),
            Err(why) => latest.rejected.push(Rejected { path, why }),
        }
    }
    Ok((!is_one_gone).then_some(latest))
}
