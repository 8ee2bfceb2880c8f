//! The token cache: what files hold, as token ids on the disk, so that it is read and tokenized once and then mapped into memory.
//!
//! A cache is a folder that content names: SHA-256 of the files, the tokenizer and the settings. It is made under another name, in parts
//! that stay if the process is killed, by one process at a time, and gets its name when it is whole.
//!
//! ```text
//! CACHES/tokens/KEY/cache.json    how many of what; SHA-256 of the tokens; the rows that were left out
//!                  /ids           the tokens, 1, 2 or 4 bytes each, little-endian as all of it
//!                  /documents     the first token of each document, 64 bits each
//!                  /unlearnt      first and end of each run of tokens that are no targets, 64 bits each
//! CACHES/tokens/KEY.making/       the same, while it is made, with progress.json
//! CACHES/tokens/KEY.lock          whose lock the maker has
//! CACHES/files/NAME.json          SHA-256 of a file, remembered
//! ```

mod fingerprint;
mod making;

use std::fs::{self, File, TryLockError};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use serde::{Deserialize, Serialize};

pub(super) use fingerprint::{Stamp, remembering, sha256_of};

use super::reading::{BadRow, Reading, Watch};
use super::region::Region;
use super::source::{DataFile, Source, kind_of};
use super::stream::TokenStream;
use crate::checkpoint::sha256_hex;
use crate::error::{Error, Result};
use crate::files;

/// Of the format, and of what makes it: caches of another one are made anew.
const VERSION: u32 = 1;

/// The files of a cache.
const IDS: &str = "ids";
const DOCUMENTS: &str = "documents";
const UNLEARNT: &str = "unlearnt";
const MANIFEST: &str = "cache.json";

/// What a cache says of itself.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Manifest {
    version: u32,
    /// Bytes of an id.
    width: usize,
    tokens: u64,
    documents: u64,
    /// Runs of tokens that are no targets.
    unlearnt: u64,
    sha256: String,
    left_out: LeftOut,
}

/// What of the rows of a source is not among its tokens.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct LeftOut {
    /// Rows that could not be read.
    pub rows: u64,
    /// The first of them.
    pub first: Vec<BadRow>,
    /// Documents without a token.
    pub empty: u64,
}

/// Rows that could not be read, of which it is remembered which they were.
const MOST_TOLD: usize = 20;

impl LeftOut {
    /// Counts rows that could not be read.
    pub(super) fn add(&mut self, bad: Vec<BadRow>) {
        self.rows += bad.len() as u64;
        let room = MOST_TOLD.saturating_sub(self.first.len());
        self.first.extend(bad.into_iter().take(room));
    }
}

/// The folder of caches: what the configuration says, or in the user's folder of caches.
///
/// # Errors
/// [`Error::Config`] where the user has none.
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

/// The tokens of what is read, from their cache, which is made where there is none.
///
/// # Errors
/// [`Error::Data`] for files that cannot be read; [`Error::Io`] where the cache cannot be written.
pub(super) fn open(
    reading: &Reading,
    caches: &Path,
    watch: &mut dyn Watch,
) -> Result<(TokenStream, LeftOut)> {
    let (key, stamps) = key(reading, caches)?;
    let tokens = caches.join("tokens");
    let place = tokens.join(&key);
    if let Some(found) = find(&place)? {
        return Ok(found);
    }
    fs::create_dir_all(&tokens).map_err(Error::io(&tokens))?;
    let lock = tokens.join(format!("{key}.lock"));
    let locked = take_lock(&lock, watch)?;
    if let Some(found) = find(&place)? {
        return Ok(found);
    }
    // Where there are no locks, everybody makes their own, and the first one to be done has made it.
    let mine = if locked.is_some() {
        format!("{key}.making")
    } else {
        format!("{key}.making-{}", std::process::id())
    };
    making::make(reading, &tokens.join(mine), &place, &mut || unchanged(&stamps), watch)?;
    find(&place)?.ok_or_else(|| Error::data(&place, "is no whole cache, though it was made just now"))
}

/// Waits until this process alone may make the cache. None where the file system has no locks.
fn take_lock(path: &Path, watch: &mut dyn Watch) -> Result<Option<File>> {
    let file = File::options().create(true).append(true).open(path).map_err(Error::io(path))?;
    match file.try_lock() {
        Ok(()) => return Ok(Some(file)),
        Err(TryLockError::WouldBlock) => watch.waits(),
        Err(TryLockError::Error(error)) if error.kind() == io::ErrorKind::Unsupported => return Ok(None),
        Err(TryLockError::Error(error)) => return Err(Error::io(path)(error)),
    }
    file.lock().map_err(Error::io(path))?;
    Ok(Some(file))
}

/// The cache at this place, if it is whole.
fn find(place: &Path) -> Result<Option<(TokenStream, LeftOut)>> {
    let Ok(text) = files::read_text(&place.join(MANIFEST), files::MOST_TEXT) else { return Ok(None) };
    let Ok(manifest) = serde_json::from_str::<Manifest>(&text) else { return Ok(None) };
    let parts = [
        (IDS, manifest.tokens.saturating_mul(manifest.width as u64)),
        (DOCUMENTS, manifest.documents.saturating_mul(8)),
        (UNLEARNT, manifest.unlearnt.saturating_mul(16)),
    ];
    let is_whole = |(name, bytes): &(&str, u64)| {
        fs::metadata(place.join(name)).is_ok_and(|about| about.is_file() && about.len() == *bytes)
    };
    if manifest.version != VERSION || ![1, 2, 4].contains(&manifest.width) || !parts.iter().all(is_whole) {
        return Ok(None);
    }
    let map = |name: &str| Region::map(&place.join(name));
    let (ids, documents, unlearnt) = (map(IDS)?, map(DOCUMENTS)?, map(UNLEARNT)?);
    let stream = TokenStream::of_parts(ids, manifest.width, documents, unlearnt, manifest.sha256);
    Ok(Some((stream, manifest.left_out)))
}

/// What names a cache.
#[derive(Serialize)]
struct Key<'a> {
    version: u32,
    /// Of each file what it is read as, and the SHA-256 of it and of those that belong to it.
    files: Vec<(&'static str, Vec<String>)>,
    asked: &'a super::source::Asked,
    /// Of the tokenizer as it is written; none where tokens are bytes.
    tokenizer: Option<String>,
    framing: [Option<i32>; 2],
    vocab_size: usize,
    skips: bool,
}

/// The name of the cache of what is read, and what says that files are as they were when it was made.
fn key(reading: &Reading, caches: &Path) -> Result<(String, Vec<(PathBuf, Stamp)>)> {
    let (mut stamps, mut files) = (Vec::new(), Vec::new());
    let size = |path: &PathBuf| fs::metadata(path).map_or(0, |about| about.len());
    let caches = remembering(Some(caches), reading.files.iter().map(size).sum());
    for path in &reading.files {
        if let Some(piped) = &reading.piped {
            files.push((kind_of(piped, &reading.asked).name(), vec![sha256_hex(&piped.region()?)]));
            continue;
        }
        // Before the file is looked at.
        stamps.push((path.clone(), Stamp::of(path)?));
        let kind: &dyn Source =
            kind_of(&DataFile::open(path, &reading.asked, &Arc::new(AtomicU64::new(0)))?, &reading.asked);
        let mut of = vec![sha256_of(path, caches)?];
        for other in kind.companions(path) {
            stamps.push((other.clone(), Stamp::of(&other)?));
            of.push(sha256_of(&other, caches)?);
        }
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

/// Checks that files are as they were.
fn unchanged(stamps: &[(PathBuf, Stamp)]) -> Result<()> {
    for (path, stamp) in stamps {
        if Stamp::of(path)? != *stamp {
            return Err(Error::data(path, "was changed while it was read: begin again"));
        }
    }
    Ok(())
}
