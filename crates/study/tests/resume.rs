//! A study that is stopped anywhere and continued is the study that was never stopped.

use crate::rig::{Random, simulated, study};
use nibble_study::{Next, Queue, Results, Rows, Study, csv, html, json, markdown, write_row};
use std::path::Path;

const STUDY: &str = r#"
name = "stopped"
baseline = "base"
recipes = ["base", "a", "b&<c>"]
configs = ["small", "large"]
seeds = [3, 1, 2]
set = ["data.seq_len=64"]
floor = 2
[[branch]]
trunk = { recipe = "base", steps = 100 }
recipes = ["base", "a"]
schedule = "kept"
[[branch]]
trunk = { recipe = "base", steps = 100 }
recipes = ["base", "b&<c>"]
schedule = "new"
"#;

/// Everything that a study shows.
fn shown(study: &Study, dir: &Path) -> [String; 4] {
    let rows = Rows::read(dir, &study.cells()).unwrap();
    let results = Results::of(study, &rows);
    [markdown(&results), csv(&results), json(&results), html(study, &rows).unwrap()]
}

/// Runs what is missing.
fn finish(study: &Study, dir: &Path) {
    let queue = Queue::open(dir, study.cells(), "here").unwrap();
    while let Next::Cell(claim) = queue.next().unwrap() {
        let row = simulated(claim.cell());
        claim.finish(&row).unwrap();
    }
}

#[test]
fn any_subset_and_then_the_rest() {
    let study = study(STUDY);
    let cells = study.cells();
    let dir = tempfile::tempdir().unwrap();
    finish(&study, dir.path());
    let expected = shown(&study, dir.path());
    let mut random = Random(3);
    for _ in 0..8 {
        let mut subset: Vec<_> = cells.iter().filter(|_| random.uniform() < 0.7).collect();
        random.shuffle(&mut subset);
        let dir = tempfile::tempdir().unwrap();
        for cell in subset {
            write_row(dir.path(), &simulated(cell)).unwrap();
        }
        assert_ne!(shown(&study, dir.path()), expected);
        finish(&study, dir.path());
        let found = shown(&study, dir.path());
        for (found, expected) in found.iter().zip(&expected) {
            assert!(found == expected, "{found}");
        }
    }
}

/// Wherever it is stopped, seeds are complete up to the last one begun.
#[test]
fn a_stopped_study_has_whole_pairs() {
    let study = study(STUDY);
    let cells = study.cells();
    for stop in 0..=cells.len() {
        let rows = Rows::of(&cells, cells[..stop].iter().map(simulated)).unwrap();
        let results = Results::of(&study, &rows);
        let begun: std::collections::BTreeSet<(&str, u64)> =
            cells[..stop].iter().map(|cell| (&*cell.config, cell.seed)).collect();
        for config in &results.configs {
            let seeds = begun.iter().filter(|(name, _)| *name == config.config).count();
            for one in config.groups.iter().flat_map(|group| &group.comparisons) {
                let not_run = one.counts.not_run;
                assert!([3 - seeds, 4 - seeds.max(1)].contains(&not_run), "{stop}: {one:?}");
            }
        }
        if stop % 7 == 0 {
            html(&study, &rows).unwrap();
        }
    }
}
