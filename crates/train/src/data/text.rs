//! Text from a path, plain or gzip, read as bytes, its end held out.

use std::io::{self, Read};
use std::path::Path;

use flate2::bufread::GzDecoder;

use super::signature::kind_of;
use crate::error::{Error, Result};
use crate::files;

/// The bytes of a text and where the held-out part begins.
#[derive(Debug, Clone)]
pub struct Text {
    bytes: Vec<u8>,
    split: usize,
}

/// First bytes of a gzip member (RFC 1952, 2.3.1).
const GZIP_MAGIC: [u8; 2] = [0x1f, 0x8b];

impl Text {
    /// Reads `path`; what begins like gzip is inflated, whatever its name. What then begins like another kind of file that is no
    /// text is refused, unless its `bytes` are what is meant. The last `valid_fraction` is held out.
    ///
    /// # Errors
    /// [`Error::Data`] where the file cannot be read, is empty, is damaged gzip or no text, or where either part is too short
    /// for one sequence of `seq_len` tokens and the token after it.
    pub fn open(path: &Path, bytes: bool, valid_fraction: f64, seq_len: usize) -> Result<Self> {
        let is_bytes = bytes;
        let raw = files::read_whole(path, MOST_BYTES)
            .map_err(|e| Error::data(path, format!("cannot be read: {e}{}", where_to_get(path, &e))))?;
        let bytes = if raw.starts_with(&GZIP_MAGIC) { inflate(path, &raw)? } else { raw };
        if let Some(kind) = kind_of(&bytes).filter(|_| !is_bytes) {
            let why = format!("{kind}; if its bytes are what is to be learnt, set data.bytes=true");
            return Err(Error::data(path, why));
        }
        if bytes.is_empty() {
            return Err(Error::data(path, "is empty"));
        }
        let split = (bytes.len() as f64 * (1.0 - valid_fraction)) as usize;
        let text = Self { split: split.min(bytes.len()), bytes };
        let needed = seq_len + 1;
        for (part, got, share) in [
            ("training", text.train().len(), 1.0 - valid_fraction),
            ("held-out", text.valid().len(), valid_fraction),
        ] {
            if got < needed {
                let why = format!(
                    "is too short: its {part} part ({:.0} % of {} bytes) has {got} bytes, and one sequence \
                     (data.seq_len = {seq_len}) needs {needed}",
                    100.0 * share,
                    text.bytes.len()
                );
                return Err(Error::data(path, why));
            }
        }
        Ok(text)
    }

    /// The bytes to train on.
    #[must_use]
    pub fn train(&self) -> &[u8] {
        &self.bytes[..self.split]
    }

    /// All bytes, inflated.
    #[must_use]
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// The held-out bytes, the end of the file.
    #[must_use]
    pub fn valid(&self) -> &[u8] {
        &self.bytes[self.split..]
    }
}

/// More bytes than a text has that is held in memory.
const MOST_BYTES: u64 = 1 << 38;

/// No text is packed so much smaller; what is repeats itself, and may be made to fill the memory.
const MOST_RATIO: u64 = 200;

/// What may be inflated whatever the ratio.
const ALWAYS_BYTES: u64 = 64 << 20;

/// The bytes of all members of a gzip file, one after the other.
fn inflate(path: &Path, raw: &[u8]) -> Result<Vec<u8>> {
    let most = (MOST_RATIO * raw.len() as u64).clamp(ALWAYS_BYTES, MOST_BYTES);
    let (mut bytes, mut rest) = (Vec::new(), raw);
    while rest.starts_with(&GZIP_MAGIC) {
        let mut member = GzDecoder::new(rest).take(most + 1 - bytes.len() as u64);
        member.read_to_end(&mut bytes).map_err(|error| {
            let what = match error.kind() {
                std::io::ErrorKind::UnexpectedEof => "is truncated gzip",
                _ => "is damaged gzip",
            };
            Error::data(path, format!("{what}: {error} after {} inflated bytes", bytes.len()))
        })?;
        if bytes.len() as u64 > most {
            let why =
                format!("inflates to more than {most} bytes, of {} packed ones: that is no text", raw.len());
            return Err(Error::data(path, why));
        }
        rest = member.into_inner().into_inner();
    }
    // Zeros pad a file to the blocks of a tape.
    if rest.iter().any(|byte| *byte != 0) {
        let why = format!("has {} bytes after its gzip data that are no gzip", rest.len());
        return Err(Error::data(path, why));
    }
    Ok(bytes)
}

/// Where to get a text that the built-in configuration names and does not bring along.
fn where_to_get(path: &Path, error: &io::Error) -> &'static str {
    match error.kind() == io::ErrorKind::NotFound && path == Path::new("tinyshakespeare.txt") {
        true => {
            "; name a text of yours with --set data.source=FILE. Shakespeare's works are at Project Gutenberg \
             (https://www.gutenberg.org/ebooks/100), and this file is in https://github.com/karpathy/char-rnn, as \
             data/tinyshakespeare/input.txt"
        }
        false => "; name a text, plain or gzip, with --set data.source=FILE",
    }
}
