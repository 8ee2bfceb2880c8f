//! Test files that no binary includes. Crates declare their test binaries themselves (`autotests = false`), so cargo does not search.

use crate::run::{output, root};
use std::fs;

/// Every file below a `tests/`, and every folder with a `mod.rs`, must be a module of a neighbouring file or a test in its `Cargo.toml`.
pub fn check() -> Result<(), String> {
    let listed =
        output("git", &["ls-files", "--cached", "--others", "--exclude-standard", "crates/*/tests/*.rs"])?;
    let mut forgotten = Vec::new();
    for file in listed.lines() {
        let Some((folder, name)) = taken_up(file) else { continue };
        let text = |path: String| fs::read_to_string(root().join(path)).unwrap_or_default();
        let manifest = match folder.split_once("/tests") {
            Some((package, "")) => text(format!("{package}/Cargo.toml")),
            _ => "autotests = false".to_owned(),
        };
        let beside =
            listed.lines().filter(|other| other.rsplit_once('/').is_some_and(|(at, _)| at == folder));
        let modules: String = beside.map(|other| text(other.to_owned())).collect();
        if root().join(file).exists() && !is_taken_up(name, &manifest, &modules) {
            forgotten.push(file);
        }
    }
    match forgotten[..] {
        [] => Ok(()),
        _ => Err(format!(
            "no test binary has these as a module, see the files beside them: {}",
            forgotten.join(", ")
        )),
    }
}

/// The folder and module name of such a file; `None` for `main.rs`.
fn taken_up(file: &str) -> Option<(&str, &str)> {
    let module = file.strip_suffix("/mod.rs").or_else(|| file.strip_suffix(".rs"))?;
    let (folder, name) = module.rsplit_once('/')?;
    let is_of_tests = folder.split('/').nth(2) == Some("tests");
    (is_of_tests && name != "main").then_some((folder, name))
}

/// Whether a test binary includes this module: by a neighbouring file, or by the manifest, which names it or leaves the search to cargo.
fn is_taken_up(name: &str, manifest: &str, modules: &str) -> bool {
    let by_cargo =
        !manifest.contains("autotests = false") || manifest.contains(&format!("name = \"{name}\""));
    let is_declared = |line: &str| line.strip_prefix("pub ").unwrap_or(line) == format!("mod {name};");
    by_cargo || modules.lines().any(is_declared)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn modules_are_files_and_folders() {
        assert_eq!(taken_up("crates/cpu/tests/comm.rs"), Some(("crates/cpu/tests", "comm")));
        assert_eq!(taken_up("crates/train/tests/rig/mod.rs"), Some(("crates/train/tests", "rig")));
        assert_eq!(taken_up("crates/train/tests/rig/comm.rs"), Some(("crates/train/tests/rig", "comm")));
        for other in ["crates/cli/tests/command/main.rs", "crates/cpu/src/gemm/tests/mod.rs"] {
            assert_eq!(taken_up(other), None, "{other}");
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
