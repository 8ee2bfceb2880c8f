//! Which directory a run writes to: a new run never lands among another's checkpoints.

use crate::error::{Error, Result};
use std::path::{Path, PathBuf};

/// The directory in which a new run starts.
///
/// # Errors
/// Where the user named `dir` and it already holds checkpoints.
pub fn fresh(dir: &Path, named_by_user: bool) -> Result<PathBuf> {
    if !holds_checkpoints(dir) {
        return Ok(dir.to_owned());
    }
    if named_by_user {
        return Err(Error::usage(format!(
            "`run.dir`: {} already holds checkpoints; continue that run with --resume, or name another directory",
            dir.display()
        )));
    }
    let free = (2u32..).map(|n| numbered(dir, n)).find(|dir| !holds_checkpoints(dir));
    // 2³² runs do not fit on a disk.
    Ok(free.unwrap_or_else(|| dir.to_owned()))
}

/// The directory of the latest run: `dir`, or the one with the highest number that a run has begun in.
///
/// # Errors
/// If the directories cannot be listed.
pub fn latest(dir: &Path, named_by_user: bool) -> Result<PathBuf> {
    if named_by_user {
        return Ok(dir.to_owned());
    }
    let parent = dir.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let Some(name) = dir.file_name().map(|n| n.to_string_lossy()) else { return Ok(dir.to_owned()) };
    let entries = match std::fs::read_dir(parent) {
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(dir.to_owned()),
        other => other.map_err(Error::io(parent))?,
    };
    let mut highest = 1;
    for entry in entries {
        let entry = entry.map_err(Error::io(parent))?;
        let entry_name = entry.file_name();
        let number =
            entry_name.to_string_lossy().strip_prefix(&format!("{name}-")).and_then(|n| n.parse().ok());
        if let Some(number) = number.filter(|_| entry.path().join("checkpoints").is_dir()) {
            highest = highest.max(number);
        }
    }
    Ok(if highest > 1 { numbered(dir, highest) } else { dir.to_owned() })
}

fn numbered(dir: &Path, n: u32) -> PathBuf {
    let name = dir.file_name().unwrap_or_default().to_string_lossy();
    dir.with_file_name(format!("{name}-{n}"))
}

fn holds_checkpoints(dir: &Path) -> bool {
    let Ok(entries) = std::fs::read_dir(dir.join("checkpoints")) else { return false };
    entries.flatten().any(|entry| entry.file_name().to_string_lossy().starts_with("step-"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn new_runs_take_the_next_number_and_resumed_ones_the_highest() {
        let root = tempfile::tempdir().unwrap();
        let dir = root.path().join("tiny");
        let begin = |name: &str| std::fs::create_dir_all(root.path().join(name).join("checkpoints")).unwrap();
        let save = |name: &str| {
            std::fs::create_dir_all(root.path().join(name).join("checkpoints/step-00000001")).unwrap();
        };
        assert_eq!(latest(&dir, false).unwrap(), dir);
        assert_eq!(fresh(&dir, false).unwrap(), dir);
        begin("tiny");
        assert_eq!(fresh(&dir, false).unwrap(), dir, "killed before its first checkpoint: nothing to lose");
        save("tiny");
        assert_eq!(fresh(&dir, false).unwrap(), root.path().join("tiny-2"));
        save("tiny-2");
        begin("tiny-10");
        begin("tiny-x");
        assert_eq!(fresh(&dir, false).unwrap(), root.path().join("tiny-3"));
        assert_eq!(latest(&dir, false).unwrap(), root.path().join("tiny-10"));
        assert_eq!(latest(&dir, true).unwrap(), dir);
        assert!(fresh(&dir, true).unwrap_err().to_string().contains("--resume"));
    }
}
