//! Import cycles between the modules of a crate: files in a cycle have no reading order.
//!
//! An arrow goes from a file to each file of its crate that defines a name it uses, whichever module exports the name. Declaring or
//! re-exporting a module is not an arrow, and imports of tests are ignored. A module and a module inside it may name each other: a reader
//! has their folder open. Names are resolved from the text: `use`, paths, and names of a glob. Names inside other macros' tokens are not
//! resolved.

use crate::run::{output, root};
use crate::tokens::{Token, is_name, tokens};
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

/// Fails if a crate's files have cycles, and lists them.
pub fn check() -> Result<(), String> {
    let listed =
        output("git", &["ls-files", "--cached", "--others", "--exclude-standard", "crates/*/src/*.rs"])?;
    let mut of_crates: BTreeMap<&str, BTreeMap<String, String>> = BTreeMap::new();
    for file in listed.lines() {
        let Some((package, inside)) = file.split_once("/src/") else { continue };
        // Deleted in the work tree, but still in the index.
        let Ok(text) = std::fs::read_to_string(root().join(file)) else { continue };
        of_crates.entry(package).or_default().insert(inside.to_owned(), text);
    }
    let mut found = String::new();
    for (package, files) in &of_crates {
        let arrows = arrows(files);
        for circle in circles(&arrows) {
            found += &format!("\n{package}: {} files in a circle", circle.len());
            let inside = |arrow: &&Arrow| circle.contains(&arrow.from) && circle.contains(&arrow.to);
            for Arrow { from, to, line, name } in arrows.iter().filter(inside) {
                found += &format!("\n  {package}/src/{from}:{line}: {name} of {to}");
            }
        }
    }
    match found.is_empty() {
        true => Ok(()),
        false => Err(format!("files import one another in circles; move what both need below them:{found}")),
    }
}

/// A use in one file of a name that another file defines.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
struct Arrow {
    from: String,
    to: String,
    line: usize,
    name: String,
}

/// A name that a module imports from another path, or all names of a module.
#[derive(Debug, Clone)]
struct Use {
    /// `*` for a glob.
    alias: String,
    path: Vec<String>,
    line: usize,
    is_public: bool,
}

/// A module: a file, or an inline module.
#[derive(Debug, Default)]
struct Module {
    file: String,
    parent: Option<usize>,
    children: BTreeMap<String, usize>,
    items: BTreeSet<String>,
    uses: Vec<Use>,
    /// The module's code without `use` declarations and inner modules.
    code: Vec<Token>,
}

/// The target of a path.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Target {
    Module(usize),
    /// An item that this module defines.
    Item(usize),
}

/// The modules of a crate, parents first.
#[derive(Debug, Default)]
struct Tree(Vec<Module>);

/// Every arrow between files of a crate, one per name. Files are given by their paths below `src/`.
fn arrows(files: &BTreeMap<String, String>) -> Vec<Arrow> {
    let mut all = BTreeSet::new();
    for entry in ["lib.rs", "main.rs"].into_iter().filter(|entry| files.contains_key(*entry)) {
        let mut tree = Tree::default();
        tree.add_file(files, entry, None);
        for id in 0..tree.0.len() {
            all.extend(tree.arrows_of(id));
        }
    }
    let mut seen = BTreeSet::new();
    let pairs: BTreeSet<(String, String)> =
        all.iter().map(|arrow| (arrow.from.clone(), arrow.to.clone())).collect();
    all.retain(|Arrow { from, to, .. }| {
        let is_one = is_inside(from, to) || is_inside(to, from);
        !(is_one && pairs.contains(&(to.clone(), from.clone())))
    });
    all.into_iter()
        .filter(|arrow| seen.insert((arrow.from.clone(), arrow.to.clone(), arrow.name.clone())))
        .collect()
}

/// Whether a file's module is inside another file's module.
fn is_inside(file: &str, other: &str) -> bool {
    let (file, other) = (folder_of(file), folder_of(other));
    file != other && file.starts_with(other)
}

/// The folder of a file's submodules.
fn folder_of(file: &str) -> PathBuf {
    let path = Path::new(file);
    match path.file_name().and_then(|name| name.to_str()) {
        Some("lib.rs" | "main.rs" | "mod.rs") => path.parent().unwrap_or(path).to_owned(),
        _ => path.with_extension(""),
    }
}

impl Tree {
    /// Adds the module of a file, and its inline modules.
    fn add_file(
        &mut self,
        files: &BTreeMap<String, String>,
        file: &str,
        parent: Option<usize>,
    ) -> Option<usize> {
        let code = without_tests(tokens(files.get(file)?));
        Some(self.add(files, (file, &folder_of(file)), &code, parent))
    }

    fn add(
        &mut self,
        files: &BTreeMap<String, String>,
        (file, folder): (&str, &Path),
        code: &[Token],
        parent: Option<usize>,
    ) -> usize {
        let id = self.0.len();
        self.0.push(Module { file: file.to_owned(), parent, ..Module::default() });
        let mut at = 0;
        while at < code.len() {
            let after = |n: usize| code.get(at + n).map_or("", |token| token.text.as_str());
            match (code[at].text.as_str(), after(2)) {
                ("mod", ";") => {
                    let name = after(1).to_owned();
                    let beside =
                        |end: &str| folder.join(format!("{name}{end}")).to_string_lossy().into_owned();
                    let path =
                        [beside(".rs"), beside("/mod.rs")].into_iter().find(|path| files.contains_key(path));
                    let child = path.and_then(|path| self.add_file(files, &path, Some(id)));
                    self.0[id].children.extend(child.map(|child| (name, child)));
                    at += 3;
                }
                ("mod", "{") => {
                    let end = closing(code, at + 2);
                    let name = after(1).to_owned();
                    let child = self.add(files, (file, &folder.join(&name)), &code[at + 3..end], Some(id));
                    self.0[id].children.insert(name, child);
                    at = end + 1;
                }
                ("use", _) if after(1) != "<" => {
                    let end = (at..code.len()).find(|i| code[*i].text == ";").unwrap_or(code.len());
                    let is_public = at > 0 && matches!(code[at - 1].text.as_str(), "pub" | ")");
                    flatten(&code[at + 1..end], &[], is_public, &mut self.0[id].uses);
                    at = end + 1;
                }
                _ => {
                    self.0[id].code.push(code[at].clone());
                    at += 1;
                }
            }
        }
        self.0[id].items = items(&self.0[id].code);
        id
    }

    /// Resolves a path from a module.
    fn resolve(&self, from: usize, path: &[String]) -> Option<Target> {
        self.follow(from, path, &mut BTreeSet::new())
    }

    /// [`Tree::resolve`], without what was already asked on the way here.
    fn follow<'p>(
        &'p self,
        from: usize,
        path: &'p [String],
        asked: &mut BTreeSet<(usize, &'p [String])>,
    ) -> Option<Target> {
        let (name, rest) = path.split_first()?;
        if !asked.insert((from, path)) {
            return None;
        }
        let module = &self.0[from];
        let mut into = |next: usize| match rest {
            [] => Some(Target::Module(next)),
            // If it is not found, a macro defines it.
            _ => self.follow(next, rest, asked).or(Some(Target::Item(next))),
        };
        match name.as_str() {
            "crate" => return into(0),
            "self" => return into(from),
            "super" => return into(module.parent?),
            _ => {}
        }
        let child = module.children.get(name).copied();
        if module.items.contains(name) && (rest.is_empty() || child.is_none()) {
            return Some(Target::Item(from));
        }
        if let Some(child) = child {
            return into(child);
        }
        for import in module.uses.iter().filter(|import| import.alias == *name) {
            match self.follow(from, &import.path, asked) {
                Some(Target::Module(next)) if !rest.is_empty() => {
                    return self.follow(next, rest, asked).or(Some(Target::Item(next)));
                }
                Some(target) => return Some(target),
                None => {}
            }
        }
        module
            .uses
            .iter()
            .filter(|import| import.alias == "*")
            .find_map(|glob| self.through(from, glob, path, asked))
    }

    /// Resolves a path whose first name may come from a glob.
    fn through<'p>(
        &'p self,
        from: usize,
        glob: &'p Use,
        path: &'p [String],
        asked: &mut BTreeSet<(usize, &'p [String])>,
    ) -> Option<Target> {
        match self.follow(from, &glob.path, asked)? {
            Target::Module(next) if next != from => self.follow(next, path, asked),
            _ => None,
        }
    }

    fn arrows_of(&self, id: usize) -> Vec<Arrow> {
        let module = &self.0[id];
        let mut found = Vec::new();
        let mut add = |target: Option<Target>, line: usize, name: String| {
            if let Some(Target::Item(to)) = target
                && self.0[to].file != module.file
            {
                let (from, to) = (module.file.clone(), self.0[to].file.clone());
                found.push(Arrow { from, to, line, name });
            }
        };
        let names: BTreeSet<&str> = module.code.iter().map(|token| token.text.as_str()).collect();
        for import in module.uses.iter().filter(|import| import.alias != "*") {
            if !import.is_public || names.contains(import.alias.as_str()) {
                add(self.resolve(id, &import.path), import.line, import.path.join("::"));
            }
        }
        let globs: Vec<&Use> = module.uses.iter().filter(|import| import.alias == "*").collect();
        for (line, path) in paths(&module.code) {
            if let [name] = &path[..] {
                let is_own =
                    module.items.contains(name) || module.uses.iter().any(|import| import.alias == *name);
                if !is_own {
                    let target =
                        globs.iter().find_map(|glob| self.through(id, glob, &path, &mut BTreeSet::new()));
                    add(target, line, name.clone());
                }
            } else {
                add(self.resolve(id, &path), line, path.join("::"));
            }
        }
        found
    }
}

/// The index of the bracket that closes this one.
fn closing(code: &[Token], open: usize) -> usize {
    let mut depth = 0;
    for (i, token) in code.iter().enumerate().skip(open) {
        match token.text.as_str() {
            "{" | "(" | "[" => depth += 1,
            "}" | ")" | "]" => depth -= 1,
            _ => {}
        }
        if depth == 0 {
            return i;
        }
    }
    code.len()
}

/// Code without test-only code: `#[cfg(test)]` and the item after it.
fn without_tests(code: Vec<Token>) -> Vec<Token> {
    let mut kept = Vec::new();
    let mut at = 0;
    while at < code.len() {
        let is = |n: usize, text: &str| code.get(at + n).is_some_and(|token| token.text == text);
        if !(is(0, "#") && is(1, "[") && is(2, "cfg") && is(4, "test") && is(5, ")")) {
            kept.push(code[at].clone());
            at += 1;
            continue;
        }
        // This attribute and any others.
        while code.get(at).is_some_and(|token| token.text == "#") {
            at = closing(&code, at + 1) + 1;
        }
        at = end_of_item(&code, at);
    }
    kept
}

/// The index after an item, a field or a statement.
fn end_of_item(code: &[Token], begin: usize) -> usize {
    const WITH_BODY: [&str; 6] = ["fn", "impl", "struct", "enum", "trait", "mod"];
    let mut at = begin;
    let mut has_body = false;
    while at < code.len() {
        match code[at].text.as_str() {
            ";" => return at + 1,
            "," if !has_body => return at + 1,
            // The end of the enclosing block.
            "}" => return at,
            "{" => return closing(code, at) + 1,
            "(" | "[" => at = closing(code, at),
            word => has_body |= WITH_BODY.contains(&word),
        }
        at += 1;
    }
    at
}

/// The names that a module's code defines at its top level.
fn items(code: &[Token]) -> BTreeSet<String> {
    const KEYWORDS: [&str; 9] = ["fn", "struct", "enum", "trait", "type", "const", "static", "union", "mod"];
    let mut found = BTreeSet::new();
    let mut at = 0;
    while at < code.len() {
        let after = |n: usize| code.get(at + n).map_or("", |token| token.text.as_str());
        match code[at].text.as_str() {
            "{" | "(" | "[" => at = closing(code, at),
            "macro_rules" => {
                found.insert(after(2).to_owned());
            }
            word if KEYWORDS.contains(&word) => {
                let name = if matches!(after(1), "mut" | "fn" | "unsafe") { after(2) } else { after(1) };
                found.insert(name.to_owned());
            }
            _ => {}
        }
        at += 1;
    }
    found
}

/// The paths in code, including single names, each with its line.
fn paths(code: &[Token]) -> Vec<(usize, Vec<String>)> {
    let mut found = Vec::new();
    let mut at = 0;
    while at < code.len() {
        let before = at.checked_sub(1).map_or("", |i| code[i].text.as_str());
        if !is_name(&code[at].text) || matches!(before, "." | "::" | "fn" | "struct" | "enum" | "type") {
            at += 1;
            continue;
        }
        let (line, mut path) = (code[at].line, vec![code[at].text.clone()]);
        while code.get(at + 1).is_some_and(|token| token.text == "::")
            && code.get(at + 2).is_some_and(|token| is_name(&token.text))
        {
            path.push(code[at + 2].text.clone());
            at += 2;
        }
        found.push((line, path));
        at += 1;
    }
    found
}

/// The names that a `use` imports, from the tokens between `use` and its semicolon.
fn flatten(code: &[Token], before: &[String], is_public: bool, to: &mut Vec<Use>) {
    let mut path = before.to_vec();
    let mut at = 0;
    let mut alias = None;
    while at < code.len() {
        let Token { text, line } = &code[at];
        match text.as_str() {
            "::" => {}
            "{" => {
                let end = closing(code, at);
                let mut first = at + 1;
                let mut i = first;
                while i <= end {
                    if i == end || code[i].text == "," {
                        if i > first {
                            flatten(&code[first..i], &path, is_public, to);
                        }
                        first = i + 1;
                    } else if code[i].text == "{" {
                        i = closing(code, i);
                    }
                    i += 1;
                }
                return;
            }
            "*" => {
                to.push(Use { alias: "*".into(), path, line: *line, is_public });
                return;
            }
            "as" => {
                alias = code.get(at + 1).map(|token| token.text.clone());
                at += 1;
            }
            // The group's own module.
            "self" if !path.is_empty() => {}
            name => path.push(name.to_owned()),
        }
        at += 1;
    }
    let (Some(last), Some(token)) = (path.last(), code.first()) else { return };
    let alias = alias.unwrap_or_else(|| last.clone());
    to.push(Use { alias, line: token.line, path, is_public });
}

/// The cycles: maximal groups of two or more files, each of which reaches every other.
fn circles(arrows: &[Arrow]) -> Vec<BTreeSet<String>> {
    let mut next: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
    for arrow in arrows {
        next.entry(&arrow.from).or_default().insert(&arrow.to);
    }
    let reached = |from: &str| {
        let (mut seen, mut to_do) = (BTreeSet::new(), vec![from.to_owned()]);
        while let Some(file) = to_do.pop() {
            for to in next.get(file.as_str()).into_iter().flatten() {
                if seen.insert((*to).to_owned()) {
                    to_do.push((*to).to_owned());
                }
            }
        }
        seen
    };
    let all: BTreeMap<&str, BTreeSet<String>> = next.keys().map(|file| (*file, reached(file))).collect();
    let mut found: Vec<BTreeSet<String>> = Vec::new();
    for (file, from_it) in &all {
        let circle: BTreeSet<String> = from_it
            .iter()
            .filter(|to| all.get(to.as_str()).is_some_and(|back| back.contains(*file)))
            .cloned()
            .collect();
        if circle.len() > 1 && !found.contains(&circle) {
            found.push(circle);
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    fn arrows_of(files: &[(&str, &str)]) -> Vec<String> {
        let files = files.iter().map(|(name, text)| ((*name).to_owned(), (*text).to_owned())).collect();
        let arrow = |arrow: Arrow| format!("{}:{} -> {} {}", arrow.from, arrow.line, arrow.to, arrow.name);
        arrows(&files).into_iter().map(arrow).collect()
    }

    #[test]
    fn an_arrow_goes_to_the_file_that_defines_a_name() {
        let lib = "mod a;\nmod b;\nmod ops;\npub use ops::*;\npub use b::{B, Other as Named};\nstruct Own;";
        let ops = "mod gemm;\npub mod sum;\npub use gemm::Gemm;\npub(crate) use sum::{self as total, of};\nfn f() { of() }";
        let files = [
            ("lib.rs", lib),
            (
                "a.rs",
                "use crate::{Gemm, Named};\n// use crate::b::B;\nfn f() { crate::ops::total::of(\"crate::B\") }",
            ),
            ("b.rs", "pub struct B;\npub enum Other { A }\nuse super::Own;"),
            ("ops/mod.rs", ops),
            (
                "ops/gemm.rs",
                "use super::sum;\npub struct Gemm;\nfn f<'a>(x: &'a str) { sum::of(x); self::g() }\nfn g() {}",
            ),
            (
                "ops/sum.rs",
                "pub fn of() {}\n#[cfg(test)]\nmod tests { use crate::b::B; }\nuse crate::ops::gemm::Gemm;",
            ),
        ];
        let expected = [
            "a.rs:1 -> b.rs crate::Named",
            "a.rs:1 -> ops/gemm.rs crate::Gemm",
            "a.rs:3 -> ops/sum.rs crate::ops::total::of",
            "b.rs:3 -> lib.rs super::Own",
            "ops/gemm.rs:3 -> ops/sum.rs sum::of",
            "ops/mod.rs:4 -> ops/sum.rs sum::of",
            "ops/sum.rs:4 -> ops/gemm.rs crate::ops::gemm::Gemm",
        ];
        assert_eq!(arrows_of(&files), expected);
    }

    #[test]
    fn a_module_and_one_inside_of_it_may_name_each_other() {
        let files = |lib: &'static str| [("lib.rs", lib), ("a.rs", "use super::X;\npub fn f(_: X) {}")];
        assert_eq!(arrows_of(&files("mod a;\nstruct X;")), ["a.rs:1 -> lib.rs super::X"]);
        assert!(arrows_of(&files("mod a;\nstruct X;\nfn g() { a::f(X) }")).is_empty());
    }

    #[test]
    fn code_of_tests_names_nothing() {
        let b = "pub struct X;\npub struct Y;";
        for (a, is) in [
            ("#[cfg(test)]\nuse crate::b::X;", false),
            ("#[cfg(test)]\n#[allow(unused)]\nfn f(a: [u8; 2]) -> (u8, X) { crate::b::X }", false),
            ("struct S { #[cfg(test)] x: crate::b::X, y: u8 }", false),
            ("#[derive(Debug)]\nstruct S { #[cfg(test)] x: crate::b::X }\nuse crate::b::Y;", true),
            ("#[cfg(test)]\nfn f<A, B>(x: X) -> crate::b::Y { crate::b::X }", false),
            ("fn f() { #[cfg(test)] crate::b::X; }\nuse crate::b::Y;", true),
            ("#[cfg(unix)]\nuse crate::b::X;", true),
            ("fn f() -> char { '\"' }\nfn g() -> &str { r#\"crate::b::X\"# }", false),
            ("fn f() { use super::b::*; let x = X; }", true),
        ] {
            let found = arrows_of(&[("lib.rs", "mod a;\nmod b;"), ("a.rs", a), ("b.rs", b)]);
            assert_eq!(!found.is_empty(), is, "{a}: {found:?}");
        }
    }

    #[test]
    fn circles_are_what_leads_back() {
        let circles_of = |pairs: &str| {
            let arrow = |pair: &str| {
                let (from, to) = pair.split_at(1);
                Arrow { from: from.into(), to: to.into(), line: 1, name: String::new() }
            };
            let found = circles(&pairs.split(' ').map(arrow).collect::<Vec<_>>());
            found.iter().map(|circle| circle.iter().cloned().collect()).collect::<Vec<String>>()
        };
        assert!(circles_of("ab bc ac").is_empty());
        assert_eq!(circles_of("ab bc ca cd de ed"), ["abc", "de"]);
    }

    #[test]
    fn there_is_none_here() {
        assert_eq!(check(), Ok(()));
    }
}
