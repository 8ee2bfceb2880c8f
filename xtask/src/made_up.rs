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
}

/// A format unlike any other (its record with its arithmetic, its line of the table, its module), and an operation, on a CPU and on a GPU.
const ALL: [MadeUp; 2] = [
    MadeUp {
        what: "format",
        patch: "crates/formats/tests/made_up_format.patch",
        counted: ("@@", "hunks", 3),
    },
    MadeUp { what: "operation", patch: "crates/core/tests/made_up_op.patch", counted: ("+++ ", "files", 8) },
];

/// What is asked of a copy that has both: arguments of `cargo test`, and lines that the tests must print.
struct Asked {
    arguments: &'static [&'static str],
    lines: &'static [&'static str],
}

/// What every format owes: the exhaustive properties, conformance on the CPU under every instruction set, a run that learns. And every operation:
/// conformance, recorded and replayed as well, and a line of the table of kernel instances.
const ASKED: [Asked; 2] = [
    Asked {
        arguments: &["--package", "nibble-formats", "--lib", "--test", "exhaustive"],
        lines: &["made_up::tests::a_block_by_hand ... ok"],
    },
    // Of the whole workspace, or its dependencies are built once more with the features of each package alone.
    Asked {
        arguments: &[
            "--workspace",
            "--test",
            "conformance",
            "--test",
            "recorder",
            "--test",
            "formats_train",
            "--test",
            "compile_all",
            "--",
            "--show-output",
            "simd::",
            "replayed::negate",
            "formats_of_no_recipe",
            "resources",
        ],
        lines: &[
            "simd::gemm ... ok",
            "simd::negate ... ok",
            "replayed::negate ... ok",
            "trained: made-up",
            "resources_list_every_instance_in_order ... ok",
        ],
    },
];

/// Adds all of them to a copy of this checkout, and runs their tests there.
pub fn made_up() -> Result<(), String> {
    let copy = root().join("target/made-up");
    remove(&copy)?;
    copy_sources(&copy)?;
    ALL.iter().try_for_each(|made_up| add(made_up, &copy))?;
    ASKED.iter().try_for_each(|asked| run_tests(&copy, asked))?;
    remove(&copy)
}

fn add(MadeUp { what, patch, counted: (begins, counted, most) }: &MadeUp, copy: &Path) -> Result<(), String> {
    let path = root().join(patch);
    let text = fs::read_to_string(&path).map_err(|e| format!("{}: {e}", path.display()))?;
    let count = text.lines().filter(|line| line.starts_with(begins)).count();
    if count > *most {
        return Err(format!("{patch} has {count} {counted}: one more {what} is to take {most}"));
    }
    apply(&path, copy)
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
fn run_tests(copy: &Path, Asked { arguments, lines }: &Asked) -> Result<(), String> {
    let shown = format!("cargo test {}", arguments.join(" "));
    eprintln!("── made-up: {shown}");
    let cargo = std::env::var("CARGO").unwrap_or_else(|_| "cargo".to_owned());
    let target = std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| root().join("target"), PathBuf::from);
    let ran = Command::new(cargo)
        .args(["test", "--locked"])
        .args(*arguments)
        .current_dir(copy)
        .env("CARGO_TARGET_DIR", root().join(target))
        .stderr(std::process::Stdio::inherit())
        .output()
        .map_err(|e| format!("cargo did not start: {e}"))?;
    let printed = String::from_utf8_lossy(&ran.stdout);
    if !ran.status.success() {
        return Err(format!("with them `{shown}` fails:\n{printed}"));
    }
    if let Some(line) = lines.iter().find(|line| !printed.contains(**line)) {
        return Err(format!("with them `{shown}` lacks `{line}`:\n{printed}"));
    }
    printed.lines().filter(|line| line.starts_with("test result")).for_each(|line| println!("{line}"));
    Ok(())
}
