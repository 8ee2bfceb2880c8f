//! The formats that the kernels for all formats support, read from the headers that declare them (`NIB_UNIT_FORMAT`,
//! csrc/formats/block_format.cuh). This module is part of the build script, which generates two texts: a header that includes all of
//! these headers, and the rows of a table in Rust.

use std::fmt::Write;

/// Path of the generated header below `csrc/`.
pub const HEADER: &str = "formats/all.cuh";

const MACRO: &str = "NIB_UNIT_FORMAT";
/// The rounding modes for which a kernel may have a separate instance.
const ROUNDINGS: [&str; 3] = ["NearestEven", "NearestAway", "Stochastic"];
/// The name that stands for every scale rule that no earlier row names.
const ANY_OTHER: &str = "AnyOther";

/// One declaration of a format.
#[derive(Debug, PartialEq, Eq)]
pub struct Declared<'t> {
    /// The header's path below `csrc/`; the next field is the line number.
    path: &'t str,
    line: usize,
    format: &'t str,
    rule: Option<&'t str>,
    device: &'t str,
    own: Vec<&'t str>,
}

/// The declarations in these sources (pairs of path below `csrc/` and text), in the order of the
/// sources.
///
/// # Errors
/// The error names the file and line number, and then what is wrong with the line.
pub fn declared<'t>(
    sources: impl IntoIterator<Item = (&'t str, &'t str)>,
) -> Result<Vec<Declared<'t>>, String> {
    let mut all = Vec::new();
    for (path, text) in sources {
        for (i, line) in text.lines().enumerate() {
            let code = line.split("//").next().unwrap_or(line).trim();
            if !code.contains(MACRO) || code.starts_with("#define") {
                continue;
            }
            let found = declaration(path, i + 1, code);
            all.push(found.map_err(|why| format!("csrc/{path}:{}: {why}: {line}", i + 1))?);
        }
    }
    Ok(all)
}

fn declaration<'t>(path: &'t str, line: usize, code: &'t str) -> Result<Declared<'t>, String> {
    if !path.starts_with("formats/") {
        return Err("only a header of csrc/formats/ declares a format".into());
    }
    let list = code.strip_prefix(MACRO).and_then(|rest| rest.strip_prefix('(')?.strip_suffix(')'));
    let list = list.ok_or_else(|| format!("a declaration is one line, `{MACRO}(..)` and nothing else"))?;
    let parts: Vec<&str> = list.split(',').map(str::trim).collect();
    let [format, rule, device, own @ ..] = parts.as_slice() else {
        return Err("a format, a scale rule, a struct, and any roundings, with commas between them".into());
    };
    if let Some(part) = parts.iter().find(|part| !is_name(part)) {
        return Err(format!("`{part}` is no name"));
    }
    if let Some(rounding) = own.iter().find(|rounding| !ROUNDINGS.contains(rounding)) {
        return Err(format!("`{rounding}` is none of {}", ROUNDINGS.join(", ")));
    }
    let rule = (*rule != ANY_OTHER).then_some(*rule);
    Ok(Declared { path, line, format, rule, device, own: own.to_vec() })
}

fn is_name(part: &str) -> bool {
    let is_letter = |c: char| c.is_ascii_alphanumeric() || c == '_';
    part.starts_with(|c: char| c.is_ascii_alphabetic()) && part.chars().all(is_letter)
}

/// The text of [`HEADER`]: an include of each header that declares a format.
pub fn header(declared: &[Declared<'_>]) -> String {
    let mut text =
        format!("// Every header with a line `{MACRO}`. The build script writes this file.\n#pragma once\n");
    let mut paths: Vec<&str> = declared.iter().map(|one| one.path).collect();
    paths.dedup();
    for path in paths {
        writeln!(text, "#include \"{path}\"").unwrap(); // writing to a String cannot fail
    }
    text
}

/// The rows of the table of formats, as a Rust array. Each row ends with the place of its declaration, so that a compiler error about an
/// unknown name shows that place.
pub fn rows(declared: &[Declared<'_>]) -> String {
    let mut text = String::from("[\n");
    for Declared { path, line, format, rule, device, own } in declared {
        let rule = rule.map_or_else(|| "None".to_owned(), |rule| format!("Some(ScaleRule::{rule})"));
        let own: Vec<String> = own.iter().map(|rounding| format!("Rounding::{rounding}")).collect();
        let row = format!("row(Format::{format}, {rule}, device!({device}), &[{}])", own.join(", "));
        writeln!(text, "    {row}, // csrc/{path}:{line}").unwrap(); // to a String
    }
    text.push(']');
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "// NIB_UNIT_FORMAT(in a comment)\n#define NIB_UNIT_FORMAT(...)\n\n\
                        NIB_UNIT_FORMAT(A, Amax, ABlock, NearestEven, Stochastic)\n  NIB_UNIT_FORMAT(A, AnyOther, A) // why\n";

    #[test]
    fn declarations_become_includes_and_rows() {
        let all = declared([("formats/a.cuh", TEXT), ("formats/b.cuh", ""), ("ptx/c.cuh", "")]).unwrap();
        let includes = header(&all);
        assert!(includes.ends_with("#pragma once\n#include \"formats/a.cuh\"\n"), "{includes}");
        assert_eq!(
            rows(&all),
            "[\n    row(Format::A, Some(ScaleRule::Amax), device!(ABlock), &[Rounding::NearestEven, Rounding::Stochastic]), \
             // csrc/formats/a.cuh:4\n    row(Format::A, None, device!(A), &[]), // csrc/formats/a.cuh:5\n]"
        );
    }

    #[test]
    fn what_is_wrong_is_told_with_its_file_and_line() {
        for (line, told) in [
            ("NIB_UNIT_FORMAT(A, Amax)", "a format, a scale rule, a struct"),
            ("NIB_UNIT_FORMAT(A, Amax, B,)", "`` is no name"),
            ("NIB_UNIT_FORMAT(A, Amax, B, Even)", "`Even` is none of NearestEven"),
            ("NIB_UNIT_FORMAT(A, Amax, Fp8<E>)", "`Fp8<E>` is no name"),
            ("NIB_UNIT_FORMAT(A, Amax,", "is one line"),
            ("NIB_UNIT_FORMAT(A, Amax, B);", "is one line"),
            ("} NIB_UNIT_FORMAT(A, Amax, B)", "is one line"),
        ] {
            let text = format!("\n{line}\n");
            let error = declared([("formats/a.cuh", &*text)]).unwrap_err();
            assert!(error.starts_with("csrc/formats/a.cuh:2: ") && error.contains(told), "{error}");
            assert!(error.ends_with(line), "{error}");
        }
        let error = declared([("kernels/a.cuh", TEXT)]).unwrap_err();
        assert!(error.starts_with("csrc/kernels/a.cuh:4: only a header of csrc/formats/"), "{error}");
    }
}
