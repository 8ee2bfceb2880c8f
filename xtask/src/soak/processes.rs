//! Processes, as shown by /proc.

use std::fs;
use std::path::Path;
use std::process::Command;

/// The resources that a process holds.
#[derive(Debug, Clone, Copy)]
pub struct Holds {
    /// KiB of resident memory.
    pub rss_kib: u64,
    /// KiB of the resident memory that is anonymous: without file pages, which the system evicts and rereads at will.
    pub anon_kib: u64,
    /// Number of open file descriptors.
    pub fds: u64,
    pub threads: u64,
}

/// All processes that this user may inspect.
pub fn all() -> Vec<u32> {
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok()).collect()
}

/// The resources of a process; `None` if it has ended.
pub fn holds(process: u32) -> Option<Holds> {
    let status = fs::read_to_string(format!("/proc/{process}/status")).ok()?;
    let number = |name: &str| {
        let line = status.lines().find_map(|line| line.strip_prefix(name))?;
        line.trim_start_matches(':').split_whitespace().next()?.parse().ok()
    };
    let fds = fs::read_dir(format!("/proc/{process}/fd")).ok()?.count() as u64;
    Some(Holds { rss_kib: number("VmRSS")?, anon_kib: number("RssAnon")?, fds, threads: number("Threads")? })
}

/// The names of a process's open files.
pub fn files_of(process: u32) -> Vec<String> {
    let entries = fs::read_dir(format!("/proc/{process}/fd")).into_iter().flatten().flatten();
    let mut files: Vec<String> =
        entries.filter_map(|entry| Some(fs::read_link(entry.path()).ok()?.display().to_string())).collect();
    files.sort();
    files
}

/// The child processes of the launcher, with their ranks.
pub fn ranks_of(launcher: u32) -> Vec<(u32, usize)> {
    let children = all().into_iter().filter(|process| parent_of(*process) == Some(launcher));
    children.filter_map(|child| Some((child, variable(child, "NIBBLE_RANK=")?.parse().ok()?))).collect()
}

/// The processes whose environment has `NAME=` with this value.
pub fn with_variable(name: &str, value: &Path) -> Vec<u32> {
    let value = value.to_string_lossy();
    all().into_iter().filter(|process| variable(*process, name).is_some_and(|found| found == value)).collect()
}

/// Kills a process with SIGKILL.
pub fn kill(process: u32) -> Result<(), String> {
    signal("KILL", process)
}

/// Sends a signal to a process.
pub fn signal(name: &str, process: u32) -> Result<(), String> {
    let line = format!("kill -{name} {process}");
    // The shell's builtin: a system may have no `kill` program.
    match Command::new("sh").args(["-c", &line]).status() {
        Ok(status) if status.success() => Ok(()),
        Ok(_) => Err(format!("`{line}` failed")),
        Err(why) => Err(format!("`{line}`: {why}")),
    }
}

fn parent_of(process: u32) -> Option<u32> {
    let stat = fs::read_to_string(format!("/proc/{process}/stat")).ok()?;
    // The program's name is in parentheses, and may contain spaces.
    stat.rsplit_once(')')?.1.split_whitespace().nth(1)?.parse().ok()
}

fn variable(process: u32, name: &str) -> Option<String> {
    let environment = fs::read(format!("/proc/{process}/environ")).ok()?;
    let mut variables = environment.split(|byte| *byte == 0);
    variables.find_map(|variable| {
        Some(String::from_utf8_lossy(variable.strip_prefix(name.as_bytes())?).into_owned())
    })
}
