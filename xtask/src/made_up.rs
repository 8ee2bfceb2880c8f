//! `cargo xtask made-up`.

use crate::moved::{copy_sources, remove};
use crate::run::root;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Something of nobody's: what it takes to add one.
struct MadeUp {
    what: &'static str,
    /// Adds it to a checkout.
    patch: &'static str,
    /// How a line of the patch begins that is counted, what such lines count, and how many there may be.
    counted: (&'static str, &'static str, usize),
    /// What is asked of the copy: arguments of `cargo test`, and a line that the tests must print.
    tests: &'static [(&'static [&'static str], &'static str)],
}

/// A format unlike any other (its record with its arithmetic, its line of the table, its module), and what every format owes: the
/// exhaustive properties, conformance on the CPU, a run that learns.
const FORMAT: MadeUp = MadeUp {
    what: "format",
    patch: "crates/formats/tests/made_up_format.patch",
    counted: ("@@", "hunks", 3),
    tests: &[
        (
            &["--package", "nibble-formats", "--lib", "--test", "exhaustive"],
            "made_up::tests::a_block_by_hand ... ok",
        ),
        // Every instruction set against the specification.
        (&["--package", "nibble-cpu", "--test", "conformance"], "simd::gemm ... ok"),
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
    ],
};

/// An operation, on a CPU and on a GPU, and what it owes: conformance, recorded and replayed as well, and a line of the table of kernel instances.
const OP: MadeUp = MadeUp {
    what: "operation",
    patch: "crates/core/tests/made_up_op.patch",
    counted: ("+++ ", "files", 8),
    tests: &[
        (&["--package", "nibble-cpu", "--test", "conformance", "negate"], "simd::negate ... ok"),
        (&["--package", "nibble-cpu", "--test", "recorder", "negate"], "replayed::negate ... ok"),
        (
            &["--package", "nibble-cuda", "--test", "compile_all", "resources"],
            "resources_list_every_instance_in_order ... ok",
        ),
    ],
};

/// Adds each to a copy of this checkout, as it says, and runs its tests there.
pub fn made_up() -> Result<(), String> {
    [FORMAT, OP].iter().try_for_each(add)
}

fn add(MadeUp { what, patch, counted: (begins, counted, most), tests }: &MadeUp) -> Result<(), String> {
    let path = root().join(patch);
    let text = fs::read_to_string(&path).map_err(|e| format!("{}: {e}", path.display()))?;
    let count = text.lines().filter(|line| line.starts_with(begins)).count();
    if count > *most {
        return Err(format!("{patch} has {count} {counted}: one more {what} is to take {most}"));
    }
    let copy = root().join("target/made-up");
    remove(&copy)?;
    copy_sources(&copy)?;
    apply(&path, &copy)?;
    for (arguments, line) in *tests {
        run_tests(&copy, arguments, line).map_err(|e| format!("with a made-up {what} {e}"))?;
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
        Ok(_) => Err(format!("{} does not apply: bring its context up to date", patch.display())),
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
        return Err(format!("`{shown}` fails, or lacks `{line}`:\n{printed}"));
    }
    printed.lines().filter(|line| line.starts_with("test result")).for_each(|line| println!("{line}"));
    Ok(())
}
