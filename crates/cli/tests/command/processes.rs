//! Ranks that are processes: the bits of threads, and no fault of one that loses anything or leaves another behind.

use crate::{Place, SMALL, read};
use nibble_core::Recipe;
use nibble_testkit::Breadth;
use std::process::{Command, Output};

/// What meshes of up to eight ranks can divide.
const DIVIDED: [&str; 4] =
    ["model.experts=8", "train.batch_size=16", "train.shards=8", "train.expert_shards=8"];

pub fn set<'a>(changes: impl IntoIterator<Item = &'a str>) -> Vec<&'a str> {
    changes.into_iter().flat_map(|change| ["--set", change]).collect()
}

/// `nibble launch` of so many ranks that train the small model.
fn launch(place: &Place, ranks: usize, options: &[&str], changes: &[&str]) -> Command {
    std::fs::write(place.path("small.toml"), SMALL).unwrap();
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
fn processes_give_the_bits_of_one_rank() {
    const FEW: [&str; 4] = ["train.steps=3", "train.warmup_steps=1", "checkpoint.every=2", "eval.every=0"];
    /// Widths that every recipe's transforms divide.
    const WIDE: [&str; 4] =
        ["model.d_model=128", "model.kv_heads=2", "model.head_dim=64", "model.expert_ffn=64"];
    let place = Place::with_text();
    // What carries rows knows nothing of recipes: plain rows, FP8, packed codes, and scales of tensors, each on one mesh of two and one of four.
    let daily = vec!["bf16", "fp8-flow", "mxfp4-hopper", "nvfp4"];
    let recipes = Breadth::of_tests().either(Recipe::all_names().collect(), daily);
    for (i, recipe) in recipes.into_iter().enumerate() {
        let of = |more: &[&str]| -> Vec<String> {
            let changes = DIVIDED.iter().chain(&FEW).chain(&WIDE).chain(more).copied();
            set(changes).into_iter().chain(["--recipe", recipe]).map(str::to_owned).collect()
        };
        let one = of(&["run.dir=one"]);
        let one: Vec<&str> = one.iter().map(String::as_str).collect();
        place.train(&one).ok();
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

#[test]
fn eight_processes_give_the_bits_of_one_rank() {
    let place = Place::with_text();
    let changes = |dir| set(DIVIDED.into_iter().chain(["run.dp=2", "train.steps=4", dir]));
    let one = set(DIVIDED.into_iter().chain(["train.steps=4", "run.dir=one"]));
    place.train(&one).ok();
    let out = launch(&place, 8, &[], &changes("run.dir=eight")).output().unwrap();
    assert!(out.status.success() && out.stderr.is_empty(), "{}", said(&out));
    assert!(left(&place, "eight", 4) == left(&place, "one", 4));
    // What all of them took, and a log of each.
    let times = std::fs::read_to_string(place.path("eight/ranks.jsonl")).unwrap();
    let times: Vec<serde_json::Value> =
        times.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(times.len(), 3, "the last step has no later one to tell of it");
    assert!(times.iter().all(|line| line["waiting"].as_array().unwrap().len() == 8));
    let metrics = std::fs::read_to_string(place.path("eight/metrics.jsonl")).unwrap();
    assert!(metrics.contains("ranks/slowest"), "{metrics}");
    for rank in 1..8 {
        let log = std::fs::read_to_string(place.path(format!("eight/ranks/rank-{rank:05}.log"))).unwrap();
        assert!(log.contains(&format!("rank {rank}: process ")), "{log}");
    }
}

/// What happens to a rank, and part of the cause that is told.
const FAULTS: [(&str, &str); 5] = [
    ("sigkill", "it was killed by SIGKILL"),
    ("sigstop", "nothing was heard from it for 2 s"),
    ("disconnect", "connection"),
    ("fail", "a test asked for it"),
    ("out-of-memory", "out of memory"),
];

/// Where it happens, and the phase that is told.
const PHASES: [(&str, &str); 6] = [
    ("loading:1", "start"),
    ("forward-exchange:9", "forward exchange"),
    ("backward-exchange:9", "backward exchange"),
    ("reduce:5", "reduce"),
    ("copy-begins:2", "checkpoint"),
    ("evaluation-begins:1", "evaluation"),
];

/// The run of the tests of faults.
const FAULTY: [&str; 4] = ["train.steps=8", "checkpoint.every=2", "eval.every=5", "run.dp=1"];

/// Processes whose working directory is this place.
fn left_behind(place: &Place) -> usize {
    #[cfg(target_os = "linux")]
    return crate::launchers::processes_in(place).len();
    #[cfg(not(target_os = "linux"))]
    return {
        let _ = place;
        0
    };
}

/// Ends a run of four ranks by a fault of one, and lets it go on with as many as are given, to the bits of an undisturbed run.
fn disturb(
    place: &Place,
    (fault, phase): (&str, &str),
    rank: usize,
    then: usize,
    expected: &[Vec<u8>; 2],
) -> String {
    let what = format!("{rank}/{fault}@{phase}");
    let changes = |more: &[&'static str]| {
        set(DIVIDED.into_iter().chain(FAULTY).chain(["run.dir=run"]).chain(more.iter().copied()))
    };
    let out =
        launch(place, 4, &["--deadline", "4"], &changes(&[])).env("NIBBLE_FAULT", &what).output().unwrap();
    let told = said(&out);
    assert!(out.status.code() == Some(1), "{what}: {:?}: {told}", out.status);
    assert_eq!(told.matches("error:").count(), 1, "{what}: {told}");
    assert_eq!(left_behind(place), 0, "{what}");
    let begun = place.path("run/config.toml").exists();
    let more = if begun { vec!["--resume"] } else { Vec::new() };
    let words = [changes(&[]), more].concat();
    let out = match then {
        1 => place.train(&words),
        _ => {
            let out = launch(place, then, &[], &words).output().unwrap();
            crate::Done { code: out.status.code(), stdout: String::new(), stderr: said(&out) }
        }
    };
    assert!(out.code == Some(0), "{what}: goes not on with {then} ranks: {}", out.stderr);
    assert!(left(place, "run", 8) == *expected, "{what}, then {then} ranks: other bits");
    std::fs::remove_dir_all(place.path("run")).unwrap();
    told
}

#[test]
fn every_fault_in_every_phase_ends_all_ranks_with_one_message_and_loses_nothing() {
    let place = Place::with_text();
    place.train(&set(DIVIDED.into_iter().chain(FAULTY).chain(["run.dir=one"]))).ok();
    let expected = left(&place, "one", 8);
    for (f, (fault, cause)) in FAULTS.into_iter().enumerate() {
        // Daily half of the phases, and the other half under the next fault.
        let daily = |p: usize| (f + p).is_multiple_of(2);
        let taken = |p: &usize| Breadth::of_tests().either(true, daily(*p));
        for (p, (point, phase)) in PHASES.into_iter().enumerate().filter(|(p, _)| taken(p)) {
            // Each fault and each phase on every rank, and followed by every number of ranks, over the others.
            let (rank, then) = ((f + p / 2) % 4, [1, 2, 4][(f + 2 * p) % 3]);
            let told = disturb(&place, (fault, point), rank, then, &expected);
            // A rank that has lost its connection goes on until it needs the others.
            let phase = if fault == "disconnect" { "" } else { phase };
            for part in [&format!("rank {rank} on host "), phase, cause] {
                assert!(told.contains(part), "{rank}/{fault}@{point}: no {part:?} in {told}");
            }
            assert!(point == "loading:1" || told.contains(", step "), "{told}");
        }
    }
}

#[test]
fn a_run_goes_on_by_itself_with_as_many_ranks_or_fewer() {
    let place = Place::with_text();
    let changes = |dir| set(DIVIDED.into_iter().chain(FAULTY).chain([dir]));
    place.train(&changes("run.dir=one")).ok();
    let expected = left(&place, "one", 8);
    for (options, fault, goes_on) in [
        (
            &["--max-restarts", "1"][..],
            "2/sigkill@reduce:5",
            "goes on from the newest whole checkpoint, on 4 ranks",
        ),
        (
            &["--max-restarts", "2", "--min-ranks", "1"],
            "0/fail@forward-exchange:9",
            "the newest whole checkpoint, on 2 ranks",
        ),
        // No run has begun: what is there of others is not gone on with.
        (&["--max-restarts", "1", "--min-ranks", "4"], "3/sigkill@loading:1", "the run begins, on 4 ranks"),
    ] {
        let mut command =
            launch(&place, 4, &[&["--deadline", "4"], options].concat(), &changes("run.dir=run"));
        let out = command.env("NIBBLE_FAULT", fault).output().unwrap();
        let told = said(&out);
        assert!(out.status.success(), "{fault}: {told}");
        assert!(told.contains("restart 1 of ") && told.contains(goes_on), "{fault}: {told}");
        assert_eq!(told.matches("restart").count(), 1, "{fault}: {told}");
        assert!(left(&place, "run", 8) == expected, "{fault}: other bits");
        std::fs::remove_dir_all(place.path("run")).unwrap();
    }
}

#[test]
fn a_mistake_is_told_once_and_not_tried_again() {
    let place = Place::with_text();
    for (changes, part) in [
        (&["train.stesp=3"][..], "train.stesp"),
        (&["run.ranks=3"], "nibble launch started 2 ranks"),
        (&["data.source=none.txt"], "none.txt"),
        (&["run.dp=3"], "run.dp"),
    ] {
        let changes = set(changes.iter().copied());
        let out = launch(&place, 2, &["--max-restarts", "5"], &changes).output().unwrap();
        let told = said(&out);
        assert_eq!(out.status.code(), Some(2), "{told}");
        assert!(
            told.contains(part) && told.matches("error:").count() == 1 && !told.contains("restart"),
            "{told}"
        );
    }
}

#[test]
fn numbers_that_are_none_end_all_ranks() {
    let place = Place::with_text();
    for point in ["step-begins:3", "step-begins:7"] {
        // With room for whatever is sent: a step that is done again is one without the fault.
        let more = ["run.capacity_factor=8", "run.dir=run"];
        let changes = set(DIVIDED.into_iter().chain(FAULTY).chain(more));
        let fault = format!("1/nan@{point}");
        let out = launch(&place, 2, &[], &changes).env("NIBBLE_FAULT", fault).output().unwrap();
        let told = said(&out);
        assert_eq!(out.status.code(), Some(1), "{told}");
        assert!(told.contains("not finite") || told.contains("no number") || told.contains("NaN"), "{told}");
        assert_eq!(told.matches("error:").count(), 1, "{told}");
        assert_eq!(left_behind(&place), 0);
        let out = launch(&place, 2, &[], &[changes, vec!["--resume"]].concat()).output().unwrap();
        assert!(out.status.success(), "{}", said(&out));
        std::fs::remove_dir_all(place.path("run")).unwrap();
    }
}
