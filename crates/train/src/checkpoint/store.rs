//! Writes, renames and removes checkpoints.

use super::divided::{self, divided};
use super::files::{TensorSpec, sync_dir, write_synced, write_tensors};
use super::state::{FileEntry, Position, STATE_FILE, State};
use super::{CONFIG_FILE, DIR, MODEL, OPTIM, SCALES, list, name_of};
use crate::error::{Error, Result};
use crate::fault::{Point, reach};
use crate::files::{self, remove_abandoned};
use crate::spikes::{checkpoints_before, read_spikes};
use std::collections::BTreeMap;
use std::fs::{self, File, TryLockError};
use std::path::{Path, PathBuf};
use std::sync::Arc;

const TMP_PREFIX: &str = ".tmp-";
/// Prefix for the old checkpoint of a step while a new checkpoint of the same step replaces the old one.
const REPLACED_PREFIX: &str = ".tmp-replaced-";
const LOCK_FILE: &str = ".lock";

/// The contents of a checkpoint except the tensors' values. The caller supplies the values while the checkpoint is written.
#[derive(Debug, Clone)]
pub struct Outline {
    /// F32 master weights, sorted by name.
    pub model: Vec<TensorSpec>,
    /// Optimizer moments, sorted by name.
    pub optim: Vec<TensorSpec>,
    /// Amax histories of delayed scaling, sorted by name. If the list is empty, the checkpoint has no file of amax histories.
    pub scales: Vec<TensorSpec>,
    /// Upper limit of the bytes of tensor values in one file; 0 means one file per kind of tensor.
    pub file_bytes: usize,
    /// The contents of `config.json`.
    pub config_json: String,
    /// Names and contents of the tokenizer's files.
    pub tokenizer: Vec<(&'static str, String)>,
    /// The training progress that the checkpoint stores.
    pub position: Position,
}

impl Outline {
    fn tensors(&self) -> [&[TensorSpec]; 3] {
        [&self.model, &self.optim, &self.scales]
    }

    /// The names of the tensor files, and the tensors of each.
    fn files(&self) -> Vec<(String, &[TensorSpec])> {
        tensor_files(self.tensors(), |spec| spec, self.file_bytes)
    }
}

/// The checkpoints of one run, opened for writing by one process at a time. Clones share the lock.
#[derive(Debug, Clone)]
pub struct Store {
    dir: PathBuf,
    /// For how many recorded spikes the checkpoint before is kept.
    spikes: usize,
    /// The file is locked while a clone of the store lives. The operating system unlocks the file when the process ends, however the
    /// process ends.
    _lock: Arc<File>,
}

impl Store {
    /// Opens or creates the directory of checkpoints of the run in `run_dir`. Also removes incomplete checkpoints that killed processes
    /// left.
    ///
    /// # Errors
    /// Returns [`Error::Checkpoint`] if another process is writing checkpoints in `run_dir`, and [`Error::Io`] if a file operation fails.
    pub fn open(run_dir: &Path) -> Result<Self> {
        let in_use = || Error::checkpoint(&run_dir.join(DIR), "another process is writing checkpoints here");
        Self::try_open(run_dir)?.ok_or_else(in_use)
    }

    /// Makes the store also keep the checkpoint before each loss or gradient spike, for the newest `spikes` spikes that the run has
    /// recorded.
    #[must_use]
    pub fn keeping_spikes(self, spikes: usize) -> Self {
        Self { spikes, ..self }
    }

    /// Like [`Store::open`], but returns `None` if another process is writing checkpoints in `run_dir`.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn try_open(run_dir: &Path) -> Result<Option<Self>> {
        let dir = run_dir.join(DIR);
        files::make_folder(&dir).map_err(Error::io(&dir))?;
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
        let store = Self { dir, spikes: 0, _lock: Arc::new(lock) };
        remove_abandoned(run_dir).map_err(Error::io(run_dir))?;
        store.clean()?;
        Ok(Some(store))
    }

    /// Whether a run has ever opened a store of checkpoints in this directory.
    #[must_use]
    pub fn is_in(run_dir: &Path) -> bool {
        run_dir.join(DIR).join(LOCK_FILE).exists()
    }

    /// Writes a checkpoint, removes old checkpoints, and returns the new checkpoint's directory. The newest `keep` checkpoints stay; 0
    /// means that all stay. `next` supplies the tensors' values in the outline's order: the model's tensors, then the optimizer's, then the
    /// scales. `next` may supply pieces of any length, but a piece must not contain values of two files. At any time, only one piece of the
    /// values is in memory.
    ///
    /// # Errors
    /// Returns [`Error::Io`] if writing fails (such as on a full disk), [`Error::Checkpoint`] for inconsistent tensors, and any error of
    /// `next`. If `save` fails, the earlier checkpoints stay unchanged.
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

    /// Creates and returns the temporary directory of a checkpoint's files.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub(crate) fn begin(&self, outline: &Outline) -> Result<PathBuf> {
        let dir = self.unnamed(outline);
        remove(&dir)?;
        reach(Point::CheckpointBegins)?;
        files::make_folder(&dir).map_err(Error::io(&dir))?;
        Ok(dir)
    }

    /// Completes a checkpoint. `written` lists its tensor files, which any rank may have written in any order. Writes all other files,
    /// `state.json` last, renames the checkpoint's directory, and removes all but the newest `keep` checkpoints (0: keeps all). Returns the
    /// new directory.
    ///
    /// # Errors
    /// The errors in `written`; [`Error::Io`]; [`Error::Checkpoint`] if a file is missing. After an error, the earlier checkpoints are
    /// untouched, and the new checkpoint is removed.
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
            // Errors of this removal are ignored, because only the first error is reported. The next opening of the store removes
            // leftovers.
            let _ = remove(&dir);
        }
        let path = written?;
        self.prune(keep, &path)?;
        reach(Point::CheckpointEnds)?;
        Ok(path)
    }

    /// Removes the files of an unfinished checkpoint. The next opening of the store removes what remains.
    pub(crate) fn abandon(&self, outline: &Outline) {
        let _ = remove(&self.unnamed(outline));
    }

    /// The temporary directory of a checkpoint.
    fn unnamed(&self, outline: &Outline) -> PathBuf {
        self.dir.join(format!("{TMP_PREFIX}{}", name_of(outline.position.step)))
    }

    /// The error of a checkpoint whose sender of values stopped early: the sender has failed, and reports the reason.
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
            // Restores the old checkpoint at once. If the restoration fails too, the next opening of the store restores the checkpoint.
            let _ = fs::rename(&replaced, &path);
            return Err(error);
        }
        reach(Point::Renamed)?;
        sync_dir(&self.dir)?;
        remove(&replaced)?;
        Ok(path)
    }

    /// Removes all but the newest `keep` of the checkpoints up to `saved`, which was saved last. Later checkpoints remain from a
    /// rolled-back run and may be damaged. Checkpoints after `saved` are neither counted nor removed, nor are those before a spike removed
    /// ([`Store::keeping_spikes`]).
    fn prune(&self, keep: usize, saved: &Path) -> Result<()> {
        let mut all = list(&self.dir)?;
        all.truncate(all.iter().position(|(_, path)| path == saved).map_or(all.len(), |i| i + 1));
        let surplus = if keep == 0 { 0 } else { all.len().saturating_sub(keep) };
        let spikes = match (surplus, self.spikes, self.dir.parent()) {
            (0, ..) | (_, 0, _) | (.., None) => Vec::new(),
            (_, spikes, Some(run_dir)) => {
                let steps: Vec<u64> = all.iter().map(|(step, _)| *step).collect();
                checkpoints_before(&read_spikes(run_dir)?, spikes, &steps)
            }
        };
        for (_, path) in all[..surplus].iter().filter(|(step, _)| !spikes.contains(step)) {
            // A directory with a checkpoint's final name is always a complete checkpoint, so the directory is renamed before its files are
            // removed.
            let doomed = self.dir.join(format!("{TMP_PREFIX}pruned"));
            remove(&doomed)?;
            fs::rename(path, &doomed).map_err(Error::io(path))?;
            reach(Point::Pruned)?;
            remove(&doomed)?;
        }
        Ok(())
    }

    /// Removes leftovers of killed writers, and restores a checkpoint that a killed writer had moved aside.
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

/// Writes and syncs a tensor file, whose values come from `next`.
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

/// Writes and syncs all files other than tensor files, `state.json` last.
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

/// The kinds of tensors, each with its tensors. The kind of the scales is left out if there are no scales.
fn kinds<T>(tensors: [&[T]; 3]) -> impl Iterator<Item = (&'static str, &[T])> {
    let all = [MODEL, OPTIM, SCALES].into_iter().zip(tensors);
    all.filter(|(kind, tensors)| *kind != SCALES || !tensors.is_empty())
}

/// The names of a checkpoint's tensor files, each with its tensors, in the order of `state.json`. `tensors` contains the tensors of the
/// model, of the optimizer, and of the scales. A file has at most `most_bytes` bytes of values (0: one file per kind).
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

/// Removes a directory or a file, if it exists.
fn remove(path: &Path) -> Result<()> {
    match files::remove(path) {
        Err(e) if e.kind() != std::io::ErrorKind::NotFound => Err(Error::io(path)(e)),
        _ => Ok(()),
    }
}
