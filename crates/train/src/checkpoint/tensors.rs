//! Tensors of a checkpoint, which are read on demand.

use super::divided::{Index, index_name};
use super::files::OpenFile;
use super::state::FileEntry;
use super::stored::{Kind, SCALE_SUFFIX, scale_shape};
use super::{MODEL, MODEL_FILE};
use crate::error::{Error, Result};
use safetensors::tensor::{Dtype, Metadata};
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::thread::{Builder, JoinHandle};

/// Largest accepted header of a safetensors file, in bytes. The safetensors library has the same limit.
const LONGEST_HEADER: u64 = 100_000_000;

/// All tensors of one kind, such as weights, in a checkpoint. The tensors are in one or several files. Each tensor can be taken only once,
/// and [`Tensors::finish`] fails if a tensor has not been taken. While the caller reads tensors, another thread or another rank verifies
/// the files' checksums. The tensors' values are known to be valid only after [`Tensors::finish`] has succeeded.
#[derive(Debug)]
pub struct Tensors {
    /// The path of the file, or the directory of several files.
    path: PathBuf,
    files: Vec<OpenFile>,
    tensors: BTreeMap<String, TensorAt>,
    checked: Option<JoinHandle<Result<()>>>,
}

/// The location of a tensor's values: file, offset, and storage format.
#[derive(Debug)]
pub(crate) struct TensorAt {
    file: usize,
    shape: Vec<usize>,
    start: u64,
    dtype: Dtype,
    kind: Kind,
}

/// Types of tensors that files may contain.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Types {
    /// Only F32, the type that a run writes.
    Own,
    /// Types of published models: F32, BF16, F16, and E4M3 with block scales.
    Published,
}

impl TensorAt {
    /// Number of values of the tensor.
    pub fn num_values(&self) -> usize {
        self.shape.iter().product()
    }
}

impl Tensors {
    /// The path of the file, or the directory of several files.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Opens one or more safetensors files.
    pub(super) fn of_files(dir: &Path, files: &[&OpenFile], types: Types) -> Result<Self> {
        let path = match files {
            [one] => one.path().to_owned(),
            _ => dir.to_owned(),
        };
        let mut all = Self { path, files: Vec::new(), tensors: BTreeMap::new(), checked: None };
        files.iter().try_for_each(|open| all.add(open, types))?;
        Ok(all)
    }

    /// Opens one or more safetensors files of F32 tensors. If `checks` is true, a background thread verifies the files' checksums.
    pub(super) fn open(dir: &Path, files: &[(&FileEntry, &OpenFile)], checks: bool) -> Result<Self> {
        let opened: Vec<&OpenFile> = files.iter().map(|(_, open)| *open).collect();
        let mut all = Self::of_files(dir, &opened, Types::Own)?;
        if checks {
            let written: Vec<(FileEntry, OpenFile)> =
                files.iter().map(|(entry, open)| ((*entry).clone(), (*open).clone())).collect();
            let check = move || written.iter().try_for_each(|(entry, open)| open.verify(entry));
            let checked = Builder::new().name("checkpoint checksum".into()).spawn(check);
            all.checked = Some(checked.map_err(nibble_core::Error::not_started)?);
        }
        Ok(all)
    }

    /// The tensors of a published model's folder: the tensors of the index, or of the single file if there is no index.
    ///
    /// # Errors
    /// [`Error::Checkpoint`] for a missing or damaged file, [`Error::Io`] for too many open files.
    pub(crate) fn of_folder(dir: &Path) -> Result<Self> {
        let index = dir.join(index_name(MODEL));
        // A dangling link in place of the index is an error; a folder with such a link is not a folder without an index.
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

    fn add(&mut self, file: &OpenFile, types: Types) -> Result<()> {
        let path = file.path();
        let (metadata, begin) = read_header(file)?;
        let end = begin.checked_add(metadata.data_len() as u64);
        if end != Some(file.len()?) {
            return Err(Error::checkpoint(path, "is damaged: its tensors do not fill it"));
        }
        for (name, info) in metadata.tensors() {
            if types == Types::Own && info.dtype != Dtype::F32 {
                let why = format!("tensor `{name}` is {:?}, expected F32", info.dtype);
                return Err(Error::checkpoint(path, why));
            }
            let start = begin + info.data_offsets.0 as u64;
            let (file, shape) = (self.files.len(), info.shape.clone());
            let stored = TensorAt { file, shape, start, dtype: info.dtype, kind: Kind::F32 };
            if self.tensors.insert(name.clone(), stored).is_some() {
                return Err(Error::checkpoint(path, format!("has tensor `{name}`, as another file has")));
            }
        }
        self.files.push(file.clone());
        Ok(())
    }

    /// Names and shapes of the tensors that have not been taken, sorted by name.
    pub fn shapes(&self) -> impl Iterator<Item = (&str, &[usize])> {
        self.tensors.iter().map(|(name, stored)| (name.as_str(), stored.shape.as_slice()))
    }

    /// Names of the remaining tensors, each with the path of its file.
    pub(super) fn places(&self) -> impl Iterator<Item = (&str, &Path)> {
        self.tensors.iter().map(|(name, stored)| (name.as_str(), self.files[stored.file].path()))
    }

    /// Reads the tensor `name`, which must have the shape `shape`, and removes the tensor from the remaining tensors.
    ///
    /// # Errors
    /// Returns [`Error::Checkpoint`], which names the tensor if the tensor is missing or has another shape, and names the file if the file
    /// cannot be read.
    pub fn take(&mut self, name: &str, shape: &[usize]) -> Result<Vec<f32>> {
        let stored = self.find(name, shape)?;
        let mut values = vec![0.0; stored.num_values()];
        self.read(&stored, 0, &mut values)?;
        Ok(values)
    }

    /// Like [`Tensors::take`], but returns `None` if there is no such tensor.
    ///
    /// # Errors
    /// Returns [`Error::Checkpoint`], which names the tensor if the tensor has another shape, and names the file if the file cannot be
    /// read.
    pub fn take_if_there(&mut self, name: &str, shape: &[usize]) -> Result<Option<Vec<f32>>> {
        self.tensors.contains_key(name).then(|| self.take(name, shape)).transpose()
    }

    /// Like [`Tensors::take`], but returns only the location. [`Tensors::read`] reads the values later.
    pub(crate) fn find(&mut self, name: &str, shape: &[usize]) -> Result<TensorAt> {
        let mut stored = match self.tensors.get(name) {
            Some(stored) if stored.shape != shape => {
                let why = format!("tensor `{name}` has shape {:?}, expected {shape:?}", stored.shape);
                return Err(Error::checkpoint(&self.path, why));
            }
            _ => self
                .tensors
                .remove(name)
                .ok_or_else(|| Error::checkpoint(&self.path, format!("has no tensor `{name}`")))?,
        };
        stored.kind = match stored.dtype {
            Dtype::F32 => Kind::F32,
            Dtype::BF16 => Kind::Bf16,
            Dtype::F16 => Kind::F16,
            Dtype::F8_E4M3 => {
                let scales = self.take(&format!("{name}{SCALE_SUFFIX}"), &scale_shape(shape))?;
                Kind::E4m3 { scales, cols: shape.last().copied().unwrap_or(1) }
            }
            other => {
                let why = format!("tensor `{name}` is {other:?}, expected F32, BF16, F16 or F8_E4M3");
                return Err(Error::checkpoint(&self.path, why));
            }
        };
        Ok(stored)
    }

    /// Reads the tensor's values from index `at` on, which must exist.
    pub(crate) fn read(&mut self, stored: &TensorAt, at: usize, to: &mut [f32]) -> Result<()> {
        let place = stored.start + (at * stored.kind.bytes()) as u64;
        let file = &self.files[stored.file];
        stored.kind.read(at, to, |bytes| file.read_exact_at(bytes, place))
    }

    /// Like [`Tensors::read`], but for weights, which must be finite.
    ///
    /// # Errors
    /// [`Error::Checkpoint`] naming the tensor `name` and its first value that is not finite.
    pub(crate) fn read_weights(
        &mut self,
        (name, stored): (&str, &TensorAt),
        at: usize,
        to: &mut [f32],
    ) -> Result<()> {
        self.read(stored, at, to)?;
        let Some(index) = to.iter().position(|value| !value.is_finite()) else { return Ok(()) };
        let what = if to[index].is_nan() { "a NaN" } else { "an infinity" };
        let why = match stored.kind.scale_of(at + index).filter(|(_, scale)| !scale.is_finite()) {
            Some((block, scale)) => format!(
                "tensor `{name}` is not finite: it holds {what} at index {}, as element {block} of `{name}{SCALE_SUFFIX}` is {scale}",
                at + index
            ),
            None => format!("tensor `{name}` is not finite: it holds {what} at index {}", at + index),
        };
        let path = self.files[stored.file].path();
        Err(Error::checkpoint(path, format!("{why}; no run goes on from it, and nothing is made of it")))
    }

    /// Checks that the files match their checksums, and that every tensor was taken. If a tensor has not been taken, the files belong to
    /// another model.
    ///
    /// # Errors
    /// Returns [`Error::Checkpoint`], which names a damaged file, or the first tensor that was not taken.
    pub fn finish(mut self) -> Result<()> {
        self.check()?;
        match self.tensors.keys().next() {
            None => Ok(()),
            Some(name) => {
                let why =
                    format!("has {} tensors that the model lacks, such as `{name}`", self.tensors.len());
                Err(Error::checkpoint(&self.path, why))
            }
        }
    }

    /// Like [`Tensors::finish`], but ignores remaining tensors for which `passed_over` is true, and the scales of these tensors.
    ///
    /// # Errors
    /// The errors of [`Tensors::finish`].
    pub(crate) fn finish_but(mut self, passed_over: impl Fn(&str) -> bool) -> Result<()> {
        self.tensors.retain(|name, _| !passed_over(name.strip_suffix(SCALE_SUFFIX).unwrap_or(name)));
        self.finish()
    }

    /// Like [`Tensors::finish`], but ignores tensors that have not been taken.
    ///
    /// # Errors
    /// Returns [`Error::Checkpoint`], which names the damaged file.
    pub fn finish_with_others(mut self) -> Result<()> {
        self.check()
    }

    /// Waits until the background thread has verified the checksums.
    fn check(&mut self) -> Result<()> {
        match self.checked.take().map(JoinHandle::join) {
            Some(Err(panic)) => std::panic::resume_unwind(panic),
            Some(Ok(checked)) => checked,
            None => Ok(()),
        }
    }
}

/// Returns an error, with advice on conversion, for a folder whose weights have another format than safetensors.
fn require_safetensors(dir: &Path) -> Result<()> {
    const KINDS: [&str; 7] = ["bin", "pt", "pth", "ckpt", "gguf", "h5", "msgpack"];
    // Only files with these names contain weights; other files, such as those of optimizers, do not.
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

/// The header of a safetensors file, and the offset of the file's data.
fn read_header(file: &OpenFile) -> Result<(Metadata, u64)> {
    let damaged = |why: String| Error::checkpoint(file.path(), format!("is damaged: {why}"));
    let mut len = [0; size_of::<u64>()];
    file.read_exact_at(&mut len, 0)?;
    let len = u64::from_le_bytes(len);
    if len > LONGEST_HEADER {
        return Err(damaged(format!("a header of {len} bytes, {LONGEST_HEADER} at most are expected")));
    }
    // A truncated header is not refused here, because it fails to parse.
    let there = len.min(file.len()?.saturating_sub(size_of::<u64>() as u64));
    let mut text = vec![0; there as usize];
    file.read_exact_at(&mut text, size_of::<u64>() as u64)?;
    let metadata = serde_json::from_slice(&text).map_err(|e| damaged(e.to_string()))?;
    Ok((metadata, size_of::<u64>() as u64 + len))
}
