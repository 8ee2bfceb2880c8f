//! Random access to the bytes of a file. Files are read by position and not mapped. If another program truncates a file, the result is an
//! error that names the file; with a mapping the process would crash.

use std::borrow::Cow;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use super::fingerprint::Stamp;
use crate::error::{Error, Result};
use crate::files;

/// Bytes with random access.
#[derive(Debug)]
pub(super) enum Region {
    /// The bytes are in a file.
    StoredFile(StoredFile),
    /// The bytes are in memory: data from a pipe, or no bytes.
    Held(Arc<[u8]>),
}

/// An open file, and the stamp that detects changes.
#[derive(Debug)]
pub(super) struct StoredFile {
    path: PathBuf,
    file: File,
    len: usize,
    stamp: Mutex<Stamp>,
    /// SHA-256 of the whole file, if known.
    sha256: Option<String>,
    blocks: Mutex<Vec<Block>>,
}

/// A block of a file, cached for reads of single numbers.
#[derive(Debug)]
struct Block {
    number: usize,
    bytes: Vec<u8>,
}

const BLOCK_BYTES: usize = 4096;

/// Number of cached blocks. A few blocks suffice, because numbers are read at a few places that move forward.
const MOST_BLOCKS: usize = 8;

impl Region {
    /// Opens a file.
    ///
    /// # Errors
    /// Returns [`Error::Data`] if the file cannot be read.
    pub fn open(path: &Path) -> Result<Self> {
        let wrong = |e: io::Error| Error::data(path, format!("cannot be read: {e}"));
        let file = files::open_to_read(path).map_err(wrong)?;
        let about = file.metadata().map_err(wrong)?;
        let len = usize::try_from(about.len())
            .map_err(|_| Error::data(path, "is longer than this machine can address"))?;
        Ok(Self::StoredFile(StoredFile {
            path: path.to_owned(),
            file,
            len,
            stamp: Mutex::new(Stamp::of_metadata(&about)),
            sha256: None,
            blocks: Mutex::default(),
        }))
    }

    /// Records the SHA-256 of the region's bytes, which were hashed when the file had the stamp `stamp`. If the stamp changes later, the
    /// file is still accepted if its bytes have the same hash.
    ///
    /// # Errors
    /// Returns [`Error::Data`] if the stamp has already changed.
    pub fn known(mut self, stamp: &Stamp, sha256: &str) -> Result<Self> {
        if let Self::StoredFile(stored) = &mut self {
            let is_same = *stored.stamp.get_mut().unwrap_or_else(PoisonError::into_inner) == *stamp;
            if !is_same {
                return Err(Error::data(&stored.path, "was changed while it was read: begin again"));
            }
            stored.sha256 = Some(sha256.to_owned());
        }
        Ok(self)
    }

    /// Number of bytes.
    pub fn len(&self) -> usize {
        match self {
            Self::StoredFile(stored) => stored.len,
            Self::Held(bytes) => bytes.len(),
        }
    }

    /// The bytes of the region in the range `range`.
    ///
    /// # Errors
    /// Returns [`Error::Data`] if the file cannot be read, or has been truncated.
    pub fn read(&self, range: Range<usize>) -> Result<Cow<'_, [u8]>> {
        match self {
            Self::StoredFile(stored) => {
                let mut bytes = vec![0; range.len()];
                stored.fill(&mut bytes, range.start)?;
                Ok(bytes.into())
            }
            Self::Held(bytes) => bytes
                .get(range)
                .map(Cow::from)
                .ok_or_else(|| Error::data(Path::new("<pipe>"), format!("ends at byte {}", bytes.len()))),
        }
    }

    /// The `N` bytes of the number that begins at byte `place`.
    ///
    /// # Errors
    /// The errors of [`Region::read`].
    pub fn number<const N: usize>(&self, place: usize) -> Result<[u8; N]> {
        let mut number = [0; N];
        match self {
            Self::StoredFile(stored) if place / BLOCK_BYTES == (place + N - 1) / BLOCK_BYTES => {
                stored.of_block(place / BLOCK_BYTES, place % BLOCK_BYTES, &mut number)?;
            }
            _ => number.copy_from_slice(&self.read(place..place + N)?),
        }
        Ok(number)
    }

    /// The little-endian `u64` that begins at byte `place`.
    ///
    /// # Errors
    /// The errors of [`Region::read`].
    pub fn u64_at(&self, place: usize) -> Result<u64> {
        self.number(place).map(u64::from_le_bytes)
    }

    /// Checks that the file has not changed since it was opened.
    ///
    /// # Errors
    /// Returns [`Error::Data`] if the file has changed.
    pub fn require_unchanged(&self) -> Result<()> {
        match self {
            Self::StoredFile(stored) => stored.require_unchanged(),
            Self::Held(_) => Ok(()),
        }
    }
}

impl StoredFile {
    fn unread(&self, error: &io::Error) -> Error {
        Error::data(&self.path, format!("cannot be read: {error}"))
    }

    fn changed(&self, size: u64) -> Error {
        let how = match size.cmp(&(self.len as u64)) {
            std::cmp::Ordering::Less => format!("was cut to {size} of {} bytes", self.len),
            std::cmp::Ordering::Equal => "was changed".to_owned(),
            std::cmp::Ordering::Greater => format!("has grown from {} to {size} bytes", self.len),
        };
        Error::data(&self.path, format!("{how} while it was in use; put it back as it was, or begin again"))
    }

    fn fill(&self, to: &mut [u8], at: usize) -> Result<()> {
        let read = files::read_full_at(&self.file, to, at as u64).map_err(|e| self.unread(&e))?;
        if read == to.len() {
            return Ok(());
        }
        match self.file.metadata() {
            Ok(about) if about.len() != self.len as u64 => Err(self.changed(about.len())),
            _ => Err(Error::data(&self.path, format!("ends at byte {}", at + read))),
        }
    }

    /// Copies a number out of a block.
    fn of_block(&self, number: usize, place: usize, to: &mut [u8]) -> Result<()> {
        let mut blocks = self.blocks.lock().unwrap_or_else(PoisonError::into_inner);
        let found = match blocks.iter().position(|block| block.number == number) {
            Some(found) => found,
            None => {
                let start = number * BLOCK_BYTES;
                let mut bytes = vec![0; BLOCK_BYTES.min(self.len.saturating_sub(start))];
                self.fill(&mut bytes, start)?;
                blocks.truncate(MOST_BLOCKS - 1);
                blocks.insert(0, Block { number, bytes });
                0
            }
        };
        // The block moves to the front, so that the least recently used block is evicted first.
        blocks[..=found].rotate_right(1);
        let bytes = blocks[0].bytes.get(place..place + to.len());
        let bytes = bytes.ok_or_else(|| Error::data(&self.path, format!("ends at byte {}", self.len)))?;
        to.copy_from_slice(bytes);
        Ok(())
    }

    fn require_unchanged(&self) -> Result<()> {
        let now = Stamp::of_metadata(&self.file.metadata().map_err(|e| self.unread(&e))?);
        let mut stamp = self.stamp.lock().unwrap_or_else(PoisonError::into_inner);
        if *stamp == now {
            return Ok(());
        }
        // A new name, a new owner, or a removed link changes the stamp too. The whole file is hashed again only if the stamp has changed.
        if let Some(sha256) = &self.sha256
            && now.size() == self.len as u64
            && *sha256 == files::sha256_of_file(&self.file).map_err(|e| self.unread(&e))?
        {
            *stamp = now;
            return Ok(());
        }
        Err(self.changed(now.size()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Numbers are read at every place, within blocks and across block boundaries, from files and from memory.
    #[test]
    fn numbers_are_read_across_blocks() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("numbers");
        let bytes: Vec<u8> = (0..12 * BLOCK_BYTES + 5).map(|i| (i * 7 + i / 251) as u8).collect();
        std::fs::write(&path, &bytes).unwrap();
        let (stored, held) = (Region::open(&path).unwrap(), Region::Held(bytes.into()));
        let len = held.len();
        for place in (0..len - 8).step_by(101).chain([BLOCK_BYTES - 3, 0, len - 8]) {
            assert_eq!(stored.u64_at(place).unwrap(), held.u64_at(place).unwrap(), "{place}");
        }
        for region in [&stored, &held] {
            assert!(region.u64_at(len - 7).unwrap_err().to_string().contains("ends at byte"));
            assert!(region.u64_at(len + BLOCK_BYTES).unwrap_err().to_string().contains("ends at byte"));
        }
    }
}
