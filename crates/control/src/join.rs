use crate::error::{Error, Result};
use serde::{Deserialize, Serialize};

/// What a rank declares when it joins.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Join {
    /// The program and its version: the same on every rank.
    pub version: String,
    /// The configuration of the run as TOML: the same on every rank. At most 56 KiB.
    pub config: String,
    /// The rank, from 0.
    pub rank: usize,
    /// Number of ranks that it expects.
    pub world: usize,
    /// The host's name.
    pub host: String,
    /// The process number on its host.
    pub pid: u32,
    /// Whether the hub is in rank 0's process, so that losing the hub means that rank 0 has failed.
    pub hub_is_rank_0: bool,
}

/// Longest configuration, in bytes: keeps the handshake below 64 KiB.
const CONFIG: usize = 56 << 10;
/// The longest version and the longest name of a host, in bytes.
const NAME: usize = 1 << 10;

impl Join {
    /// Checks that it fits into a handshake.
    pub(crate) fn check(&self) -> Result<()> {
        let texts = [
            ("configuration", &self.config, CONFIG),
            ("version", &self.version, NAME),
            ("host's name", &self.host, NAME),
        ];
        match texts.into_iter().find(|(_, text, most)| text.len() > *most) {
            None => Ok(()),
            Some((what, text, most)) => Err(Error::TooLong { what, bytes: text.len(), most }),
        }
    }
}
