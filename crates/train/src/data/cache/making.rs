//! Builds a cache: appends to the cache's files, and records the progress after each part.

use std::fs::{self, File};
use std::io::Read;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use super::{FILES, LeftOut, MANIFEST, Manifest, VERSION, bytes_of};
use crate::data::encode::Encoded;
use crate::data::reading::{BadRow, ReadTo, Reading, Sink, Watch};
use crate::data::sealed;
use crate::data::stream::width_of;
use crate::error::{Error, Result};
use crate::fault::{Point, reach};
use crate::files;
use crate::files::hexadecimal;

const PROGRESS: &str = "progress.json";

/// Number of batches and bytes of a part. A killed process loses at most the work on one part.
const PART_BATCHES: usize = 8;
const PART_BYTES: u64 = 64 << 20;

/// Progress of an unfinished cache. Bytes in the cache's files beyond this progress are ignored.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
struct Progress {
    version: u32,
    place: ReadTo,
    tokens: u64,
    documents: u64,
    unlearnt: u64,
    /// SHA-256 of each file up to this progress. The hashes detect changes by other programs.
    files: [String; 3],
    left_out: LeftOut,
}

impl Progress {
    /// The progress of a cache that has no contents yet.
    fn begin() -> Self {
        let files = [(); 3].map(|()| hexadecimal(&Sha256::new().finalize()));
        Self { version: VERSION, files, ..Self::default() }
    }

    /// Number of bytes of each file if an id has `width` bytes.
    fn bytes(&self, width: usize) -> [u64; 3] {
        bytes_of([self.tokens, self.documents, self.unlearnt], width)
    }
}

/// The folders in which a cache is built.
pub(super) struct Making<'a> {
    /// Folder in which the cache is built.
    pub dir: &'a Path,
    /// Folder to which the cache is moved when it is complete.
    pub place: &'a Path,
    pub key: &'a str,
    /// Whether a complete cache already exists in the folder `place`.
    pub is_there: &'a dyn Fn() -> Result<bool>,
}

/// A file that is being written, and the SHA-256 of the file's contents.
struct Part {
    path: PathBuf,
    file: File,
    hash: Sha256,
}

impl Part {
    /// Opens a file and hashes its first `bytes` bytes. Returns whether these bytes exist and have this SHA-256.
    fn open(path: PathBuf, bytes: u64, sha256: &str) -> Result<(Self, bool)> {
        let file =
            File::options().create(true).read(true).append(true).open(&path).map_err(Error::io(&path))?;
        let mut hash = Sha256::new();
        let mut taken = (&file).take(bytes);
        let read = std::io::copy(&mut taken, &mut hash).map_err(Error::io(&path))?;
        let is_there = read == bytes && hexadecimal(&hash.clone().finalize()) == sha256;
        Ok((Self { path, file, hash }, is_there))
    }

    fn append(&mut self, bytes: &[u8]) -> Result<()> {
        files::append(&mut self.file, bytes).map_err(Error::io(&self.path))?;
        self.hash.update(bytes);
        Ok(())
    }

    /// Syncs the file to disk and returns the SHA-256 of the file's contents.
    fn keep(&self) -> Result<String> {
        self.file.sync_data().map_err(Error::io(&self.path))?;
        Ok(hexadecimal(&self.hash.clone().finalize()))
    }
}

/// A cache that is being built.
struct Maker<'a> {
    dir: &'a Path,
    width: usize,
    /// The cache's files, in the order of [`FILES`].
    parts: [Part; 3],
    progress: Progress,
    /// Number of batches and bytes since the end of the last part.
    batches: usize,
    bytes: u64,
}

/// Builds a cache from the output of `reading` in the folder `making.dir`, and moves the cache to its final place. Resumes the work of a
/// killed process.
///
/// # Errors
/// [`Error::Data`] if files cannot be read; [`Error::Io`] if the cache cannot be written. Completed parts stay on disk.
pub(super) fn make(
    reading: &Reading,
    making: &Making<'_>,
    is_unchanged: &mut dyn FnMut() -> Result<()>,
    watch: &mut dyn Watch,
) -> Result<()> {
    let Making { dir, place, key, is_there } = *making;
    let mut maker = Maker::begin(dir, width_of(reading.encoder.vocab_size))?;
    reading.read(maker.progress.place, &mut maker, watch)?;
    maker.keep()?;
    is_unchanged()?;
    let (width, progress) = (maker.width, maker.progress);
    if progress.tokens == 0 {
        let first = reading.files.first().map(PathBuf::as_path).unwrap_or(dir);
        let why = match progress.left_out.first.first() {
            None => "is empty: it has no token".to_owned(),
            Some(bad) => format!(
                "has no token: all of its {} rows were left out, the first for: {bad}",
                progress.left_out.rows
            ),
        };
        return Err(Error::data(first, why));
    }
    let Progress { tokens, documents, unlearnt, files, left_out, .. } = progress;
    let key = key.to_owned();
    let manifest = Manifest { version: VERSION, key, width, tokens, documents, unlearnt, files, left_out };
    let text = sealed::seal(manifest).map_err(|e| Error::data(dir, e.to_string()))?;
    write(&dir.join(MANIFEST), text)?;
    files::sync_dir(dir).map_err(Error::io(dir))?;
    reach(Point::CacheWhole)?;
    if let Err(error) = fs::rename(dir, place) {
        if is_there()? {
            // If the file system has no locks, another process can finish first.
            fs::remove_dir_all(dir).map_err(Error::io(dir))?;
        } else {
            // There is no cache at this place, or a damaged cache.
            files::remove(place).map_err(Error::io(place))?;
            fs::rename(dir, place).map_err(|_| Error::io(place)(error))?;
        }
    }
    let _ = fs::remove_file(place.join(PROGRESS));
    let folder = place.parent().unwrap_or(place);
    files::sync_dir(folder).map_err(Error::io(folder))
}

fn write(path: &Path, text: String) -> Result<()> {
    files::write_whole(path, text).map_err(Error::io(path))
}

impl<'a> Maker<'a> {
    /// Starts a cache, or resumes from the recorded progress.
    fn begin(dir: &'a Path, width: usize) -> Result<Self> {
        fs::create_dir_all(dir).map_err(Error::io(dir))?;
        let known = files::read_text(&dir.join(PROGRESS), files::MOST_TEXT).ok();
        let known: Option<Progress> = known.and_then(|text| sealed::open(&text));
        let known = known.filter(|progress| progress.version == VERSION).unwrap_or_else(Progress::begin);
        let open = |progress: &Progress| {
            let parts = FILES.into_iter().zip(progress.bytes(width)).zip(&progress.files);
            let parts = parts.map(|((name, bytes), sha256)| Part::open(dir.join(name), bytes, sha256));
            parts.collect::<Result<Vec<(Part, bool)>>>()
        };
        let (mut opened, mut progress) = (open(&known)?, known);
        if !opened.iter().all(|(_, is_there)| *is_there) {
            progress = Progress::begin();
            opened = open(&progress)?;
        }
        for ((part, _), bytes) in opened.iter().zip(progress.bytes(width)) {
            part.file.set_len(bytes).map_err(Error::io(&part.path))?;
        }
        let parts = opened.into_iter().map(|(part, _)| part).collect::<Vec<_>>();
        // There is one part for each name in `FILES`.
        let parts = parts.try_into().map_err(|_| Error::data(dir, "has other files than a cache"))?;
        Ok(Self { dir, width, parts, progress, batches: 0, bytes: 0 })
    }

    /// Syncs the data received so far to disk and records this state as progress.
    fn keep(&mut self) -> Result<()> {
        for (part, sha256) in self.parts.iter().zip(&mut self.progress.files) {
            *sha256 = part.keep()?;
        }
        let text = sealed::seal(&self.progress).map_err(|e| Error::data(self.dir, e.to_string()))?;
        write(&self.dir.join(PROGRESS), text)?;
        (self.batches, self.bytes) = (0, 0);
        reach(Point::CacheKept)
    }
}

impl Sink for Maker<'_> {
    fn take(&mut self, encoded: Vec<Encoded>, bad: Vec<BadRow>, place: ReadTo) -> Result<()> {
        let (mut ids, mut documents, mut unlearnt) = (Vec::new(), Vec::new(), Vec::new());
        for piece in encoded {
            let first = self.progress.tokens;
            if piece.ids.is_empty() {
                self.progress.left_out.empty += u64::from(piece.begins);
                continue;
            }
            if piece.begins {
                documents.extend(first.to_le_bytes());
                self.progress.documents += 1;
            }
            for run in &piece.unlearnt {
                unlearnt.extend([run.start, run.end].map(|at| (first + at as u64).to_le_bytes()).concat());
                self.progress.unlearnt += 1;
            }
            match self.width {
                1 => ids.extend(piece.ids.iter().map(|id| *id as u8)),
                2 => ids.extend(piece.ids.iter().flat_map(|id| (*id as u16).to_le_bytes())),
                _ => ids.extend(piece.ids.iter().flat_map(|id| id.to_le_bytes())),
            }
            self.progress.tokens += piece.ids.len() as u64;
        }
        for (part, bytes) in self.parts.iter_mut().zip([&ids, &documents, &unlearnt]) {
            part.append(bytes)?;
        }
        self.progress.left_out.add(bad);
        self.progress.place = place;
        self.batches += 1;
        self.bytes += ids.len() as u64;
        if self.batches >= PART_BATCHES || self.bytes >= PART_BYTES { self.keep() } else { Ok(()) }
    }
}
