//! The process that runs a cell, and whether the process is still alive.

use serde::{Deserialize, Serialize};

/// The process that has claimed a cell.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Holder {
    /// The process id on its host.
    pub pid: u32,
    /// Name of the process's host.
    pub host: String,
    /// Start time of the process, in the kernel's ticks since the host started. The start time distinguishes the process from a later
    /// process with the same id. `None` if the system does not report the start time.
    pub started: Option<u64>,
    /// The device on which the cell runs, such as `cuda:1`. Empty if the process did not name a device.
    #[serde(default)]
    pub device: String,
}

impl Holder {
    /// Describes this process, which runs a cell on `device`; `host` is the name of its host.
    #[must_use]
    pub fn this(host: &str, device: &str) -> Self {
        let pid = std::process::id();
        Self { pid, host: host.to_owned(), started: started(pid), device: device.to_owned() }
    }

    /// Whether both may use the same device. Only two numbered devices (`cuda:0`, `cuda:1`) are known to differ.
    pub(crate) fn may_share_device(&self, other: &Self) -> bool {
        let differ = self.device != other.device && self.device.contains(':') && other.device.contains(':');
        self.host == other.host && !differ
    }

    /// Whether the process is known to have ended: it ran on this host, and this host no longer has such a process. For a process on
    /// another host, or if the system does not list processes (`/proc`), the result is false.
    #[must_use]
    pub fn is_dead(&self, host: &str) -> bool {
        // Whether the system lists processes is tested with this process itself.
        let told = started(std::process::id()).is_some();
        self.host == host && told && (started(self.pid).is_none() || started(self.pid) != self.started)
    }
}

/// Reads field 22 of `/proc/PID/stat`; the name of the program, in parentheses, may contain any characters.
fn started(pid: u32) -> Option<u64> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let after_name = stat.rsplit_once(')')?.1;
    after_name.split_whitespace().nth(19)?.parse().ok()
}
