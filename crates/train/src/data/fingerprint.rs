//! SHA-256 of files. The hashes are remembered, so that an unchanged file is not read again.

use std::fs::{self, File, Metadata};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};

use super::sealed;
use crate::error::{Error, Result};
use crate::files;
use crate::files::sha256_hex;

/// Files below this size are hashed again each time, because this takes almost no time and leaves nothing on disk.
const REMEMBERED_BYTES: u64 = 16 << 20;

/// The folder for remembered hashes; `None` if `bytes`, the total size of the files, is too small to remember hashes.
pub(super) fn remembering(caches: Option<&Path>, bytes: u64) -> Option<&Path> {
    caches.filter(|_| bytes >= REMEMBERED_BYTES)
}

/// A file that changed more recently than this may change again without a change of its time stamp, because time stamps have a limited
/// resolution.
const SETTLED: Duration = Duration::from_secs(2);

/// Metadata that identifies a version of a file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Stamp {
    size: u64,
    /// Time of the last modification, in nanoseconds since 1970.
    modified: u128,
    /// Inode and time of the last change of any kind, if the operating system has them.
    inode: u64,
    changed: i128,
}

impl Stamp {
    /// The stamp of a file: size, modification time and other metadata that identify a version of the file.
    ///
    /// # Errors
    /// Returns [`Error::Data`] if the operating system returns no metadata of the file.
    pub fn of(path: &Path) -> Result<Self> {
        let about = fs::metadata(path).map_err(|e| Error::data(path, format!("cannot be read: {e}")))?;
        Ok(Self::of_metadata(&about))
    }

    /// Computes the stamp from metadata that was already read.
    pub fn of_metadata(about: &Metadata) -> Self {
        let modified = about.modified().ok().and_then(|time| time.duration_since(UNIX_EPOCH).ok());
        let (inode, changed) = identity(about);
        Self { size: about.len(), modified: modified.unwrap_or_default().as_nanos(), inode, changed }
    }

    /// Size of the file in bytes.
    pub fn size(&self) -> u64 {
        self.size
    }

    fn is_settled(&self) -> bool {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        self.modified + SETTLED.as_nanos() < now.as_nanos()
    }
}

#[cfg(unix)]
fn identity(about: &Metadata) -> (u64, i128) {
    use std::os::unix::fs::MetadataExt;
    (about.ino(), i128::from(about.ctime()) * 1_000_000_000 + i128::from(about.ctime_nsec()))
}

#[cfg(not(unix))]
fn identity(_: &Metadata) -> (u64, i128) {
    (0, 0)
}

/// The remembered hash of a file.
#[derive(Serialize, Deserialize)]
struct Remembered {
    path: PathBuf,
    stamp: Stamp,
    sha256: String,
}

/// SHA-256 of a file, and the stamp of the file that was hashed. The hash is remembered in the folder of caches, if there is such a folder.
///
/// # Errors
/// [`Error::Data`] if the file cannot be read.
pub(super) fn sha256_of(path: &Path, caches: Option<&Path>) -> Result<(Stamp, String)> {
    let unread = |e: std::io::Error| Error::data(path, format!("cannot be read: {e}"));
    let stamp = Stamp::of(path)?;
    let place = caches.and_then(|caches| {
        let path = fs::canonicalize(path).ok()?;
        let name = sha256_hex(path.as_os_str().as_encoded_bytes());
        Some((caches.join("files").join(format!("{name}.json")), path))
    });
    if let Some((place, path)) = &place
        && let Ok(text) = files::read_text(place, files::MOST_TEXT)
        && let Some(known) = sealed::open::<Remembered>(&text)
        && known.path == *path
        && known.stamp == stamp
    {
        return Ok((stamp, known.sha256));
    }
    let is_settled = stamp.is_settled();
    let sha256 = File::open(path).and_then(|file| files::sha256_of_file(&file)).map_err(unread)?;
    if let Some((place, path)) = place.filter(|_| is_settled)
        && let Ok(text) = sealed::seal(Remembered { path, stamp: stamp.clone(), sha256: sha256.clone() })
        && let Some(folder) = place.parent()
    {
        // If this write fails, the file is hashed again the next time.
        let _ = fs::create_dir_all(folder).and_then(|()| files::write_whole(&place, text));
    }
    Ok((stamp, sha256))
}
