//! Megatron's indexed data: token ids in a `.bin` file. An `.idx` file of the same name says where sequences and documents begin.
//!
//! The index contains a mark; the version (64 bits); the type of an id (8 bits); the number of sequences, and the number of documents plus
//! one (64 bits each); the length of each sequence (32 bits); the byte offset of each sequence (64 bits); and the first sequence of each
//! document (64 bits), followed by the number of sequences.

use std::fs::File;
use std::io::{BufReader, ErrorKind, Read};
use std::path::{Path, PathBuf};

use super::{Asked, Content, DataFile, MOST_ROW_BYTES, Piece, Pieces, Row, Source, damaged};
use crate::data::region::Region;
use crate::error::{Error, Result};
use crate::files;

/// Token ids and their index in a pair of Megatron files.
pub(super) struct Megatron;

const MARK: &[u8] = b"MMIDIDX\0\0";

/// Number of bytes that precede the sequence lengths.
const HEADER_BYTES: usize = MARK.len() + 8 + 1 + 8 + 8;

/// Types of ids: the type's number, the bytes of an id, and whether ids are signed. Numbers 6 and 7 are floating-point types.
const TYPES: [(u8, usize, bool); 6] =
    [(1, 1, false), (2, 1, true), (3, 2, true), (4, 4, true), (5, 8, true), (8, 2, false)];

impl Source for Megatron {
    fn name(&self) -> &'static str {
        "Megatron's token ids"
    }

    fn is_of(&self, file: &DataFile) -> bool {
        file.head.starts_with(MARK)
            || file.is_plain() && has_ending(&file.path, "bin") && begins_so(&index_of(&file.path))
    }

    fn id_bits(&self, file: &DataFile) -> Option<u32> {
        // An unreadable index is reported later, when the index is opened.
        let bits = |index: Index| index.width as u32 * 8 - u32::from(index.is_signed);
        Some(Index::open(&index_of(&file.path)).map_or(u32::BITS, bits))
    }

    fn companions(&self, path: &Path) -> Vec<PathBuf> {
        let index = index_of(path);
        match () {
            () if has_ending(path, "bin") && begins_so(&index) => vec![index],
            () if has_ending(path, "idx") && begins_so(path) => vec![ids_of(path)],
            () => Vec::new(),
        }
    }

    fn open(&self, file: &DataFile, asked: &Asked) -> Result<Box<dyn Pieces>> {
        asked.require_no_keys(file, "a file of token ids")?;
        let index = Index::open(&index_of(&file.path))?;
        let path = ids_of(&file.path);
        let unread = |e: std::io::Error| {
            Error::data(&path, format!("cannot be read: {e}; it holds the ids of {}", index.path.display()))
        };
        let ids = files::open_to_read(&path).map_err(unread)?;
        let has = ids.metadata().map_err(unread)?.len();
        let ids = BufReader::with_capacity(1 << 20, ids);
        let file = file.clone();
        Ok(Box::new(Documents { index, ids, path, has, file, document: 0, sequence: 0, within: 0, place: 0 }))
    }
}

fn has_ending(path: &Path, ending: &str) -> bool {
    path.extension().is_some_and(|is| is.eq_ignore_ascii_case(ending))
}

/// The path of the index that belongs to a file of ids.
fn index_of(path: &Path) -> PathBuf {
    if has_ending(path, "idx") { path.to_owned() } else { beside(path, ["idx", "IDX"]) }
}

/// The path of the file of ids that belongs to `path`, which is a file of ids or an index.
fn ids_of(path: &Path) -> PathBuf {
    if has_ending(path, "bin") { path.to_owned() } else { beside(path, ["bin", "BIN"]) }
}

/// The path with the extension `small`, or with `large` (in capitals) if only the file with `large` exists.
fn beside(path: &Path, [small, large]: [&str; 2]) -> PathBuf {
    let (small, large) = (path.with_extension(small), path.with_extension(large));
    if !small.exists() && large.exists() { large } else { small }
}

/// Whether the file begins like an index. The result is also true if the file exists but cannot be read; the error is reported later, when
/// the index is opened.
fn begins_so(path: &Path) -> bool {
    let mut start = Vec::new();
    let read =
        files::open_to_read(path).and_then(|file| file.take(MARK.len() as u64).read_to_end(&mut start));
    read.map_or_else(|error| error.kind() != ErrorKind::NotFound, |_| start == MARK)
}

/// An index whose parts are read from disk as needed.
#[derive(Debug)]
pub(in crate::data) struct Index {
    bytes: Region,
    path: PathBuf,
    width: usize,
    is_signed: bool,
    sequences: u64,
    documents: u64,
}

impl Index {
    /// Opens an index. Each part of the index is checked for consistency when it is read.
    ///
    /// # Errors
    /// Returns [`Error::Data`] for a file that is no index, has another version, or has another length than its header implies.
    pub fn open(path: &Path) -> Result<Self> {
        Self::of(Region::open(path)?, path)
    }

    /// Parses these bytes as a Megatron index.
    ///
    /// # Errors
    /// The errors of [`Index::open`].
    pub fn of(bytes: Region, path: &Path) -> Result<Self> {
        let wrong = |why: String| Error::data(path, why);
        if bytes.len() < HEADER_BYTES || *bytes.read(0..MARK.len())? != *MARK {
            return Err(wrong("is no index of Megatron: it does not begin with MMIDIDX and a header".into()));
        }
        let version = bytes.u64_at(MARK.len())?;
        if version != 1 {
            return Err(wrong(format!("is an index of Megatron in version {version}, expected 1")));
        }
        let [code] = bytes.number(MARK.len() + 8)?;
        let Some((_, width, is_signed)) = TYPES.into_iter().find(|(number, ..)| *number == code) else {
            return Err(wrong(format!(
                "says that ids are of type {code}, expected one of 1 to 5 or 8, whole numbers"
            )));
        };
        let [sequences, documents] = [bytes.u64_at(HEADER_BYTES - 16)?, bytes.u64_at(HEADER_BYTES - 8)?];
        let needed =
            (u128::from(sequences) * 12 + u128::from(documents) * 8).saturating_add(HEADER_BYTES as u128);
        if bytes.len() as u128 != needed {
            return Err(wrong(format!(
                "has {} bytes, and with the {sequences} sequences and {documents} documents that it says it would have {needed}",
                bytes.len()
            )));
        }
        if documents == 0 {
            return Err(wrong("says that there are no documents".into()));
        }
        let index =
            Self { bytes, path: path.to_owned(), width, is_signed, sequences, documents: documents - 1 };
        let (first, last) = (index.first_sequence(0)?, index.first_sequence(index.documents)?);
        if first != 0 || last != sequences {
            return Err(wrong(format!(
                "says that documents are of the sequences {first} to {last}, and there are {sequences} from 0 on"
            )));
        }
        Ok(index)
    }

    /// The first sequence of a document. For the number of documents: the end of the last document.
    fn first_sequence(&self, document: u64) -> Result<u64> {
        self.bytes.u64_at(HEADER_BYTES + 12 * self.sequences as usize + 8 * document as usize)
    }

    /// The numbers of the sequences that form document `number`.
    ///
    /// # Errors
    /// Returns [`Error::Data`] if the range is invalid.
    pub fn document(&self, number: u64) -> Result<std::ops::Range<u64>> {
        let (first, end) = (self.first_sequence(number)?, self.first_sequence(number + 1)?);
        if first > end || end > self.sequences {
            let why = format!(
                "document {}: is of the sequences {first} to {end} of {}",
                number + 1,
                self.sequences
            );
            return Err(damaged(&self.path, why));
        }
        Ok(first..end)
    }

    /// The number of token ids of sequence `sequence`, which begins at byte `place`.
    ///
    /// # Errors
    /// Returns [`Error::Data`] if the length is negative, or if the index contains another offset than `place`.
    pub fn length(&self, sequence: u64, place: u64) -> Result<u64> {
        let at = HEADER_BYTES + 4 * sequence as usize;
        let length = i32::from_le_bytes(self.bytes.number(at)?);
        let said = self.bytes.u64_at(HEADER_BYTES + 4 * self.sequences as usize + 8 * sequence as usize)?;
        let Ok(length) = u64::try_from(length) else {
            return Err(damaged(&self.path, format!("sequence {}: has {length} ids", sequence + 1)));
        };
        if said != place {
            let why =
                format!("sequence {}: lies at byte {said}, and the one before ends at {place}", sequence + 1);
            return Err(damaged(&self.path, why));
        }
        Ok(length)
    }
}

/// The documents in a pair of Megatron files.
struct Documents {
    index: Index,
    ids: BufReader<File>,
    path: PathBuf,
    /// Size of the file of ids in bytes.
    has: u64,
    file: DataFile,
    document: u64,
    sequence: u64,
    /// Number of ids of the current sequence that have been returned.
    within: u64,
    /// Byte offset of the current sequence.
    place: u64,
}

impl Pieces for Documents {
    fn unit(&self) -> &'static str {
        "document"
    }

    fn next(&mut self) -> Result<Option<Row>> {
        if self.document == self.index.documents {
            return match self.place == self.has {
                true => Ok(None),
                false => {
                    let why = format!("has {} bytes, and its index is of {}", self.has, self.place);
                    Err(damaged(&self.path, why))
                }
            };
        }
        let of = self.index.document(self.document)?;
        let begins = self.sequence == of.start && self.within == 0;
        let (number, width) = (self.document + 1, self.index.width as u64);
        let (mut ids, mut wrong) = (Vec::new(), None);
        let most = (MOST_ROW_BYTES / 4) as u64;
        while self.sequence < of.end && (ids.len() as u64) < most {
            let length = self.index.length(self.sequence, self.place)?;
            // The sum does not overflow, because a length has at most 31 bits.
            if self.place + length * width > self.has {
                let why = format!(
                    "ends at byte {}, within sequence {}, of {length} ids from byte {} on",
                    self.has,
                    self.sequence + 1,
                    self.place
                );
                return Err(damaged(&self.path, why));
            }
            let count = (length - self.within).min(most - ids.len() as u64);
            let mut bytes = vec![0; (count * width) as usize];
            self.ids
                .read_exact(&mut bytes)
                .map_err(|e| Error::data(&self.path, format!("cannot be read: {e}")))?;
            self.file.tell_read(bytes.len() as u64);
            for id in bytes.chunks_exact(self.index.width).map(|id| id_of(id, self.index.is_signed)) {
                ids.push(u32::try_from(id).unwrap_or_else(|_| {
                    wrong = Some(format!("has the id {id}, which is none"));
                    0
                }));
            }
            self.within += count;
            if self.within == length {
                (self.sequence, self.within, self.place) =
                    (self.sequence + 1, 0, self.place + length * width);
            }
        }
        let ends = self.sequence == of.end;
        self.document += u64::from(ends);
        let holds = match wrong {
            Some(why) => Err(why),
            None => Ok(Piece { begins, ends, content: Content::Ids(ids) }),
        };
        if holds.is_err() && !(begins && ends) {
            let why = holds.err().unwrap_or_default();
            return Err(damaged(&self.path, format!("document {number}: {why}")));
        }
        Ok(Some(Row { number, holds }))
    }
}

/// Decodes an integer of one to eight bytes.
fn id_of(bytes: &[u8], is_signed: bool) -> i64 {
    let fill = if is_signed && bytes.last().is_some_and(|last| *last >= 0x80) { 0xff } else { 0 };
    let mut whole = [fill; 8];
    whole[..bytes.len()].copy_from_slice(bytes);
    i64::from_le_bytes(whole)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_of_every_type() {
        assert_eq!(id_of(&[0xff], false), 255);
        assert_eq!(id_of(&[0xff], true), -1);
        assert_eq!(id_of(&[0x57, 0xc4], false), 50_263);
        assert_eq!(id_of(&[0xfe, 0xff, 0xff, 0xff], true), -2);
        assert_eq!(id_of(&[1, 0, 0, 0, 0, 0, 0, 0], true), 1);
    }
}
