//! Processes as /proc has them.

use std::fs;
use std::path::Path;
use std::process::Command;

/// What a process holds.
#[derive(Debug, Clone, Copy)]
pub struct Holds {
    /// KiB of memory that is in use and resident.
    pub rss_kib: u64,
    /// KiB of these that are its own: without pages of files, which the system takes back and reads again as it likes.
    pub anon_kib: u64,
    /// File descriptors.
    pub fds: u64,
    pub threads: u64,
}

/// All processes that this user may look into.
pub fn all() -> Vec<u32> {
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok()).collect()
}

/// What a process holds; `None` if it is gone.
pub fn holds(process: u32) -> Option<Holds> {
    let status = fs::read_to_string(format!("/proc/{process}/status")).ok()?;
    let number = |name: &str| {
        let line = status.lines().find_map(|line| line.strip_prefix(name))?;
        line.trim_start_matches(':').split_whitespace().next()?.parse().ok()
    };
    let fds = fs::read_dir(format!("/proc/{process}/fd")).ok()?.count() as u64;
    Some(Holds { rss_kib: number("VmRSS")?, anon_kib: number("RssAnon")?, fds, threads: number("Threads")? })
}

/// What its file descriptors are of, by name.
pub fn files_of(process: u32) -> Vec<String> {
    let entries = fs::read_dir(format!("/proc/{process}/fd")).into_iter().flatten().flatten();
    let mut files: Vec<String> =
        entries.filter_map(|entry| Some(fs::read_link(entry.path()).ok()?.display().to_string())).collect();
    files.sort();
    files
}

/// The processes that this one has started, with their ranks.
pub fn ranks_of(launcher: u32) -> Vec<(u32, usize)> {
    let children = all().into_iter().filter(|process| parent_of(*process) == Some(launcher));
    children.filter_map(|child| Some((child, variable(child, "NIBBLE_RANK=")?.parse().ok()?))).collect()
}

/// The processes in whose environment `NAME=` has this value.
pub fn with_variable(name: &str, value: &Path) -> Vec<u32> {
    let value = value.to_string_lossy();
    all().into_iter().filter(|process| variable(*process, name).is_some_and(|found| found == value)).collect()
}

/// Kills it as nothing can be done against.
pub fn kill(process: u32) -> Result<(), String> {
    signal("KILL", process)
}

/// Sends a signal.
pub fn signal(name: &str, process: u32) -> Result<(), String> {
    let line = format!("kill -{name} {process}");
    // The shell's own: a system may have no program of this name.
    match Command::new("sh").args(["-c", &line]).status() {
        Ok(status) if status.success() => Ok(()),
        Ok(_) => Err(format!("`{line}` failed")),
        Err(why) => Err(format!("`{line}`: {why}")),
    }
}

fn parent_of(process: u32) -> Option<u32> {
    let stat = fs::read_to_string(format!("/proc/{process}/stat")).ok()?;
    // The name of the program is in parentheses, and may have spaces.
    stat.rsplit_once(')')?.1.split_whitespace().nth(1)?.parse().ok()
}

fn variable(process: u32, name: &str) -> Option<String> {
    let environment = fs::read(format!("/proc/{process}/environ")).ok()?;
    let mut variables = environment.split(|byte| *byte == 0);
    variables.find_map(|variable| {
        Some(String::from_utf8_lossy(variable.strip_prefix(name.as_bytes())?).into_owned())
    })
}
