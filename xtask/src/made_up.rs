//! `cargo xtask made-up`.

use crate::exhaustive::EXHAUSTIVE;
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
    /// How many files it may touch.
    files: usize,
}

/// A format unlike any other (its record with its arithmetic, its line of the table, its module, its header for a GPU and what its kernels
/// need), and an operation. Both on a CPU and on a GPU.
const ALL: [MadeUp; 2] = [
    MadeUp { what: "format", patch: "crates/formats/tests/made_up_format.patch", files: 5 },
    MadeUp { what: "operation", patch: "crates/core/tests/made_up_op.patch", files: 7 },
];

/// What is asked of a copy that has both: arguments of `cargo test`, lines that the tests must print, and words by which kernel instances are
/// known that they must compile where there is a compiler (`NIBBLE_ONLY`).
struct Asked {
    arguments: &'static [&'static str],
    lines: &'static [&'static str],
    kernels: &'static [&'static str],
}

/// What a line begins with where there is none.
const NO_COMPILER: &str = "skipped: compiling every kernel instance";

/// What every format owes: the exhaustive properties, conformance on the CPU under every instruction set, a run that learns. And every operation:
/// conformance, recorded and replayed as well. Of both, a line for each kernel instance, held to by a compiler where there is one.
const ASKED: [Asked; 2] = [
    Asked {
        // Functions of no format are left out.
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
            // Or its dependencies are built once more with the features of each package alone.
            "--workspace",
            "--test",
            "cpu",
            "--test",
            "train",
            "--test",
            "compile_all",
            "--",
            "--show-output",
            // The operations with cases of every format, and the new one. The others are what they are without them.
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

/// Adds all of them to a copy of this checkout, and runs their tests there.
pub fn made_up() -> Result<(), String> {
    let copy = root().join("target/made-up");
    remove(&copy)?;
    copy_sources(&copy)?;
    name_version(&copy)?;
    ALL.iter().try_for_each(|made_up| add(made_up, &copy))?;
    ASKED.iter().try_for_each(|asked| run_tests(&copy, asked))?;
    remove(&copy)
}

/// Whether the patches apply to this checkout. A change next to a line of theirs breaks them; [`made_up`] finds that only after all else.
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

/// Gives the copy's packages a version of their own. Otherwise cargo takes them for this checkout's, whose target folder they share: it would
/// build both anew each time, and with a copy left behind by a failure take what it made of that for up to date.
fn name_version(copy: &Path) -> Result<(), String> {
    let version = concat!("version = \"", env!("CARGO_PKG_VERSION"), "\"");
    let own = concat!("version = \"", env!("CARGO_PKG_VERSION"), "+made-up\"");
    edit(&copy.join("Cargo.toml"), |text| text.replacen(version, own, 1))?;
    edit(&copy.join("Cargo.lock"), |text| {
        // A package from elsewhere has a source.
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

/// `git apply` of the patch in a folder: with `--check` among the arguments nothing is written.
fn git_apply(patch: &Path, folder: &Path, arguments: &[&str]) -> Result<(), String> {
    let mut git = Command::new("git");
    // The copy lies inside a checkout, of which it is no part.
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

/// `cargo test` in the copy. Its target folder is this checkout's, where the dependencies are built.
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
