//! No output replaces what was not asked for, whichever command writes it.

use crate::gpu::has_gpu;
use crate::{Place, read};
use std::collections::BTreeSet;

/// How an output is asked for.
struct Case {
    /// Command and option, or `OUT` for an argument without one.
    output: (&'static str, &'static str),
    /// What else it takes.
    more: &'static str,
    /// Files that it reads.
    inputs: &'static [&'static str],
    does: Does,
}

/// What happens where the output is accepted.
#[derive(Clone, Copy, PartialEq)]
enum Does {
    /// It is done at once.
    Writes,
    /// It asks for a GPU.
    AsksForGpu,
    /// It takes long; the same code as another's writes the output.
    Measures,
}

const fn case(command: &'static str, option: &'static str, more: &'static str, does: Does) -> Case {
    Case { output: (command, option), more, inputs: &[], does }
}

const fn reading(mut case: Case, inputs: &'static [&'static str]) -> Case {
    case.inputs = inputs;
    case
}

/// Every output of every command.
const CASES: &[Case] = &[
    reading(case("plot", "--output", "run", Does::Writes), &["run/metrics.jsonl", "run/config.toml"]),
    reading(case("report", "--out", "run", Does::Writes), &["run/metrics.jsonl", "run/recipe.toml"]),
    reading(case("quantize", "OUT", "m.safetensors --format mxfp4", Does::Writes), &["m.safetensors"]),
    reading(
        case("inspect", "--out", "small.toml --recipe mine.toml", Does::Writes),
        &["small.toml", "mine.toml", "base.toml", "text.txt"],
    ),
    reading(
        case("fidelity", "--out", "run --recipe bf16 --redraws 1 --batches 2 --held-out 1", Does::Writes),
        &["run/metrics.jsonl", "run/config.toml", "text.txt"],
    ),
    reading(
        case("replay", "--out", "run 2 --batches 1", Does::Writes),
        &["run/metrics.jsonl", "run/config.toml", "run/spikes.jsonl", "text.txt"],
    ),
    case("verify", "--json", "--cpu --only cast", Does::Writes),
    case("bench", "--json", "", Does::Measures),
    reading(case("bench all", "--json", "small.toml", Does::Measures), &["small.toml", "text.txt"]),
    reading(
        case("bench step", "--json", "small.toml --recipe mine.toml --steps 1", Does::Writes),
        &["small.toml", "mine.toml", "base.toml", "text.txt"],
    ),
    case("bench ops", "--json", "", Does::Measures),
    case("bench kernels", "--json", "", Does::AsksForGpu),
    case("bench kernels", "--plot", "", Does::AsksForGpu),
    case("bench gemm", "--json", "", Does::AsksForGpu),
    case("bench gemm", "--plot", "", Does::AsksForGpu),
    case("bench gemm", "--tune", "", Does::AsksForGpu),
    case("bench attention", "--json", "", Does::AsksForGpu),
    case("bench experts", "--json", "", Does::AsksForGpu),
    case("bench grouped", "--json", "--format mxfp8-e4m3", Does::AsksForGpu),
    reading(
        case("bench exchange", "--json", "--recipe mine.toml", Does::Writes),
        &["mine.toml", "base.toml"],
    ),
];

impl Case {
    fn name(&self) -> String {
        format!("{} {}", self.output.0, self.output.1)
    }

    /// The command line that writes to `out`.
    fn args<'a>(&self, out: &'a str, force: bool) -> Vec<&'a str> {
        let (command, option) = self.output;
        let words = |text: &'static str| text.split_whitespace();
        let option = (option != "OUT").then_some(option);
        let force = force.then_some("--force");
        words(command).chain(words(self.more)).chain(option).chain([out]).chain(force).collect()
    }

    /// Asserts that an output is refused, before anything else is looked at, and stays as it was.
    fn refuses(&self, place: &Place, out: &str, force: bool) -> String {
        let before = std::fs::read(place.path(out)).ok();
        let error = place.nibble(&self.args(out, force)).failed(2);
        let told = format!("{}, --force {force}: {error}", self.name());
        assert!(error.contains(out) && !error.contains("Hopper"), "{told}");
        assert!(std::fs::read(place.path(out)).ok() == before, "{told}: changed");
        error
    }
}

/// Files that every command may be asked to read or to replace.
fn place() -> Place {
    let place = Place::with_text();
    place.train(&["--set", "run.dir=run", "--set", "train.steps=2"]).ok();
    std::fs::write(place.path("mine.toml"), "extends = \"base.toml\"\n").unwrap();
    std::fs::write(place.path("base.toml"), "extends = \"bf16\"\n").unwrap();
    std::fs::copy(place.path("run/checkpoints/step-00000002/model.safetensors"), place.path("m.safetensors"))
        .unwrap();
    place
}

/// The outputs that the help of a command and of its subcommands names.
fn outputs_in_help(place: &Place, command: &str, found: &mut BTreeSet<String>) {
    let words: Vec<&str> = command.split_whitespace().chain(["--help"]).collect();
    let help = place.nibble(&words).ok().stdout;
    let mut section = "";
    for line in help.lines() {
        // Between options of long help there are empty lines.
        if !line.is_empty() && !line.starts_with(' ') {
            section = line;
        }
        let mut words = line.split_whitespace();
        let (first, second) = (words.next().unwrap_or_default(), words.next().unwrap_or_default());
        match section {
            "Options:" | "Arguments:" if first == "<OUT>" || first == "[OUT]" => {
                found.insert(format!("{command} OUT"));
            }
            "Options:" if first.starts_with("--") && second == "<OUT>" => {
                found.insert(format!("{command} {first}"));
            }
            "Commands:" | "What to measure:"
                if line.starts_with("  ")
                    && !line.starts_with("   ")
                    && first != "help"
                    && !first.starts_with('-') =>
            {
                outputs_in_help(place, format!("{command} {first}").trim(), found);
            }
            _ => {}
        }
    }
}

#[test]
fn every_output_that_help_names_is_tried_here() {
    let mut found = BTreeSet::new();
    outputs_in_help(&Place::new(), "", &mut found);
    assert_eq!(found, CASES.iter().map(Case::name).collect::<BTreeSet<_>>());
}

/// Somebody expects a file at the other end of a link, which would not be there.
#[cfg(unix)]
#[test]
fn no_output_takes_the_place_of_a_link_that_leads_nowhere() {
    let place = place();
    std::os::unix::fs::symlink("gone/file.json", place.path("link.json")).unwrap();
    std::os::unix::fs::symlink("gone", place.path("folder")).unwrap();
    for case in CASES {
        for force in [false, true] {
            let error = case.refuses(&place, "link.json", force);
            assert!(error.contains("is a link to gone/file.json, which does not exist"), "{error}");
            let error = case.refuses(&place, "folder/out.json", force);
            assert!(
                error.contains("lies in folder, which is a link to gone, which does not exist"),
                "{error}"
            );
        }
    }
    for args in [["export", "run", "folder"], ["train", "small.toml", "--set=run.dir=folder"]] {
        let error = place.nibble(&args).failed(2);
        assert!(error.contains("is a link to gone, which does not exist"), "{error}");
    }
    assert!(!place.path("gone").exists() && std::fs::read_link(place.path("link.json")).is_ok());
}

#[test]
fn a_file_that_the_command_has_not_written_stays() {
    let place = place();
    std::fs::write(place.path("thesis.txt"), "mine").unwrap();
    std::fs::write(place.path("thesis.svg"), "<svg/>").unwrap();
    std::fs::write(place.path("thesis.json"), "{\"generator\": \"mine\"}").unwrap();
    for case in CASES {
        for file in ["thesis.txt", "thesis.svg", "thesis.json", "text.txt", "m.safetensors"] {
            let error = case.refuses(&place, file, false);
            let is_input = case.inputs.contains(&file);
            assert!(is_input || error.contains("--force"), "{}: {error}", case.name());
        }
        case.refuses(&place, "run", true);
    }
}

#[test]
fn inputs_and_files_of_runs_stay_whatever_is_forced() {
    let place = place();
    let of_run = [
        "metrics.jsonl",
        "config.toml",
        "loss.svg",
        "checkpoints/state.json",
        "events.out.tfevents.1.2.nibble",
    ];
    for case in CASES {
        for input in case.inputs {
            case.refuses(&place, input, true);
            case.refuses(&place, &format!("./{input}"), true);
        }
        for file in of_run {
            let error = case.refuses(&place, &format!("run/{file}"), true);
            assert!(error.contains("run"), "{error}");
        }
    }
}

#[test]
fn what_is_forced_is_replaced_and_known_from_then_on() {
    let place = place();
    for (i, case) in CASES.iter().enumerate() {
        let file = format!("mine-{i}.txt");
        std::fs::write(place.path(&file), "mine").unwrap();
        match case.does {
            Does::Writes => {
                place.nibble(&case.args(&file, true)).ok();
                assert!(read(place.path(&file)) != b"mine", "{}", case.name());
                place.nibble(&case.args(&file, false)).ok();
            }
            Does::AsksForGpu if !has_gpu() => {
                let error = place.nibble(&case.args(&file, true)).failed(2);
                assert!(error.contains("Hopper GPU"), "{}: {error}", case.name());
                assert_eq!(read(place.path(&file)), b"mine");
            }
            Does::AsksForGpu | Does::Measures => {}
        }
    }
    let left: Vec<_> = std::fs::read_dir(place.path(".")).unwrap().map(|e| e.unwrap().file_name()).collect();
    assert!(!left.iter().any(|name| name.to_string_lossy().starts_with('.')), "{left:?}");
}

#[cfg(unix)]
#[test]
fn pipes_are_written_to_and_stay() {
    use std::os::unix::fs::FileTypeExt;
    let place = place();
    let pipe = place.path("pipe");
    assert!(std::process::Command::new("mkfifo").arg(&pipe).status().unwrap().success());
    for case in CASES {
        let error = place.nibble(&case.args("pipe", true)).failed(2);
        assert!(error.contains("nobody reads"), "{}: {error}", case.name());
        if case.does != Does::Writes {
            continue;
        }
        // Open for both, so that no end waits for the other.
        let both = std::fs::File::options().read(true).write(true).open(&pipe).unwrap();
        let mut reader = std::fs::File::open(&pipe).unwrap();
        let content = std::thread::spawn(move || {
            let mut content = Vec::new();
            std::io::Read::read_to_end(&mut reader, &mut content).unwrap();
            content
        });
        place.nibble(&case.args("pipe", false)).ok();
        drop(both);
        let content = content.join().unwrap();
        assert!(
            content.len() > 1 && std::fs::metadata(&pipe).unwrap().file_type().is_fifo(),
            "{}",
            case.name()
        );
        // Standard output is a pipe here.
        let out = place.command(&case.args("/dev/stdout", false)).output().unwrap();
        assert!(out.status.success() && out.stdout.len() > content.len(), "{}: {out:?}", case.name());
    }
}

#[test]
fn what_lies_beside_an_output_stays_too() {
    let place = place();
    let inspect = |out: &str| place.nibble(&["inspect", "small.toml", "--out", out]);
    std::fs::write(place.path("a.json"), "{}").unwrap();
    let error = inspect("a.safetensors").failed(2);
    assert!(error.contains("the model's sizes") && error.contains("a.json is there already"), "{error}");
    assert_eq!(read(place.path("a.json")), b"{}");
    let error = inspect("x.json").failed(2);
    assert!(error.contains("two outputs") && !place.path("x.json").exists(), "{error}");
    let error = place.nibble(&["bench", "gemm", "--json", "x", "--plot", "./x"]).failed(2);
    assert!(error.contains("two outputs"), "{error}");
}

#[cfg(all(unix, debug_assertions))]
#[test]
fn a_signal_ends_a_command_with_nothing_unfinished() {
    use std::os::unix::process::ExitStatusExt;
    let place = place();
    let unfinished = || {
        let all = std::fs::read_dir(place.path(".")).unwrap().flatten();
        let mut all = all.filter(|entry| entry.file_name().to_string_lossy().starts_with('.'));
        all.any(|entry| entry.metadata().is_ok_and(|there| there.len() > 0))
    };
    for signal in [libc::SIGINT, libc::SIGTERM, libc::SIGHUP] {
        let mut command = place.command(&["quantize", "m.safetensors", "q.safetensors", "--format", "mxfp4"]);
        crate::endings::heeding_signals(&mut command);
        // It stops with its output on the disk, under another name.
        let command = command.env("NIBBLE_FAULT", "stop@file-unnamed:1").stdout(std::process::Stdio::null());
        let mut running = command.spawn().unwrap();
        while !unfinished() {
            assert!(running.try_wait().unwrap().is_none(), "it ended");
            std::thread::yield_now();
        }
        let kill = format!("kill -{signal} {}", running.id());
        assert!(std::process::Command::new("sh").args(["-c", &kill]).status().unwrap().success());
        assert_eq!(running.wait().unwrap().signal(), Some(signal));
        assert!(!unfinished() && !place.path("q.safetensors").exists());
    }
}
