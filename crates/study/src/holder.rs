//! Which process runs a cell, and whether it still lives.

use serde::{Deserialize, Serialize};

/// The process that has taken a cell.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Holder {
    /// Its number on its host.
    pub pid: u32,
    /// Its host's name.
    pub host: String,
    /// When it started, in the kernel's ticks since the host started; another process that gets its number has another. Absent where the system does not say.
    pub started: Option<u64>,
}

impl Holder {
    /// This process, on a host of this name.
    #[must_use]
    pub fn this(host: &str) -> Self {
        let pid = std::process::id();
        Self { pid, host: host.to_owned(), started: started(pid) }
    }

    /// Whether it is known to have ended: it ran on this host, which has no such process any more. Of another host, or where the system does not tell its processes
    /// (`/proc`), nothing is known.
    #[must_use]
    pub fn is_dead(&self, host: &str) -> bool {
        // This process itself shows whether the system tells.
        let told = started(std::process::id()).is_some();
        self.host == host && told && (started(self.pid).is_none() || started(self.pid) != self.started)
    }
}

/// Field 22 of `/proc/PID/stat`; the name of the program, in parentheses, may hold anything.
fn started(pid: u32) -> Option<u64> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let after_name = stat.rsplit_once(')')?.1;
    after_name.split_whitespace().nth(19)?.parse().ok()
}
