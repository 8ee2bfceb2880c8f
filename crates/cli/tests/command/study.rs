//! `nibble study`: runs, rows and tables; a study whose runs are killed is that of one that was not.

use crate::{Place, read};
use std::collections::BTreeMap;

/// Two recipes, two seeds.
pub const STUDY: &str = r#"
name = "small"
baseline = "bf16"
recipes = ["bf16", "mxfp4-hopper"]
configs = ["small.toml"]
seeds = 2
set = ["train.steps=6", "checkpoint.every=2"]
"#;

fn place() -> Place {
    let place = Place::with_text();
    std::fs::write(place.path("small.toml"), crate::SMALL).unwrap();
    std::fs::write(place.path("small-study.toml"), STUDY.replace("mxfp4-hopper", "recipes/mine.toml"))
        .unwrap();
    // A recipe of a file that extends another.
    std::fs::create_dir(place.path("recipes")).unwrap();
    std::fs::write(place.path("recipes/mine.toml"), "extends = \"base.toml\"\n").unwrap();
    std::fs::write(place.path("recipes/base.toml"), "extends = \"mxfp4-hopper\"\n").unwrap();
    place
}

/// The rows of a study without what depends on the machine's speed.
fn rows(place: &Place, dir: &str) -> BTreeMap<String, serde_json::Value> {
    let files = std::fs::read_dir(place.path(dir).join("rows")).unwrap().map(|file| file.unwrap().path());
    let rows = files.filter(|file| file.extension().is_some_and(|ending| ending == "json"));
    let row = |file: std::path::PathBuf| {
        let mut row: serde_json::Value = serde_json::from_slice(&read(&file)).unwrap();
        for key in ["seconds", "tokens_per_second"] {
            row[key] = 0.into();
        }
        (file.file_name().unwrap().to_str().unwrap().to_owned(), row)
    };
    rows.map(row).collect()
}

#[test]
fn a_study_whose_runs_are_killed_has_the_rows_of_one_that_was_not() {
    let place = place();
    let study = ["study", "small-study.toml", "--device", "cpu"];
    place.nibble(&[&study[..], &["--plan"]].concat()).ok().contains("4 runs, 0 done, 4 left");
    assert!(!place.path("small-study").exists(), "a plan writes nothing");
    place.nibble(&study).ok().contains("4 of 4 cells have been run").contains("`recipes/mine.toml`");
    let whole = rows(&place, "small-study");
    assert_eq!(whole.len(), 4);
    assert!(
        whole
            .values()
            .all(|row| row["outcome"]["is"] == "done" && row["curve"].as_array().unwrap().len() == 6)
    );
    // The first run is killed, behind its second checkpoint or within its first, and goes on or begins anew by the next call.
    for (dir, fault, told) in
        [("other", "sigkill@checkpoint-ends:2", ": resumes"), ("early", "sigkill@file-written:1", ": starts")]
    {
        let other = [&study[..], &["--dir", dir]].concat();
        let out = place.command(&other).env("NIBBLE_FAULT", fault).output().unwrap();
        assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
        assert!(rows(&place, dir).is_empty(), "{fault}");
        let done = place.nibble(&other).ok();
        assert!(
            done.stdout.lines().any(|line| line.contains(".bf16.s1-") && line.ends_with(told)),
            "{}",
            done.stdout
        );
        assert_eq!(rows(&place, dir), whole, "{fault}");
    }
    // Tables are a function of the rows; nothing is run for them.
    let tables = || {
        ["table.md", "table.csv", "table.json", "study.html"].map(|name| read(place.path("other").join(name)))
    };
    let before = tables();
    place.nibble(&[&study[..], &["--dir", "other", "--tables"]].concat()).ok();
    assert_eq!(tables(), before);
}

#[test]
fn what_is_wrong_with_a_study_is_said_before_anything_runs() {
    let place = place();
    for (old, new, told) in [
        ("mxfp4-hopper", "mxfp4-hoper", "did you mean"),
        ("baseline", "base", "base"),
        ("seeds = 2", "seeds = 0", "seeds"),
        ("small.toml", "smal.toml", "smal.toml"),
    ] {
        std::fs::write(place.path("small-study.toml"), STUDY.replace(old, new)).unwrap();
        let error = place.nibble(&["study", "small-study.toml"]).failed(2);
        assert!(error.contains(told), "{new}: {error}");
        assert!(!place.path("small-study").exists());
    }
}
