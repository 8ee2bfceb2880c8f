//! Metrics as a TensorBoard event file: records in TensorFlow's framing that contain `Event` messages of its `event.proto`, of which a few
//! fields are encoded by hand.
//!
//! | message | fields |
//! |---|---|
//! | `Event` | 1 wall time, double; 2 step, int64; 3 file version, string; 5 `Summary`; 7 `SessionLog` |
//! | `Summary` | 1 `Value`, repeated |
//! | `Value` | 1 tag, string; 2 simple value, float |
//! | `SessionLog` | 1 status, enum |

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use super::Metrics;
use crate::error::{Error, Result};
use crate::files::{append, write_whole};

/// A TensorBoard event file of one process. TensorBoard reads all event files of a directory in the order of their names.
#[derive(Debug)]
pub struct EventLog {
    file: File,
    path: PathBuf,
}

/// Prefix of the names of event files.
pub const EVENTS_PREFIX: &str = "events.out.tfevents.";

/// `SessionLog.START`: readers then drop events of this step and later ones from earlier files.
const START: u64 = 1;

impl EventLog {
    /// Creates a new file in the directory for a run that has completed `step` steps. A new run removes the older event files in the
    /// directory.
    ///
    /// # Errors
    /// Returns [`Error::Io`] if a call of the operating system fails.
    pub fn create(dir: &Path, step: u64) -> Result<Self> {
        crate::files::make_folder(dir).map_err(Error::io(dir))?;
        if step == 0 {
            remove_older(dir)?;
        }
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        let path = dir.join(format!("{EVENTS_PREFIX}{:010}.{:09}.nibble", now.as_secs(), now.subsec_nanos()));
        let version = record(&[event(0), bytes_field(3, b"brain.Event:2")].concat());
        let start = record(&[event(step + 1), bytes_field(7, &varint_field(1, START))].concat());
        write_whole(&path, [version, start].concat()).map_err(Error::io(&path))?;
        let file = File::options().append(true).open(&path).map_err(Error::io(&path))?;
        Ok(Self { file, path })
    }

    /// Appends these metrics to the file; each metric has the same name as in the metrics file. The data has reached the operating system
    /// when this function returns.
    ///
    /// # Errors
    /// Returns [`Error::Io`] if a call of the operating system fails.
    pub fn write(&mut self, metrics: &Metrics) -> Result<()> {
        let values = serde_json::to_value(metrics).map_err(|e| Error::data(&self.path, e.to_string()))?;
        let scalars = values.as_object().into_iter().flatten().filter(|(name, _)| *name != "step");
        let summary: Vec<u8> = scalars
            .filter_map(|(name, value)| Some((name, value.as_f64()?)))
            .flat_map(|(name, value)| {
                let value = float_field(2, value as f32);
                bytes_field(1, &[bytes_field(1, name.as_bytes()), value].concat())
            })
            .collect();
        let record = record(&[event(metrics.step), bytes_field(5, &summary)].concat());
        append(&mut self.file, &record).map_err(Error::io(&self.path))
    }
}

/// Length, its checksum, the message, its checksum.
fn record(message: &[u8]) -> Vec<u8> {
    let len = (message.len() as u64).to_le_bytes();
    [&len[..], &masked_crc(&len).to_le_bytes(), message, &masked_crc(message).to_le_bytes()].concat()
}

/// Removes event files of an earlier run that never wrote a checkpoint.
fn remove_older(dir: &Path) -> Result<()> {
    for entry in fs::read_dir(dir).map_err(Error::io(dir))?.flatten() {
        let name = entry.file_name();
        let name = name.to_string_lossy();
        if name.starts_with(EVENTS_PREFIX) && name.ends_with(".nibble") {
            fs::remove_file(entry.path()).map_err(Error::io(&entry.path()))?;
        }
    }
    Ok(())
}

/// The fields of every event.
fn event(step: u64) -> Vec<u8> {
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    let mut out = vec![tag(1, 1)];
    out.extend(now.as_secs_f64().to_le_bytes());
    out.extend(varint_field(2, step));
    out
}

/// A field's number and wire type. Field numbers here are below 16, so this is one byte.
fn tag(field: u8, wire_type: u8) -> u8 {
    field << 3 | wire_type
}

fn varint(mut value: u64) -> Vec<u8> {
    let mut out = Vec::new();
    while value >= 0x80 {
        out.push(value as u8 | 0x80);
        value >>= 7;
    }
    out.push(value as u8);
    out
}

fn varint_field(field: u8, value: u64) -> Vec<u8> {
    [vec![tag(field, 0)], varint(value)].concat()
}

fn bytes_field(field: u8, bytes: &[u8]) -> Vec<u8> {
    [&[tag(field, 2)], &varint(bytes.len() as u64)[..], bytes].concat()
}

fn float_field(field: u8, value: f32) -> Vec<u8> {
    [&[tag(field, 5)], &value.to_le_bytes()[..]].concat()
}

/// CRC-32C, rotated and offset, as in TensorFlow's records.
fn masked_crc(bytes: &[u8]) -> u32 {
    crc32c(bytes).rotate_right(15).wrapping_add(0xa282_ead8)
}

/// Castagnoli's polynomial, reflected; bit by bit, which is fast enough for a few hundred bytes per step.
fn crc32c(bytes: &[u8]) -> u32 {
    const POLYNOMIAL: u32 = 0x82f6_3b78;
    let step = |crc: u32| if crc & 1 == 1 { crc >> 1 ^ POLYNOMIAL } else { crc >> 1 };
    !bytes.iter().fold(!0, |crc, byte| (0..8).fold(crc ^ u32::from(*byte), |crc, _| step(crc)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn checksums_are_those_of_the_standard() {
        // RFC 3720, B.4.
        assert_eq!(crc32c(b"123456789"), 0xe306_9283);
        assert_eq!(crc32c(&[0; 32]), 0x8a91_36aa);
        assert_eq!(crc32c(&[0xff; 32]), 0x62a8_ab43);
        assert_eq!([varint(1), varint(300)], [vec![1], vec![0xac, 2]]);
    }

    /// The messages of a file, each verified against its checksums.
    fn messages(bytes: &[u8]) -> Vec<Vec<u8>> {
        let mut rest = bytes;
        let mut out = Vec::new();
        while !rest.is_empty() {
            let (len, after) = rest.split_at(8);
            let (len_crc, after) = after.split_at(4);
            assert_eq!(len_crc, masked_crc(len).to_le_bytes());
            let (message, after) = after.split_at(u64::from_le_bytes(len.try_into().unwrap()) as usize);
            let (crc, after) = after.split_at(4);
            assert_eq!(crc, masked_crc(message).to_le_bytes());
            out.push(message.to_vec());
            rest = after;
        }
        out
    }

    fn files(dir: &Path) -> Vec<PathBuf> {
        let mut paths: Vec<_> = fs::read_dir(dir).unwrap().map(|e| e.unwrap().path()).collect();
        paths.sort();
        paths
    }

    #[test]
    fn a_file_holds_every_number_of_the_metrics_but_those_that_are_none() {
        let dir = tempfile::tempdir().unwrap();
        let mut log = EventLog::create(dir.path(), 0).unwrap();
        let other = [("lost".to_owned(), f64::NAN), ("kept".to_owned(), 0.25)].into();
        log.write(&Metrics { step: 300, loss: Some(4.5), other, ..Metrics::default() }).unwrap();
        let events = messages(&fs::read(&files(dir.path())[0]).unwrap());
        assert_eq!(events.len(), 3);
        assert!(events[0].ends_with(b"brain.Event:2"));
        assert!(events[1].ends_with(&[2 << 3, 1, 7 << 3 | 2, 2, 1 << 3, 1]), "{:?}", events[1]);
        // After the wall time: the step, and a summary of two values.
        let loss = [b"\x0a\x1c".as_slice(), b"loss_metrics/global_avg_loss", b"\x15", &4.5f32.to_le_bytes()];
        let kept = [b"\x0a\x04".as_slice(), b"kept", b"\x15", &0.25f32.to_le_bytes()];
        let values = [loss.concat(), kept.concat()];
        let mut summary: Vec<Vec<u8>> = values.iter().map(|value| bytes_field(1, value)).collect();
        let found = &events[2][9..];
        assert!(found.starts_with(&[2 << 3, 0xac, 2, 5 << 3 | 2]), "{found:?}");
        let found = &found[5..];
        if found != summary.concat() {
            summary.reverse();
        }
        assert_eq!(found, summary.concat());
    }

    #[test]
    fn a_resumed_run_adds_a_file_and_a_new_one_replaces_all() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("events.out.tfevents.1.other"), b"not ours").unwrap();
        EventLog::create(dir.path(), 0).unwrap();
        EventLog::create(dir.path(), 7).unwrap();
        let after = files(dir.path());
        assert_eq!(after.len(), 3);
        // The second file, of the resumed run, begins with step 8.
        let second = messages(&fs::read(&after[2]).unwrap());
        assert_eq!(second[1][9..11], [2 << 3, 8]);
        EventLog::create(dir.path(), 0).unwrap();
        assert_eq!(files(dir.path()).len(), 2);
    }
}
