//! Files of a checkpoint: synced writes, checksums, and tensors in safetensors files.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use safetensors::tensor::Dtype;
use sha2::{Digest, Sha256};

use super::header::{header, little_endian, metadata};
use super::state::FileEntry;
use crate::error::{Error, Result};
use crate::fault::{Point, reach};
use crate::files::{append, hexadecimal, open_to_read, read_full_at, sha256_hex, sha256_of_file};

/// Name, shape and type of a tensor whose values are stored in row-major order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorSpec {
    /// The tensor's name in the file. The name of a weight follows the naming convention of the model's family, such as Llama.
    pub name: String,
    /// The tensor's shape, with the slowest dimension first.
    pub shape: Vec<usize>,
    /// The data type of the tensor's values, which is F32 in a checkpoint.
    pub dtype: Dtype,
}

impl TensorSpec {
    /// A tensor of F32.
    #[must_use]
    pub fn f32(name: impl Into<String>, shape: impl Into<Vec<usize>>) -> Self {
        Self { name: name.into(), shape: shape.into(), dtype: Dtype::F32 }
    }

    /// Number of bytes of the tensor's values.
    #[must_use]
    pub fn num_bytes(&self) -> usize {
        self.num_values().saturating_mul(self.dtype.bitsize()) / 8
    }

    /// Number of values.
    pub fn num_values(&self) -> usize {
        self.shape.iter().product()
    }
}

/// The header of a safetensors file with these tensors, which must be sorted by name.
fn checked_header(path: &Path, tensors: &[TensorSpec]) -> Result<Vec<u8>> {
    if let Some(pair) = tensors.windows(2).find(|pair| pair[0].name >= pair[1].name) {
        let why = match pair[0].name == pair[1].name {
            true => format!("two tensors are called `{}`", pair[0].name),
            false => format!("tensor `{}` comes before `{}`", pair[0].name, pair[1].name),
        };
        return Err(Error::checkpoint(path, why));
    }
    let tensors = tensors.iter().map(|tensor| (tensor.name.as_str(), tensor.dtype, tensor.shape.as_slice()));
    header(&metadata(), tensors).map_err(|e| Error::checkpoint(path, e.to_string()))
}

/// Writes and syncs a file of these F32 tensors, which must be sorted by name. `next` supplies the tensors' values in order, in pieces of
/// any length.
pub(super) fn write_tensors<P: AsRef<[f32]>>(
    dir: &Path,
    name: &str,
    tensors: &[TensorSpec],
    next: &mut dyn FnMut() -> Result<P>,
) -> Result<FileEntry> {
    let path = dir.join(name);
    let header = checked_header(&path, tensors)?;
    let mut file = HashedFile::create(path)?;
    file.write(&header)?;
    reach(Point::FileBegun)?;
    let mut missing: usize = tensors.iter().map(TensorSpec::num_values).sum();
    while missing > 0 {
        let piece = next()?;
        let values = piece.as_ref();
        let Some(left) = missing.checked_sub(values.len()).filter(|_| !values.is_empty()) else {
            let why = format!("was given {} values where {missing} are missing", values.len());
            return Err(Error::checkpoint(&file.path, why));
        };
        file.write(&little_endian(values))?;
        missing = left;
    }
    file.finish(name)
}

/// A new file whose checksum is computed during the write.
struct HashedFile {
    path: PathBuf,
    file: File,
    bytes: u64,
    hash: Sha256,
}

impl HashedFile {
    fn create(path: PathBuf) -> Result<Self> {
        let file = File::create_new(&path).map_err(Error::io(&path))?;
        Ok(Self { path, file, bytes: 0, hash: Sha256::new() })
    }

    fn write(&mut self, content: &[u8]) -> Result<()> {
        append(&mut self.file, content).map_err(Error::io(&self.path))?;
        self.hash.update(content);
        self.bytes += content.len() as u64;
        Ok(())
    }

    /// Syncs the file to disk.
    fn finish(self, name: &str) -> Result<FileEntry> {
        self.file.sync_all().map_err(Error::io(&self.path))?;
        Ok(FileEntry { name: name.to_owned(), bytes: self.bytes, sha256: hexadecimal(&self.hash.finalize()) })
    }
}

/// Writes and syncs a new file.
pub(super) fn write_synced(dir: &Path, name: &str, content: &[u8]) -> Result<FileEntry> {
    let mut file = HashedFile::create(dir.join(name))?;
    file.write(content)?;
    file.finish(name)
}

/// An open file of a checkpoint. The file's contents stay readable even if the run removes the checkpoint. Reads are positional, so several
/// threads can read at once.
#[derive(Debug, Clone)]
pub(super) struct OpenFile {
    path: PathBuf,
    file: Arc<File>,
}

impl OpenFile {
    pub fn open(dir: &Path, entry: &FileEntry) -> Result<Self> {
        Self::named(dir, &entry.name)
    }

    /// Opens the file `name` in the directory `dir`.
    pub fn named(dir: &Path, name: &str) -> Result<Self> {
        let path = dir.join(name);
        match open_to_read(&path) {
            Ok(file) => Ok(Self { path, file: Arc::new(file) }),
            // The file is not damaged: the process has reached the limit of open files.
            Err(source) if is_out_of_files(&source) => Err(Error::Io { path, source }),
            Err(source) => Err(unreadable(&path, source)),
        }
    }

    /// The file's length in bytes.
    pub fn len(&self) -> Result<u64> {
        Ok(self.file.metadata().map_err(|e| unreadable(&self.path, e))?.len())
    }

    /// Fills `to` with the file's bytes from position `at` on.
    pub fn read_exact_at(&self, to: &mut [u8], at: u64) -> Result<()> {
        match read_full_at(&self.file, to, at) {
            Ok(read) if read == to.len() => Ok(()),
            Ok(_) => Err(unreadable(&self.path, std::io::ErrorKind::UnexpectedEof.into())),
            Err(error) => Err(unreadable(&self.path, error)),
        }
    }

    /// The file's path.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Checks the file against the checksum in `entry`, piece by piece.
    pub fn verify(&self, entry: &FileEntry) -> Result<()> {
        check_len(&self.path, self.len()?, entry)?;
        let sha256 = sha256_of_file(&self.file).map_err(|e| unreadable(&self.path, e))?;
        check_hash(&self.path, &sha256, entry)
    }

    /// Reads the file and checks its contents against the checksum in `entry`.
    pub fn read_checked(&self, entry: &FileEntry) -> Result<Vec<u8>> {
        let bytes = self.len()?;
        check_len(&self.path, bytes, entry)?;
        // The file's length was checked above.
        let mut content = vec![0; bytes as usize];
        self.read_exact_at(&mut content, 0)?;
        check_hash(&self.path, &sha256_hex(&content), entry)?;
        Ok(content)
    }
}

/// The error of a file that cannot be read.
pub(super) fn unreadable(path: &Path, e: std::io::Error) -> Error {
    Error::checkpoint(path, format!("cannot be read: {e}"))
}

/// Whether the error says that the process or the system has reached its limit of open files.
fn is_out_of_files(error: &std::io::Error) -> bool {
    const ENFILE: i32 = 23;
    const EMFILE: i32 = 24;
    cfg!(unix) && matches!(error.raw_os_error(), Some(ENFILE | EMFILE))
}

fn check_len(path: &Path, bytes: u64, entry: &FileEntry) -> Result<()> {
    if bytes == entry.bytes {
        return Ok(());
    }
    let how = if bytes < entry.bytes { "truncated" } else { "altered" };
    Err(Error::checkpoint(path, format!("is {how}: {bytes} bytes, expected {}", entry.bytes)))
}

fn check_hash(path: &Path, sha256: &str, entry: &FileEntry) -> Result<()> {
    match sha256 == entry.sha256 {
        true => Ok(()),
        false => Err(Error::checkpoint(path, "is altered: it does not match its SHA-256")),
    }
}

/// Syncs a directory's entries (creations, renames) to disk.
pub(super) fn sync_dir(dir: &Path) -> Result<()> {
    crate::files::sync_dir(dir).map_err(Error::io(dir))
}

#[cfg(test)]
mod tests {
    use super::*;
    use safetensors::tensor::TensorView;

    #[test]
    fn what_is_written_in_pieces_is_what_is_encoded_at_once() {
        let dir = tempfile::tempdir().unwrap();
        let values: Vec<f32> = (0..77).map(|i| (i as f32).sqrt() - 3.0).collect();
        let shapes: [(&str, &[usize], usize); 5] = [
            ("a.10.\"w\"", &[2, 3], 6),
            ("a.2.w", &[], 1),
            ("a.2.w.exp_avg", &[7, 0], 0),
            ("a.2.w.exp_avg_sq", &[10, 7], 70),
            ("ä", &[0], 0),
        ];
        let (mut at, mut views, mut specs) = (0, Vec::new(), Vec::new());
        for (name, shape, len) in shapes {
            let data = bytemuck::cast_slice(&values[at..][..len]);
            views.push((name, TensorView::new(Dtype::F32, shape.to_vec(), data).unwrap()));
            specs.push(TensorSpec::f32(name, shape));
            at += len;
        }
        let whole = safetensors::serialize(views, Some(metadata().into_iter().collect())).unwrap();
        for (i, piece) in [1, 2, 10, 76, 77].into_iter().enumerate() {
            let (name, mut pieces) = (format!("{i}"), values.chunks(piece));
            let mut next = || Ok(pieces.next().unwrap().to_vec());
            let entry = write_tensors(dir.path(), &name, &specs, &mut next).unwrap();
            assert!(std::fs::read(dir.path().join(&name)).unwrap() == whole, "pieces of {piece}");
            assert_eq!((entry.bytes, entry.sha256.as_str()), (whole.len() as u64, &*sha256_hex(&whole)));
            OpenFile::open(dir.path(), &entry).unwrap().verify(&entry).unwrap();
        }
        let mut next = || Ok(vec![0.0; 50]);
        let error = write_tensors(dir.path(), "more", &specs, &mut next).unwrap_err().to_string();
        assert!(error.contains("was given 50 values where 27 are missing"), "{error}");
        specs.swap(1, 2);
        let error = write_tensors(dir.path(), "order", &specs, &mut next).unwrap_err().to_string();
        assert!(error.contains("tensor `a.2.w.exp_avg` comes before `a.2.w`"), "{error}");
    }
}
