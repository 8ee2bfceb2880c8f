//! Recipes from files, with path and line in their errors. A recipe file may name other recipe files, by paths relative to its folder.

use crate::error::{Error, Result};
use crate::files;
use nibble_core::{Error as CoreError, Recipe};
use std::cell::RefCell;
use std::path::{Path, PathBuf};
use toml::Spanned;
use toml::de::{DeTable, DeValue};

/// The file of a recipe, unless the recipe is built in.
pub(crate) fn path_of(recipe: &str) -> Option<&Path> {
    recipe.ends_with(".toml").then(|| Path::new(recipe))
}

/// The recipe of a file, named by the file's stem.
pub(super) fn load(path: &Path) -> Result<Recipe> {
    Files::default().load(path, &[])
}

/// The file of a recipe and the files that it names, directly or through another file. None for a built-in recipe; of files that cannot be
/// read, those that are known.
pub(crate) fn files_of(recipe: &str) -> Vec<PathBuf> {
    let files = Files::default();
    // A recipe in error is reported when it is used.
    let _ = path_of(recipe).map(|path| files.load(path, &[]));
    files.read.into_inner()
}

/// The recipe files that were read, in order.
#[derive(Default)]
struct Files {
    read: RefCell<Vec<PathBuf>>,
}

impl Files {
    /// Reads a file that the last of the files `from` names, that the one before it names, and so on.
    fn load(&self, path: &Path, from: &[&Path]) -> Result<Recipe> {
        self.read.borrow_mut().push(path.to_owned());
        let text = read_text(path)?;
        let name = path.file_stem().map_or_else(|| path.to_string_lossy(), |stem| stem.to_string_lossy());
        let from = [from, &[path]].concat();
        let named = |other: &str| match path_of(other) {
            None => Recipe::builtin(other),
            Some(other) => self.named(&path.with_file_name("").join(other), &from),
        };
        Recipe::parse_with(&name, &text, &named).map_err(|error| located(error.into(), path, &text))
    }

    /// [`Files::load`] of a file that a file names. The error becomes part of the naming file's.
    fn named(&self, path: &Path, from: &[&Path]) -> nibble_core::Result<Recipe> {
        let fail = |why| {
            let recipe = path.display().to_string();
            Err(CoreError::Recipe { recipe, key: "(file)".into(), why })
        };
        // One file may have several paths. A file without such a path cannot be read either.
        let is_it = |one: &&Path| one.canonicalize().ok() == path.canonicalize().ok();
        if path.exists() && from.iter().any(is_it) {
            let way = from.iter().chain([&path]).map(|one| one.display().to_string());
            return fail(format!("the recipe is part of itself: {}", way.collect::<Vec<_>>().join(" → ")));
        }
        self.load(path, from).or_else(|error| fail(error.to_string()))
    }
}

fn read_text(path: &Path) -> Result<String> {
    files::read_text(path, files::MOST_TEXT).map_err(Error::io(path))
}

/// Adds the line of the key to an error about a recipe, if the file contains the key.
pub(super) fn in_file(error: Error, path: &Path) -> Error {
    match read_text(path) {
        Ok(text) => located(error, path, &text),
        Err(_) => error,
    }
}

fn located(error: Error, path: &Path, text: &str) -> Error {
    let Error::Core(CoreError::Recipe { key, why, .. }) = error else { return error };
    let (key, why, at) = match DeTable::parse(text) {
        Err(syntax) => (String::new(), syntax.message().to_owned(), syntax.span().map(|span| span.start)),
        Ok(table) => {
            let path: Vec<&str> = key.split('.').collect();
            let at = deepest(table.get_ref(), &path).map(|(_, at)| at);
            (key, why, at)
        }
    };
    // Lines are counted from 1.
    let line = at.map(|at| text.bytes().take(at).filter(|byte| *byte == b'\n').count() + 1);
    Error::Config { key, file: Some(path.to_owned()), line, why, suggestion: None }
}

/// The longest prefix of a dotted key that exists in a table: the number of names in this prefix, and the position of its last name. Keys
/// that a recipe inherits from another recipe are not in the file.
fn deepest(table: &DeTable<'_>, path: &[&str]) -> Option<(usize, usize)> {
    let (first, rest) = path.split_first()?;
    // `override[2]` is the second item of the list `override`.
    let (name, which) = match first.strip_suffix(']').and_then(|first| first.split_once('[')) {
        Some((name, which)) => (name, which.parse::<usize>().ok()?.checked_sub(1)),
        None => (*first, None),
    };
    let (key, value) = table.iter().find(|(key, _)| key.get_ref().as_ref() == name)?;
    let here = (1, key.span().start);
    let below = |value: &Spanned<DeValue<'_>>| {
        let found = value.get_ref().as_table().and_then(|table| deepest(table, rest));
        found.map(|(names, at)| (names + 1, at))
    };
    let found = match (value.get_ref(), which) {
        (DeValue::Array(list), Some(which)) => {
            list.get(which).map(|one| below(one).unwrap_or((1, one.span().start)))
        }
        // Takes the first item among the items with the longest prefix.
        (DeValue::Array(list), None) => {
            list.iter().filter_map(below).reduce(|best, one| if one.0 > best.0 { one } else { best })
        }
        _ => below(value),
    };
    Some(found.unwrap_or(here))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::checks::load_recipe;

    /// A folder with these files.
    fn folder(files: &[(&str, &str)]) -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        for (name, text) in files {
            let path = dir.path().join(name);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        }
        dir
    }

    fn named(dir: &tempfile::TempDir, name: &str) -> String {
        dir.path().join(name).to_string_lossy().into_owned()
    }

    const H: &str = "[expert]\nsaved.h = { format = \"mxfp4\", scale = \"rceil\" }\n";

    #[test]
    fn a_file_extends_another_relative_to_its_own_folder() {
        let dir = folder(&[
            (
                "a/mine.toml",
                "extends = \"../b/base.toml\"\n[[override]]\nsteps = \"0.5..1\"\nset.recipe = \"late.toml\"\n",
            ),
            ("b/base.toml", &format!("extends = \"base0.toml\"\n{H}")),
            ("b/base0.toml", "extends = \"fp8-flow\"\ndescription = \"of a file\"\n"),
            ("a/late.toml", "extends = \"bf16\"\n"),
        ]);
        let mine = load_recipe(&named(&dir, "a/mine.toml")).unwrap();
        let text = format!(
            "extends = \"fp8-flow\"\ndescription = \"of a file\"\n{H}[[override]]\nsteps = \"0.5..1\"\nset.recipe = \"bf16\"\n"
        );
        assert_eq!(mine, Recipe::parse("mine", &text).unwrap());
        // What a run stores names no file.
        assert_eq!(Recipe::parse("mine", &mine.to_toml()).unwrap(), mine);
        let read = files_of(&named(&dir, "a/mine.toml"));
        let stems: Vec<_> = read.iter().map(|path| path.file_stem().unwrap().to_str().unwrap()).collect();
        assert_eq!(stems, ["mine", "base", "base0", "late"]);
        assert!(read.iter().all(|path| path.exists()) && files_of("bf16").is_empty());
    }

    #[test]
    fn errors_name_each_file_on_the_way() {
        let dir = folder(&[
            ("itself.toml", "extends = \"itself.toml\"\n"),
            ("one.toml", "description = \"\"\nextends = \"two.toml\"\n"),
            ("two.toml", "extends = \"bf16\"\n[[override]]\nset.recipe = \"./one.toml\"\n"),
            ("gone.toml", "\nextends = \"nowhere.toml\"\n"),
            ("wrong.toml", "extends = \"base.toml\"\n"),
            ("base.toml", "extends = \"bf16\"\n\n[expret]\n"),
        ]);
        let error = |name: &str| load_recipe(&named(&dir, name)).unwrap_err().to_string();
        for (name, parts) in [
            ("itself.toml", &["itself.toml:1: `extends`", "part of itself"][..]),
            (
                "one.toml",
                &["one.toml:2: `extends`", "two.toml:3: `override.set.recipe`", "part of itself", " → "],
            ),
            ("gone.toml", &["gone.toml:2: `extends`", "nowhere.toml"]),
            ("wrong.toml", &["wrong.toml:1: `extends`", "base.toml:3: `expret`", "did you mean \"expert\""]),
        ] {
            let error = error(name);
            parts.iter().for_each(|part| assert!(error.contains(part), "{name}: no {part} in {error}"));
        }
    }
}
