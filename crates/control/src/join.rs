use crate::error::{Error, Result};
use serde::{Deserialize, Serialize};

/// The settings that a rank declares when it joins.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Join {
    /// The program and its version, which must be the same on all ranks.
    pub version: String,
    /// The configuration of the run as TOML, which must be the same on all ranks. At most 56 KiB.
    pub config: String,
    /// The rank number, from 0.
    pub rank: usize,
    /// Number of ranks that this rank expects.
    pub world: usize,
    /// Name of the rank's host.
    pub host: String,
    /// The process id on the rank's host.
    pub pid: u32,
    /// Whether the hub runs in rank 0's process; if so, a loss of the hub means that rank 0 has failed.
    pub hub_is_rank_0: bool,
}

/// Maximum length of a configuration, in bytes. This limit keeps the handshake below 64 KiB.
const CONFIG: usize = 56 << 10;
/// Maximum length of a version and of a host name, in bytes.
const NAME: usize = 1 << 10;

impl Join {
    /// Checks that the settings fit into a handshake.
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
