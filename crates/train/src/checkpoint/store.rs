//! Writing, renaming and removing checkpoints.

use super::divided::{self, divided};
use super::files::{TensorSpec, sync_dir, write_synced, write_tensors};
use super::state::{FileEntry, Position, STATE_FILE, State};
use super::{CONFIG_FILE, DIR, MODEL, OPTIM, SCALES, list, name_of};
use crate::error::{Error, Result};
use crate::fault::{Point, reach};
use crate::files::{self, remove_abandoned};
use std::collections::BTreeMap;
use std::fs::{self, File, TryLockError};
use std::path::{Path, PathBuf};
use std::sync::Arc;

const TMP_PREFIX: &str = ".tmp-";
/// A checkpoint that was moved aside while another of the same step takes its place.
const REPLACED_PREFIX: &str = ".tmp-replaced-";
const LOCK_FILE: &str = ".lock";

/// The contents of a checkpoint except the tensors' values, which are supplied during writing.
#[derive(Debug, Clone)]
pub struct Outline {
    /// F32 master weights, sorted by name.
    pub model: Vec<TensorSpec>,
    /// Optimizer moments, sorted by name.
    pub optim: Vec<TensorSpec>,
    /// Amax histories of delayed scaling, sorted by name; if empty, there is no such file.
    pub scales: Vec<TensorSpec>,
    /// Largest size of the values in a file of tensors, in bytes; 0: one file per kind.
    pub file_bytes: usize,
    /// `config.json`.
    pub config_json: String,
    /// The tokenizer's files, by name.
    pub tokenizer: Vec<(&'static str, String)>,
    /// The position of the run.
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

/// The checkpoints of one run, opened for writing by one process at a time. Clones share the lock.
#[derive(Debug, Clone)]
pub struct Store {
    dir: PathBuf,
    /// Locked while a clone lives; the system unlocks it when the process ends, however it ends.
    _lock: Arc<File>,
}

impl Store {
    /// Opens (and creates) the checkpoints of the run in `run_dir`, and removes leftovers of killed writers.
    ///
    /// # Errors
    /// [`Error::Checkpoint`] where another process is writing here; [`Error::Io`].
    pub fn open(run_dir: &Path) -> Result<Self> {
        let in_use = || Error::checkpoint(&run_dir.join(DIR), "another process is writing checkpoints here");
        Self::try_open(run_dir)?.ok_or_else(in_use)
    }

    /// [`Store::open`], or `None` if another process is writing.
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

    /// Writes a checkpoint, removes all but the newest `keep` (0 = keep all), and returns its directory. `next` supplies the values of the
    /// model's, the optimizer's and the scales' tensors in the outline's order, in pieces of any length that end at the end of a file. Only
    /// one piece is held in memory.
    ///
    /// # Errors
    /// [`Error::Io`] (such as a full disk), [`Error::Checkpoint`] for inconsistent tensors, and the errors of `next`; the earlier
    /// checkpoints are then untouched.
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

    /// Completes a checkpoint whose files of tensors are `written`, by any rank and in any order: writes all other files, `state.json`
    /// last, renames its directory, removes all but the newest `keep` (0 = keep all), and returns its directory.
    ///
    /// # Errors
    /// The errors in `written`; [`Error::Io`]; [`Error::Checkpoint`] if a file is missing. The earlier checkpoints are then untouched, and
    /// this one is removed.
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
            // The first error is the one to report; leftovers are removed when the store is next opened.
            let _ = remove(&dir);
        }
        let path = written?;
        self.prune(keep, &path)?;
        reach(Point::CheckpointEnds)?;
        Ok(path)
    }

    /// Removes the files of an unfinished checkpoint. Leftovers are removed when the store is next opened.
    pub(crate) fn abandon(&self, outline: &Outline) {
        let _ = remove(&self.unnamed(outline));
    }

    /// The temporary directory of a checkpoint.
    fn unnamed(&self, outline: &Outline) -> PathBuf {
        self.dir.join(format!("{TMP_PREFIX}{}", name_of(outline.position.step)))
    }

    /// The error of a checkpoint whose supply of values ended: the sender has failed, and reports why.
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
            // Restores the old checkpoint at once; if that fails too, the next opening of the store restores it.
            let _ = fs::rename(&replaced, &path);
            return Err(error);
        }
        reach(Point::Renamed)?;
        sync_dir(&self.dir)?;
        remove(&replaced)?;
        Ok(path)
    }

    /// Removes all but `keep` of the checkpoints up to the one just saved. Later checkpoints are of a run that was rolled back, possibly
    /// since they are damaged: they neither count nor are removed.
    fn prune(&self, keep: usize, saved: &Path) -> Result<()> {
        let mut all = list(&self.dir)?;
        all.truncate(all.iter().position(|(_, path)| path == saved).map_or(all.len(), |i| i + 1));
        let surplus = if keep == 0 { 0 } else { all.len().saturating_sub(keep) };
        for (_, path) in &all[..surplus] {
            // Under its own name a checkpoint is complete or absent.
            let doomed = self.dir.join(format!("{TMP_PREFIX}pruned"));
            remove(&doomed)?;
            fs::rename(path, &doomed).map_err(Error::io(path))?;
            reach(Point::Pruned)?;
            remove(&doomed)?;
        }
        Ok(())
    }

    /// Removes leftovers of killed writers, and restores a checkpoint that one had moved aside.
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

/// Writes and syncs a file of tensors, whose values come from `next`.
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

/// Writes and syncs all files other than tensors, `state.json` last.
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

/// The kinds of tensors, with their tensors. Without scales there is no such kind.
fn kinds<T>(tensors: [&[T]; 3]) -> impl Iterator<Item = (&'static str, &[T])> {
    let all = [MODEL, OPTIM, SCALES].into_iter().zip(tensors);
    all.filter(|(kind, tensors)| *kind != SCALES || !tensors.is_empty())
}

/// The files of tensors of a checkpoint by name, each with its tensors, in the order of `state.json`. `tensors`: those of the model, the
/// optimizer, and the scales. A file has at most `most_bytes` bytes of values (0: one file per kind).
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
