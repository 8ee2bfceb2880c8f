//! Bytes of a file, mapped into memory where they can be.

use std::fs::File;
use std::ops::Deref;
use std::path::Path;
use std::sync::Arc;

use memmap2::Mmap;

use crate::error::{Error, Result};

/// Bytes that are read here and there.
#[derive(Debug)]
pub(super) enum Region {
    /// Those of a file.
    Mapped(Mmap),
    /// Those that came through a pipe, or none.
    Held(Arc<[u8]>),
}

impl Region {
    /// Maps a file. Somebody who cuts it short meanwhile ends the process (SIGBUS); somebody who writes to it changes what is read.
    ///
    /// # Errors
    /// [`Error::Data`] where it cannot be mapped.
    pub fn map(path: &Path) -> Result<Self> {
        let wrong = |e: std::io::Error| Error::data(path, format!("cannot be read: {e}"));
        let file = File::open(path).map_err(wrong)?;
        // A map of no bytes is refused by the system.
        if file.metadata().map_err(wrong)?.len() == 0 {
            return Ok(Self::Held(Arc::new([])));
        }
        // SAFETY: the bytes are only read, as plain bytes, of which every value is one. That another process may change the file is said
        // above: what is read then is wrong, or the process ends, as it does where any program's file is cut under its map.
        let map = unsafe { Mmap::map(&file) };
        map.map(Self::Mapped).map_err(wrong)
    }

    /// The number that the eight bytes at this place are; 0 beyond the end.
    pub fn u64_at(&self, place: usize) -> u64 {
        self.get(place..).and_then(|rest| rest.first_chunk()).map_or(0, |bytes| u64::from_le_bytes(*bytes))
    }
}

impl Deref for Region {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        match self {
            Self::Mapped(map) => map,
            Self::Held(bytes) => bytes,
        }
    }
}
