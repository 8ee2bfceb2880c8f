//! Whole files that are compressed with gzip or zstd, and decompressed while they are read.

use std::io::{self, BufRead, Read};
use std::mem;

use flate2::bufread::GzDecoder;
use ruzstd::decoding::errors::{FrameDecoderError, ReadFrameHeaderError};
use ruzstd::decoding::{BlockDecodingStrategy, FrameDecoder};

/// The compression of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::data) enum Packing {
    /// The gzip format of RFC 1952.
    Gzip,
    /// The zstd format of RFC 8878.
    Zstd,
}

/// First bytes of a gzip member (RFC 1952, 2.3.1).
const GZIP_MAGIC: [u8; 2] = [0x1f, 0x8b];

/// First bytes of a zstd frame (RFC 8878, 3.1.1).
const ZSTD_MAGIC: [u8; 4] = [0x28, 0xb5, 0x2f, 0xfd];

/// The last three bytes of a skippable frame's magic number; the low half of its first byte is arbitrary (RFC 8878, 3.1.2).
const SKIPPED_MAGIC: [u8; 3] = [0x2a, 0x4d, 0x18];

impl Packing {
    /// The compression format that the file's first four bytes indicate; `None` for an uncompressed file.
    pub fn of(start: &[u8]) -> Option<Self> {
        if start.starts_with(&GZIP_MAGIC) {
            return Some(Self::Gzip);
        }
        let is_skipped =
            start.first().is_some_and(|first| first >> 4 == 5) && start.get(1..4) == Some(&SKIPPED_MAGIC);
        (start.starts_with(&ZSTD_MAGIC) || is_skipped).then_some(Self::Zstd)
    }

    /// The name of the compression format.
    pub fn name(self) -> &'static str {
        match self {
            Self::Gzip => "gzip",
            Self::Zstd => "zstd",
        }
    }

    /// Whether files of this compression format are decompressed even under `data.bytes`.
    pub fn is_always(self) -> bool {
        self == Self::Gzip
    }
}

/// Highest accepted compression ratio of a text. Data with a higher ratio is repetitive, and may have been created to fill the disk.
const MOST_RATIO: u64 = 200;

/// Decompressed size up to which any compression ratio is accepted.
const ALWAYS_BYTES: u64 = 64 << 20;

/// Largest zstd window in bytes, which is the window of `zstd --ultra -22`.
const MOST_WINDOW: u64 = 128 << 20;

/// Decompresses a file of `size` compressed bytes.
pub(super) fn unpacked(packing: Packing, raw: Box<dyn BufRead + Send>, size: u64) -> impl Read + Send {
    let most = size.saturating_mul(MOST_RATIO).max(ALWAYS_BYTES);
    Bounded { members: Members { packing, at: Place::Between(raw) }, read: 0, most, size }
}

type Raw = Box<dyn BufRead + Send>;

/// The members or frames of a compressed file, which are read one after the other.
struct Members {
    packing: Packing,
    at: Place,
}

enum Place {
    Between(Raw),
    InGzip(Box<GzDecoder<Raw>>),
    InZstd(Box<Frame>),
    Done,
}

/// A reader that fails when the decompressed size exceeds the size that a text can have.
struct Bounded {
    members: Members,
    read: u64,
    most: u64,
    size: u64,
}

impl Read for Bounded {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let count = self.members.read(into)?;
        self.read += count as u64;
        if self.read > self.most {
            let (most, size) = (self.most, self.size);
            let why = format!("inflates to more than {most} bytes, of {size} packed ones: that is no text");
            return Err(io::Error::other(why));
        }
        Ok(count)
    }
}

impl Read for Members {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        loop {
            let count = match &mut self.at {
                Place::Done => return Ok(0),
                Place::Between(_) => 0,
                Place::InGzip(member) => member.read(into)?,
                Place::InZstd(frame) => frame.read(into)?,
            };
            if count > 0 || into.is_empty() {
                return Ok(count);
            }
            self.at = match mem::replace(&mut self.at, Place::Done) {
                Place::Done => Place::Done,
                Place::InGzip(member) => Place::Between(member.into_inner()),
                Place::InZstd(frame) => Place::Between(frame.raw),
                Place::Between(raw) if self.packing == Packing::Gzip => begin_member(raw)?,
                Place::Between(raw) => begin_frame(raw)?,
            };
        }
    }
}

/// Starts the next member, if there is one.
fn begin_member(mut raw: Raw) -> io::Result<Place> {
    Ok(match raw.fill_buf()?.first() {
        Some(first) if *first == GZIP_MAGIC[0] => Place::InGzip(Box::new(GzDecoder::new(raw))),
        None => Place::Done,
        Some(_) => {
            only_zeros(&mut raw)?;
            Place::Done
        }
    })
}

/// Accepts only zeros, because zeros pad a file to the block size of a tape.
fn only_zeros(raw: &mut Raw) -> io::Result<()> {
    let (mut count, mut are_zeros) = (0, true);
    loop {
        let rest = raw.fill_buf()?;
        are_zeros &= rest.iter().all(|byte| *byte == 0);
        count += rest.len();
        match rest.len() {
            0 if are_zeros => return Ok(()),
            0 => {
                let why = format!("has {count} bytes after its gzip data that are no gzip");
                return Err(io::Error::new(io::ErrorKind::InvalidData, why));
            }
            read => raw.consume(read),
        }
    }
}

/// A frame of zstd.
struct Frame {
    raw: Raw,
    decoder: FrameDecoder,
    /// Number of bytes returned so far.
    given: u64,
}

impl Frame {
    /// Reads the next bytes. Returns 0 at the end of the frame, where checksum and size are verified.
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        while self.decoder.can_collect() == 0 && !self.decoder.is_finished() {
            if let Err(error) =
                self.decoder.decode_blocks(&mut self.raw, BlockDecodingStrategy::UptoBlocks(1))
            {
                return Err(broken(&mut self.raw, &error));
            }
        }
        let count = self.decoder.read(into)?;
        self.given += count as u64;
        if count == 0 && !into.is_empty() {
            let (said, is) = (self.decoder.get_checksum_from_data(), self.decoder.get_calculated_checksum());
            let size = self.decoder.content_size();
            if said.is_some_and(|said| is != Some(said)) || size > 0 && size != self.given {
                let why = "its checksum or its size is another one";
                return Err(io::Error::new(io::ErrorKind::InvalidData, why));
            }
        }
        Ok(count)
    }
}

/// Starts the next frame, if there is one. Skippable frames are skipped.
fn begin_frame(mut raw: Raw) -> io::Result<Place> {
    loop {
        if raw.fill_buf()?.is_empty() {
            return Ok(Place::Done);
        }
        let mut decoder = FrameDecoder::new();
        decoder.set_max_window_size(MOST_WINDOW);
        let skip = match decoder.init(&mut raw) {
            Ok(()) => return Ok(Place::InZstd(Box::new(Frame { raw, decoder, given: 0 }))),
            Err(FrameDecoderError::ReadFrameHeaderError(ReadFrameHeaderError::SkipFrame {
                length, ..
            })) => u64::from(length),
            Err(error) => return Err(broken(&mut raw, &error)),
        };
        if io::copy(&mut (&mut raw).take(skip), &mut io::sink())? < skip {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
    }
}

/// The error of a damaged frame: an unexpected end of file if no bytes are left, otherwise the decoder's error.
fn broken(raw: &mut Raw, error: &FrameDecoderError) -> io::Error {
    let kind = match raw.fill_buf().is_ok_and(<[u8]>::is_empty) {
        true => io::ErrorKind::UnexpectedEof,
        false => io::ErrorKind::InvalidData,
    };
    io::Error::new(kind, error.to_string())
}
