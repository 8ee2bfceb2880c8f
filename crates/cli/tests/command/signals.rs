//! Signals that come once, twice and three times, in every phase of a run. A run is held at a point while they are sent.

use crate::endings::heeding_signals;
use crate::kill::{Undisturbed, train};
use crate::launchers::{SECRET, free_port};
use nibble_testkit::Breadth;
use std::io::{BufRead, BufReader};
use std::path::PathBuf;
use std::process::{Child, ChildStderr, Command, Stdio};

/// Phases of a run, by a point of each that one thread passes.
const PHASES: [&str; 12] = [
    "loading:1",
    "claimed:1",
    "run-opened:1",
    "step-begins:3",
    "before-optimizer:3",
    "evaluation-begins:1",
    "copy-begins:1",
    "file-begun:1",
    "before-rename:2",
    "steps-done:1",
    "evaluation-begins:3",
    "run-ends:1",
];

/// Those after which nothing is left to be stopped.
const TOO_LATE: [&str; 1] = ["run-ends:1"];

/// A run that is held at a point.
struct Held {
    child: Child,
    stderr: BufReader<ChildStderr>,
    file: PathBuf,
}

impl Held {
    /// A new run in `dir`, held where it passes a point for so many times. `window`: seconds in which a second signal is the first one's echo.
    fn at(run: &Undisturbed, dir: &str, phase: &str, window: &str) -> Self {
        let mut command = train(&run.place, dir, 1, &[]);
        command.env("NIBBLE_FAULT", format!("hold@{phase}")).env("NIBBLE_SIGNAL_WINDOW", window);
        let (point, _) = phase.split_once(':').unwrap();
        Self::start(command, run.place.path(format!("{point}.held")))
    }

    /// Starts a command, and waits until it is held and has made this file.
    fn start(mut command: Command, file: PathBuf) -> Self {
        heeding_signals(&mut command);
        let mut child = command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
        let stderr = BufReader::new(child.stderr.take().unwrap());
        while !file.exists() {
            assert!(child.try_wait().unwrap().is_none(), "ended before {}", file.display());
            std::thread::yield_now();
        }
        Self { child, stderr, file }
    }

    fn send(&self, signal: &str) {
        let kill = format!("kill -{signal} {}", self.child.id());
        assert!(Command::new("sh").args(["-c", &kill]).status().unwrap().success());
    }

    /// What is said of the first signal, once it is.
    fn told(&mut self) -> String {
        let mut line = String::new();
        // An empty line comes first.
        while line.trim().is_empty() {
            assert!(self.stderr.read_line(&mut line).unwrap() > 0, "the signal is not told of");
        }
        line
    }

    /// Lets the run go on. Its exit code.
    fn released(mut self) -> Option<i32> {
        std::fs::remove_file(&self.file).unwrap();
        self.child.wait().unwrap().code()
    }

    /// The exit code of a run that ends where it is held.
    fn ended(mut self) -> Option<i32> {
        let code = self.child.wait().unwrap().code();
        std::fs::remove_file(&self.file).unwrap();
        code
    }
}

#[test]
fn a_signal_that_comes_twice_at_once_counts_once_in_every_phase() {
    let run = Undisturbed::new(1);
    for phase in PHASES {
        let mut held = Held::at(&run, "run", phase, "86400");
        held.send("TERM");
        let told = held.told();
        assert!(told.contains("SIGTERM: the run ends after this step"), "{phase}: {told}");
        assert!(told.contains("a second one after 3 s, or a third, ends it at once"), "{phase}: {told}");
        // `timeout` sends a SIGTERM to the process and to its group; a shell and a terminal may each send one of their own.
        held.send(if phase.starts_with('s') { "INT" } else { "TERM" });
        let code = held.released();
        assert_eq!(code, Some(if TOO_LATE.contains(&phase) { 0 } else { 143 }), "{phase}");
        // It has saved what it had done.
        let has_saved = std::fs::read_dir(run.place.path("run/checkpoints")).unwrap();
        let has_saved = has_saved.filter(|e| e.as_ref().unwrap().path().join("state.json").exists());
        assert!(has_saved.count() > 0, "{phase}: no checkpoint");
        run.assert_resumes("run", phase);
    }
}

#[test]
fn a_second_signal_later_or_a_third_at_any_time_ends_the_process_in_every_phase() {
    let run = Undisturbed::new(1);
    for phase in PHASES {
        let mut held = Held::at(&run, "run", phase, "0");
        held.send("INT");
        held.told();
        held.send("TERM");
        assert_eq!(held.ended(), Some(143), "{phase}: the second signal's");
        run.assert_resumes("run", phase);
        let mut held = Held::at(&run, "run", phase, "86400");
        held.send("INT");
        held.told();
        // Of one kind the system keeps one; either of these may come last.
        held.send("TERM");
        held.send("HUP");
        let code = held.ended();
        assert!(matches!(code, Some(129 | 143)), "{phase}: {code:?}");
        run.assert_resumes("run", phase);
    }
}

/// A second signal would end a rank at once, without its checkpoint.
#[test]
fn a_signal_to_the_launcher_reaches_every_rank_once_and_the_run_saves_once() {
    for rank in [0, 1] {
        let run = Undisturbed::new(1);
        let (fault, window) = (format!("{rank}/hold@before-optimizer:3"), "0");
        let mut command = run.place.command(&["launch", "--ranks", "2", "--max-restarts", "3", "--"]);
        command.args(train(&run.place, "run", 2, &[]).get_args());
        command.env("NIBBLE_FAULT", fault).env("NIBBLE_SIGNAL_WINDOW", window);
        let mut held = Held::start(command, run.place.path("before-optimizer.held"));
        held.send("TERM");
        let told = held.told();
        assert!(told.contains("SIGTERM: the run ends after this step"), "{told}");
        assert_eq!(held.released(), Some(143));
        let saved = std::fs::read_dir(run.place.path("run/checkpoints")).unwrap();
        let saved = saved.filter(|e| e.as_ref().unwrap().path().join("state.json").exists()).count();
        assert!((1..=2).contains(&saved), "{saved} checkpoints");
        run.assert_resumes("run", "a signal to the launcher");
    }
}

/// The process of a rank that works in the run's place, by what its launcher has set.
#[cfg(target_os = "linux")]
fn process_of(run: &Undisturbed, variable: &str) -> u32 {
    let place = run.place.path(".").canonicalize().unwrap();
    let processes = std::fs::read_dir("/proc").unwrap().map(|entry| entry.unwrap().path());
    let is_it = |process: &PathBuf| {
        std::fs::read_link(process.join("cwd")).is_ok_and(|at| at == place)
            && std::fs::read(process.join("environ"))
                .is_ok_and(|set| set.split(|byte| *byte == 0).any(|one| one == variable.as_bytes()))
    };
    let process = processes.into_iter().find(is_it).unwrap_or_else(|| panic!("no process with {variable}"));
    process.file_name().unwrap().to_str().unwrap().parse().unwrap()
}

/// The others learn of it from the run alone, and wait for no signal of their own.
#[test]
#[cfg(target_os = "linux")]
fn a_signal_to_one_rank_ends_all_with_its_code_and_the_run_saves_once() {
    const SIGNALS: [(&str, i32); 3] = [("TERM", 143), ("INT", 130), ("HUP", 129)];
    const PHASES: [&str; 5] =
        ["loading:1", "before-optimizer:3", "evaluation-begins:1", "steps-done:1", "evaluation-begins:3"];
    let run = Undisturbed::new(1);
    for [signal, asked, phase, launched] in Breadth::of_tests().cross([SIGNALS.len(), 2, PHASES.len(), 2]) {
        let ((signal, code), phase, launched) = (SIGNALS[signal], PHASES[phase], launched == 0);
        let what = format!("SIG{signal} to rank {asked} in {phase}, by nibble launch: {launched}");
        let fault = format!("{asked}/hold@{phase}");
        let file = run.place.path(format!("{}.held", phase.split_once(':').unwrap().0));
        let train = train(&run.place, "run", 2, &["--set", "train.expert_shards=2"]);
        let mut commands: Vec<Command> = match launched {
            true => {
                let mut command = run.place.command(&["launch", "--ranks", "2", "--deadline", "4", "--"]);
                command.args(train.get_args());
                vec![command]
            }
            false => {
                let port = free_port().to_string();
                let rank = |rank: usize| {
                    let mut command = run.place.command(&[]);
                    command.args(train.get_args()).env("RANK", rank.to_string()).env("WORLD_SIZE", "2");
                    command.env("MASTER_ADDR", "127.0.0.1").env("MASTER_PORT", &port);
                    command.env("NIBBLE_SECRET", SECRET).env("NIBBLE_DEADLINE", "4");
                    command
                };
                [0, 1].map(rank).into()
            }
        };
        let mut children: Vec<Child> = Vec::new();
        for command in &mut commands {
            heeding_signals(command);
            command.env("NIBBLE_FAULT", &fault).stdout(Stdio::null()).stderr(Stdio::null());
            children.push(command.spawn().unwrap());
        }
        while !file.exists() {
            let ended = children.iter_mut().find_map(|child| child.try_wait().unwrap());
            assert_eq!(ended, None, "{what}: one ended before {phase}");
            std::thread::yield_now();
        }
        let variable = if launched { "NIBBLE_RANK" } else { "RANK" };
        let rank = process_of(&run, &format!("{variable}={asked}"));
        assert!(
            Command::new("kill").args([&format!("-{signal}"), &rank.to_string()]).status().unwrap().success()
        );
        std::fs::remove_file(&file).unwrap();
        for mut child in children {
            assert_eq!(child.wait().unwrap().code(), Some(code), "{what}");
        }
        let saved = std::fs::read_dir(run.place.path("run/checkpoints")).unwrap();
        let saved = saved.filter(|e| e.as_ref().unwrap().path().join("state.json").exists()).count();
        assert!((1..=2).contains(&saved), "{what}: {saved} checkpoints");
        std::fs::remove_dir_all(run.place.path("run")).unwrap();
    }
}

#[test]
fn a_process_that_signals_end_at_once_leaves_no_unfinished_file() {
    let run = Undisturbed::new(1);
    let mut held = Held::at(&run, "run", "file-unnamed:4", "0");
    let unfinished = || {
        let names = std::fs::read_dir(run.place.path("run")).unwrap().map(|e| e.unwrap().file_name());
        names.filter(|name| name.to_str().unwrap().starts_with(".nibble-tmp")).count()
    };
    assert_eq!(unfinished(), 1);
    held.send("TERM");
    held.told();
    held.send("TERM");
    assert_eq!(held.ended(), Some(143));
    assert_eq!(unfinished(), 0);
    run.assert_resumes("run", "two signals");
}

#[test]
fn a_command_beside_a_run_takes_the_newest_checkpoint_where_the_one_it_meant_has_gone() {
    let run = Undisturbed::new(1);
    let at = |step: u32| run.place.path(format!("whole/checkpoints/step-{step:08}"));
    std::fs::rename(at(12), run.place.path("aside")).unwrap();
    for command in ["eval", "generate"] {
        let mut looking = run.place.command(&[command, "whole"]);
        looking.env("NIBBLE_FAULT", "hold@checkpoint-listed:1");
        let held = Held::start(looking, run.place.path("checkpoint-listed.held"));
        // The run publishes one checkpoint and removes another.
        std::fs::rename(run.place.path("aside"), at(12)).unwrap();
        std::fs::rename(at(10), run.place.path("gone")).unwrap();
        assert_eq!(held.released(), Some(0), "{command}");
        std::fs::rename(at(12), run.place.path("aside")).unwrap();
        std::fs::rename(run.place.path("gone"), at(10)).unwrap();
    }
}
