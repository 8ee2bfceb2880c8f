//! Finds the files of a path, a folder or a glob, and decompresses the bytes of a file.

use std::fs::{self, File};
use std::io::{self, BufRead, BufReader, Cursor, Read};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::packed::{Packing, unpacked};
use super::{Asked, KINDS};
use crate::error::{Error, Result};
use crate::files;

/// Number of bytes at the beginning of a file that decide its kind.
const HEAD_BYTES: usize = 64 << 10;

/// Buffer size of file readers.
const BUFFER_BYTES: usize = 256 << 10;

/// Largest number of bytes from a pipe that are kept in memory.
const MOST_PIPED: u64 = 1 << 38;

/// A data file.
#[derive(Debug, Clone)]
pub(in crate::data) struct DataFile {
    /// The file's path, as shown in messages to the user.
    pub path: PathBuf,
    /// The file's first bytes, after decompression.
    pub head: Vec<u8>,
    /// The file's compression.
    pub packing: Option<Packing>,
    /// The file's size on the disk, before decompression.
    pub size: u64,
    /// Counter of the bytes read. The reporter of the progress shares this counter.
    read: Arc<AtomicU64>,
    /// All bytes of the file, if they came through a pipe.
    held: Option<Arc<[u8]>>,
}

impl DataFile {
    /// Opens a file and reads the file's first bytes.
    ///
    /// # Errors
    /// Returns [`Error::Data`] for a file that cannot be read, or whose compressed data is damaged.
    pub fn open(path: &Path, asked: &Asked, read: &Arc<AtomicU64>) -> Result<Self> {
        let unread =
            |e: io::Error| Error::data(path, format!("cannot be read: {e}{}", where_to_get(path, &e)));
        let is_file =
            files::open_to_read(path).and_then(|file| Ok(file.metadata()?.is_file())).map_err(unread)?;
        let held: Option<Arc<[u8]>> = match is_file {
            true => None,
            false => Some(files::read_whole(path, MOST_PIPED).map_err(unread)?.into()),
        };
        let size = match &held {
            Some(held) => held.len() as u64,
            None => fs::metadata(path).map_err(unread)?.len(),
        };
        let mut file =
            Self { path: path.to_owned(), head: Vec::new(), packing: None, size, read: read.clone(), held };
        let mut start = Vec::new();
        file.raw()?.take(4).read_to_end(&mut start).map_err(unread)?;
        file.packing = Packing::of(&start).filter(|packing| packing.is_always() || !asked.bytes);
        let mut head = Vec::new();
        let begun = file.reader()?.take(HEAD_BYTES as u64).read_to_end(&mut head);
        begun.map_err(|e| file.broken(&e))?;
        if let (Some(outer), Some(inner)) = (file.packing, Packing::of(&head))
            && !asked.bytes
        {
            let (outer, inner) = (outer.name(), inner.name());
            let why = format!(
                "is {inner} inside {outer}, expected what is packed once: unpack it once more, with `{outer} -d`; if its bytes are what is to be learnt, \
                 set data.bytes=true"
            );
            return Err(Error::data(path, why));
        }
        file.head = head;
        file.read.store(0, Ordering::Relaxed);
        Ok(file)
    }

    /// A reader of the file's decompressed bytes.
    ///
    /// # Errors
    /// Returns [`Error::Data`] if the file cannot be opened.
    pub fn reader(&self) -> Result<Box<dyn BufRead + Send>> {
        let raw = self.raw()?;
        Ok(match self.packing {
            None => raw,
            Some(packing) => {
                Box::new(BufReader::with_capacity(BUFFER_BYTES, unpacked(packing, raw, self.size)))
            }
        })
    }

    /// A reader of the file's bytes as stored.
    fn raw(&self) -> Result<Box<dyn BufRead + Send>> {
        if let Some(held) = &self.held {
            return Ok(Box::new(Cursor::new(held.clone())));
        }
        let counted = Counted { file: self.file()?, read: self.read.clone() };
        Ok(Box::new(BufReader::with_capacity(BUFFER_BYTES, counted)))
    }

    /// Opens the file again, for file formats that need random access.
    ///
    /// # Errors
    /// Returns [`Error::Data`] if the file cannot be opened.
    pub fn file(&self) -> Result<File> {
        files::open_to_read(&self.path).map_err(|e| Error::data(&self.path, format!("cannot be read: {e}")))
    }

    /// Whether the data are in an uncompressed file, which allows random access.
    pub fn is_plain(&self) -> bool {
        self.packing.is_none() && self.held.is_none()
    }

    /// Whether the data came through a pipe and are in memory.
    pub fn is_piped(&self) -> bool {
        self.held.is_some()
    }

    /// All bytes of the data, if the data came through a pipe; otherwise `None`.
    pub fn held(&self) -> Option<&Arc<[u8]>> {
        self.held.as_ref()
    }

    /// Adds `bytes` to the number of bytes read so far. File formats with random access call this function to report their progress.
    pub fn tell_read(&self, bytes: u64) {
        self.read.fetch_add(bytes, Ordering::Relaxed);
    }

    /// Whether the file's name has one of the extensions in `endings`. The comparison ignores case, and ignores the extension of a
    /// compression such as gzip.
    pub fn is_named(&self, endings: &[&str]) -> bool {
        is_named(&self.path, endings)
    }

    /// The error for a file whose data ends too early or becomes unreadable.
    pub fn broken(&self, error: &io::Error) -> Error {
        let why = match self.packing {
            None => format!("cannot be read: {error}"),
            Some(packing) if error.kind() == io::ErrorKind::UnexpectedEof => {
                format!("is truncated {}: {error}", packing.name())
            }
            Some(packing) => format!("is damaged {}: {error}", packing.name()),
        };
        Error::data(&self.path, why)
    }
}

/// A file that counts the bytes read from it.
struct Counted {
    file: File,
    read: Arc<AtomicU64>,
}

impl Read for Counted {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let count = self.file.read(into)?;
        self.read.fetch_add(count as u64, Ordering::Relaxed);
        Ok(count)
    }
}

/// The files of a path, a folder or a glob, in order.
///
/// # Errors
/// [`Error::Data`] if there are no files, or a folder cannot be read.
pub(in crate::data) fn find(source: &str) -> Result<Vec<PathBuf>> {
    let path = Path::new(source);
    if path.is_dir() {
        let mut found = Vec::new();
        add_folder(path, 0, &mut found)?;
        found.sort();
        let found = without_companions(found);
        return match found.is_empty() {
            true => Err(Error::data(path, "is a folder without a file of data")),
            false => Ok(found),
        };
    }
    if path.exists() || !source.contains(['*', '?', '[']) {
        return Ok(vec![path.to_owned()]);
    }
    let wrong = |why: String| Error::data(path, format!("is no glob that can be followed: {why}"));
    // As in a shell, a glob matches hidden files only if the glob contains the dot.
    let options = glob::MatchOptions { require_literal_leading_dot: true, ..glob::MatchOptions::new() };
    let names = glob::glob_with(source, options).map_err(|e| wrong(e.to_string()))?;
    let mut found = names.collect::<Result<Vec<_>, _>>().map_err(|e| wrong(e.to_string()))?;
    found.retain(|path| path.is_file());
    let found = without_companions(found);
    match found.is_empty() {
        true => Err(Error::data(path, "is a glob that no file fits")),
        false => Ok(found),
    }
}

/// Deepest nesting of folders. The depth is limited because a link may lead back to a parent folder.
const MOST_DEPTH: usize = 32;

/// Adds the files of a folder and its subfolders. Hidden files are left out.
fn add_folder(folder: &Path, depth: usize, found: &mut Vec<PathBuf>) -> Result<()> {
    let unread = |e: io::Error| Error::data(folder, format!("cannot be read: {e}"));
    if depth > MOST_DEPTH {
        return Err(Error::data(
            folder,
            format!("lies more than {MOST_DEPTH} folders deep; does a link lead back?"),
        ));
    }
    for entry in fs::read_dir(folder).map_err(unread)? {
        let path = entry.map_err(unread)?.path();
        let is_hidden = path.file_name().is_some_and(|name| name.to_string_lossy().starts_with('.'));
        match () {
            () if is_hidden => {}
            () if path.is_dir() => add_folder(&path, depth + 1, found)?,
            () if is_named(&path, &ENDINGS) => found.push(path),
            () => {}
        }
    }
    Ok(())
}

/// Endings of the files that are read in a folder. The folder may also contain other files, such as licences and images.
const ENDINGS: [&str; 8] = [".txt", ".text", ".md", ".jsonl", ".ndjson", ".parquet", ".bin", ".idx"];

/// Whether a file's name has one of these endings. The case is ignored, and so is the additional ending of a compressed file.
fn is_named(path: &Path, endings: &[&str]) -> bool {
    let name = path.file_name().unwrap_or_default().to_string_lossy().to_ascii_lowercase();
    let name = [".gz", ".zst", ".zstd"].iter().find_map(|end| name.strip_suffix(end)).unwrap_or(&name);
    endings.iter().any(|ending| name.ends_with(ending))
}

/// Removes files that are companions of an earlier file.
fn without_companions(found: Vec<PathBuf>) -> Vec<PathBuf> {
    let (mut kept, mut brought) = (Vec::new(), Vec::new());
    for path in found {
        if !brought.contains(&path) {
            brought.extend(KINDS.iter().flat_map(|kind| kind.companions(&path)));
            kept.push(path);
        }
    }
    kept
}

/// Where the user can get the text that a built-in configuration names but Nibble does not include.
fn where_to_get(path: &Path, error: &io::Error) -> &'static str {
    match error.kind() == io::ErrorKind::NotFound && path == Path::new("tinyshakespeare.txt") {
        true => {
            "; name a text of yours with --set data.source=FILE. Shakespeare's works are at Project Gutenberg \
             (https://www.gutenberg.org/ebooks/100), and this file is in https://github.com/karpathy/char-rnn, as \
             data/tinyshakespeare/input.txt"
        }
        false => "; name a file, a folder or a glob with --set data.source=FILE",
    }
}
