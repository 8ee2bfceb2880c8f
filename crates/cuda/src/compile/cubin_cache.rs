//! Compiled kernels on disk, indexed by content address.
//!
//! An entry is a file `KEY.cubin`. A file is written under another name and then renamed. So a reader sees a complete
//! entry or none, even with concurrent writers. A digest of the content turns a truncated or damaged file into a cache
//! miss.

use crate::compile::cubin::{Cubin, Key, Resources};
use nibble_core::visible;
use sha2::{Digest, Sha256};
use std::io::Write;
use std::path::{Path, PathBuf};

const MAGIC: &str = "nibble cubin 1";

/// A directory of cache entries.
#[derive(Debug, Clone)]
pub(crate) struct CubinCache {
    folder: PathBuf,
}

impl CubinCache {
    pub(crate) fn new(folder: PathBuf) -> Self {
        Self { folder }
    }

    fn path(&self, key: &Key) -> PathBuf {
        self.folder.join(format!("{key}.cubin"))
    }

    /// Reads an entry; returns `None` if it does not exist or is damaged. A damaged entry is
    /// removed.
    pub(crate) fn read(&self, key: &Key) -> Option<Cubin> {
        let path = self.path(key);
        let bytes = std::fs::read(&path).ok()?;
        let cubin = decode(&bytes);
        if cubin.is_none() {
            remove(&path);
        }
        cubin
    }

    /// Writes an entry. If the directory cannot be written, a message is printed but no error is returned, because the
    /// next run then only compiles again.
    pub(crate) fn write(&self, key: &Key, cubin: &Cubin) {
        if let Err(error) = self.try_write(key, cubin) {
            let why = format_args!(
                "warning: compiled kernels are not kept in {}: {error}\n",
                self.folder.display()
            );
            // If standard error cannot be written, there is no other way to report the failure.
            let _ = std::io::stderr().write_all(visible(why).as_bytes());
        }
    }

    fn try_write(&self, key: &Key, cubin: &Cubin) -> std::io::Result<()> {
        std::fs::create_dir_all(&self.folder)?;
        let path = self.path(key);
        // The process id and a counter keep concurrent writers apart.
        static WRITES: std::sync::atomic::AtomicU64 = std::sync::atomic::AtomicU64::new(0);
        let turn = WRITES.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        let beside = self.folder.join(format!(".{key}.{}.{turn}.tmp", std::process::id()));
        let written = (|| {
            let mut file = std::fs::File::create(&beside)?;
            file.write_all(&encode(cubin))?;
            file.sync_all()?;
            std::fs::rename(&beside, &path)
        })();
        if written.is_err() {
            remove(&beside);
        }
        written
    }

    /// Removes an entry that the driver has refused.
    pub(crate) fn evict(&self, key: &Key) {
        remove(&self.path(key));
    }
}

fn remove(path: &Path) {
    // If the entry is already gone, nothing remains to be done; if it cannot be removed, it will be found damaged
    // again and overwritten.
    let _ = std::fs::remove_file(path);
}

fn encode(cubin: &Cubin) -> Vec<u8> {
    let r = cubin.resources;
    let mut body = format!(
        "{}\n{} {} {} {}\n",
        cubin.symbol, r.registers, r.spill_store_bytes, r.spill_load_bytes, r.static_shared_bytes
    )
    .into_bytes();
    body.extend_from_slice(&cubin.image);
    let mut bytes = format!("{MAGIC}\n{:x}\n", Sha256::digest(&body)).into_bytes();
    bytes.extend_from_slice(&body);
    bytes
}

fn decode(bytes: &[u8]) -> Option<Cubin> {
    let (magic, rest) = line(bytes)?;
    let (digest, body) = line(rest)?;
    if magic != MAGIC || digest != format!("{:x}", Sha256::digest(body)) {
        return None;
    }
    let (symbol, rest) = line(body)?;
    let (numbers, image) = line(rest)?;
    let mut numbers = numbers.split(' ').map(str::parse);
    let mut number = || numbers.next()?.ok();
    Some(Cubin {
        symbol: symbol.to_owned(),
        resources: Resources {
            registers: number()?,
            spill_store_bytes: number()?,
            spill_load_bytes: number()?,
            static_shared_bytes: number()?,
        },
        image: image.to_vec(),
    })
}

fn line(bytes: &[u8]) -> Option<(&str, &[u8])> {
    let end = bytes.iter().position(|&b| b == b'\n')?;
    Some((std::str::from_utf8(&bytes[..end]).ok()?, &bytes[end + 1..]))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample() -> Cubin {
        Cubin {
            symbol: "_Z1kv".into(),
            resources: Resources {
                registers: 168,
                spill_store_bytes: 4,
                spill_load_bytes: 8,
                static_shared_bytes: 16,
            },
            image: vec![0x7F, b'E', b'L', b'F', b'\n', 0, 255],
        }
    }

    #[test]
    fn what_is_written_is_read_and_evicted() {
        let folder = tempfile::tempdir().unwrap();
        let cache = CubinCache::new(folder.path().join("new"));
        let key = Key::of_parts(&[b"a"]);
        assert_eq!(cache.read(&key), None);
        cache.write(&key, &sample());
        assert_eq!(cache.read(&key), Some(sample()));
        assert_eq!(cache.read(&Key::of_parts(&[b"b"])), None);
        let names: Vec<_> = std::fs::read_dir(folder.path().join("new")).unwrap().collect();
        assert_eq!(names.len(), 1, "no temporary file stays");
        cache.evict(&key);
        assert_eq!(cache.read(&key), None);
    }

    #[test]
    fn a_damaged_entry_is_a_miss_wherever_the_damage_is() {
        let folder = tempfile::tempdir().unwrap();
        let cache = CubinCache::new(folder.path().to_owned());
        let key = Key::of_parts(&[b"a"]);
        let whole = encode(&sample());
        for at in 0..whole.len() {
            for damaged in [whole[..at].to_vec(), {
                let mut bytes = whole.clone();
                bytes[at] ^= 1;
                bytes
            }] {
                std::fs::write(cache.path(&key), damaged).unwrap();
                assert_eq!(cache.read(&key), None, "damage at byte {at}");
                assert!(!cache.path(&key).exists(), "a damaged entry is removed");
            }
        }
    }
}
