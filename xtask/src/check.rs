//! `cargo xtask check`.

use crate::run::{command, output};
use std::time::Instant;

/// Whether to run the tests.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Tests {
    /// All of them, with the README's command.
    Run,
    /// None.
    Skip,
}

/// Every check, cheapest first; stops at the first that fails.
pub fn check(tests: Tests) -> Result<(), String> {
    let clippy = ["clippy", "--workspace", "--all-targets", "--locked", "--", "-D", "warnings"];
    let doc = ["doc", "--workspace", "--no-deps", "--document-private-items", "--locked"];
    step("format", || cargo(&["fmt", "--all", "--check"], &[]))?;
    step("no C", no_c)?;
    step("clippy", || cargo(&clippy, &[]))?;
    step("documentation", || cargo(&doc, &[("RUSTDOCFLAGS", "-D warnings")]))?;
    if tests == Tests::Run {
        step("tests", || cargo(&["test", "--workspace"], &[]))?;
    }
    Ok(())
}

fn step(name: &str, run: impl FnOnce() -> Result<(), String>) -> Result<(), String> {
    eprintln!("── {name}");
    let start = Instant::now();
    run().map_err(|why| format!("{name}: {why}"))?;
    eprintln!("── {name}: passed in {:.1} s", start.elapsed().as_secs_f64());
    Ok(())
}

fn cargo(arguments: &[&str], environment: &[(&str, &str)]) -> Result<(), String> {
    let status = command("cargo", arguments).envs(environment.iter().copied()).status();
    match status {
        Ok(status) if status.success() => Ok(()),
        Ok(status) => Err(format!("`cargo {}` failed ({status})", arguments.join(" "))),
        Err(e) => Err(format!("cargo did not start: {e}")),
    }
}

/// No crate that is built compiles or links C: `cargo build` needs Rust and nothing else.
fn no_c() -> Result<(), String> {
    // What is built for this machine; crates for other systems, and their bindings, are listed in Cargo.lock alone.
    let tree = output(
        "cargo",
        &[
            "tree",
            "--workspace",
            "--locked",
            "--edges",
            "normal,build,dev",
            "--prefix",
            "none",
            "--format",
            "{p}",
        ],
    )?;
    let found = crates_with_c(&tree);
    if found.is_empty() {
        return Ok(());
    }
    Err(format!(
        "these crates compile or bind C: {}; `cargo tree --invert NAME` shows who wants them",
        found.join(", ")
    ))
}

/// Those crates of a listing, one `name version` a line, that compile C, or bind a C library as `*-sys` crates do.
fn crates_with_c(tree: &str) -> Vec<&str> {
    const COMPILERS: [&str; 6] = ["cc", "cmake", "bindgen", "pkg-config", "vcpkg", "nasm-rs"];
    // Declarations of JavaScript and WebAssembly functions, of system calls, and of a library that is loaded at run time, in Rust: no C
    // is built or linked.
    const PURE: [&str; 4] = ["js-sys", "web-sys", "linux-raw-sys", "nvml-wrapper-sys"];
    let mut found: Vec<&str> = tree
        .lines()
        .filter_map(|line| line.split_whitespace().next())
        .filter(|name| COMPILERS.contains(name) || (name.ends_with("-sys") && !PURE.contains(name)))
        .collect();
    found.sort();
    found.dedup();
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn compilers_and_bindings_are_found_once() {
        let tree = "nibble v0.1.0 (/here)\n\ncc v1.2.3\nzstd-sys v2.0.1+zstd.1.5\nserde v1.0.1\ncc v1.2.3 (*)\n\
                    linux-raw-sys v0.9.4\naccess v1.0.0\n";
        assert_eq!(crates_with_c(tree), ["cc", "zstd-sys"]);
        assert!(crates_with_c("serde v1.0.1\nsystem v1.0.0\n").is_empty());
    }
}
