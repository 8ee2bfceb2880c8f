use crate::error::{Error, Result};
use serde::{Deserialize, Serialize};

/// What a rank says of itself when it comes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Join {
    /// The program and its version: the same on every rank.
    pub version: String,
    /// The configuration of the run as TOML: the same on every rank. At most 56 KiB.
    pub config: String,
    /// Which rank it is, from 0.
    pub rank: usize,
    /// How many ranks it takes the run to have.
    pub world: usize,
    /// The host's name, as people know it.
    pub host: String,
    /// The process, as its host counts.
    pub pid: u32,
    /// Whether the hub is in the process of rank 0, so that rank 0 has failed where the hub is lost.
    pub hub_is_rank_0: bool,
}

/// The longest configuration, in bytes: with the rest of the handshake it stays below its 64 KiB.
const CONFIG: usize = 56 << 10;
/// The longest version and the longest name of a host, in bytes.
const NAME: usize = 1 << 10;

impl Join {
    /// Whether it fits into a handshake.
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
