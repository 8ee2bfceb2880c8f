//! `cargo xtask exhaustive`.

use crate::run::{commit, output, root};
use crate::{made_up, moved};
use serde_json::Value;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Instant;

/// The environment variable under which tests cover their whole lists: `nibble_testkit::EXHAUSTIVE`.
pub const EXHAUSTIVE: &str = "NIBBLE_EXHAUSTIVE";

/// A part that runs by itself, and not again once it has passed on this commit.
struct Part {
    name: String,
    runs: Runs,
}

enum Runs {
    /// A test binary, run in its package's folder, as cargo does.
    Tests { binary: PathBuf, folder: PathBuf },
    /// `cargo` with these arguments.
    Cargo(&'static [&'static str]),
    /// `cargo xtask` with this argument, in this process.
    Task(fn() -> Result<(), String>),
}

/// The result of a part.
struct Ended {
    passed: bool,
    seconds: u64,
    /// Number of tests skipped on this machine.
    skipped: usize,
    /// Passed earlier, on this commit.
    before: bool,
}

/// Runs every test over its whole lists, each kernel instance, and copies of this checkout: the parts in `asked`, or all. A part that has
/// passed on this commit is not run again. A failed part does not stop the others.
pub fn exhaustive(asked: &[&str]) -> Result<(), String> {
    let commit = commit()?;
    let all = parts()?;
    if asked == ["--list"] {
        all.iter().for_each(|part| println!("{}", part.name));
        return Ok(());
    }
    if let Some(unknown) = asked.iter().find(|name| all.iter().all(|part| part.name != **name)) {
        return Err(format!(
            "no part is named {unknown}: `cargo xtask exhaustive --list` prints their names"
        ));
    }
    let folder = root().join("target/exhaustive").join(&commit);
    fs::create_dir_all(&folder).map_err(|e| format!("{}: {e}", folder.display()))?;
    let mut ended = Vec::new();
    for part in all.iter().filter(|part| asked.is_empty() || asked.contains(&part.name.as_str())) {
        eprintln!("── {} on {commit}", part.name);
        ended.push((part, run(part, &folder, !commit.ends_with("-changed"))?));
    }
    print!("{}", table(&commit, &ended));
    let failed: Vec<&str> =
        ended.iter().filter(|(_, end)| !end.passed).map(|(part, _)| part.name.as_str()).collect();
    match failed[..] {
        [] => Ok(()),
        _ => Err(format!("failed: {}; their output is in {}", failed.join(", "), folder.display())),
    }
}

/// A part for each test binary of the workspace, and parts for what no binary tests.
fn parts() -> Result<Vec<Part>, String> {
    let messages =
        output("cargo", &["test", "--workspace", "--locked", "--no-run", "--message-format=json"])?;
    let mut parts: Vec<Part> = messages.lines().filter_map(tests_of).collect();
    parts.sort_by(|a, b| a.name.cmp(&b.name));
    let task = |name: &str, runs| Part { name: name.to_owned(), runs };
    parts.push(task("documentation", Runs::Cargo(&["test", "--workspace", "--locked", "--doc"])));
    parts.push(task("moved", Runs::Task(moved::moved)));
    parts.push(task("made-up", Runs::Task(made_up::made_up)));
    Ok(parts)
}

/// The test binary in a message of cargo, if there is one: `train`, `train-lib`, `nibble-bin`.
fn tests_of(message: &str) -> Option<Part> {
    let message: Value = serde_json::from_str(message).ok()?;
    let is_test = message["profile"]["test"].as_bool()?;
    let binary = message["executable"].as_str().filter(|_| is_test)?;
    let folder = Path::new(message["manifest_path"].as_str()?).parent()?.to_owned();
    let (kind, name) = (message["target"]["kind"][0].as_str()?, message["target"]["name"].as_str()?);
    let name = match kind {
        "test" => name.to_owned(),
        _ => format!("{}-{kind}", name.trim_start_matches("nibble_")),
    };
    Some(Part { name, runs: Runs::Tests { binary: binary.into(), folder } })
}

/// Runs a part, unless `resumes` is set and it has passed before; its output goes to a file in `folder`.
fn run(part: &Part, folder: &Path, resumes: bool) -> Result<Ended, String> {
    let (log, passed) =
        (folder.join(format!("{}.log", part.name)), folder.join(format!("{}.passed", part.name)));
    let told = |e: std::io::Error| format!("{}: {e}", log.display());
    if let (true, Ok(seconds)) = (resumes, fs::read_to_string(&passed)) {
        let seconds = seconds.trim().parse().unwrap_or(0);
        return Ok(Ended { passed: true, seconds, skipped: skipped(&log), before: true });
    }
    let start = Instant::now();
    let good = match &part.runs {
        Runs::Task(task) => task().map_err(|why| eprintln!("{why}")).is_ok(),
        Runs::Tests { binary, folder } => {
            logged(Command::new(binary).arg("--show-output").current_dir(folder), &log)?
        }
        Runs::Cargo(arguments) => logged(&mut crate::run::command("cargo", arguments), &log)?,
    };
    let seconds = start.elapsed().as_secs();
    match good {
        true => fs::write(&passed, seconds.to_string()).map_err(told)?,
        // The output is also printed before the table.
        false => eprintln!("{}", fs::read_to_string(&log).unwrap_or_default()),
    }
    Ok(Ended { passed: good, seconds, skipped: skipped(&log), before: false })
}

/// Runs a command with its output in a file. Returns whether it succeeded.
fn logged(command: &mut Command, log: &Path) -> Result<bool, String> {
    let told = |e: std::io::Error| format!("{}: {e}", log.display());
    let file = fs::File::create(log).map_err(told)?;
    let also = file.try_clone().map_err(told)?;
    command.env(EXHAUSTIVE, "1").stdin(Stdio::null()).stdout(file).stderr(also);
    Ok(command.status().map_err(|e| format!("{command:?}: {e}"))?.success())
}

/// Number of lines in a log that report something skipped.
fn skipped(log: &Path) -> usize {
    let text = fs::read_to_string(log).unwrap_or_default();
    text.lines().filter(|line| line.starts_with("skipped:")).count()
}

fn table(commit: &str, ended: &[(&Part, Ended)]) -> String {
    let mut text = format!("exhaustive, commit {commit}\n");
    for (part, Ended { passed, seconds, skipped, before }) in ended {
        let verdict = if *passed { "passed" } else { "FAILED" };
        let skipped = if *skipped > 0 { format!(", {skipped} skipped") } else { String::new() };
        let before = if *before { ", before this call" } else { "" };
        text += &format!("{verdict} {:<16} {seconds:>6} s{skipped}{before}\n", part.name);
    }
    let total: u64 = ended.iter().map(|(_, end)| end.seconds).sum();
    text + &format!("{} parts, {total} s\n", ended.len())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn binaries_of_tests_are_parts() {
        let message = |kind: &str, name: &str, test: bool| {
            format!(
                "{{\"reason\":\"compiler-artifact\",\"manifest_path\":\"/a/crates/x/Cargo.toml\",\"target\":{{\"kind\":[\"{kind}\"],\
                 \"name\":\"{name}\"}},\"profile\":{{\"test\":{test}}},\"executable\":\"/a/target/debug/deps/x-1\"}}"
            )
        };
        let named = |message: &str| tests_of(message).map(|part| part.name);
        assert_eq!(named(&message("test", "train", true)).as_deref(), Some("train"));
        assert_eq!(named(&message("lib", "nibble_train", true)).as_deref(), Some("train-lib"));
        assert_eq!(named(&message("bin", "nibble", true)).as_deref(), Some("nibble-bin"));
        assert_eq!(named(&message("bin", "nibble", false)), None, "the program");
        assert_eq!(named("{\"reason\":\"build-finished\",\"success\":true}"), None);
        let Some(Part { runs: Runs::Tests { folder, .. }, .. }) = tests_of(&message("test", "train", true))
        else {
            panic!("a test binary");
        };
        assert_eq!(folder, Path::new("/a/crates/x"));
    }

    #[test]
    fn what_has_passed_is_not_run_again_and_what_failed_is() {
        let folder = tempfile::tempdir().unwrap();
        let part = |runs: fn() -> Result<(), String>| Part { name: "x".to_owned(), runs: Runs::Task(runs) };
        let end = |runs, resumes| run(&part(runs), folder.path(), resumes).unwrap();
        assert!(!end(|| Err("no".to_owned()), true).passed);
        let first = end(|| Ok(()), true);
        assert!(first.passed && !first.before);
        let again = end(|| panic!("is not run"), true);
        assert!(again.passed && again.before);
        assert!(!end(|| Err("a tree with changes".to_owned()), false).passed);
    }

    #[test]
    fn the_variable_is_that_of_the_tests() {
        let tests = fs::read_to_string(root().join("crates/testkit/src/breadth.rs")).unwrap();
        assert!(tests.contains(&format!("EXHAUSTIVE: &str = \"{EXHAUSTIVE}\"")));
    }
}
