//! The directory of a run, and the files in it. A new run replaces no file of another run or of a person. A run has begun when
//! `config.toml` exists, under the lock of `checkpoints/.lock`. A run that ended before this point leaves its directory free for other
//! runs.
//!
//! | file | written | read by |
//! |---|---|---|
//! | `config.toml` | when the run begins or resumes: every key | `train --resume`, `plot`, `report` |
//! | `recipe.toml` | when the run begins or resumes: the full recipe | `plot`, `report`; a resumed run takes its checkpoint's recipe |
//! | `metrics.jsonl` | a line per step, and one per evaluation | `plot`, `report` |
//! | `ranks.jsonl` | with several ranks, a line per step: seconds of each rank, and the seconds it waited | people |
//! | `ranks/` | with several ranks, a log of each except the first | people |
//! | `layers.jsonl` | for some steps, and for a failed one: rows of every expert, blocks of every site | `report` |
//! | `spikes.jsonl` | a line per step whose loss or gradient is out of order | `replay` |
//! | `loss.svg`, `memory.txt`, TensorBoard events | at each evaluation; at the beginning; each step | people |
//! | `train.log` | every setting, and the lines of the console | people |
//! | `processes.jsonl` | when a process begins to work on the run: date, machine, version | `report` |
//! | `checkpoints/` | each complete or absent | `train --resume`, `eval`, `generate` |
//!
//! A run that resumes from an earlier step truncates `metrics.jsonl`, `ranks.jsonl` and `layers.jsonl` to this step. `nibble report` shows
//! only what the run recorded, with two exceptions: it derives the list of saved tensors from a rehearsal of the shapes, and it runs the
//! watchdog over the metrics again.

use crate::checkpoint::{DIR, Store, checkpoint_folders, has_checkpoints, latest_valid};
use crate::config::{Config, in_shell, read_text};
use crate::error::{Error, Result};
use crate::fault::{Point, reach};
use crate::metrics::EVENTS_PREFIX;
pub use crate::pretrained::COMPANIONS_DIR;
use crate::spikes::SPIKES_FILE;
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

/// The file with the configuration of a run, which contains every key.
pub const CONFIG_FILE: &str = "config.toml";
/// The file with the full recipe of the run.
pub const RECIPE_FILE: &str = "recipe.toml";
/// The file of metrics, with one line per step.
pub const METRICS_FILE: &str = "metrics.jsonl";
/// The file of layer metrics, with one line for each reported step.
pub const LAYERS_FILE: &str = "layers.jsonl";
/// The file with the times of each rank, one line per step; the file exists only with several ranks.
pub const RANKS_FILE: &str = "ranks.jsonl";
/// The folder with one log file for each rank except the first.
pub const RANKS_DIR: &str = "ranks";
/// The file with the plot of the losses.
pub const PICTURE_FILE: &str = "loss.svg";

/// The file with the run's predicted memory, for people to read.
pub const MEMORY_FILE: &str = "memory.txt";
/// The file with one line for each process that has worked on the run: the process's start time, the step, and the machine.
pub const PROCESSES_FILE: &str = "processes.jsonl";
/// The file with every setting, and with the lines of the console.
pub const LOG_FILE: &str = "train.log";

/// Files that a run writes into its directory, in addition to events and checkpoints.
const FILES: [&str; 10] = [
    CONFIG_FILE,
    SPIKES_FILE,
    RECIPE_FILE,
    METRICS_FILE,
    LAYERS_FILE,
    RANKS_FILE,
    PICTURE_FILE,
    MEMORY_FILE,
    PROCESSES_FILE,
    LOG_FILE,
];

/// Whether a run has begun in a directory, that is, whether the run's configuration exists there. A run that ended before it wrote its
/// configuration has left only a lock file, which the next run takes over.
#[must_use]
pub fn has_begun(dir: &Path) -> bool {
    Store::is_in(dir) && dir.join(CONFIG_FILE).exists() || has_checkpoints(dir)
}

/// Keys that every version writes to a stored configuration: one key in each table, including old keys and the keys that are written last.
const STORED_KEYS: &str = "\
    recipe model.d_model model.layers data.source train.steps train.lr eval.every checkpoint.every \
    run.dir";

/// The configuration of the run in a directory, changed by `overrides`. If the configuration file is missing or invalid, the configuration
/// comes from the newest complete checkpoint, and a note says so.
///
/// # Errors
/// Returns [`Error::Config`] naming the file, if neither the file nor a checkpoint has the configuration, and passes on the errors of
/// [`Config::from_text`].
pub fn stored_config(dir: &Path, overrides: &[String]) -> Result<(Config, Option<String>)> {
    let file = dir.join(CONFIG_FILE);
    let why = match read_text(&file) {
        Err(e) => e.to_string(),
        Ok(text) => match first_missing(&text) {
            None => {
                // A run of an earlier version may have its tokenizer only in its checkpoints.
                let kept = [vec![dir.join(COMPANIONS_DIR)], checkpoint_folders(dir)?].concat();
                return Ok((Config::stored_beside(&text, &file, overrides, kept)?, None));
            }
            Some(what) => format!("{}: is not the configuration of a run: {what}", file.display()),
        },
    };
    let Some(checkpoint) = latest_valid(dir)?.checkpoint else {
        let why = format!(
            "{why}; no checkpoint holds it either: put the file back, or begin a new run in another directory"
        );
        return Err(Error::config("", why));
    };
    let config = Config::of_checkpoint(&checkpoint, overrides)?;
    Ok((config, Some(format!("{why}; the configuration is that of {}", checkpoint.path().display()))))
}

/// What is missing in a text that should be a run's stored configuration; `None` if nothing is missing.
fn first_missing(text: &str) -> Option<String> {
    let table: toml::Value = match toml::from_str::<toml::Table>(text) {
        Ok(table) => table.into(),
        Err(e) => return Some(e.message().to_owned()),
    };
    let has = |key: &str| key.split('.').try_fold(&table, |value, name| value.get(name)).is_some();
    STORED_KEYS.split(' ').find(|key| !has(key)).map(|key| format!("it has no `{key}`"))
}

/// Whether a run that has begun writes this file now or later. The file is recognized by its name in the run's directory, or by its place
/// below the run's checkpoints. The path must not contain symbolic links.
#[must_use]
pub fn is_of_a_run(path: &Path) -> bool {
    let Some(name) = path.file_name().map(|name| name.to_string_lossy()) else { return false };
    let is_named_so = FILES.contains(&&*name) || name.starts_with(EVENTS_PREFIX);
    path.ancestors().skip(1).enumerate().any(|(depth, dir)| {
        let is_its_own = if depth == 0 {
            is_named_so
        } else {
            [DIR, RANKS_DIR, COMPANIONS_DIR].iter().any(|below| path.starts_with(dir.join(below)))
        };
        is_its_own && has_begun(dir)
    })
}

/// Checks that a new run would replace nothing in a directory that the user named.
///
/// # Errors
/// Returns [`Error::Config`] for the key `run.dir`, naming the existing file.
pub fn require_free(dir: &Path) -> Result<()> {
    let Some(taken) = taken(dir) else { return Ok(()) };
    let why = match has_begun(dir) {
        true => {
            let (shown, argument) = (dir.display(), in_shell(dir));
            format!(
                "{shown} holds a run already; `nibble train {argument} --resume` continues it, and a new one needs another directory"
            )
        }
        false => format!(
            "{} is there already, and a run would replace it; name another directory",
            taken.display()
        ),
    };
    Err(Error::config("run.dir", why))
}

/// Finds the directory of the run that a configuration resumes: `run.dir`, if the user has named the directory. Otherwise the runs that
/// have begun in this directory and in its numbered siblings are considered; the result is the only run, or the latest run with this
/// configuration.
///
/// # Errors
/// Returns an error if the directories cannot be listed, and [`Error::Config`] naming the runs if there are several, and none has this
/// configuration.
pub fn latest(config: &Config, named_by_user: bool) -> Result<PathBuf> {
    let dir = PathBuf::from(&config.run.dir);
    if named_by_user {
        return Ok(dir);
    }
    let runs = begun(&dir)?;
    let (newest, oldest) = match &runs[..] {
        [] => return Ok(dir),
        [only] => return Ok(only.clone()),
        [oldest, .., newest] => (newest, oldest),
    };
    let mut of_newest = None;
    for run in runs.iter().rev() {
        // A run with an unreadable configuration does not match.
        let changes = stored_config(run, &[]).and_then(|(stored, _)| config.changes_to_refuse(&stored));
        let changes = changes.unwrap_or_else(|e| vec![e.to_string()]);
        if changes.is_empty() {
            return Ok(run.clone());
        }
        of_newest.get_or_insert(changes);
    }
    let why = format!(
        "continues none of the {} runs from {} to {}; from that of the last it differs in {}; name the one to go on with: nibble train {} --resume",
        runs.len(),
        oldest.display(),
        newest.display(),
        of_newest.unwrap_or_default().join("; "),
        in_shell(newest),
    );
    Err(Error::config("configuration", why))
}

/// The runs that have begun in a directory and in its numbered siblings, earliest first.
fn begun(dir: &Path) -> Result<Vec<PathBuf>> {
    let parent = dir.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let Some(name) = dir.file_name().map(|n| n.to_string_lossy()) else { return Ok(Vec::new()) };
    let entries = match std::fs::read_dir(parent) {
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
        other => other.map_err(Error::io(parent))?,
    };
    let mut numbers = BTreeSet::new();
    for entry in entries {
        let entry = entry.map_err(Error::io(parent))?;
        let entry_name = entry.file_name();
        let number =
            entry_name.to_string_lossy().strip_prefix(&format!("{name}-")).and_then(|n| n.parse().ok());
        numbers.extend(number.filter(|number| *number > 1 && has_begun(&numbered(dir, *number))));
    }
    let own = has_begun(dir).then(|| dir.to_owned());
    Ok(own.into_iter().chain(numbers.into_iter().map(|n| numbered(dir, n))).collect())
}

/// Claims a directory for a new run: this directory, or the next free number if the user has not named the directory. If two processes want
/// the same directory, only one of them gets it.
///
/// # Errors
/// Returns the errors of [`require_free`], and [`Error::Io`] if a call of the operating system fails.
pub(in crate::trainer) fn claim(dir: &Path, named_by_user: bool) -> Result<(PathBuf, Store)> {
    if named_by_user {
        require_free(dir)?;
    }
    let all = std::iter::once(dir.to_owned()).chain((2u32..).map(|n| numbered(dir, n)));
    for candidate in all.filter(|dir| taken(dir).is_none()) {
        match Store::try_open(&candidate)? {
            // The check is repeated, because another process may have begun a run there in the meantime.
            Some(store) if taken(&candidate).is_none() => {
                reach(Point::Claimed)?;
                return Ok((candidate, store));
            }
            _ if named_by_user => break,
            _ => {}
        }
    }
    Err(Error::config("run.dir", format!("another process has just begun a run in {}", dir.display())))
}

fn numbered(dir: &Path, n: u32) -> PathBuf {
    let name = dir.file_name().unwrap_or_default().to_string_lossy();
    dir.with_file_name(format!("{name}-{n}"))
}

/// A file in a directory that a new run would replace, if any.
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
        let mut config = Config::load("tiny", &[]).unwrap();
        config.run.dir = dir.to_string_lossy().into_owned();
        let claimed = |dir: &Path| {
            let (dir, _) = claim(dir, false).unwrap();
            std::fs::write(dir.join(CONFIG_FILE), config.resolved_toml().unwrap()).unwrap();
            dir
        };
        assert_eq!(latest(&config, false).unwrap(), dir);
        assert!(!has_begun(&dir));
        // A run that ended before its first write has not begun.
        drop(claim(&dir, false).unwrap());
        assert!(!has_begun(&dir));
        assert_eq!(claimed(&dir), dir);
        assert!(has_begun(&dir));
        assert_eq!(claimed(&dir), at("tiny-2"));
        // `tiny-3` contains the remains of a run whose checkpoints were removed.
        std::fs::create_dir(at("tiny-3")).unwrap();
        std::fs::write(at("tiny-3/metrics.jsonl"), "").unwrap();
        assert_eq!(claimed(&dir), at("tiny-4"));
        assert_eq!(latest(&config, false).unwrap(), at("tiny-4"));
        std::fs::create_dir_all(at("tiny-10/checkpoints/step-00000001")).unwrap();
        std::fs::write(at("tiny-10/config.toml"), config.resolved_toml().unwrap()).unwrap();
        std::fs::create_dir_all(at("tiny-x/checkpoints/step-00000001")).unwrap();
        std::fs::create_dir(at("tiny-11")).unwrap();
        assert_eq!(latest(&config, false).unwrap(), at("tiny-10"));
        assert_eq!(latest(&config, true).unwrap(), dir);
        // Runs of another configuration do not match; more steps are allowed.
        let mut other = config.clone();
        other.train.lr *= 2.0;
        std::fs::write(at("tiny-10/config.toml"), other.resolved_toml().unwrap()).unwrap();
        config.train.steps += 1;
        assert_eq!(latest(&config, false).unwrap(), at("tiny-4"));
        config.seed = 7;
        let error = latest(&config, false).unwrap_err().to_string();
        let parts = ["none of the 4 runs", "tiny-10 --resume", "train.lr", "seed: 0 → 7"];
        parts.iter().for_each(|part| assert!(error.contains(part), "no {part:?} in {error}"));
    }

    #[test]
    fn a_stored_configuration_is_whole_or_another_or_refused() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join(CONFIG_FILE);
        let whole = Config::default().resolved_toml().unwrap();
        std::fs::write(&file, &whole).unwrap();
        assert!(stored_config(dir.path(), &[]).unwrap().1.is_none());
        // A text that is cut after any line is invalid, because the last table is `run`, whose first key is the directory.
        let needed = whole.find("[run]").unwrap();
        for (cut, _) in whole.match_indices('\n').filter(|(at, _)| *at < needed).chain([(0, "")]) {
            std::fs::write(&file, &whole[..cut]).unwrap();
            let error = stored_config(dir.path(), &[]).unwrap_err().to_string();
            assert!(error.contains("config.toml: is not the configuration of a run"), "{cut}: {error}");
            assert!(error.contains("begin a new run"), "{cut}: {error}");
        }
        std::fs::remove_file(&file).unwrap();
        assert!(stored_config(dir.path(), &[]).unwrap_err().to_string().contains("config.toml"));
    }

    #[test]
    fn files_of_a_run_are_known_where_one_has_begun() {
        let root = tempfile::tempdir().unwrap();
        let at = |name: &str| root.path().join(name);
        std::fs::create_dir(at("other")).unwrap();
        assert!(!is_of_a_run(&at("run/metrics.jsonl")));
        claim(&at("run"), true).unwrap();
        std::fs::write(at("run/config.toml"), "").unwrap();
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
        let (dir, store) = claim(root.path(), true).unwrap();
        assert_eq!(dir, root.path(), "an empty directory is free");
        let error = claim(root.path(), true).unwrap_err().to_string();
        assert!(error.contains("another process has just begun a run"), "{error}");
        drop(store);
        std::fs::write(root.path().join(CONFIG_FILE), "").unwrap();
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
        // The directory has the lock of a run that ended before it had begun.
        drop(claim(&dir, false).unwrap());
        let claims: Vec<(PathBuf, Store)> = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..8).map(|_| scope.spawn(|| claim(&dir, false).unwrap())).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        let names: std::collections::BTreeSet<_> = claims.iter().map(|(path, _)| path).collect();
        assert_eq!(names.len(), 8, "{names:?}");
    }
}
