//! A run that ends at every named point, killed or failed: resumed, it ends with the very bytes of an undisturbed one.
//!
//! Points are reached, not waited for: nothing here depends on how fast the machine is.

use crate::{Place, losses, read};
use nibble_testkit::Breadth;
use nibble_train::fault::Point;
use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::process::{Command, Output};

/// Points of a run's beginning and end, which it passes once.
const ONCE: [Point; 8] = [
    Point::Loading,
    Point::DirectoryMade,
    Point::LockMade,
    Point::Claimed,
    Point::Configured,
    Point::RunOpened,
    Point::StepsDone,
    Point::RunEnds,
];

/// Points that a new run on a plain text does not pass.
const NEVER: [Point; 4] = [Point::MovedAside, Point::CheckpointListed, Point::CacheKept, Point::CacheWhole];

/// Points that one rank alone does not pass.
const AMONG_RANKS: [Point; 3] = [Point::ForwardExchange, Point::BackwardExchange, Point::Reduce];

/// A run of 12 steps with a checkpoint every other one, of which two stay; with held-out losses after 5 and 10.
pub fn train(place: &Place, dir: &str, ranks: usize, more: &[&str]) -> Command {
    let (dir, ranks) = (format!("run.dir={dir}"), format!("run.ranks={ranks}"));
    let set = ["checkpoint.every=2", "checkpoint.keep=2", &*dir, &*ranks];
    let set = set.iter().flat_map(|change| ["--set", change]);
    place.command(
        &["train", "small.toml"].into_iter().chain(set).chain(more.iter().copied()).collect::<Vec<_>>(),
    )
}

fn done(command: &mut Command) -> (Output, String) {
    let out = command.output().unwrap();
    let said = String::from_utf8_lossy(&out.stderr).into_owned();
    (out, said)
}

/// What a run leaves: weights, moments, losses.
#[derive(PartialEq)]
struct Left {
    files: Vec<Vec<u8>>,
    losses: Vec<(u64, f64)>,
    held_out: BTreeMap<u64, f64>,
}

impl Left {
    fn of(place: &Place, dir: &str) -> Self {
        let last = place.path(dir).join("checkpoints/step-00000012");
        let files = ["model.safetensors", "optim.safetensors"].map(|file| read(last.join(file)));
        Self {
            files: files.into(),
            losses: losses(place.path(dir).join("metrics.jsonl")),
            held_out: held_out(place.path(dir).join("metrics.jsonl")),
        }
    }
}

/// Step → held-out loss; the last one of a step that was evaluated again.
fn held_out(path: PathBuf) -> BTreeMap<u64, f64> {
    let metrics = nibble_train::metrics::read_metrics(&path).unwrap().metrics;
    metrics.into_iter().filter_map(|m| Some((m.step, m.valid_loss?))).collect()
}

/// An undisturbed run, and the place in which others are compared with it.
pub struct Undisturbed {
    pub place: Place,
    ranks: usize,
    /// Changes of the configuration, of every run compared with it.
    more: &'static [&'static str],
    left: Left,
}

impl Undisturbed {
    pub fn new(ranks: usize) -> Self {
        Self::with(ranks, &[])
    }

    pub fn with(ranks: usize, more: &'static [&'static str]) -> Self {
        let place = Place::with_text();
        std::fs::write(place.path("small.toml"), crate::SMALL).unwrap();
        let (out, said) = done(&mut train(&place, "whole", ranks, more));
        assert!(out.status.success(), "{said}");
        let left = Left::of(&place, "whole");
        assert_eq!(left.losses.len(), 12);
        Self { place, ranks, more, left }
    }

    /// A new run in `dir` that meets these faults.
    pub fn disturbed(&self, dir: &str, faults: &str, more: &[&str]) -> (Output, String) {
        done(train(&self.place, dir, self.ranks, &[self.more, more].concat()).env("NIBBLE_FAULT", faults))
    }

    /// Resumes the run in `dir`, which `what` has ended, or if it had not begun begins it: one of the two. Returns what it printed.
    pub fn assert_resumes(&self, dir: &str, what: &str) -> String {
        let (mut out, mut said) =
            done(&mut train(&self.place, dir, self.ranks, &[self.more, &["--resume"]].concat()));
        if out.status.code() == Some(2) {
            assert!(said.contains(&format!("there is no run in {dir} yet")), "{what}: {said}");
            assert!(!self.place.path(dir).join("config.toml").exists(), "{what}: {said}");
            (out, said) = done(&mut train(&self.place, dir, self.ranks, self.more));
        } else {
            let (out, said) = done(&mut train(&self.place, dir, self.ranks, self.more));
            assert!(out.status.code() == Some(2) && said.contains("holds a run already"), "{what}: {said}");
        }
        assert!(out.status.success(), "{what}: goes neither on nor begins: {said}");
        let left = Left::of(&self.place, dir);
        assert!(left.files == self.left.files, "{what}: other weights or moments");
        assert_eq!(left.losses, self.left.losses, "{what}: other metrics");
        assert_eq!(left.held_out, self.left.held_out, "{what}: other held-out losses");
        let names = std::fs::read_dir(self.place.path(dir).join("checkpoints")).unwrap();
        let names: Vec<_> = names.map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
        assert!(names.iter().all(|name| !name.starts_with(".tmp")), "{what}: {names:?}");
        let unfinished = std::fs::read_dir(self.place.path(dir)).unwrap().map(|e| e.unwrap().file_name());
        let unfinished: Vec<_> =
            unfinished.filter(|name| name.to_str().unwrap().starts_with(".nibble-tmp")).collect();
        assert!(unfinished.is_empty(), "{what}: {unfinished:?}");
        assert_eq!(names.iter().filter(|name| name.starts_with("step-")).count(), 2, "{what}: {names:?}");
        std::fs::remove_dir_all(self.place.path(dir)).unwrap();
        String::from_utf8_lossy(&out.stdout).into_owned()
    }

    /// Ends a run where it passes the point for the `count`th time, and resumes it.
    fn assert_survives(&self, action: &str, point: Point, count: usize) {
        let fault = format!("{action}@{}:{count}", point.name());
        let (out, said) = self.disturbed(point.name(), &fault, &[]);
        if action == "kill" {
            assert!(out.status.code().is_none() && said.is_empty(), "{fault}: {:?}: {said}", out.status);
        } else {
            assert_eq!(out.status.code(), Some(1), "{fault}: {said}");
            let named = format!("fault point {} failed: a test asked for it", point.name());
            assert!(said.starts_with("error: ") && said.contains(&named), "{fault}: {said}");
        }
        self.assert_resumes(point.name(), &fault);
    }
}

/// The points that a new run passes.
fn points() -> Vec<Point> {
    Point::ALL.iter().copied().filter(|point| !NEVER.contains(point)).collect()
}

/// How runs of so many ranks end: at each point, killed or failed, where it is passed for the first or the second time; daily in pairs.
fn ends(of_ranks: usize) -> BTreeSet<(&'static str, usize, usize)> {
    let points = points();
    let choices = Breadth::of_tests().cross([points.len(), 2, 2, 2]);
    let ends = choices.into_iter().filter_map(|[at, action, ranks, count]| {
        let ranks = if AMONG_RANKS.contains(&points[at]) { 2 } else { 1 + ranks };
        let count = if ONCE.contains(&points[at]) { 1 } else { 1 + count };
        (ranks == of_ranks).then_some((["kill", "fail"][action], at, count))
    });
    ends.collect()
}

fn end_everywhere(ranks: usize) {
    let (run, points) = (Undisturbed::new(ranks), points());
    for (action, at, count) in ends(ranks) {
        run.assert_survives(action, points[at], count);
    }
}

#[test]
fn an_end_at_any_point_costs_no_bit() {
    end_everywhere(1);
}

#[test]
fn nor_does_it_among_ranks() {
    end_everywhere(2);
}

#[test]
fn every_point_is_an_end_both_ways() {
    let all: BTreeSet<_> =
        [1, 2].iter().flat_map(|ranks| ends(*ranks)).map(|(action, at, _)| (action, at)).collect();
    assert_eq!(all.len(), 2 * points().len());
}

/// There a step is recorded once and replayed, and what a checkpoint copies comes over the link beside it.
#[test]
fn nor_does_it_on_a_gpu() {
    if !crate::gpu::has_gpu() {
        return println!("skipped: kills at every point on a GPU");
    }
    let run = Undisturbed::with(1, &["--device", "cuda:0"]);
    for point in points().into_iter().filter(|point| !AMONG_RANKS.contains(point)) {
        run.assert_survives("kill", point, 1);
    }
}

/// The checkpoint's threads are held at a point of theirs while training goes on, and then the process is killed.
#[test]
fn a_kill_beside_a_checkpoint_under_way_costs_no_bit() {
    let run = Undisturbed::new(1);
    // The third step's optimizer waits for what copies the second step's weights.
    let beside = |point: &Point| match point {
        Point::CopyBegins | Point::FileCopied => Some(Point::BeforeOptimizer),
        Point::CheckpointBegins
        | Point::FileBegun
        | Point::FileWritten
        | Point::ManifestWritten
        | Point::BeforeRename
        | Point::Renamed
        | Point::CheckpointEnds => Some(Point::AfterOptimizer),
        _ => None,
    };
    let mut pairs = 0;
    for (held, killed) in Point::ALL.iter().filter_map(|held| Some((held, beside(held)?))) {
        let faults = format!("stop@{}:1,kill@{}:3", held.name(), killed.name());
        let (out, said) = run.disturbed(held.name(), &faults, &[]);
        assert!(out.status.code().is_none(), "{faults}: {:?}: {said}", out.status);
        run.assert_resumes(held.name(), &faults);
        pairs += 1;
    }
    assert_eq!(pairs, 9);
}

/// The fifth checkpoint and the second held-out loss are of the same step, and whichever is on the disk first is not repeated.
#[test]
fn a_kill_beside_an_evaluation_costs_no_held_out_loss() {
    for ranks in [1, 2] {
        let run = Undisturbed::new(ranks);
        for fault in ["kill@renamed:5", "kill@checkpoint-ends:5", "kill@evaluated:2"] {
            let (out, said) = run.disturbed("run", fault, &[]);
            assert!(out.status.code().is_none(), "{fault}: {:?}: {said}", out.status);
            run.assert_resumes("run", fault);
        }
    }
}

/// A run that goes back from a damaged checkpoint writes that one again.
#[test]
fn what_ends_while_a_checkpoint_is_replaced_costs_no_bit() {
    let run = Undisturbed::new(1);
    for action in ["kill", "fail"] {
        let (out, said) = done(&mut train(&run.place, action, 1, &[]));
        assert!(out.status.success(), "{said}");
        let last = run.place.path(action).join("checkpoints/step-00000012");
        std::fs::write(last.join("config.json"), "damaged").unwrap();
        let fault = format!("{action}@{}:1", Point::MovedAside.name());
        let (out, said) = run.disturbed(action, &fault, &["--resume"]);
        assert!(!out.status.success(), "{fault}: {said}");
        // What was moved aside is back at once, unless nobody was left to do it.
        assert_eq!(last.exists(), action == "fail", "{fault}");
        let said = run.assert_resumes(action, &fault);
        assert!(said.contains("continuing after step 10"), "{fault}: {said}");
    }
}

#[test]
fn a_run_that_is_done_stays_as_it_is() {
    let content = |place: &Place, dir: &str| {
        let mut files: Vec<PathBuf> =
            vec![place.path(dir), place.path(dir).join("checkpoints/step-00000012")];
        files =
            files.iter().flat_map(|dir| std::fs::read_dir(dir).unwrap()).map(|e| e.unwrap().path()).collect();
        files.sort();
        let content = files.into_iter().filter(|path| path.is_file()).map(|path| {
            let written = path.metadata().unwrap().modified().unwrap();
            (read(&path), written, path)
        });
        content.collect::<Vec<_>>()
    };
    for ranks in [1, 2] {
        let run = Undisturbed::new(ranks);
        let before = content(&run.place, "whole");
        let (out, said) = done(&mut train(&run.place, "whole", ranks, &["--resume"]));
        assert!(out.status.success(), "{said}");
        let said = String::from_utf8(out.stdout).unwrap();
        assert!(said.contains("the run in whole is done, and stays as it is"), "{said}");
        assert!(said.contains("done: 12 steps") && said.contains("held-out loss: "), "{said}");
        assert!(!said.contains("step: 12"), "{said}");
        assert!(content(&run.place, "whole") == before, "something was written");
        // More steps are another matter.
        let (out, said) =
            done(&mut train(&run.place, "whole", ranks, &["--resume", "--set", "train.steps=14"]));
        assert!(out.status.success(), "{said}");
        assert_eq!(losses(run.place.path("whole/metrics.jsonl")).len(), 14);
    }
}

#[test]
fn a_step_without_memory_says_which_and_costs_no_bit() {
    let run = Undisturbed::new(1);
    for point in [Point::StepBegins, Point::BeforeOptimizer, Point::AfterOptimizer] {
        let fault = format!("out-of-memory@{}:4", point.name());
        let (out, said) = run.disturbed(point.name(), &fault, &[]);
        assert_eq!(out.status.code(), Some(1), "{fault}: {said}");
        assert!(
            said.contains("step 3: out of memory") && said.contains("train.recompute"),
            "{fault}: {said}"
        );
        run.assert_resumes(point.name(), &fault);
    }
}

#[test]
fn a_fault_that_does_not_exist_is_a_mistake() {
    let run = Place::with_text();
    std::fs::write(run.path("small.toml"), crate::SMALL).unwrap();
    let (out, said) = done(train(&run, "run", 1, &[]).env("NIBBLE_FAULT", "kill@nowhere:1"));
    assert_eq!(out.status.code(), Some(2));
    assert!(
        said.contains("NIBBLE_FAULT") && said.contains("`nowhere`") && said.contains("renamed"),
        "{said}"
    );
}
