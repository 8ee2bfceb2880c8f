//! The pages: every link resolves, every file named exists, and the pages that are read as a whole stay short.

use crate::run::{output, root};
use std::fs;
use std::path::{Component, Path, PathBuf};

/// Pages that are read from beginning to end, with their maximum number of words.
const READ_WHOLE: [(&str, usize); 3] =
    [("ARCHITECTURE.md", 3000), ("CONTRIBUTING.md", 2000), ("CHANGELOG.md", 600)];

/// Pages that name files in backticks, relative to the root, to a crate, or to a crate's sources.
const NAMES_FILES: [&str; 4] = ["ARCHITECTURE.md", "CONTRIBUTING.md", "README.md", "docs/src/walkthrough.md"];

/// Checks all pages.
pub fn check() -> Result<(), String> {
    let listed = output("git", &["ls-files", "--cached", "--others", "--exclude-standard", "*.md"])?;
    let mut wrong = Vec::new();
    for page in listed.lines().filter(|page| root().join(page).exists()) {
        let text = read(Path::new(page))?;
        wrong.extend(dead_links(page, &text, &|file| read(file).ok()));
        wrong.extend(
            uneven_rows(&text)
                .into_iter()
                .map(|row| format!("{page}: a row with more or fewer cells than its table: {row}")),
        );
        if NAMES_FILES.contains(&page) {
            let missing = files(&text).into_iter().filter(|name| !is_there(name));
            wrong.extend(missing.map(|name| format!("{page}: there is no `{name}`")));
        }
    }
    for (page, most) in READ_WHOLE {
        let words = read(Path::new(page))?.split_whitespace().count();
        if words > most {
            wrong.push(format!("{page}: {words} words, of at most {most}"));
        }
    }
    if wrong.is_empty() { Ok(()) } else { Err(wrong.join("\n")) }
}

fn read(page: &Path) -> Result<String, String> {
    fs::read_to_string(root().join(page)).map_err(|e| format!("{}: {e}", page.display()))
}

/// Links within the project that lead to no file, folder or heading. `read` returns the text of a page.
fn dead_links(page: &str, text: &str, read: &dyn Fn(&Path) -> Option<String>) -> Vec<String> {
    let folder = Path::new(page).parent().unwrap_or(Path::new(""));
    let is_dead = |link: &&str| {
        let (file, heading) = link.split_once('#').unwrap_or((link, ""));
        let path = if file.is_empty() { PathBuf::from(page) } else { clean(&folder.join(file)) };
        let has_heading = |text: &str| headings(text).iter().any(|slug| slug == heading);
        !root().join(&path).exists()
            || !(heading.is_empty() || read(&path).is_some_and(|text| has_heading(&text)))
    };
    let within = prose(text).flat_map(links).filter(|link| !link.contains("://"));
    within.filter(is_dead).map(|link| format!("{page}: {link}")).collect()
}

/// Rows of tables that have another number of cells than the first row of their table. A bar in a code span or after a backslash separates no cells.
fn uneven_rows(text: &str) -> Vec<&str> {
    let cells = |row: &str| {
        let outside: String = row.split('`').step_by(2).collect();
        outside.replace("\\|", "").matches('|').count()
    };
    let (mut wrong, mut expected) = (Vec::new(), None);
    for line in prose(text) {
        if !line.starts_with('|') {
            expected = None;
        } else if cells(line) != *expected.get_or_insert_with(|| cells(line)) {
            wrong.push(line);
        }
    }
    wrong
}

/// The lines outside of fenced blocks.
fn prose(text: &str) -> impl Iterator<Item = &str> {
    let mut fenced = false;
    text.lines().filter(move |line| {
        let is_fence = line.trim_start().starts_with("```");
        fenced ^= is_fence;
        !fenced && !is_fence
    })
}

/// Targets of the links in a line.
fn links(line: &str) -> Vec<&str> {
    line.split("](").skip(1).filter_map(|rest| rest.split([')', ' ']).next()).collect()
}

/// A path without `..`.
fn clean(path: &Path) -> PathBuf {
    let mut clean = PathBuf::new();
    for part in path.components() {
        match part {
            Component::ParentDir => _ = clean.pop(),
            part => clean.push(part),
        }
    }
    clean
}

/// Headings as link anchors.
fn headings(text: &str) -> Vec<String> {
    let slug = |heading: &str| {
        let kept = heading.trim().chars().filter(|c| c.is_alphanumeric() || " -_".contains(*c));
        kept.collect::<String>().to_lowercase().replace(' ', "-")
    };
    prose(text).filter(|line| line.starts_with('#')).map(|line| slug(line.trim_start_matches('#'))).collect()
}

/// Paths in backticks: text with a slash and a file extension, or a slash at its end. Capitals stand for any name.
fn files(text: &str) -> Vec<&str> {
    let quoted = prose(text).flat_map(|line| line.split('`').skip(1).step_by(2));
    let is_plain = |name: &&str| {
        name.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || "/._-".contains(c))
    };
    let is_path = |name: &&str| {
        let ends =
            [".rs", ".toml", ".md", ".cuh", ".txt", ".patch", "/"].iter().any(|end| name.ends_with(end));
        ends && name.contains('/') && !name.starts_with("runs/")
    };
    quoted.filter(is_plain).filter(is_path).collect()
}

/// Whether a path exists at the root, below `crates/`, or in some crate or its sources.
fn is_there(name: &str) -> bool {
    let root = root();
    let crates = fs::read_dir(root.join("crates")).into_iter().flatten().flatten().map(|entry| entry.path());
    let within = crates.flat_map(|krate| [krate.join(name), krate.join("src").join(name)]);
    [root.join(name), root.join("crates").join(name)].into_iter().chain(within).any(|path| path.exists())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dead_links_are_found_and_code_is_not_read() {
        let page = "[a](README.md) [b](README.md#no-such-heading) [c](nowhere.md)\n[d](#here)\n```sh\n[e](nowhere.md)\n```\n# Here\n[f](https://example.org/x)";
        let read = |path: &Path| {
            Some(if path == Path::new("x.md") { page.to_owned() } else { "# Nibble".to_owned() })
        };
        let mut found = dead_links("x.md", page, &read);
        found.retain(|link| !link.ends_with("#here"));
        assert_eq!(found, ["x.md: README.md#no-such-heading", "x.md: nowhere.md"]);
        assert_eq!(headings("## Change a `GPU` kernel\n# What, then?"), ["change-a-gpu-kernel", "what-then"]);
    }

    #[test]
    fn rows_have_the_cells_of_their_table() {
        let table =
            "| a | b |\n|---|---|\n| `x|y` | \\| |\n| 1 | 2 | | 3 | 4 |\n\n| one |\n```\n| 1 | 2 |\n```\n";
        assert_eq!(uneven_rows(table), ["| 1 | 2 | | 3 | 4 |"]);
    }

    #[test]
    fn named_files_are_found() {
        let page = "`core/src/lib.rs` `crates/NAME.rs` `moe/` `x.rs` `cargo test` `no/such.rs`";
        assert_eq!(files(page), ["core/src/lib.rs", "moe/", "no/such.rs"]);
        assert_eq!(files(page).into_iter().map(is_there).collect::<Vec<_>>(), [true, true, false]);
    }
}
