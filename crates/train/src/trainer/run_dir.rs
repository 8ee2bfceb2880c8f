//! Which directory a run writes to: a new run replaces no file of another run, or of a person.

use crate::checkpoint::{DIR, Store, has_checkpoints};
use crate::error::{Error, Result};
use crate::metrics::EVENTS_PREFIX;
use std::path::{Path, PathBuf};

/// The configuration of a run, every key.
pub const CONFIG_FILE: &str = "config.toml";
/// The recipe in full, as the run began with it.
pub const RECIPE_FILE: &str = "recipe.toml";
/// A line for each step.
pub const METRICS_FILE: &str = "metrics.jsonl";
/// For some steps a line that goes layer by layer.
pub const LAYERS_FILE: &str = "layers.jsonl";
/// The picture of the losses.
pub const PICTURE_FILE: &str = "loss.svg";

/// What memory the run takes, for people.
pub const MEMORY_FILE: &str = "memory.txt";

/// What a run writes into its directory, beside events and checkpoints.
const FILES: [&str; 6] = [CONFIG_FILE, RECIPE_FILE, METRICS_FILE, LAYERS_FILE, PICTURE_FILE, MEMORY_FILE];

/// Whether a run has begun in a directory.
#[must_use]
pub fn has_begun(dir: &Path) -> bool {
    Store::is_in(dir) || has_checkpoints(dir)
}

/// Whether a run that has begun writes this file, or will: it is called so in the run's directory, or lies below its checkpoints. Of a
/// path without links.
#[must_use]
pub fn is_of_a_run(path: &Path) -> bool {
    let Some(name) = path.file_name().map(|name| name.to_string_lossy()) else { return false };
    let is_named_so = FILES.contains(&&*name) || name.starts_with(EVENTS_PREFIX);
    path.ancestors().skip(1).enumerate().any(|(depth, dir)| {
        let is_its_own = if depth == 0 { is_named_so } else { path.starts_with(dir.join(DIR)) };
        is_its_own && has_begun(dir)
    })
}

/// Checks that a new run would replace nothing in a directory that the user named.
///
/// # Errors
/// [`Error::Config`] of `run.dir` that says what is there.
pub fn require_free(dir: &Path) -> Result<()> {
    let Some(taken) = taken(dir) else { return Ok(()) };
    let why = match has_begun(dir) {
        true => {
            let dir = dir.display();
            format!("{dir} holds a run already; --resume continues it, and a new one needs another directory")
        }
        false => format!(
            "{} is there already, and a run would replace it; name another directory",
            taken.display()
        ),
    };
    Err(Error::config("run.dir", why))
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
        if let Some(number) = number.filter(|_| has_begun(&entry.path())) {
            highest = highest.max(number);
        }
    }
    Ok(if highest > 1 { numbered(dir, highest) } else { dir.to_owned() })
}

/// Takes a directory for a new run: this one, or if the user has not named it the next free number. Of two processes that want
/// the same one, one gets it.
///
/// # Errors
/// As [`require_free`]; [`Error::Io`].
pub(super) fn claim(dir: &Path, named_by_user: bool) -> Result<(PathBuf, Store)> {
    if named_by_user {
        require_free(dir)?;
    }
    let all = std::iter::once(dir.to_owned()).chain((2u32..).map(|n| numbered(dir, n)));
    for candidate in all.filter(|dir| taken(dir).is_none()) {
        match Store::create(&candidate)? {
            Some(store) => return Ok((candidate, store)),
            None if named_by_user => break,
            None => {}
        }
    }
    Err(Error::config("run.dir", format!("another process has just begun a run in {}", dir.display())))
}

fn numbered(dir: &Path, n: u32) -> PathBuf {
    let name = dir.file_name().unwrap_or_default().to_string_lossy();
    dir.with_file_name(format!("{name}-{n}"))
}

/// What a run would replace in a directory, if anything.
fn taken(dir: &Path) -> Option<PathBuf> {
    let files = FILES.map(|name| dir.join(name));
    files.into_iter().find(|file| file.exists()).or_else(|| has_begun(dir).then(|| dir.to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn new_runs_take_the_next_free_number_and_resumed_ones_the_highest() {
        let root = tempfile::tempdir().unwrap();
        let at = |name: &str| root.path().join(name);
        let dir = at("tiny");
        let claimed = |dir: &Path| claim(dir, false).unwrap().0;
        assert_eq!(latest(&dir, false).unwrap(), dir);
        assert!(!has_begun(&dir));
        assert_eq!(claimed(&dir), dir);
        assert!(has_begun(&dir));
        assert_eq!(claimed(&dir), at("tiny-2"));
        // What is left of a run whose checkpoints were removed.
        std::fs::create_dir(at("tiny-3")).unwrap();
        std::fs::write(at("tiny-3/metrics.jsonl"), "").unwrap();
        assert_eq!(claimed(&dir), at("tiny-4"));
        std::fs::create_dir_all(at("tiny-10/checkpoints/step-00000001")).unwrap();
        std::fs::create_dir_all(at("tiny-x/checkpoints/step-00000001")).unwrap();
        std::fs::create_dir(at("tiny-11")).unwrap();
        assert_eq!(latest(&dir, false).unwrap(), at("tiny-10"));
        assert_eq!(latest(&dir, true).unwrap(), dir);
    }

    #[test]
    fn files_of_a_run_are_known_where_one_has_begun() {
        let root = tempfile::tempdir().unwrap();
        let at = |name: &str| root.path().join(name);
        std::fs::create_dir(at("other")).unwrap();
        assert!(!is_of_a_run(&at("run/metrics.jsonl")));
        claim(&at("run"), true).unwrap();
        for name in
            ["metrics.jsonl", "loss.svg", "events.out.tfevents.1.2.nibble", "checkpoints/step-00000001/a"]
        {
            assert!(is_of_a_run(&at("run").join(name)), "{name}");
            assert!(!is_of_a_run(&at("other").join(name)), "{name}");
        }
        assert!(is_of_a_run(&at("run/checkpoints/mine")) && !is_of_a_run(&at("run/report.html")));
        assert!(!is_of_a_run(&at("run/mine/metrics.jsonl")));
    }

    #[test]
    fn a_directory_that_the_user_named_is_that_one_or_an_error() {
        let root = tempfile::tempdir().unwrap();
        assert_eq!(claim(root.path(), true).unwrap().0, root.path(), "an empty directory is free");
        let error = claim(root.path(), true).unwrap_err().to_string();
        assert!(error.contains("`run.dir`") && error.contains("--resume"), "{error}");
        let other = tempfile::tempdir().unwrap();
        std::fs::write(other.path().join("config.toml"), "# mine").unwrap();
        let error = claim(other.path(), true).unwrap_err().to_string();
        assert!(error.contains("config.toml is there already"), "{error}");
        assert!(!other.path().join("checkpoints").exists());
    }

    #[test]
    fn of_many_that_want_one_directory_each_gets_its_own() {
        let root = tempfile::tempdir().unwrap();
        let dir = root.path().join("tiny");
        let claims: Vec<(PathBuf, Store)> = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..8).map(|_| scope.spawn(|| claim(&dir, false).unwrap())).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        let names: std::collections::BTreeSet<_> = claims.iter().map(|(path, _)| path).collect();
        assert_eq!(names.len(), 8, "{names:?}");
    }
}
