//! Makes a cache: appends to its files, and keeps after each part how far it has come.

use std::fs::{self, File};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::fingerprint::sha256_hex_of;
use super::{DOCUMENTS, IDS, LeftOut, MANIFEST, Manifest, UNLEARNT, VERSION};
use crate::checkpoint::sha256_hex;
use crate::data::encode::Encoded;
use crate::data::reading::{BadRow, Place, Reading, Sink, Watch};
use crate::data::stream::width_of;
use crate::error::{Error, Result};
use crate::fault::{Point, reach};
use crate::files;

const PROGRESS: &str = "progress.json";

/// Batches and bytes of a part: what a killed process loses at most.
const PART_BATCHES: usize = 8;
const PART_BYTES: u64 = 64 << 20;

/// What is on the disk of a cache that is being made; what its files have beyond that does not count.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
struct Progress {
    version: u32,
    place: Place,
    tokens: u64,
    documents: u64,
    unlearnt: u64,
    left_out: LeftOut,
}

/// A cache that is being made.
struct Maker<'a> {
    dir: &'a Path,
    width: usize,
    ids: File,
    documents: File,
    unlearnt: File,
    progress: Progress,
    /// Batches and bytes since the last part.
    batches: usize,
    bytes: u64,
}

/// Makes the cache of what is read in `dir`, or goes on with what a killed process has left there, and gives it its place.
///
/// # Errors
/// [`Error::Data`] for files that cannot be read; [`Error::Io`] where the cache cannot be written. What is made stays.
pub(super) fn make(
    reading: &Reading,
    dir: &Path,
    place: &Path,
    is_unchanged: &mut dyn FnMut() -> Result<()>,
    watch: &mut dyn Watch,
) -> Result<()> {
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
    let sha256 = identity(dir, &progress)?;
    let Progress { tokens, documents, unlearnt, left_out, .. } = progress;
    let manifest = Manifest { version: VERSION, width, tokens, documents, unlearnt, sha256, left_out };
    let text = serde_json::to_string_pretty(&manifest).map_err(|e| Error::data(dir, e.to_string()))?;
    write(&dir.join(MANIFEST), text)?;
    files::sync_dir(dir).map_err(Error::io(dir))?;
    reach(Point::CacheWhole)?;
    if let Err(error) = fs::rename(dir, place) {
        if super::find(place)?.is_none() {
            // A folder that is no cache stands there: what somebody has damaged is made anew.
            fs::remove_dir_all(place).map_err(Error::io(place))?;
            fs::rename(dir, place).map_err(|_| Error::io(place)(error))?;
        } else {
            // Another process, where there are no locks, was first.
            fs::remove_dir_all(dir).map_err(Error::io(dir))?;
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
    /// Begins, or goes on.
    fn begin(dir: &'a Path, width: usize) -> Result<Self> {
        fs::create_dir_all(dir).map_err(Error::io(dir))?;
        let known = files::read_text(&dir.join(PROGRESS), files::MOST_TEXT).ok();
        let known: Option<Progress> = known.and_then(|text| serde_json::from_str(&text).ok());
        let known = known.filter(|progress| progress.version == VERSION);
        let mut progress = known.unwrap_or_else(|| Progress { version: VERSION, ..Progress::default() });
        let open = |name: &str| {
            let path = dir.join(name);
            File::options().create(true).read(true).append(true).open(&path).map_err(Error::io(&path))
        };
        let files = [(IDS, width as u64), (DOCUMENTS, 8), (UNLEARNT, 16)];
        let [ids, documents, unlearnt] = [open(IDS)?, open(DOCUMENTS)?, open(UNLEARNT)?];
        let all = [&ids, &documents, &unlearnt];
        let counts = |of: &Progress| [of.tokens, of.documents, of.unlearnt];
        let has = |file: &File| file.metadata().map_or(0, |about| about.len());
        let is_there = all
            .iter()
            .zip(files)
            .zip(counts(&progress))
            .all(|((file, (_, width)), count)| has(file) >= count * width);
        if !is_there {
            progress = Progress { version: VERSION, ..Progress::default() };
        }
        for ((file, (name, width)), count) in all.iter().zip(files).zip(counts(&progress)) {
            file.set_len(count * width).map_err(Error::io(&dir.join(name)))?;
        }
        Ok(Self { dir, width, ids, documents, unlearnt, progress, batches: 0, bytes: 0 })
    }

    /// What has been taken is on the disk, and stays.
    fn keep(&mut self) -> Result<()> {
        for (name, file) in [(IDS, &self.ids), (DOCUMENTS, &self.documents), (UNLEARNT, &self.unlearnt)] {
            file.sync_data().map_err(Error::io(&self.dir.join(name)))?;
        }
        let text = serde_json::to_string(&self.progress).map_err(|e| Error::data(self.dir, e.to_string()))?;
        write(&self.dir.join(PROGRESS), text)?;
        (self.batches, self.bytes) = (0, 0);
        reach(Point::CacheKept)
    }
}

impl Sink for Maker<'_> {
    fn take(&mut self, encoded: Vec<Encoded>, bad: Vec<BadRow>, place: Place) -> Result<()> {
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
        for (name, file, bytes) in [
            (IDS, &mut self.ids, &ids),
            (DOCUMENTS, &mut self.documents, &documents),
            (UNLEARNT, &mut self.unlearnt, &unlearnt),
        ] {
            files::append(file, bytes).map_err(Error::io(&self.dir.join(name)))?;
        }
        self.progress.left_out.add(bad);
        self.progress.place = place;
        self.batches += 1;
        self.bytes += ids.len() as u64;
        if self.batches >= PART_BATCHES || self.bytes >= PART_BYTES { self.keep() } else { Ok(()) }
    }
}

/// SHA-256 of the ids alone, where they are one document that is learnt whole: so a text has the same, packed or not. Else of that, and of
/// what says where documents begin and what is not learnt.
fn identity(dir: &Path, progress: &Progress) -> Result<String> {
    let of = |name: &str| {
        let path = dir.join(name);
        let hash = File::open(&path).and_then(|mut file| sha256_hex_of(&mut file));
        hash.map_err(Error::io(&path))
    };
    let ids = of(IDS)?;
    match (progress.documents, progress.unlearnt) {
        (1, 0) => Ok(ids),
        _ => Ok(sha256_hex([ids, of(DOCUMENTS)?, of(UNLEARNT)?].concat().as_bytes())),
    }
}
