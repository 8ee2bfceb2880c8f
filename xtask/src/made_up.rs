//! `cargo xtask made-up`.

use crate::moved::{copy_sources, remove};
use crate::run::root;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// A format of nobody's, unlike any other: what it takes to add one.
const PATCH: &str = "crates/formats/tests/made_up_format.patch";
/// Its record with its arithmetic, its line of the table, its module.
const HUNKS: usize = 3;

/// What is asked of the copy: arguments of `cargo test`, and a line that the tests must print.
const TESTS: [(&[&str], &str); 3] = [
    (
        &["--package", "nibble-formats", "--lib", "--test", "exhaustive"],
        "made_up::tests::a_block_by_hand ... ok",
    ),
    (
        // Every instruction set against the specification.
        &["--package", "nibble-cpu", "--test", "conformance"],
        "simd::gemm ... ok",
    ),
    (
        &[
            "--package",
            "nibble-train",
            "--test",
            "formats_train",
            "--",
            "--nocapture",
            "formats_of_no_recipe",
        ],
        "trained: made-up",
    ),
];

/// Adds a made-up format to a copy of this checkout, in three hunks, and runs in it what every format owes: the exhaustive properties,
/// conformance on the CPU, a run that learns.
pub fn made_up() -> Result<(), String> {
    let patch = root().join(PATCH);
    let text = fs::read_to_string(&patch).map_err(|e| format!("{}: {e}", patch.display()))?;
    let hunks = text.lines().filter(|line| line.starts_with("@@")).count();
    if hunks > HUNKS {
        return Err(format!("{PATCH} has {hunks} hunks: a format is to take {HUNKS}"));
    }
    let copy = root().join("target/made-up");
    remove(&copy)?;
    copy_sources(&copy)?;
    apply(&patch, &copy)?;
    for (arguments, line) in TESTS {
        run_tests(&copy, arguments, line)?;
    }
    remove(&copy)
}

/// Applies the patch.
fn apply(patch: &Path, copy: &Path) -> Result<(), String> {
    let mut git = Command::new("git");
    // The copy lies inside a checkout, of which it is no part.
    git.arg("apply").arg(patch).env("GIT_CEILING_DIRECTORIES", copy.parent().unwrap_or(copy));
    match git.current_dir(copy).status() {
        Ok(status) if status.success() => Ok(()),
        Ok(_) => Err(format!("{PATCH} does not apply: bring its context up to date")),
        Err(e) => Err(format!("{git:?}: {e}")),
    }
}

/// `cargo test` in the copy. Its target folder is this checkout's, where the dependencies are built.
fn run_tests(copy: &Path, arguments: &[&str], line: &str) -> Result<(), String> {
    let shown = format!("cargo test {}", arguments.join(" "));
    eprintln!("── made-up: {shown}");
    let cargo = std::env::var("CARGO").unwrap_or_else(|_| "cargo".to_owned());
    let target = std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| root().join("target"), PathBuf::from);
    let ran = Command::new(cargo)
        .args(["test", "--locked"])
        .args(arguments)
        .current_dir(copy)
        .env("CARGO_TARGET_DIR", root().join(target))
        .stderr(std::process::Stdio::inherit())
        .output()
        .map_err(|e| format!("cargo did not start: {e}"))?;
    let printed = String::from_utf8_lossy(&ran.stdout);
    if !ran.status.success() || !printed.contains(line) {
        return Err(format!("with a made-up format `{shown}` fails, or lacks `{line}`:\n{printed}"));
    }
    printed.lines().filter(|line| line.starts_with("test result")).for_each(|line| println!("{line}"));
    Ok(())
}
