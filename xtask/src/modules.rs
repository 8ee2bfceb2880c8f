//! Files of tests that no binary takes up. Crates name their test binaries themselves (`autotests = false`), so cargo does not look for them.

use crate::run::{output, root};
use std::fs;

/// Every file right below a `tests/`, and every folder with a `mod.rs`, is a module of its `main.rs` or a test of its `Cargo.toml`.
pub fn check() -> Result<(), String> {
    let listed =
        output("git", &["ls-files", "--cached", "--others", "--exclude-standard", "crates/*/tests/*.rs"])?;
    let mut forgotten = Vec::new();
    for file in listed.lines() {
        let Some((package, name)) = taken_up(file) else { continue };
        let text = |path: &str| fs::read_to_string(root().join(package).join(path)).unwrap_or_default();
        if root().join(file).exists() && !is_taken_up(name, &text("Cargo.toml"), &text("tests/main.rs")) {
            forgotten.push(file);
        }
    }
    match forgotten[..] {
        [] => Ok(()),
        _ => Err(format!(
            "no test binary has these as a module, see `main.rs` beside them: {}",
            forgotten.join(", ")
        )),
    }
}

/// The package of such a file, and the module that it is; none of `main.rs`, and of files that are a part of another.
fn taken_up(file: &str) -> Option<(&str, &str)> {
    let (package, inside) = file.split_once("/tests/")?;
    let name = inside.strip_suffix("/mod.rs").or_else(|| inside.strip_suffix(".rs"))?;
    (name != "main" && !name.contains('/')).then_some((package, name))
}

/// Whether a test binary has this module: by `main.rs`, or by the manifest, which names it or leaves the search to cargo.
fn is_taken_up(name: &str, manifest: &str, main: &str) -> bool {
    let by_cargo =
        !manifest.contains("autotests = false") || manifest.contains(&format!("name = \"{name}\""));
    by_cargo || main.lines().any(|line| line == format!("mod {name};"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn modules_are_files_and_folders_right_below() {
        assert_eq!(taken_up("crates/cpu/tests/comm.rs"), Some(("crates/cpu", "comm")));
        assert_eq!(taken_up("crates/train/tests/rig/mod.rs"), Some(("crates/train", "rig")));
        for part in
            ["crates/train/tests/rig/comm.rs", "crates/cpu/tests/main.rs", "crates/cli/tests/command/main.rs"]
        {
            assert_eq!(taken_up(part), None, "{part}");
        }
    }

    #[test]
    fn a_file_that_nobody_names_is_found() {
        let manifest = "autotests = false\n\n[[test]]\nname = \"alone\"\n";
        let main = "mod comm;\nmod rig;\n";
        for (name, manifest, main, is) in [
            ("comm", manifest, main, true),
            ("alone", manifest, main, true),
            ("rag", manifest, main, false),
            ("comm", manifest, "", false),
            ("rag", "", "", true),
        ] {
            assert_eq!(is_taken_up(name, manifest, main), is, "{name}");
        }
    }

    #[test]
    fn none_is_forgotten_here() {
        assert_eq!(check(), Ok(()));
    }
}
