//! The token cache: the token ids of files, stored on disk so that files are read and tokenized only once.
//!
//! A cache is a folder whose name is a hash of the cache's inputs: the SHA-256 of the files, the tokenizer and the settings. One process at
//! a time builds a cache under another name, in parts that survive if the process is killed. The cache gets its final name when it is
//! complete.
//!
//! A cache is verified: `cache.json` contains the cache's key, the SHA-256 of the cache's files, and its own SHA-256. Opening a cache
//! checks the hash of a file if the file's size, time or inode changed since the last check, and always for a small cache. A damaged cache
//! is rebuilt. A run that reads a cache checks the files' sizes and times after every sequence.
//!
//! ```text
//! CACHES/tokens/KEY/cache.json    counts of tokens, documents and runs; SHA-256 of the three files below and of itself; the rows left out
//!                  /ids           the tokens, 1, 2 or 4 bytes each; all files are little-endian
//!                  /documents     the first token of each document, 64 bits each
//!                  /unlearnt      first token and end of each run of non-target tokens, 64 bits each
//! CACHES/tokens/KEY.making/       an unfinished cache, with progress.json
//! CACHES/tokens/KEY.lock          locked by the process that builds the cache
//! CACHES/files/NAME.json          remembered SHA-256 of a file
//! ```

mod making;

use std::fs::{self, File, TryLockError};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::fingerprint::{Stamp, remembering, sha256_of};

pub use super::reading::LeftOut;
use super::reading::{Reading, Watch};
use super::region::Region;
use super::sealed;
use super::source::{DataFile, Source, kind_of};
use super::stream::TokenStream;
use crate::error::{Error, Result};
use crate::files;
use crate::files::sha256_hex;
use making::Making;

/// Version of the format and of the code that fills the cache. Caches of other versions are rebuilt.
const VERSION: u32 = 3;

/// The names of a cache's files.
const FILES: [&str; 3] = ["ids", "documents", "unlearnt"];
const MANIFEST: &str = "cache.json";

/// Time between two checks whether another process has released the lock.
const AGAIN: Duration = Duration::from_millis(50);

/// The contents of `cache.json`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Manifest {
    version: u32,
    /// The name of the cache's folder.
    key: String,
    /// Number of bytes per id.
    width: usize,
    tokens: u64,
    documents: u64,
    /// Number of runs of tokens that are no targets.
    unlearnt: u64,
    /// SHA-256 of each file, in the order of [`FILES`].
    files: [String; 3],
    left_out: LeftOut,
}

/// Number of bytes of each file. `counts` are the numbers of tokens, documents and runs of non-target tokens; an id has `width` bytes.
fn bytes_of(counts: [u64; 3], width: usize) -> [u64; 3] {
    let [tokens, documents, unlearnt] = counts;
    [tokens.saturating_mul(width as u64), documents.saturating_mul(8), unlearnt.saturating_mul(16)]
}

impl Manifest {
    /// Number of bytes of each file.
    fn bytes(&self) -> [u64; 3] {
        bytes_of([self.tokens, self.documents, self.unlearnt], self.width)
    }

    /// SHA-256 of the ids alone, if they are one document without non-target tokens. So a text has the same hash whether it is compressed
    /// or not. For other ids, the hash also covers the boundaries of documents and of non-target runs.
    fn sha256(&self) -> String {
        match (self.documents, self.unlearnt) {
            (1, 0) => self.files[0].clone(),
            _ => sha256_hex(self.files.concat().as_bytes()),
        }
    }
}

/// The folder of caches: `data.cache_dir`, or a folder in the user's cache folder.
///
/// # Errors
/// [`Error::Config`] if the user has no cache folder.
pub(super) fn folder(set: &str) -> Result<PathBuf> {
    if !set.is_empty() {
        return Ok(set.into());
    }
    let of = |name: &str| std::env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
    let caches = of("XDG_CACHE_HOME").or_else(|| std::env::home_dir().map(|home| home.join(".cache")));
    let caches = caches.filter(|caches| caches.is_absolute());
    caches.map(|caches| caches.join("nibble").join("data")).ok_or_else(|| {
        Error::config(
            "data.cache_dir",
            "is not set, and there is no XDG_CACHE_HOME and no home: name a folder for token caches",
        )
    })
}

/// The tokens of a source from the source's cache. The cache is built if it does not exist.
///
/// # Errors
/// [`Error::Data`] if files cannot be read; [`Error::Io`] if the cache cannot be written.
pub(super) fn open(
    reading: &Reading,
    caches: &Path,
    watch: &mut dyn Watch,
) -> Result<(TokenStream, LeftOut)> {
    let (key, stamps) = key(reading, caches)?;
    let tokens = caches.join("tokens");
    let place = tokens.join(&key);
    let find = || find(&place, &key, caches);
    if let Found::Whole(found) = find()? {
        return Ok(*found);
    }
    fs::create_dir_all(&tokens).map_err(Error::io(&tokens))?;
    let lock = tokens.join(format!("{key}.lock"));
    let locked = take_lock(&lock, watch)?;
    match find()? {
        Found::Whole(found) => return Ok(*found),
        Found::Damaged(file, why) => watch.damaged(&file, &why),
        Found::Nothing => {}
    }
    // If the file system has no locks, every process builds its own cache. The first process to finish provides the cache for all.
    let mine = if locked.is_some() {
        format!("{key}.making")
    } else {
        format!("{key}.making-{}", std::process::id())
    };
    let is_there = || Ok(matches!(find()?, Found::Whole(_)));
    let making = Making { dir: &tokens.join(mine), place: &place, key: &key, is_there: &is_there };
    making::make(reading, &making, &mut || unchanged(&stamps), watch)?;
    match find()? {
        Found::Whole(found) => Ok(*found),
        Found::Damaged(file, why) => Err(Error::data(&file, format!("{why}, though it was made just now"))),
        Found::Nothing => Err(Error::data(&place, "is not there, though it was made just now")),
    }
}

/// Waits until this process holds the lock. Returns `None` if the file system has no locks.
fn take_lock(path: &Path, watch: &mut dyn Watch) -> Result<Option<File>> {
    let file = File::options().create(true).append(true).open(path).map_err(Error::io(path))?;
    loop {
        match file.try_lock() {
            Ok(()) => return Ok(Some(file)),
            Err(TryLockError::Error(error)) if error.kind() == io::ErrorKind::Unsupported => return Ok(None),
            Err(TryLockError::Error(error)) => return Err(Error::io(path)(error)),
            // The loop polls instead of blocking, so that `watch` can end the wait.
            Err(TryLockError::WouldBlock) if watch.waits() => std::thread::sleep(AGAIN),
            Err(TryLockError::WouldBlock) => {
                return Err(Error::data(
                    path,
                    "is held by another process, which was not waited for: somebody stopped it",
                ));
            }
        }
    }
}

/// The state of the place at which a cache is expected.
enum Found {
    Whole(Box<(TokenStream, LeftOut)>),
    /// The cache has a damaged file. The fields are the file and a description of the damage.
    Damaged(PathBuf, String),
    Nothing,
}

/// Looks for the cache of this key at its place. Reads the files whose SHA-256 is not remembered.
fn find(place: &Path, key: &str, caches: &Path) -> Result<Found> {
    if !place.exists() {
        return Ok(Found::Nothing);
    }
    let damaged = |name: &str, why: String| Ok(Found::Damaged(place.join(name), why));
    let read = files::read_text(&place.join(MANIFEST), files::MOST_TEXT);
    let manifest = match read.map(|text| sealed::open::<Manifest>(&text)) {
        Ok(Some(manifest)) => manifest,
        Ok(None) => return damaged(MANIFEST, "is not as it was written".into()),
        Err(error) => return damaged(MANIFEST, format!("cannot be read: {error}")),
    };
    if manifest.version != VERSION || manifest.key != key || ![1, 2, 4].contains(&manifest.width) {
        return damaged(MANIFEST, "is of another cache".into());
    }
    let mut regions = Vec::new();
    for ((name, bytes), expected) in FILES.into_iter().zip(manifest.bytes()).zip(&manifest.files) {
        let path = place.join(name);
        let region = match Region::open(&path) {
            Ok(region) if region.len() as u64 == bytes => region,
            Ok(region) => {
                return damaged(name, format!("has {} bytes, and {bytes} were written", region.len()));
            }
            Err(error) => return damaged(name, error.to_string()),
        };
        let (stamp, sha256) = sha256_of(&path, remembering(Some(caches), bytes))?;
        if sha256 != *expected {
            return damaged(name, "is not what was written: it has another SHA-256".into());
        }
        regions.push(region.known(&stamp, &sha256)?);
    }
    // The number of regions is always three.
    let Ok([ids, documents, unlearnt]) = <[Region; 3]>::try_from(regions) else { return Ok(Found::Nothing) };
    let stream = TokenStream::of_parts(ids, manifest.width, documents, unlearnt, manifest.sha256());
    Ok(Found::Whole(Box::new((stream, manifest.left_out))))
}

/// The inputs of the hash that names a cache.
#[derive(Serialize)]
struct Key<'a> {
    version: u32,
    /// The kind of each file, and the SHA-256 of the file and of its companion files.
    files: Vec<(&'static str, Vec<String>)>,
    asked: &'a super::source::Asked,
    /// SHA-256 of the tokenizer's JSON; `None` if tokens are bytes.
    tokenizer: Option<String>,
    framing: [Option<i32>; 2],
    vocab_size: usize,
    skips: bool,
}

/// The name of a source's cache, and stamps with which to check that the source's files stay unchanged.
fn key(reading: &Reading, caches: &Path) -> Result<(String, Vec<(PathBuf, Stamp)>)> {
    let (mut stamps, mut files) = (Vec::new(), Vec::new());
    let size = |path: &PathBuf| fs::metadata(path).map_or(0, |about| about.len());
    let caches = remembering(Some(caches), reading.files.iter().map(size).sum());
    for path in &reading.files {
        if let Some(piped) = &reading.piped {
            let held = piped.held().map_or(&[][..], |held| held);
            files.push((kind_of(piped, &reading.asked).name(), vec![sha256_hex(held)]));
            continue;
        }
        let mut of = Vec::new();
        let mut add = |path: &Path| -> Result<()> {
            let (stamp, sha256) = sha256_of(path, caches)?;
            stamps.push((path.to_owned(), stamp));
            of.push(sha256);
            Ok(())
        };
        // The file is hashed before it is opened, so that a later change is detected.
        add(path)?;
        let file = DataFile::open(path, &reading.asked, &Arc::new(AtomicU64::new(0)))?;
        let kind: &dyn Source = kind_of(&file, &reading.asked);
        reading.require_width(kind, &file)?;
        kind.companions(path).iter().try_for_each(|other| add(other))?;
        files.push((kind.name(), of));
    }
    let encoder = &reading.encoder;
    let key = Key {
        version: VERSION,
        files,
        asked: &reading.asked,
        tokenizer: encoder.tokenizer.as_ref().map(|tokenizer| sha256_hex(tokenizer.to_json().as_bytes())),
        framing: [encoder.framing.bos, encoder.framing.eos],
        vocab_size: encoder.vocab_size,
        skips: reading.on_error == crate::config::OnError::Skip,
    };
    let text = serde_json::to_string(&key).map_err(|e| Error::config("data", e.to_string()))?;
    Ok((sha256_hex(text.as_bytes()), stamps))
}

/// Checks that the files still have these stamps.
fn unchanged(stamps: &[(PathBuf, Stamp)]) -> Result<()> {
    for (path, stamp) in stamps {
        if Stamp::of(path)? != *stamp {
            return Err(Error::data(path, "was changed while it was read: begin again"));
        }
    }
    Ok(())
}
