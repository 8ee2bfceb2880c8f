//! Ranks that are processes: the bits of threads, and no fault of one that loses anything or leaves another behind.

use crate::{Place, SMALL, read};
use nibble_core::Recipe;
use std::process::{Command, Output};

/// Meshes of 2 and of 4 ranks: replicas, and ranks that divide the experts.
const MESHES: [(usize, usize); 5] = [(1, 2), (1, 4), (2, 1), (2, 2), (4, 1)];

/// What meshes of up to eight ranks can divide.
const DIVIDED: [&str; 4] =
    ["model.experts=8", "train.batch_size=8", "train.shards=8", "train.expert_shards=8"];

pub fn set<'a>(changes: impl IntoIterator<Item = &'a str>) -> Vec<&'a str> {
    changes.into_iter().flat_map(|change| ["--set", change]).collect()
}

/// `nibble launch` of so many ranks that train the small model.
fn launch(place: &Place, ranks: usize, options: &[&str], changes: &[&str]) -> Command {
    let ranks = ranks.to_string();
    let launch = ["launch", "--ranks", &*ranks].into_iter().chain(options.iter().copied());
    let words: Vec<&str> =
        launch.chain(["--", "train", "small.toml"]).chain(changes.iter().copied()).collect();
    place.command(&words)
}

pub fn place() -> Place {
    let place = Place::with_text();
    std::fs::write(place.path("small.toml"), SMALL).unwrap();
    place
}

pub fn said(out: &Output) -> String {
    String::from_utf8_lossy(&out.stderr).into_owned()
}

/// The weights and moments of a run's last checkpoint.
pub fn left(place: &Place, dir: &str, step: u64) -> [Vec<u8>; 2] {
    let last = place.path(dir).join(format!("checkpoints/step-{step:08}"));
    ["model.safetensors", "optim.safetensors"].map(|file| read(last.join(file)))
}

#[test]
fn processes_give_the_bits_of_one_rank_under_every_recipe() {
    const FEW: [&str; 4] = ["train.steps=3", "train.warmup_steps=1", "checkpoint.every=2", "eval.every=0"];
    let place = place();
    for (i, recipe) in Recipe::all_names().enumerate() {
        let of = |more: &[&str]| -> Vec<String> {
            let changes = DIVIDED.iter().chain(&FEW).chain(more).copied();
            set(changes).into_iter().chain(["--recipe", recipe]).map(str::to_owned).collect()
        };
        let one = of(&["run.dir=one"]);
        let one: Vec<&str> = one.iter().map(String::as_str).collect();
        place.nibble(&[&["train", "small.toml"], &one[..]].concat()).ok();
        let expected = left(&place, "one", 3);
        // Each recipe on one mesh of 2 and one of 4, all meshes over the recipes.
        let (two, four) = ([(1, 2), (2, 1)][i % 2], [(1, 4), (2, 2), (4, 1)][i % 3]);
        for (dp, ep) in [two, four] {
            let changes = of(&[&format!("run.dp={dp}"), "run.dir=many"]);
            let changes: Vec<&str> = changes.iter().map(String::as_str).collect();
            let out = launch(&place, dp * ep, &[], &changes).output().unwrap();
            assert!(out.status.success() && out.stderr.is_empty(), "{recipe}, {dp} x {ep}: {}", said(&out));
            assert!(left(&place, "many", 3) == expected, "{recipe}, mesh {dp} x {ep}: other bits");
            std::fs::remove_dir_all(place.path("many")).unwrap();
        }
        std::fs::remove_dir_all(place.path("one")).unwrap();
    }
}
