//! `nibble data`, and the token caches that commands make.

use crate::Place;
use std::collections::BTreeMap;
use std::path::Path;
use std::process::{Output, Stdio};

/// So many rows, the text of each another one.
fn rows(count: usize) -> String {
    (0..count).map(|i| format!("{{\"text\": \"row {i} of them\\n\"}}\n")).collect()
}

#[test]
fn what_is_in_files_is_told() {
    let place = Place::new();
    std::fs::write(place.path("rows.jsonl"), rows(3000) + "{\"text\": \"\"}\n").unwrap();
    let told = place.nibble(&["data", "rows.jsonl"]).ok();
    told.contains("rows.jsonl: JSON lines, ")
        .contains("\n3,000 documents, ")
        .contains("the longest 17 bytes\n");
    told.contains("empty: 1 document\n").contains("document 1: \"row 0 of them\\n\"\n");
    told.contains("documents by length, in bytes:\n")
        .contains("                 16 to 31         2,900  ####");
    assert!(!place.path("caches").exists());
    std::fs::write(place.path("ids.bin"), [7u16, 50_000, 9].map(u16::to_le_bytes).concat()).unwrap();
    let told = place.nibble(&["data", "ids.bin", "rows.jsonl"]).ok();
    told.contains("ids.bin: token ids, 6 B\n")
        .contains("\n3,001 documents, ")
        .contains("largest id: 50000\n");
    told.contains("document 1: 7 50000 9\n");
    // Small ids are no bytes either, whichever file comes first.
    std::fs::write(place.path("small.bin"), [72u16, 105].map(u16::to_le_bytes).concat()).unwrap();
    for files in [["small.bin", "rows.jsonl"], ["rows.jsonl", "small.bin"]] {
        let told = place.nibble(&[&["data"], &files[..]].concat()).ok();
        assert!(!told.stdout.contains("\"Hi\""), "{}", told.stdout);
    }
    let told = place.nibble(&["data", "small.bin", "--tokens"]).ok();
    told.contains("document 1, its first tokens:\n      72\n     105\n");
    let told = place.nibble(&["data", "rows.jsonl", "--tokens"]).ok();
    told.contains("document 1, its first tokens:\n     114  \"r\"\n     111  \"o\"\n");
    let error = place.nibble(&["data", "ids.bin", "--set", "model.vocab_size=1000"]).failed(2);
    assert!(error.contains("ids.bin: token 1: has the id 50000 as token 2 of it"), "{error}");
}

#[test]
fn a_check_finds_every_broken_row() {
    let place = Place::new();
    let whole = rows(5000);
    let mut lines: Vec<&str> = whole.lines().collect();
    lines[16] = "{\"text\": 3}";
    lines[4998] = "{\"text\": \"a";
    std::fs::write(place.path("rows.jsonl"), lines.join("\n")).unwrap();
    let stopped = place.nibble(&["data", "rows.jsonl"]).failed(2);
    assert!(stopped.contains("rows.jsonl: line 17: \"text\" is a number"), "{stopped}");
    let checked = place.nibble(&["data", "rows.jsonl", "--check"]);
    checked.contains(
        "rows.jsonl: line 17: \"text\" is a number, expected a text\nrows.jsonl: line 4999: is no JSON: ",
    );
    checked.contains("4,998 documents").contains("left out: 2 rows\n");
    assert_eq!(checked.failed(1), "error: 2 rows cannot be read\n");
    place.nibble(&["data", "rows.jsonl", "--set", "data.on_error=skip"]).ok().contains("left out: 2 rows\n");
}

/// A run of one step on rows; of 60,000 a cache is made in more than one part.
fn place_of_rows(count: usize) -> Place {
    let place = Place::with_text();
    std::fs::write(place.path("rows.jsonl"), rows(count)).unwrap();
    std::fs::write(place.path("small.toml"), crate::SMALL).unwrap();
    place
}

fn command(place: &Place, caches: &str, run: &str) -> std::process::Command {
    let sets = ["data.source=rows.jsonl", "train.steps=1", "train.warmup_steps=0", "checkpoint.at_end=false"];
    let own = [format!("data.cache_dir={caches}"), format!("run.dir={run}")];
    let sets = sets.into_iter().chain(own.iter().map(String::as_str)).flat_map(|set| ["--set", set]);
    place.command(&[&["train", "small.toml"][..], &sets.collect::<Vec<_>>()].concat())
}

fn assert_done(out: &Output) {
    assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
}

/// Every file below a folder of caches, locks aside, by its path in it.
fn files(dir: &Path) -> BTreeMap<String, Vec<u8>> {
    let mut found = BTreeMap::new();
    let mut folders = vec![dir.to_owned()];
    while let Some(folder) = folders.pop() {
        for path in std::fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap().path()) {
            match path.is_dir() {
                true => folders.push(path),
                false => {
                    let name = path.strip_prefix(dir).unwrap().display().to_string();
                    found.insert(name, std::fs::read(&path).unwrap());
                }
            }
        }
    }
    found.retain(|name, _| !name.ends_with(".lock"));
    found
}

#[cfg(all(unix, debug_assertions))]
#[test]
fn a_cache_that_a_killed_process_began_is_gone_on_with_to_the_same_bytes() {
    let place = place_of_rows(60_000);
    assert_done(&command(&place, "whole", "run").output().unwrap());
    let whole = files(&place.path("whole"));
    assert_eq!(whole.len(), 4, "{:?}", whole.keys());
    for (number, fault) in
        ["sigkill@cache-kept:1", "sigkill@cache-kept:2", "kill@cache-whole:1", "full@write:3"]
            .iter()
            .enumerate()
    {
        let caches = format!("caches-{number}");
        let killed =
            command(&place, &caches, &format!("a-{number}")).env("NIBBLE_FAULT", fault).output().unwrap();
        assert!(!killed.status.success(), "{fault}");
        let left = files(&place.path(&caches));
        assert!(left.keys().all(|name| name.contains(".making/")), "{fault}: {:?}", left.keys());
        if fault.contains("cache-") {
            let progress = left.iter().find(|(name, _)| name.ends_with("progress.json")).unwrap().1;
            let progress: serde_json::Value = serde_json::from_slice(progress).unwrap();
            assert!(
                progress["holds"]["documents"].as_u64().unwrap() >= 30_000,
                "{fault}: nothing is kept: {progress}"
            );
        }
        assert_done(&command(&place, &caches, &format!("b-{number}")).output().unwrap());
        assert!(files(&place.path(&caches)) == whole, "{fault}: another cache");
    }
}

/// What a run reads is cut or written to before its third step: it ends with an error that names the file, and goes on once the file is made anew.
#[cfg(all(unix, debug_assertions))]
#[test]
fn files_that_change_under_a_run_end_it_by_name() {
    type Damage = fn(&[u8]) -> Vec<u8>;
    const DAMAGES: [Damage; 3] =
        [|bytes| bytes[..bytes.len() / 2].to_vec(), |bytes| vec![0xff; bytes.len()], |_| Vec::new()];
    let names = ["text.txt", "ids", "documents"];
    for (damage, name) in DAMAGES.into_iter().flat_map(|damage| names.map(|name| (damage, name))) {
        let place = place_of_rows(3000);
        std::fs::write(place.path("text.txt"), "To be, or not to be: ".repeat(2000)).unwrap();
        let source = if name == "text.txt" { name } else { "rows.jsonl" };
        let source = format!("data.source={source}");
        let mut run = command(&place, "caches", "run");
        run.args(["--set", &source, "--set", "data.document_mask=true", "--set", "train.steps=20"]);
        let mut held = run
            .env("NIBBLE_FAULT", "hold@step-begins:3")
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let mark = place.path("step-begins.held");
        while !mark.exists() && held.try_wait().unwrap().is_none() {
            std::thread::yield_now();
        }
        let caches = files(&place.path(".")).into_keys();
        let file = caches.filter(|file| !file.contains("run/")).find(|file| file.ends_with(name)).unwrap();
        let path = place.path(&file);
        let whole = std::fs::read(&path).unwrap();
        std::fs::write(&path, damage(&whole)).unwrap();
        std::fs::remove_file(mark).unwrap();
        let ended = held.wait_with_output().unwrap();
        let said = String::from_utf8_lossy(&ended.stderr).into_owned();
        assert_eq!(ended.status.code(), Some(2), "{name}: {said}");
        assert!(
            said.contains(&format!("{file}: ")) && said.contains("while it was in use"),
            "{name}: {said}"
        );
        if name != "text.txt" {
            let mut again = command(&place, "caches", "again");
            again.args(["--set", "data.document_mask=true"]);
            let out = again.output().unwrap();
            assert_done(&out);
            let said = String::from_utf8_lossy(&out.stderr).into_owned();
            assert!(said.contains(&file) && said.contains("rebuilding the token cache"), "{said}");
            assert!(std::fs::read(&path).unwrap() == whole);
        }
    }
}

#[cfg(all(unix, debug_assertions))]
#[test]
fn a_process_waits_for_another_that_makes_the_same_cache() {
    let place = place_of_rows(60_000);
    assert_done(&command(&place, "whole", "run").output().unwrap());
    let first = command(&place, "caches", "a")
        .env("NIBBLE_FAULT", "hold@cache-kept:1")
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    let held = place.path("cache-kept.held");
    while !held.exists() {
        std::thread::yield_now();
    }
    let waits = |run: &str| {
        let mut waits =
            command(&place, "caches", run).stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
        // It says that it waits before it does.
        let mut line = String::new();
        let mut said = std::io::BufReader::new(waits.stderr.take().unwrap());
        std::io::BufRead::read_line(&mut said, &mut line).unwrap();
        assert!(line.contains("another process is building the same token cache"), "{line}");
        // Whoever tells of a signal needs somebody who reads.
        (waits, said)
    };
    let (second, _said) = waits("b");
    for (signal, code) in [(libc::SIGTERM, 143), (libc::SIGINT, 130)] {
        let (mut asked, _said) = waits("c");
        // SAFETY: the process is this test's, and has not been waited for.
        assert_eq!(unsafe { libc::kill(asked.id() as i32, signal) }, 0);
        assert_eq!(asked.wait().unwrap().code(), Some(code));
    }
    std::fs::remove_file(held).unwrap();
    assert_done(&first.wait_with_output().unwrap());
    assert_done(&second.wait_with_output().unwrap());
    assert!(files(&place.path("caches")) == files(&place.path("whole")));
}

#[test]
fn a_run_tells_what_it_reads_and_what_it_leaves_out() {
    let place = place_of_rows(60_000);
    std::fs::write(place.path("broken.jsonl"), rows(2000) + "{\"txt\": 1}\n").unwrap();
    let mixture = "data.mixture=[{source=\"broken.jsonl\",weight=3},{source=\"text.txt\"}]";
    let sets = [
        "--set",
        mixture,
        "--set",
        "data.on_error=skip",
        "--set",
        "data.cache_dir=caches",
        "--set",
        "run.dir=mixed",
    ];
    let done = place.nibble(&[&["train", "small.toml"], &sets[..]].concat()).ok();
    done.contains("source broken.jsonl: 2,000 documents, ").contains("source text.txt: 1 documents, ");
    done.contains("source broken.jsonl: 1 row cannot be read and is left out: broken.jsonl: line 2001: has no \"text\", but \"txt\"");
    done.contains("data: broken.jsonl (3), text.txt (1)");
    place.nibble(&["train", "mixed", "--resume", "--set", "train.steps=14"]).ok();
    let other = mixture.replace('3', "2");
    let error =
        place.nibble(&["train", "mixed", "--resume", "--set", "train.steps=16", "--set", &other]).failed(2);
    assert!(error.contains("the data's content") && error.contains("data.mixture: "), "{error}");
    // Another source takes the place of the mixture.
    let other = place.nibble(&["eval", "mixed", "--set", "data.source=text.txt"]);
    other.contains("data: text.txt\n");
}
