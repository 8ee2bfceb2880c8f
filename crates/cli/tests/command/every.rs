//! Every command once, small: for tests of what no command may do.

use crate::Place;
use std::path::PathBuf;

/// Commands that these tests leave out, and why.
const LEFT_OUT: [(&str, &str); 4] = [
    ("launch", "runs `train`, which is in the list, in processes of their own: their errors are told by it"),
    ("bench", "measures for minutes"),
    ("verify", "needs a GPU, or says so"),
    ("help", "prints what clap makes"),
];

/// A command that succeeds in [`place`].
pub struct Command {
    pub args: &'static [&'static str],
    /// Where it writes, if it does.
    pub out: Option<&'static str>,
}

const fn says(args: &'static [&'static str]) -> Command {
    Command { args, out: None }
}

const fn writes(out: &'static str, args: &'static [&'static str]) -> Command {
    Command { args, out: Some(out) }
}

pub const ALL: &[Command] = &[
    writes("out", &["train", "small.toml", "--set", "run.dir=out"]),
    says(&["environment"]),
    says(&["train", "small.toml", "--dry-run"]),
    says(&["train", "small.toml", "--dry-run=gpu"]),
    says(&["eval", "run", "--device", "cpu"]),
    says(&["generate", "run", "--tokens", "8", "--device", "cpu"]),
    says(&["generate", "run", "--prompts", "prompts.txt", "--tokens", "8", "--device", "cpu"]),
    writes("out.svg", &["plot", "run", "--output", "out.svg"]),
    writes("out.html", &["report", "run", "--out", "out.html"]),
    writes("out.st", &["quantize", "in.st", "out.st", "--format", "mxfp4", "--device", "cpu"]),
    writes("out.st", &["quantize", "q.st", "out.st", "--back", "--device", "cpu"]),
    writes("folder", &["export", "run", "folder"]),
    says(&["eval", "model", "--set", "data.source=text.txt", "--device", "cpu"]),
    writes(
        "out.json",
        &["eval", "model", "--task", "quiz.jsonl", "--samples", "out.json", "--device", "cpu"],
    ),
    says(&["eval", "model", "--perplexity", "text.txt", "--stride", "8", "--device", "cpu"]),
    says(&["generate", "model", "--tokens", "8", "--device", "cpu"]),
    writes("second", &["train", "small.toml", "--from", "model", "--set", "run.dir=second"]),
    writes("third", &["train", "small.toml", "--init-from", "run", "--set", "run.dir=third"]),
    says(&["models"]),
    says(&["data", "text.txt"]),
    says(&["models", "small.toml"]),
    says(&["study", "study.toml", "--plan"]),
    writes(
        "out.json",
        &[
            "fidelity",
            "run",
            "--recipe",
            "mxfp4",
            "--redraws",
            "2",
            "--batches",
            "2",
            "--out",
            "out.json",
            "--device",
            "cpu",
        ],
    ),
    writes("out.json", &["replay", "run", "6", "--batches", "2", "--out", "out.json", "--device", "cpu"]),
    says(&["recipe"]),
    says(&["recipe", "mxfp4-hopper", "--trace"]),
    says(&["recipe", "hif4", "--cost", "small.toml"]),
    writes("out.st", &["inspect", "small.toml", "--out", "out.st"]),
    says(&["doctor"]),
    says(&["doctor", "--links", "--device", "cpu"]),
];

impl Command {
    /// The process, on one thread.
    pub fn process(&self, place: &Place) -> std::process::Command {
        let mut process = place.command(self.args);
        process.env("NIBBLE_THREADS", "1");
        process
    }

    /// Removes what it has written.
    pub fn clear(&self, place: &Place) {
        let Some(out) = self.out else { return };
        for path in [place.path(out), place.path(out).with_extension("json")] {
            let gone =
                if path.is_dir() { std::fs::remove_dir_all(&path) } else { std::fs::remove_file(&path) };
            assert!(gone.is_ok() || !path.exists(), "{}", path.display());
        }
    }
}

/// A place with what the commands read: a configuration, a run, and a file of tensors, plain and quantized.
pub fn place() -> Place {
    let place = Place::with_text();
    std::fs::write(place.path("prompts.txt"), "nibble\nfour bits\n").unwrap();
    place.train(&["--set", "run.dir=run"]).ok();
    std::fs::copy(place.path("run/checkpoints/step-00000012/model.safetensors"), place.path("in.st"))
        .unwrap();
    place.nibble(&["quantize", "in.st", "q.st", "--format", "nvfp4", "--device", "cpu"]).ok();
    place.nibble(&["export", "run", "model"]).ok();
    std::fs::write(place.path("study.toml"), crate::study::STUDY).unwrap();
    // So many that what is written of them takes more than a KiB.
    std::fs::write(place.path("quiz.jsonl"), crate::QUESTION.repeat(60)).unwrap();
    place
}

/// Every file below a folder, and what is in it.
pub fn files(folder: PathBuf) -> Vec<(PathBuf, Vec<u8>)> {
    let mut all = Vec::new();
    for entry in folder.read_dir().unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() { all.extend(files(path)) } else { all.push((path.clone(), crate::read(path))) }
    }
    all.sort();
    all
}

/// Names of files that a command has begun and neither finished nor removed.
pub fn unfinished(place: &Place) -> Vec<PathBuf> {
    let names = files(place.path(".")).into_iter().map(|(path, _)| path);
    names.filter(|path| path.iter().any(|name| name.to_string_lossy().starts_with(".nibble-tmp-"))).collect()
}

#[test]
fn the_list_has_every_command() {
    let help = Place::new().nibble(&["--help"]).ok().stdout;
    let listed = help.split("Commands:\n").nth(1).unwrap();
    let names = listed.lines().filter_map(|line| {
        line.strip_prefix("  ")?.split(' ').next().filter(|n| !n.is_empty() && !n.starts_with('-'))
    });
    for name in names {
        let run = ALL.iter().any(|command| command.args[0] == name);
        assert!(run || LEFT_OUT.iter().any(|(left_out, _)| *left_out == name), "`{name}` is not in the list");
    }
}
