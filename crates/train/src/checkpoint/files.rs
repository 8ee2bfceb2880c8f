//! Files of a checkpoint: synced writing, checksums, tensors as safetensors.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};

use safetensors::tensor::{Dtype, SafeTensors, TensorView};
use sha2::{Digest, Sha256};

use super::state::FileEntry;
use crate::error::{Error, Result};

/// A named logical tensor to be written: F32, row-major.
#[derive(Debug, Clone)]
pub struct TensorRef<'a> {
    /// Canonical name; for weights the one Hugging Face's `transformers` uses.
    pub name: String,
    /// Shape, the slowest dimension first.
    pub shape: Vec<usize>,
    /// The values, as many as the shape's product.
    pub data: &'a [f32],
}

/// Tensors read from a checkpoint; each can be taken once, and at the end none may be left.
#[derive(Debug)]
pub struct Tensors {
    path: PathBuf,
    tensors: BTreeMap<String, (Vec<usize>, Vec<f32>)>,
}

impl Tensors {
    /// Names and shapes of the tensors not yet taken, in order of their names.
    pub fn shapes(&self) -> impl Iterator<Item = (&str, &[usize])> {
        self.tensors.iter().map(|(name, (shape, _))| (name.as_str(), shape.as_slice()))
    }

    /// Takes the tensor `name`, which must have this shape.
    ///
    /// # Errors
    /// [`Error::Checkpoint`] naming the tensor where it is missing or has another shape.
    pub fn take(&mut self, name: &str, shape: &[usize]) -> Result<Vec<f32>> {
        match self.tensors.get(name) {
            None => Err(Error::checkpoint(&self.path, format!("has no tensor `{name}`"))),
            Some((got, _)) if got != shape => {
                let why = format!("tensor `{name}` has shape {got:?}, expected {shape:?}");
                Err(Error::checkpoint(&self.path, why))
            }
            // Just found.
            Some(_) => Ok(self.tensors.remove(name).map(|(_, data)| data).unwrap_or_default()),
        }
    }

    /// Checks that every tensor was taken: one that was not belongs to another model.
    ///
    /// # Errors
    /// [`Error::Checkpoint`] naming the first of the others.
    pub fn finish(self) -> Result<()> {
        match self.tensors.keys().next() {
            None => Ok(()),
            Some(name) => {
                let why =
                    format!("has {} tensors that the model lacks, such as `{name}`", self.tensors.len());
                Err(Error::checkpoint(&self.path, why))
            }
        }
    }

    /// Reads the content of a safetensors file of F32 tensors; `path` is for messages.
    pub(super) fn decode(path: &Path, bytes: &[u8]) -> Result<Self> {
        let damaged = |e: safetensors::SafeTensorError| Error::checkpoint(path, format!("is damaged: {e}"));
        let file = SafeTensors::deserialize(bytes).map_err(damaged)?;
        let mut tensors = BTreeMap::new();
        for (name, view) in file.iter() {
            if view.dtype() != Dtype::F32 {
                let why = format!("tensor `{name}` is {:?}, expected F32", view.dtype());
                return Err(Error::checkpoint(path, why));
            }
            // Not a cast: the file's bytes need not be aligned in memory, and are little-endian everywhere.
            let values = view.data().chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]]));
            tensors.insert(name.to_owned(), (view.shape().to_vec(), values.collect()));
        }
        Ok(Self { path: path.to_path_buf(), tensors })
    }
}

/// The bytes of a safetensors file. Equal tensors give equal bytes, in whatever order they come. `path` is for messages.
///
/// # Errors
/// [`Error::Checkpoint`] for two tensors of one name, or values that are not as many as the shape says.
pub fn encode(path: &Path, tensors: &[TensorRef<'_>]) -> Result<Vec<u8>> {
    let mut names = BTreeSet::new();
    let mut views = Vec::with_capacity(tensors.len());
    for tensor in tensors {
        let TensorRef { name, shape, data } = tensor;
        if !names.insert(name) {
            return Err(Error::checkpoint(path, format!("two tensors are called `{name}`")));
        }
        if shape.iter().product::<usize>() != data.len() {
            let why = format!("tensor `{name}` has {} values, expected shape {shape:?}", data.len());
            return Err(Error::checkpoint(path, why));
        }
        let view = TensorView::new(Dtype::F32, shape.clone(), bytemuck::cast_slice(data));
        views.push((name, view.map_err(|e| Error::checkpoint(path, e.to_string()))?));
    }
    // What readers of the Hugging Face family ask for.
    let metadata = [("format".to_owned(), "pt".to_owned())].into();
    safetensors::serialize(views, Some(metadata)).map_err(|e| Error::checkpoint(path, e.to_string()))
}

/// Writes a new file and waits until it is on the disk.
pub(super) fn write_synced(dir: &Path, name: &str, content: &[u8]) -> Result<FileEntry> {
    let path = dir.join(name);
    let write = || {
        let mut file = File::create_new(&path)?;
        file.write_all(content)?;
        file.sync_all()
    };
    write().map_err(Error::io(&path))?;
    Ok(FileEntry { name: name.to_owned(), bytes: content.len() as u64, sha256: sha256_hex(content) })
}

/// Reads a file and compares it with what was written.
pub(super) fn read_checked(dir: &Path, entry: &FileEntry) -> Result<Vec<u8>> {
    let path = dir.join(&entry.name);
    let content = fs::read(&path).map_err(|e| Error::checkpoint(&path, format!("cannot be read: {e}")))?;
    if content.len() as u64 != entry.bytes {
        let how = if (content.len() as u64) < entry.bytes { "truncated" } else { "altered" };
        let why = format!("is {how}: {} bytes, expected {}", content.len(), entry.bytes);
        return Err(Error::checkpoint(&path, why));
    }
    if sha256_hex(&content) != entry.sha256 {
        return Err(Error::checkpoint(&path, "is altered: it does not match its SHA-256"));
    }
    Ok(content)
}

/// Waits until a directory's entries (creations, renames) are on the disk.
pub(super) fn sync_dir(dir: &Path) -> Result<()> {
    // Elsewhere a directory cannot be opened as a file, and renames are written through.
    if cfg!(unix) {
        File::open(dir).and_then(|dir| dir.sync_all()).map_err(Error::io(dir))?;
    }
    Ok(())
}

/// SHA-256, hexadecimal.
pub(crate) fn sha256_hex(content: &[u8]) -> String {
    Sha256::digest(content).iter().map(|byte| format!("{byte:02x}")).collect()
}
