//! Text from a path, plain or gzip, read as bytes, its end held out.

use std::io::Read;
use std::path::Path;

use flate2::bufread::MultiGzDecoder;

use crate::error::{Error, Result};

/// The bytes of a text and where the held-out part begins.
#[derive(Debug, Clone)]
pub struct Text {
    bytes: Vec<u8>,
    split: usize,
}

/// First bytes of a gzip member (RFC 1952, 2.3.1).
const GZIP_MAGIC: [u8; 2] = [0x1f, 0x8b];

impl Text {
    /// Reads `path`; what begins like gzip is inflated, whatever its name. The last `valid_fraction` is held out.
    ///
    /// # Errors
    /// [`Error::Data`] where the file cannot be read, is empty, is damaged gzip, or where either part is too short
    /// for one sequence of `seq_len` tokens and the token after it.
    pub fn open(path: &Path, valid_fraction: f64, seq_len: usize) -> Result<Self> {
        let raw = std::fs::read(path).map_err(|e| Error::data(path, format!("cannot be read: {e}")))?;
        let bytes = if raw.starts_with(&GZIP_MAGIC) { inflate(path, &raw)? } else { raw };
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

fn inflate(path: &Path, raw: &[u8]) -> Result<Vec<u8>> {
    let mut bytes = Vec::new();
    MultiGzDecoder::new(raw).read_to_end(&mut bytes).map_err(|error| {
        let what = match error.kind() {
            std::io::ErrorKind::UnexpectedEof => "is truncated gzip",
            _ => "is damaged gzip",
        };
        Error::data(path, format!("{what}: {error} after {} inflated bytes", bytes.len()))
    })?;
    Ok(bytes)
}
