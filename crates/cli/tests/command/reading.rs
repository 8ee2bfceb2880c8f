//! Nothing that is read may keep a command waiting for ever.

use crate::Place;
use std::path::Path;

/// Files of a run that the command reads, and files that are named to it (`stop`, `stop.toml`).
const READERS: &[(&[&str], &[&str])] = &[
    (&["train", "stop.toml"], &["stop.toml"]),
    (&["train", "small.toml", "--recipe", "stop.toml"], &["stop.toml"]),
    (&["train", "small.toml", "--set", "data.source=stop"], &["stop"]),
    (&["train", "stop.toml", "--dry-run"], &["stop.toml"]),
    (
        &["train", "run", "--resume", "--set", "train.steps=16"],
        &[
            "run/config.toml",
            "run/metrics.jsonl",
            "run/layers.jsonl",
            "run/checkpoints/step-00000012/state.json",
            "run/checkpoints/step-00000012/model.safetensors",
            "run/checkpoints/step-00000012/optim.safetensors",
        ],
    ),
    (
        &["eval", "run"],
        &["run/checkpoints/step-00000012/state.json", "run/checkpoints/step-00000012/model.safetensors"],
    ),
    (
        &["eval", "run/checkpoints/step-00000012"],
        &["run/checkpoints/step-00000012/state.json", "run/checkpoints/step-00000012/model.safetensors"],
    ),
    (&["eval", "run", "--set", "data.source=stop"], &["stop"]),
    (&["eval", "run", "--recipe", "stop.toml"], &["stop.toml"]),
    (
        &["generate", "run", "--tokens", "2"],
        &["run/checkpoints/step-00000012/state.json", "run/checkpoints/step-00000012/model.safetensors"],
    ),
    (&["generate", "run", "--prompts", "stop.txt"], &["stop.txt"]),
    (&["plot", "run"], &["run/config.toml", "run/metrics.jsonl"]),
    (
        &["report", "run"],
        &["run/config.toml", "run/recipe.toml", "run/metrics.jsonl", "run/layers.jsonl", "run/memory.txt"],
    ),
    (&["recipe", "stop.toml"], &["stop.toml"]),
    (&["recipe", "bf16", "--cost", "stop.toml"], &["stop.toml"]),
    (&["data", "stop"], &["stop"]),
    (&["inspect", "stop.toml", "--out", "x.safetensors"], &["stop.toml"]),
    (&["inspect", "small.toml", "--recipe", "stop.toml", "--out", "x.safetensors"], &["stop.toml"]),
    (&["bench", "step", "stop.toml"], &["stop.toml"]),
    (&["bench", "step", "small.toml", "--recipe", "stop.toml"], &["stop.toml"]),
    (&["bench", "exchange", "--recipe", "stop.toml"], &["stop.toml"]),
    (&["bench", "step", "small.toml", "--recipe", "bf16", "--set", "data.source=stop"], &["stop"]),
];

/// What a command says, which ends: one that waits for a writer would hang here.
fn ends(place: &Place, args: &[&str]) -> String {
    let done = place.nibble(args);
    done.stdout + &done.stderr
}

fn copy(from: &Path, to: &Path) {
    std::fs::create_dir_all(to).unwrap();
    for entry in std::fs::read_dir(from).unwrap().map(Result::unwrap) {
        let to = to.join(entry.file_name());
        match entry.file_type().unwrap().is_dir() {
            true => copy(&entry.path(), &to),
            false => drop(std::fs::copy(entry.path(), to).unwrap()),
        }
    }
}

#[test]
fn a_pipe_and_a_device_without_an_end_are_refused_wherever_something_is_read() {
    let place = Place::with_text();
    place.train(&["--set", "run.dir=whole"]).ok();
    for (args, files) in READERS {
        for file in *files {
            for what in ["is a pipe", "is a device"] {
                let _ = std::fs::remove_dir_all(place.path("run"));
                copy(&place.path("whole"), &place.path("run"));
                let path = place.path(file);
                let _ = std::fs::remove_file(&path);
                match what {
                    "is a pipe" => {
                        let made = std::process::Command::new("mkfifo").arg(&path).status().unwrap();
                        assert!(made.success());
                    }
                    _ => std::os::unix::fs::symlink("/dev/zero", &path).unwrap(),
                }
                let mut said = ends(&place, args);
                if args[0] == "report" {
                    // What a page lacks, it says itself.
                    said += &std::fs::read_to_string(place.path("run/report.html")).unwrap_or_default();
                }
                let name = Path::new(file).file_name().unwrap().to_str().unwrap();
                assert!(said.contains(what) && said.contains(name), "{args:?} with {file}: {said}");
                std::fs::remove_file(&path).unwrap();
            }
        }
    }
}
