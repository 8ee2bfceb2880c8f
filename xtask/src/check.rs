//! `cargo xtask check`.

use crate::run::{command, output, root};
use crate::{circles, made_up, modules, names, pages};
use std::time::Instant;

/// Whether to run the tests.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Tests {
    /// All tests, and the README's command.
    Run,
    /// None.
    Skip,
}

/// Every check, cheapest first; stops at the first that fails.
pub fn check(tests: Tests) -> Result<(), String> {
    let clippy = ["clippy", "--workspace", "--all-targets", "--locked", "--", "-D", "warnings"];
    let doc = ["doc", "--workspace", "--no-deps", "--document-private-items", "--locked"];
    step("format", || cargo(&["fmt", "--all", "--check"], &[]))?;
    step("names of formats", names::check)?;
    step("files of tests", modules::check)?;
    step("circles of files", circles::check)?;
    step("pages", pages::check)?;
    step("patches of tests", made_up::patches_apply)?;
    step("no C", no_c)?;
    step("licences and sources", licences)?;
    step("packages", packages)?;
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

/// Every crate that is built, including for tests, in this format of `cargo tree`.
fn built(format: &str) -> Result<String, String> {
    let what = ["--workspace", "--locked", "--edges", "normal,build,dev"];
    output("cargo", &[&["tree"], &what[..], &["--prefix", "none", "--format", format]].concat())
}

/// Checks that no crate that is built compiles or links C: `cargo build` needs only Rust.
fn no_c() -> Result<(), String> {
    // Only crates built for this machine; crates for other systems, and their bindings, are listed in Cargo.lock only.
    let tree = built("{p}")?;
    let found = crates_with_c(&tree);
    if found.is_empty() {
        return Ok(());
    }
    Err(format!(
        "these crates compile or bind C: {}; `cargo tree --invert NAME` shows who wants them",
        found.join(", ")
    ))
}

/// Checks that every crate that is built, for tests too, has one of these licences and comes from the registry or this repository.
fn licences() -> Result<(), String> {
    let tree = built("{l}|{p}")?;
    let found = unwelcome(&tree, &root().display().to_string());
    if found.is_empty() {
        return Ok(());
    }
    Err(format!("neither licence nor source is on the list of xtask/src/check.rs: {}", found.join("; ")))
}

/// The crates of a listing, one `licence|name version (source)` per line, that fail this check.
fn unwelcome<'a>(tree: &'a str, root: &str) -> Vec<&'a str> {
    const LICENCES: [&str; 8] = [
        "MIT",
        "Apache-2.0",
        "Apache-2.0 WITH LLVM-exception",
        "BSD-2-Clause",
        "BSD-3-Clause",
        "ISC",
        "Zlib",
        "Unicode-3.0",
    ];
    let allowed = |licence: &str| {
        // A slash is an older form of `OR`.
        let any =
            |part: &str| part.split(" OR ").flat_map(|x| x.split('/')).any(|x| LICENCES.contains(&x.trim()));
        licence.split(" AND ").all(|part| any(part.trim_matches(['(', ')'])))
    };
    let here = |package: &str| {
        let notes = package.split('(').skip(1).filter_map(|note| note.split(')').next());
        notes.into_iter().all(|note| ["*", "proc-macro"].contains(&note) || note.starts_with(root))
    };
    let lines = tree.lines().filter(|line| !line.is_empty());
    let mut found: Vec<&str> = lines
        .filter(|line| {
            line.split_once('|').is_none_or(|(licence, package)| !allowed(licence) || !here(package))
        })
        .collect();
    found.sort();
    found.dedup();
    found
}

/// Checks that every crate but this one can be packaged, and that no package needs a file outside of it. (To build the packages as
/// well: `cargo package --workspace --exclude xtask`.)
fn packages() -> Result<(), String> {
    let arguments = [
        "package",
        "--quiet",
        "--workspace",
        "--exclude",
        "xtask",
        "--no-verify",
        "--allow-dirty",
        "--locked",
    ];
    cargo(&arguments, &[])?;
    let sources = output("git", &["ls-files", "crates/*/src/*.rs", "crates/*/build.rs"])?;
    for file in sources.lines() {
        // Deleted in the work tree, but still in the index.
        let Ok(text) = std::fs::read_to_string(root().join(file)) else { continue };
        if let Some(path) = outside(file, &text) {
            return Err(format!("{file} includes {path}, which lies outside of its crate"));
        }
    }
    Ok(())
}

/// The first path in `include_str!("…")` that leaves the crate, in the text of `crates/NAME/…`.
fn outside<'a>(file: &str, text: &'a str) -> Option<&'a str> {
    // Folders from the crate's root to the file.
    let depth = file.split('/').count().saturating_sub(3);
    let included = text.split("include_str!(\"").skip(1).filter_map(|rest| rest.split('"').next());
    included.into_iter().find(|path| path.split('/').filter(|part| *part == "..").count() > depth)
}

/// The crates of a listing, one `name version` per line, that compile C, or bind a C library as `*-sys` crates do.
fn crates_with_c(tree: &str) -> Vec<&str> {
    const COMPILERS: [&str; 6] = ["cc", "cmake", "bindgen", "pkg-config", "vcpkg", "nasm-rs"];
    // Declarations of JavaScript and WebAssembly functions, of system calls, and of a library loaded at run time, all in Rust: they build
    // and link no C.
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
    fn licences_and_sources_off_the_list_are_found() {
        let tree = "MIT OR Apache-2.0|a v1.0.0\nMIT/Apache-2.0|b v1.0.0 (proc-macro) (*)\n\nApache-2.0|c v0.1.0 (/here/c)\n\
                    (MIT OR Apache-2.0) AND Unicode-3.0|d v1.0.0\nUnlicense OR MIT|e v1.0.0\n";
        assert!(unwelcome(tree, "/here").is_empty(), "{:?}", unwelcome(tree, "/here"));
        let bad = [
            "GPL-3.0|f v1.0.0",
            "MIT AND GPL-2.0|g v1.0.0",
            "MIT|h v1.0.0 (https://example.org/h#1234)",
            "|i v1.0.0",
        ];
        let mut found = unwelcome(
            "GPL-3.0|f v1.0.0\nMIT AND GPL-2.0|g v1.0.0\nMIT|h v1.0.0 (https://example.org/h#1234)\n|i v1.0.0",
            "/here",
        );
        found.sort_by_key(|line| line.split('|').nth(1));
        assert_eq!(found, bad);
    }

    #[test]
    fn a_path_out_of_the_crate_is_found() {
        let text = "include_str!(\"../../recipes/a.toml\"), include_str!(\"../../../b.toml\")";
        assert_eq!(outside("crates/core/src/recipe/mod.rs", text), Some("../../../b.toml"));
        assert_eq!(outside("crates/core/src/recipe/deep/mod.rs", text), None);
        assert_eq!(outside("crates/core/src/lib.rs", text), Some("../../recipes/a.toml"));
    }

    #[test]
    fn compilers_and_bindings_are_found_once() {
        let tree = "nibble v0.1.0 (/here)\n\ncc v1.2.3\nzstd-sys v2.0.1+zstd.1.5\nserde v1.0.1\ncc v1.2.3 (*)\n\
                    linux-raw-sys v0.9.4\naccess v1.0.0\n";
        assert_eq!(crates_with_c(tree), ["cc", "zstd-sys"]);
        assert!(crates_with_c("serde v1.0.1\nsystem v1.0.0\n").is_empty());
    }
}
