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

/// A branch under the trunk's recipe is the trunk's own run; a trunk whose checkpoint is gone is trained again; and a kill changes nothing.
#[test]
fn branches_of_a_study_start_from_their_trunk() {
    let place = place();
    let runs = STUDY.replace("seeds = 2", "seeds = 1");
    let branches = runs
        .replace("recipes = [\"bf16\", \"mxfp4-hopper\"]\n", "")
        .replace("seeds = 1", "seeds = 1\nfloor = 1")
        + "[[branch]]\ntrunk = { recipe = \"bf16\", steps = 3 }\nrecipes = [\"bf16\", \"mxfp4\"]\nschedule = \"kept\"\n\
           [[branch]]\ntrunk = { recipe = \"bf16\", steps = 3 }\nrecipes = [\"bf16\", \"mxfp4\"]\nschedule = \"new\"\n";
    std::fs::write(place.path("runs.toml"), runs).unwrap();
    std::fs::write(place.path("branches.toml"), branches).unwrap();
    place.nibble(&["study", "runs.toml", "--device", "cpu"]).ok();
    let study = ["study", "branches.toml", "--device", "cpu"];
    place
        .nibble(&study)
        .ok()
        .contains("7 of 7 cells have been run")
        .contains("branches of bf16 at step 3, schedule new");
    let whole = rows(&place, "branches");
    let of = |rows: &BTreeMap<String, serde_json::Value>, part: &str| {
        rows.iter().find(|(name, _)| name.contains(part)).map(|(_, row)| row.clone()).unwrap()
    };
    let held_out = |row: &serde_json::Value| row["held_out"].as_array().unwrap().last().unwrap().clone();
    let branch = of(&whole, ".bf16.s1.from.bf16.3.kept-");
    assert_eq!(held_out(&branch), held_out(&of(&rows(&place, "runs"), ".bf16.s1-")));
    assert_eq!(branch["curve"].as_array().unwrap().len(), 3);
    assert_ne!(held_out(&of(&whole, ".bf16.s1.from.bf16.3.kept.floor1-")), held_out(&branch));
    let left: Vec<_> =
        std::fs::read_dir(place.path("branches/runs")).unwrap().map(|run| run.unwrap().path()).collect();
    assert!(left.iter().all(|run| !run.join("checkpoints").exists()), "{left:?}");
    // The checkpoints are gone, and two rows are missing: the trunk is trained again for them.
    let gone = place.path("branches/rows");
    for name in whole.keys().filter(|name| name.contains(".mxfp4.")) {
        std::fs::remove_file(gone.join(name)).unwrap();
    }
    let out = place.command(&study).env("NIBBLE_FAULT", "sigkill@step-settled:2").output().unwrap();
    assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
    place.nibble(&study).ok().contains(".trunk3-");
    assert_eq!(rows(&place, "branches"), whole);
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
