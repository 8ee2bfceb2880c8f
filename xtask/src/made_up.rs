//! `cargo xtask made-up`.

use crate::exhaustive::EXHAUSTIVE;
use crate::moved::{copy_sources, remove};
use crate::run::root;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// An invented addition, which shows what it takes to add one.
struct MadeUp {
    what: &'static str,
    /// The patch that adds it to a checkout.
    patch: &'static str,
    /// The number of files that it may touch.
    files: usize,
}

/// A format unlike any other (its record with its arithmetic, its line of the table, its module, its GPU header and what its kernels
/// need), and an operation; both on CPU and GPU.
const ALL: [MadeUp; 2] = [
    MadeUp { what: "format", patch: "crates/formats/tests/made_up_format.patch", files: 5 },
    MadeUp { what: "operation", patch: "crates/core/tests/made_up_op.patch", files: 7 },
];

/// Checks of a copy with both additions: arguments of `cargo test`, lines that the tests must print, and words that select the kernel
/// instances to compile if there is a compiler (`NIBBLE_ONLY`).
struct Asked {
    arguments: &'static [&'static str],
    lines: &'static [&'static str],
    kernels: &'static [&'static str],
}

/// The beginning of the line that is printed if there is no compiler.
const NO_COMPILER: &str = "skipped: compiling every kernel instance";

/// For every format: the exhaustive properties, conformance on the CPU under every instruction set, a run that learns. For every operation:
/// conformance, immediate and recorded with replay. For both: a line per kernel instance, which a compiler checks if there is one.
const ASKED: [Asked; 2] = [
    Asked {
        // Without tests of no particular format.
        arguments: &[
            "--package",
            "nibble-formats",
            "--lib",
            "--test",
            "formats",
            "--",
            "tests::",
            "exhaustive::",
            "--skip",
            "math::",
        ],
        lines: &["made_up::tests::a_block_by_hand ... ok"],
        kernels: &[],
    },
    Asked {
        arguments: &[
            // Otherwise the dependencies would be rebuilt with the features of each package alone.
            "--workspace",
            "--test",
            "cpu",
            "--test",
            "train",
            "--test",
            "compile_all",
            "--",
            "--show-output",
            // The operations with cases for every format, and the new one. The other operations do not depend on the additions.
            "simd::quantize",
            "simd::dequantize",
            "simd::negate",
            "replayed::negate",
            "formats_of_no_recipe",
            "instance",
        ],
        lines: &[
            "simd::quantize ... ok",
            "simd::dequantize ... ok",
            "simd::negate ... ok",
            "replayed::negate ... ok",
            "trained: made-up",
            "resources_list_every_instance_in_order ... ok",
            "every_instance_compiles_and_needs_no_more_than_before ... ok",
            "every_instance_has_the_shared_memory_that_its_kernel_lays_out ... ok",
        ],
        kernels: &[
            "nib::quantize_units<F=nib::MadeUp,",
            "nib::dequantize_units<F=nib::MadeUp,",
            "nib::negate<",
        ],
    },
];

/// Adds both to a copy of this checkout, and runs their tests there.
pub fn made_up() -> Result<(), String> {
    let copy = root().join("target/made-up");
    remove(&copy)?;
    copy_sources(&copy)?;
    name_version(&copy)?;
    ALL.iter().try_for_each(|made_up| add(made_up, &copy))?;
    ASKED.iter().try_for_each(|asked| run_tests(&copy, asked))?;
    remove(&copy)
}

/// Whether the patches apply to this checkout. A change next to their lines breaks them, which [`made_up`] would report only much later.
pub fn patches_apply() -> Result<(), String> {
    ALL.iter().try_for_each(|made_up| git_apply(&root().join(made_up.patch), &root(), &["--check"]))
}

fn add(MadeUp { what, patch, files }: &MadeUp, copy: &Path) -> Result<(), String> {
    let path = root().join(patch);
    let text = fs::read_to_string(&path).map_err(|e| format!("{}: {e}", path.display()))?;
    let touched = text.lines().filter(|line| line.starts_with("+++ ")).count();
    if touched > *files {
        return Err(format!("{patch} touches {touched} files: one more {what} is to take {files}"));
    }
    git_apply(&path, copy, &[])
}

/// Gives the copy's packages their own version. Otherwise cargo would take them for this checkout's packages, with which they share a
/// target folder: it would rebuild both each time, and could take the build of a leftover copy for up to date.
fn name_version(copy: &Path) -> Result<(), String> {
    let version = concat!("version = \"", env!("CARGO_PKG_VERSION"), "\"");
    let own = concat!("version = \"", env!("CARGO_PKG_VERSION"), "+made-up\"");
    edit(&copy.join("Cargo.toml"), |text| text.replacen(version, own, 1))?;
    edit(&copy.join("Cargo.lock"), |text| {
        // Only packages from elsewhere have a source.
        let packages = text.split("\n\n").map(|package| match package.contains("\nsource = ") {
            true => package.to_owned(),
            false => package.replacen(version, own, 1),
        });
        packages.collect::<Vec<_>>().join("\n\n")
    })
}

fn edit(path: &Path, change: impl FnOnce(&str) -> String) -> Result<(), String> {
    let told = |e: std::io::Error| format!("{}: {e}", path.display());
    let text = fs::read_to_string(path).map_err(told)?;
    fs::write(path, change(&text)).map_err(told)
}

/// Runs `git apply` with the patch in a folder; with `--check` among the arguments nothing is written.
fn git_apply(patch: &Path, folder: &Path, arguments: &[&str]) -> Result<(), String> {
    let mut git = Command::new("git");
    // The copy is inside a checkout, but is not part of it.
    git.arg("apply")
        .args(arguments)
        .arg(patch)
        .env("GIT_CEILING_DIRECTORIES", folder.parent().unwrap_or(folder));
    match git.current_dir(folder).status() {
        Ok(status) if status.success() => Ok(()),
        Ok(_) => Err(format!("{} does not apply: bring its context up to date", patch.display())),
        Err(e) => Err(format!("{git:?}: {e}")),
    }
}

/// Runs `cargo test` in the copy, with this checkout's target folder, in which the dependencies are built.
fn run_tests(copy: &Path, Asked { arguments, lines, kernels }: &Asked) -> Result<(), String> {
    let shown = format!("cargo test {}", arguments.join(" "));
    eprintln!("── made-up: {shown}");
    let cargo = std::env::var("CARGO").unwrap_or_else(|_| "cargo".to_owned());
    let target = std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| root().join("target"), PathBuf::from);
    let ran = Command::new(cargo)
        .args(["test", "--locked"])
        .args(*arguments)
        .current_dir(copy)
        .env("CARGO_TARGET_DIR", root().join(target))
        .env("NIBBLE_ONLY", kernels.join(" "))
        .env(EXHAUSTIVE, "1")
        .stderr(std::process::Stdio::inherit())
        .output()
        .map_err(|e| format!("cargo did not start: {e}"))?;
    let printed = String::from_utf8_lossy(&ran.stdout);
    if !ran.status.success() {
        return Err(format!("with them `{shown}` fails:\n{printed}"));
    }
    let compiled = if printed.contains(NO_COMPILER) { &[] } else { *kernels };
    if let Some(line) = lines.iter().chain(compiled).find(|line| !printed.contains(**line)) {
        return Err(format!("with them `{shown}` lacks `{line}`:\n{printed}"));
    }
    let told = |line: &&str| line.starts_with("test result") || line.starts_with("skipped: ");
    printed.lines().filter(told).for_each(|line| println!("{line}"));
    Ok(())
}
