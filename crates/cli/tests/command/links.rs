//! Links between ranks, measured: figures are a machine's own, and no test is about them.

use crate::processes::{left, said, set};
use crate::{Place, gpu};

#[test]
fn doctor_measures_links_where_there_are_any() {
    let place = Place::new();
    if !gpu::has_gpu() {
        let done = place.nibble(&["doctor", "--links"]).ok();
        done.contains("Hopper GPU here, and so no link to measure");
        let error = place.nibble(&["doctor", "--links", "--ranks", "2"]).failed(2);
        assert!(error.contains("run.device = cuda") && error.contains("CUDA driver"), "{error}");
    }
    let two = place.nibble(&["doctor", "--links", "--device", "cpu"]).ok();
    two.contains("device: cpu").contains("2 ranks of this kind").contains("rank 1: cpu");
    two.contains("GB/s from a row's rank").contains("latency").contains("links within a host: ");
    place.nibble(&["doctor", "--links", "--device", "cpu", "--ranks", "3"]).ok().contains("rank 2: cpu");
}

#[test]
fn what_has_no_link_is_refused() {
    let place = Place::new();
    for (arguments, part) in [
        (&["--links", "--device", "cuda:0"][..], "a link needs two"),
        (&["--links", "--ranks", "1"], "1 is not in 2..=1024"),
        (&["--ranks", "2"], "--links"),
        (&["--device", "cpu"], "--links"),
        (&["--links", "--warm"], "cannot be used with"),
    ] {
        let error = place.nibble(&[&["doctor"], arguments].concat()).failed(2);
        assert!(error.contains(part), "{arguments:?}: {error}");
    }
    let error = place.train(&["--check-links", "--dry-run"]).failed(2);
    assert!(error.contains("cannot be used with"), "{error}");
}

#[test]
fn a_run_measures_its_links_before_it_begins_and_is_the_same_run() {
    let place = Place::with_text();
    let train = |dir: &str, more: &[&str]| {
        let changes = set(["train.steps=2", "train.warmup_steps=1", dir]);
        place.train(&[&changes, more].concat()).ok()
    };
    let one = train("run.dir=one", &["--check-links"]);
    one.contains("links: there is one rank, and so nothing to measure");
    let two = train("run.dir=two", &["--check-links", "--set", "run.ranks=2"]);
    let (before, after) = two.stdout.split_once("links within a host: ").unwrap();
    assert!(
        before.contains("device: ") && !before.contains("step:") && after.contains("step:"),
        "{}",
        two.stdout
    );
    assert!(left(&place, "one", 2) == left(&place, "two", 2));
    assert!(!train("run.dir=three", &["--set", "run.ranks=2"]).stdout.contains("links"));
}

#[test]
fn processes_measure_their_links_too() {
    let place = crate::processes::place();
    let words = ["launch", "--ranks", "2", "--", "train", "small.toml", "--check-links"];
    let changes = set(["train.steps=2", "train.warmup_steps=1", "run.dir=run"]);
    let out = place.command(&[&words[..], &changes].concat()).output().unwrap();
    assert!(out.status.success() && out.stderr.is_empty(), "{}", said(&out));
    let told = String::from_utf8_lossy(&out.stdout);
    assert_eq!(told.matches("links within a host: ").count(), 1, "{told}");
}
