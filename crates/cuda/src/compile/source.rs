//! The kernel sources in the binary, and the set of sources that an instance includes.

use nibble_core::{Error, Result};
use std::borrow::Cow;
use std::collections::BTreeMap;
use std::path::Path;

/// The path under `csrc/` and the text of every source file and of the generated list of formats. The list is sorted by path.
pub const EMBEDDED: &[(&str, &str)] = include!(concat!(env!("OUT_DIR"), "/embedded.rs"));

/// The one source that the build script generates, from the declarations in the headers of formats. The table of formats in the binary
/// comes from the same declarations, so `NIBBLE_CSRC` must not replace this file.
const GENERATED: &str = "formats/all.cuh";

/// A set of sources: the embedded sources, the sources in a directory (`NIBBLE_CSRC`), or the
/// sources of a test.
#[derive(Debug, Clone)]
pub struct Sources {
    files: BTreeMap<String, Cow<'static, str>>,
}

impl Sources {
    /// The sources in the binary.
    pub fn embedded() -> Self {
        Self::from_files(EMBEDDED.iter().map(|&(path, text)| (path.to_owned(), Cow::Borrowed(text))))
    }

    /// The sources that are embedded in the binary. If `NIBBLE_CSRC` is set, the texts of the same files are read from this directory
    /// instead.
    pub fn from_env() -> Result<Self> {
        crate::env::csrc().map_or_else(|| Ok(Self::embedded()), |folder| Self::from_folder(&folder))
    }

    fn from_folder(folder: &Path) -> Result<Self> {
        let text = |&(path, embedded): &(&str, &'static str)| {
            if path == GENERATED {
                return Ok((path.to_owned(), Cow::Borrowed(embedded)));
            }
            let file = folder.join(path);
            let text = std::fs::read_to_string(&file).map_err(|error| Error::Jit {
                kernel: path.to_owned(),
                log: format!("{}: {error}", file.display()),
            })?;
            Ok((path.to_owned(), Cow::Owned(text)))
        };
        Ok(Self { files: EMBEDDED.iter().map(text).collect::<Result<_>>()? })
    }

    /// A set of sources that consists of these (path, text) pairs.
    pub fn from_files(files: impl IntoIterator<Item = (String, Cow<'static, str>)>) -> Self {
        Self { files: files.into_iter().collect() }
    }

    /// The text of one file.
    pub fn text(&self, path: &str) -> Result<&str> {
        self.files.get(path).map(|text| text.as_ref()).ok_or_else(|| Error::Jit {
            kernel: path.to_owned(),
            log: "no such source; the sources are those of `csrc/`".into(),
        })
    }

    /// `path` and all sources that it includes, directly or indirectly, indexed by path.
    pub fn reached(&self, path: &str) -> Result<BTreeMap<&str, &str>> {
        let mut found = BTreeMap::new();
        let mut open = vec![path];
        while let Some(path) = open.pop() {
            let (key, _) = self.files.get_key_value(path).ok_or_else(|| Error::Jit {
                kernel: path.to_owned(),
                log: "included, but not among the sources of `csrc/`".into(),
            })?;
            let text = self.text(path)?;
            if found.insert(key.as_str(), text).is_none() {
                open.extend(includes(text));
            }
        }
        Ok(found)
    }
}

/// `text` without its comments, its indentation and its empty lines: what of a source decides the compiled code. (No kernel is
/// compiled with line numbers.)
pub(crate) fn code(text: &str) -> String {
    let (mut code, mut rest) = (String::with_capacity(text.len()), text);
    while let Some(at) = rest.find(['"', '/']) {
        let (before, from) = rest.split_at(at);
        code.push_str(before);
        let (kept, skipped) = if from.starts_with("//") {
            ("", from.find('\n').unwrap_or(from.len()))
        } else if from.starts_with("/*") {
            (" ", from.find("*/").map_or(from.len(), |end| end + 2))
        } else {
            let end = if from.starts_with('"') { end_of_string(from) } else { 1 };
            (&from[..end], end)
        };
        code.push_str(kept);
        rest = &from[skipped..];
    }
    code.push_str(rest);
    let lines = code.lines().map(str::trim).filter(|line| !line.is_empty());
    lines.flat_map(|line| [line, "\n"]).collect()
}

/// The length of the string literal that `text` begins with, with both quotation marks.
fn end_of_string(text: &str) -> usize {
    let mut is_escaped = false;
    let end = text[1..].find(|c| {
        let ends = c == '"' && !is_escaped;
        is_escaped = c == '\\' && !is_escaped;
        ends
    });
    end.map_or(text.len(), |end| end + 2)
}

/// The quoted includes of a source. Angle brackets would name a toolkit header; no source includes
/// one.
fn includes(text: &str) -> impl Iterator<Item = &str> {
    text.lines().filter_map(|line| {
        let rest = line.trim_start().strip_prefix("#include")?.trim_start().strip_prefix('"')?;
        rest.split_once('"').map(|(path, _)| path)
    })
}

/// Finds the declaration of the `__global__` function `kernel` in `text`: returns the text before `__global__`, and the
/// text after the name.
fn declaration<'t>(text: &'t str, kernel: &str) -> Option<(&'t str, &'t str)> {
    let function = kernel.rsplit("::").next().unwrap_or(kernel);
    text.match_indices(function).find_map(|(at, _)| {
        let (before, after) = (&text[..at], &text[at + function.len()..]);
        let whole_word = !before.ends_with(|c: char| c.is_alphanumeric() || c == '_');
        let global = before.rfind("__global__")?;
        // In a declaration only attributes and the return type lie between `__global__` and the name; before a call
        // there is a function body.
        let declares = !before[global..].contains([';', '{']);
        (whole_word && declares && after.trim_start().starts_with('(')).then_some((&text[..global], after))
    })
}

/// The template parameters of `kernel` in `text`, in their order: `["kBlockM", "kStages"]` for `template <int kBlockM, int
/// kStages> __global__ void … kernel(`. The list is empty for a plain function. The result is `None` if the source has no
/// such `__global__` function.
pub fn template_parameters<'t>(text: &'t str, kernel: &str) -> Option<Vec<&'t str>> {
    let (before, _) = declaration(text, kernel)?;
    let list = before.trim_end().strip_suffix('>').and_then(|list| {
        let start = list.rfind("template")?;
        list[start..].split_once('<')
    });
    let parameters = list.map_or("", |(_, parameters)| parameters);
    Some(parameters.split(',').filter_map(|one| one.split('=').next()?.split_whitespace().last()).collect())
}

/// The number of arguments of `kernel`; `None` if the source has no such `__global__` function.
pub fn num_arguments(text: &str, kernel: &str) -> Option<usize> {
    let (_, after) = declaration(text, kernel)?;
    let (mut depth, mut commas, mut empty) = (0, 0, true);
    for c in after.chars() {
        match c {
            '(' | '<' | '[' => depth += 1,
            ')' if depth == 1 => return Some(if empty { 0 } else { commas + 1 }),
            ')' | '>' | ']' => depth -= 1,
            ',' if depth == 1 => commas += 1,
            _ => empty &= c.is_whitespace(),
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_include_is_embedded() {
        let sources = Sources::embedded();
        for (path, _) in EMBEDDED {
            sources.reached(path).unwrap();
        }
        assert!(EMBEDDED.is_sorted() && sources.text("kernels/products/grouped_fp8_block.cuh").is_ok());
    }

    #[test]
    fn what_is_generated_includes_headers_that_are_there() {
        assert_eq!(GENERATED, crate::compile::unit_formats::HEADER);
        let text = Sources::embedded().text(GENERATED).unwrap().to_owned();
        let declare = |text: &str| text.lines().any(|line| line.starts_with("NIB_UNIT_FORMAT("));
        let headers = EMBEDDED.iter().filter(|(_, text)| declare(text)).map(|(path, _)| *path);
        assert_eq!(includes(&text).collect::<Vec<_>>(), headers.collect::<Vec<_>>());
    }

    #[test]
    fn what_is_embedded_names_no_folder_of_the_machine() {
        let generated = include_str!(concat!(env!("OUT_DIR"), "/embedded.rs"));
        assert!(!generated.contains(env!("CARGO_MANIFEST_DIR")), "a moved checkout would not build");
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("csrc");
        assert!(!folder.join(GENERATED).exists());
        let read = Sources::from_folder(&folder).unwrap();
        for (path, text) in EMBEDDED {
            assert!(read.text(path).unwrap() == *text, "{path} is another text");
        }
    }

    #[test]
    fn kernels_are_entry_points_that_an_instance_compiles_and_pieces_are_none() {
        let flush = crate::measure::timing::flush_spec();
        let mut launched: Vec<&str> =
            crate::ops::instances().iter().map(|instance| instance.spec.source).collect();
        launched.push(flush.source);
        for (path, text) in EMBEDDED {
            let mut code = text.lines().filter(|line| !line.trim_start().starts_with("//"));
            assert_eq!(path.starts_with("kernels/"), code.any(|line| line.contains("__global__")), "{path}");
            assert_eq!(path.starts_with("kernels/"), launched.contains(path), "{path}");
            assert!(
                includes(text).all(|other| !other.starts_with("kernels/")),
                "{path} includes an entry point"
            );
        }
    }

    #[test]
    fn only_ptx_holds_assembly_and_nothing_includes_the_toolkit() {
        for (path, text) in EMBEDDED {
            assert!(!text.contains("#include <"), "{path} includes a toolkit header");
            let assembly = ["asm(", "asm volatile("].iter().any(|call| text.contains(call));
            assert!(path.starts_with("ptx/") || !assembly, "{path} holds inline PTX");
        }
    }

    #[test]
    fn reaches_through_includes_and_no_further() {
        let files =
            [("a", "#include \"b\"\n"), ("b", "  #include \"c\"\n#include \"a\""), ("c", ""), ("d", "")];
        let sources = Sources::from_files(files.map(|(path, text)| (path.to_owned(), text.into())));
        assert_eq!(sources.reached("a").unwrap().into_keys().collect::<Vec<_>>(), ["a", "b", "c"]);
        let error = sources.reached("e").unwrap_err().to_string();
        assert!(error.contains('e') && error.contains("csrc/"), "{error}");
    }

    #[test]
    fn code_is_what_is_no_comment() {
        let text = "// a\n#include \"b\" // c\n\n  int x = 6 / 2; /* d\n // e */ int y;\n  const char* s = \"a // \\\" /* b\"; // \"\nint z;";
        let expected =
            "#include \"b\"\nint x = 6 / 2;   int y;\nconst char* s = \"a // \\\" /* b\";\nint z;\n";
        assert_eq!(code(text), expected);
        for (path, text) in EMBEDDED {
            let code = code(text);
            assert!(!code.contains("//") && code.matches(';').count() <= text.matches(';').count(), "{path}");
            assert_eq!(includes(&code).collect::<Vec<_>>(), includes(text).collect::<Vec<_>>(), "{path}");
        }
    }

    #[test]
    fn reads_template_parameters_in_order() {
        let text = "void other(int kernel_a);\ntemplate <int kA, class T = float,\n bool kB>\n__global__ void __launch_bounds__(3 * (2), 1)\n  kernel_a(int x) {}\n__global__ void plain(int y) { kernel_a(3); }";
        assert_eq!(template_parameters(text, "nib::kernel_a").unwrap(), ["kA", "T", "kB"]);
        assert_eq!(template_parameters(text, "plain").unwrap(), [""; 0]);
        assert_eq!(template_parameters(text, "other"), None);
        assert_eq!(template_parameters(text, "absent"), None);
        let counts = ["nib::kernel_a", "plain", "other"].map(|kernel| num_arguments(text, kernel));
        assert_eq!(counts, [Some(1), Some(1), None]);
        let text = "__global__ void none( ) {}\n__global__ void three(const P<int, 3>* a, int b,\n float (*c)[2]) {}";
        assert_eq!((num_arguments(text, "none"), num_arguments(text, "three")), (Some(0), Some(3)));
    }
}
