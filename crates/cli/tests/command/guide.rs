//! The guide under `docs/`: every command in it is run, page after page in one folder (some in another, [`APART`]), and ends as the page says.
//!
//! A fence `sh` is a script that must succeed; `sh exit=2` one that must end so; `sh gpu` needs a GPU; `toml file=NAME` is a file that a
//! reader writes; `bash` is for what cannot be run here. After a script that fails stands a fence `text` with what it says. A fence `text` right after one that succeeds
//! shows lines of its output; those of steps, whose numbers are a machine's own, are not compared, nor is anything where a GPU computes.

use crate::{Place, read};
use nibble_testkit::Breadth;
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

/// The root of the repository.
fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

fn text(path: &Path) -> String {
    String::from_utf8(read(path)).unwrap()
}

/// A fenced block: the words after the fence, its first line's number, its text.
struct Block {
    info: Vec<String>,
    line: usize,
    text: String,
}

impl Block {
    fn is(&self, word: &str) -> bool {
        self.info.iter().any(|w| w == word)
    }

    /// The value of `KEY=VALUE` after the fence.
    fn value(&self, key: &str) -> Option<&str> {
        self.info.iter().find_map(|word| word.strip_prefix(key)?.strip_prefix('='))
    }
}

fn blocks(page: &str) -> Vec<Block> {
    let mut blocks: Vec<Block> = Vec::new();
    let mut is_open = false;
    for (i, line) in page.lines().enumerate() {
        match (line.strip_prefix("```"), is_open) {
            (Some(info), false) => {
                let info = info.split_whitespace().map(str::to_owned).collect();
                blocks.push(Block { info, line: i + 2, text: String::new() });
                is_open = true;
            }
            (Some(_), true) => is_open = false,
            (None, true) => blocks.last_mut().unwrap().text += &format!("{line}\n"),
            (None, false) => {}
        }
    }
    assert!(!is_open, "a fence without an end");
    blocks
}

/// The targets of a page's links.
fn links(page: &str) -> Vec<&str> {
    page.split("](").skip(1).filter_map(|rest| rest.split(')').next()).collect()
}

/// The guide's pages in the order of its summary.
fn pages() -> Vec<(String, String)> {
    let folder = root().join("docs/src");
    let summary = text(&folder.join("SUMMARY.md"));
    links(&summary).into_iter().map(|name| (name.to_owned(), text(&folder.join(name)))).collect()
}

/// A shell in the place, where `nibble` is the command under test.
fn shell(place: &Place, script: &str) -> (Option<i32>, String) {
    let bin = Path::new(env!("CARGO_BIN_EXE_nibble")).parent().unwrap();
    let path = format!("{}:{}", bin.display(), std::env::var("PATH").unwrap_or_default());
    let mut command = place.program("sh");
    command.args(["-e", "-c", script]).env("PATH", path);
    let out = command.output().unwrap();
    let told = [out.stdout, out.stderr].concat();
    (out.status.code(), String::from_utf8_lossy(&told).into_owned())
}

/// Every recipe that ships stands in the README or in the guide's table; the cells of an ablation by the name that theirs begin with.
#[test]
fn every_recipe_is_explained() {
    let pages = text(&root().join("README.md")) + &text(&root().join("docs/src/recipes.md"));
    for name in nibble_core::Recipe::all_names() {
        let cell = ["ablation-mxfp4", "ablation-hif4"].into_iter().find(|cell| name.starts_with(cell));
        let shown = format!("`{}`", cell.unwrap_or(name));
        assert!(pages.contains(&shown), "{name}");
    }
}

#[test]
fn every_page_is_in_the_summary_and_every_link_leads_somewhere() {
    let pages = pages();
    let there: BTreeSet<String> = std::fs::read_dir(root().join("docs/src"))
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .filter(|name| name != "SUMMARY.md")
        .collect();
    assert_eq!(pages.iter().map(|(name, _)| name.clone()).collect::<BTreeSet<_>>(), there);
    for (name, page) in &pages {
        for link in links(page).into_iter().filter(|link| !link.contains("://")) {
            let target = link.split('#').next().unwrap();
            assert!(root().join("docs/src").join(target).exists(), "{name}: {link}");
        }
    }
}

/// The pages that are run in a folder of their own, so that both parts of the guide run at once: from the first of these to before the last, which goes on
/// with the first run.
const APART: [&str; 2] = ["data.md", "quantize.md"];

#[cfg(unix)]
#[test]
fn every_command_of_the_guide_ends_as_the_guide_says() {
    run_pages(false);
}

#[cfg(unix)]
#[test]
fn every_command_of_the_pages_apart_ends_as_they_say() {
    run_pages(true);
}

#[cfg(unix)]
fn run_pages(apart: bool) {
    let place = Place::new();
    let has_gpu = crate::gpu::has_gpu();
    let mut run = 0;
    let pages = pages();
    let [first, end] =
        APART.map(|page| pages.iter().position(|(name, _)| name == page).expect("a page of the guide"));
    for (_, (name, page)) in
        pages.into_iter().enumerate().filter(|(at, _)| (first..end).contains(at) == apart)
    {
        let blocks = blocks(&page);
        for (i, block) in blocks.iter().enumerate() {
            let at = format!("docs/src/{name}, line {}", block.line);
            if let Some(file) = block.value("file") {
                std::fs::write(place.path(file), &block.text).unwrap();
            }
            if !block.is("sh") {
                continue;
            }
            if block.is("gpu") && !has_gpu {
                println!("skipped: {at} needs a GPU");
                continue;
            }
            let expected = block.value("exit").map_or(0, |code| code.parse().unwrap());
            // What is fine-tuned there learns from all of its batches.
            let daily = if name == "fine-tune.md" { block.text.clone() } else { shorter(&block.text) };
            let (code, told) = shell(&place, &Breadth::of_tests().either(block.text.clone(), daily));
            assert_eq!(code, Some(expected), "{at}:\n{}{told}", block.text);
            if expected != 0 {
                // The reader is shown what is said, so that it is the mistake that the page speaks of.
                let shown = blocks.get(i + 1).filter(|next| next.is("text")).expect(&at);
                assert!(told.contains(shown.text.trim_end()), "{at}: {:?} is not in\n{told}", shown.text);
            } else if let Some(shown) = blocks.get(i + 1).filter(|next| next.is("text") && !has_gpu) {
                for line in shown.text.lines().filter(|line| !line.starts_with("step:")) {
                    assert!(told.lines().any(|l| l == line), "{at}: {line:?} is not in\n{told}");
                }
            }
            run += 1;
        }
    }
    assert!(run > 10, "{run} blocks of commands were found");
}

/// A script whose training runs have smaller batches, unless it sets them. What a page shows of their output does not depend on that.
fn shorter(script: &str) -> String {
    let (run, is_kept) = ("nibble train", ["--dry-run", "--resume", "--help"]);
    let command = |command: &str| match command.strip_prefix(run) {
        Some(rest) if !is_kept.iter().any(|word| rest.contains(word)) => {
            format!("{run} --set train.batch_size=4{rest}")
        }
        _ => command.to_owned(),
    };
    // A line that ends in a backslash goes on in the next.
    let commands = script.replace("\\\n", "\u{0}");
    commands.split_inclusive('\n').map(command).collect::<String>().replace('\u{0}', "\\\n")
}

/// In order, in a folder where a reader has a text and a configuration. Models are trained for a few steps.
#[cfg(unix)]
#[test]
fn every_command_of_the_readme_runs() {
    let place = Place::new();
    let book: String = (1..100_000).map(|n| format!("{n}\n")).collect();
    std::fs::write(place.path("book.txt"), book).unwrap();
    std::fs::copy(root().join("configs/tiny.toml"), place.path("my.toml")).unwrap();
    let mut run = 0;
    for block in blocks(&text(&root().join("README.md"))).iter().filter(|block| block.is("sh")) {
        for line in block.text.lines() {
            let line = line.replace("cargo run --release -- ", "nibble ");
            let line = line.split(" #").next().unwrap().trim_end();
            if line.contains("--device cuda:") && !crate::gpu::has_gpu() {
                println!("skipped: README.md: `{line}` needs a GPU");
                continue;
            }
            let command = match line {
                // Tests within a test.
                _ if line.starts_with("cargo ") => continue,
                _ if line.contains("--resume") => line.replace("train.steps=600", "train.steps=6"),
                _ if line.starts_with("nibble train") && !line.contains("--dry-run") => {
                    format!("{line} --set train.steps=4 --set train.warmup_steps=1")
                }
                _ => line.to_owned(),
            };
            let (code, told) = shell(&place, &command);
            assert_eq!(code, Some(0), "{command}: {told}");
            run += 1;
        }
    }
    assert!(run > 8, "{run} commands were found");
}

/// What the guide shows of the first run is what the run prints, but for the lines of steps.
#[test]
fn the_first_page_shows_what_the_first_run_prints() {
    let (_, first) = pages().into_iter().next().unwrap();
    let shown = blocks(&first).into_iter().find(|block| block.text.contains("parameters:")).unwrap();
    let place = Place::new();
    let printed = place.nibble(&["train", "--dry-run", "--device", "cpu"]).ok().stdout;
    for line in shown.text.lines().filter(|line| !line.starts_with("step:")) {
        assert!(printed.lines().any(|l| l == line), "{line:?} is not in\n{printed}");
    }
}
