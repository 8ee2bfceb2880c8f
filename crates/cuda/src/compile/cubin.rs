//! A compiled kernel instance, its content address, and the resources that it needs.

use crate::compile::source::code;
use sha2::{Digest, Sha256};
use std::collections::BTreeMap;
use std::fmt;

/// The key of a compiled kernel in the cache, which is a digest of everything that determines the compiled code.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Key([u8; 32]);

impl Key {
    /// The key of an instance: the digest of `expression`, of every source that it includes (path and text without comments),
    /// of the options, and of NVRTC's version.
    pub fn of(expression: &str, reached: &BTreeMap<&str, &str>, options: &[&str], nvrtc: (u32, u32)) -> Self {
        let counts = format!("{} {} {} {}", reached.len(), options.len(), nvrtc.0, nvrtc.1);
        let codes: Vec<(&str, String)> = reached.iter().map(|(path, text)| (*path, code(text))).collect();
        let mut parts = vec![counts.as_bytes(), expression.as_bytes()];
        parts.extend(codes.iter().flat_map(|(path, code)| [path.as_bytes(), code.as_bytes()]));
        parts.extend(options.iter().map(|option| option.as_bytes()));
        Self::of_parts(&parts)
    }

    /// The digest of a list of parts. Each part is preceded by its length, so that different lists never give the
    /// same bytes.
    pub(crate) fn of_parts(parts: &[&[u8]]) -> Self {
        let mut digest = Sha256::new();
        for part in parts {
            digest.update((part.len() as u64).to_le_bytes());
            digest.update(part);
        }
        Self(digest.finalize().into())
    }
}

impl fmt::Display for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

/// The resources that a compiled kernel needs, as ptxas reports them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Resources {
    /// Registers per thread.
    pub registers: u32,
    /// The number of bytes of spill stores, which are written to local memory because there are not enough registers.
    pub spill_store_bytes: u32,
    /// The number of bytes of spill loads, which are read back from local memory.
    pub spill_load_bytes: u32,
    /// Static shared memory in bytes; the launch determines dynamic shared memory.
    pub static_shared_bytes: u32,
}

impl Resources {
    /// Reads the resources from ptxas's verbose log.
    pub(crate) fn parse(log: &str) -> Self {
        let before = |what: &str| {
            let text = &log[..log.find(what)?];
            text.rsplit(|c: char| !c.is_ascii_digit()).find(|word| !word.is_empty())?.parse().ok()
        };
        Self {
            registers: before(" registers").unwrap_or(0),
            spill_store_bytes: before(" bytes spill stores").unwrap_or(0),
            spill_load_bytes: before(" bytes spill loads").unwrap_or(0),
            static_shared_bytes: before(" bytes smem").unwrap_or(0),
        }
    }
}

/// A compiled kernel instance.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Cubin {
    /// The machine code, an ELF image.
    pub image: Vec<u8>,
    /// The kernel's mangled name in the image.
    pub symbol: String,
    /// The resources that the kernel needs.
    pub resources: Resources,
}
