//! Only code of a format itself, and some fast paths, may name a format; other code must use the formats' records.

use crate::run::root;
use nibble_formats::Format;
use std::fs;
use std::path::Path;

/// Folders whose files may name formats, with the reason.
const APART: [(&str, &str); 3] = [
    ("crates/bench/src", "measures kernels, format by format"),
    ("crates/cuda/src", "has kernels of its own for some formats, each under its name"),
    ("crates/testkit/src/ops", "tests backends, with cases for some formats"),
];

/// Files that may name formats, with the reason.
const ALLOWED: [(&str, &str); 20] = [
    ("crates/formats/src/element.rs", "elements have names that formats share"),
    ("crates/formats/src/fp8.rs", "a format's own file"),
    ("crates/formats/src/hif4.rs", "a format's own file"),
    ("crates/formats/src/mx.rs", "a format's own file"),
    ("crates/formats/src/nvfp4.rs", "a format's own file"),
    ("crates/formats/src/lift.rs", "what blocks are lifted to"),
    ("crates/choice/src/quantize.rs", "kernels of a GPU for one format"),
    ("crates/choice/src/transcode.rs", "conversions"),
    ("crates/choice/src/swiglu_path.rs", "kernels of a GPU that make more than one thing"),
    ("crates/core/src/ops/convert/transcode.rs", "the table of conversions"),
    ("crates/core/src/recipe/shipped.rs", "recipes that are called as their format is"),
    ("crates/core/src/recipe/validate.rs", "scale rules of conversions"),
    ("crates/cpu/src/ops/convert/quantize/encode.rs", "the table of vectorised formats"),
    ("crates/cpu/src/ops/convert/transcode/mod.rs", "conversions"),
    ("crates/cpu/src/ops/convert/transcode/simd.rs", "conversions"),
    ("crates/cpu/src/ops/convert/transcode/spec.rs", "conversions"),
    ("crates/train/src/metrics/mod.rs", "metrics of two conversions"),
    ("crates/train/src/export.rs", "a type that files of published models have"),
    ("crates/train/src/pretrained.rs", "a type that files of published models have"),
    ("crates/cli/src/doctor/start.rs", "a conversion to start a GPU with"),
];

/// # Errors
/// Lists files that name a format but may not, and files that may but do not.
pub fn check() -> Result<(), String> {
    let mut files = Vec::new();
    for folder in entries(&root().join("crates"))? {
        collect(&folder.join("src"), &mut files)?;
    }
    let mut found: Vec<(String, Vec<String>)> = Vec::new();
    for path in files {
        let name = path.strip_prefix(root()).unwrap_or(&path).display().to_string().replace('\\', "/");
        let is_test = name.ends_with("/tests.rs") || name.contains("/tests/");
        if is_test {
            continue;
        }
        let text = fs::read_to_string(&path).map_err(|e| format!("{name}: {e}"))?;
        let lines = naming(&text);
        if !lines.is_empty() {
            found.push((name, lines));
        }
    }
    let wrong = complaints(&found);
    if wrong.is_empty() { Ok(()) } else { Err(wrong.join("\n")) }
}

/// The errors in these files, each given with its lines that name a format.
fn complaints(found: &[(String, Vec<String>)]) -> Vec<String> {
    let may = |name: &str, allowed: &str| {
        name.strip_prefix(allowed).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
    };
    let all = || APART.iter().chain(&ALLOWED).map(|(allowed, _)| *allowed);
    let beyond = found.iter().filter(|(name, _)| !all().any(|allowed| may(name, allowed)));
    let unneeded = all().filter(|allowed| !found.iter().any(|(name, _)| may(name, allowed)));
    let beyond = beyond.map(|(name, lines)| format!("{name} names a format: {}", lines.join("; ")));
    let unneeded = unneeded.map(|allowed| {
        format!("{allowed} may name formats and does not: take it off the list of xtask/src/names.rs")
    });
    beyond.chain(unneeded).collect()
}

/// Lines of code that name a block format, without comments and without tests at the end of the file.
fn naming(text: &str) -> Vec<String> {
    let names: Vec<String> = Format::ALL
        .into_iter()
        .filter(|format| format.is_block())
        .flat_map(|format| [format!("Format::{format:?}"), format!("\"{format}\"")])
        .collect();
    let code = text.split("\n#[cfg(test)]\nmod tests {").next().unwrap_or(text).lines();
    let code = code.map(|line| line.split("//").next().unwrap_or(line));
    let named = |line: &str| names.iter().any(|name| has_word(line, name));
    code.enumerate()
        .filter(|(_, line)| named(line))
        .map(|(i, line)| format!("line {}: {}", i + 1, line.trim()))
        .collect()
}

/// Whether a line has this word as a whole word.
fn has_word(line: &str, word: &str) -> bool {
    let goes_on = |c: char| c.is_alphanumeric() || c == '_';
    let ends = |at: usize| word.ends_with('"') || !line[at + word.len()..].starts_with(goes_on);
    let begins = |at: usize| word.starts_with('"') || !line[..at].ends_with(goes_on);
    line.match_indices(word).any(|(at, _)| begins(at) && ends(at))
}

fn entries(folder: &Path) -> Result<Vec<std::path::PathBuf>, String> {
    let told = |e: std::io::Error| format!("{}: {e}", folder.display());
    let mut all = Vec::new();
    for entry in fs::read_dir(folder).map_err(told)? {
        all.push(entry.map_err(told)?.path());
    }
    all.sort();
    Ok(all)
}

/// Every Rust file of a folder and its subfolders.
fn collect(folder: &Path, files: &mut Vec<std::path::PathBuf>) -> Result<(), String> {
    for path in entries(folder)? {
        if path.is_dir() {
            collect(&path, files)?;
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            files.push(path);
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_too_many_and_an_entry_too_many_are_told() {
        let at = |name: &str| (name.to_owned(), vec!["line 1".to_owned()]);
        let mut found: Vec<_> = ALLOWED.iter().map(|(file, _)| at(file)).collect();
        found.extend(APART.iter().map(|(folder, _)| at(&format!("{folder}/a.rs"))));
        assert_eq!(complaints(&found), [""; 0]);
        found.push(at("crates/train/src/new.rs"));
        let gone = found.remove(0).0;
        let told = complaints(&found);
        assert_eq!(told.len(), 2, "{told:?}");
        assert!(told[0].starts_with("crates/train/src/new.rs names a format: line 1"), "{told:?}");
        assert!(told[1].starts_with(&format!("{gone} may name formats and does not")), "{told:?}");
    }

    #[test]
    fn formats_are_found_by_variant_and_by_name_and_nowhere_else() {
        let text = "use a::Format;\n\
                    let a = Format::Nvfp4; // Format::Hif4\n\
                    let b = [\"hif4\", \"mxfp4-hopper\"];\n\
                    // \"nvfp4\"\n\
                    let c = Format::E4m3Row == x && MyFormat::Hif4x == y;\n\
                    let d = Format::Bf16;\n\
                    #[cfg(test)]\n\
                    mod tests { use Format::Mxfp4; }\n";
        let found = naming(text);
        assert_eq!(found.len(), 3, "{found:?}");
        assert!(found[0].starts_with("line 2: let a = Format::Nvfp4"), "{found:?}");
        assert!(found[1].starts_with("line 3") && found[2].starts_with("line 5"), "{found:?}");
        assert!(!has_word("Format::E4m3Row", "Format::E4m3") && has_word("(Format::E4m3,", "Format::E4m3"));
    }
}
