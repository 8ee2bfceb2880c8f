//! Signals that come once, twice and three times, in every phase of a run. A run is held at a point while they are sent.

use crate::endings::heeding_signals;
use crate::kill::{Undisturbed, train};
use crate::launch_ends::send;
#[cfg(target_os = "linux")]
use crate::launchers::{SECRET, free_port, of_srun, processes_in};
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
        send(signal, self.child.id());
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
        assert!(told.contains("a second signal after 3 s, or a third, ends it at once"), "{phase}: {told}");
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

/// Who starts two ranks.
#[derive(Debug, Clone, Copy, PartialEq)]
#[cfg(target_os = "linux")]
enum Starter {
    Launch,
    Torchrun,
    Srun,
}

#[cfg(target_os = "linux")]
impl Starter {
    const ALL: [Self; 3] = [Self::Launch, Self::Torchrun, Self::Srun];

    /// What is started: one launcher, or each rank by itself. And the variable of a rank's number.
    fn commands(self, run: &Undisturbed) -> (Vec<Command>, &'static str) {
        let train = train(&run.place, "run", 2, &["--set", "train.expert_shards=2"]);
        let port = free_port().to_string();
        let rank = |rank: usize| {
            let mut command = run.place.command(&[]);
            command.args(train.get_args()).env("NIBBLE_SECRET", SECRET).env("NIBBLE_DEADLINE", "4");
            match self {
                Self::Srun => of_srun(&mut command, &port, rank),
                _ => {
                    command.env("RANK", rank.to_string()).env("WORLD_SIZE", "2");
                    command.env("MASTER_ADDR", "127.0.0.1").env("MASTER_PORT", &port);
                }
            }
            command
        };
        match self {
            Self::Launch => {
                let mut command = run.place.command(&["launch", "--ranks", "2", "--deadline", "4"]);
                command.args(["--max-restarts", "3", "--"]).args(train.get_args());
                (vec![command], "NIBBLE_RANK")
            }
            Self::Torchrun => ([0, 1].map(rank).into(), "RANK"),
            Self::Srun => ([0, 1].map(rank).into(), "SLURM_PROCID"),
        }
    }
}

/// Who gets a signal.
#[derive(Debug, Clone, Copy, PartialEq)]
#[cfg(target_os = "linux")]
enum Asked {
    Rank(usize),
    /// `nibble launch`; another launcher passes a signal on to every rank.
    Launcher,
    /// The launcher and every rank, as whoever ends all processes of a job does.
    All,
}

/// To one rank, the others learn of it from the run alone, and wait for no signal of their own; what comes twice at once is one request.
#[test]
#[cfg(target_os = "linux")]
fn a_signal_to_any_process_ends_all_with_its_code_and_the_run_saves_once() {
    const SIGNALS: [(&str, i32); 3] = [("TERM", 143), ("INT", 130), ("HUP", 129)];
    const ASKED: [Asked; 4] = [Asked::Rank(0), Asked::Rank(1), Asked::Launcher, Asked::All];
    const PHASES: [&str; 7] = [
        "loading:1",
        "before-optimizer:3",
        "evaluation-begins:1",
        "file-begun:1",
        "before-rename:2",
        "steps-done:1",
        "evaluation-begins:3",
    ];
    let run = Undisturbed::new(1);
    let lengths = [SIGNALS.len(), 2, ASKED.len(), PHASES.len(), Starter::ALL.len()];
    for [signal, twice, asked, phase, starter] in Breadth::of_tests().cross(lengths) {
        let ((signal, code), twice, asked) = (SIGNALS[signal], twice == 1, ASKED[asked]);
        let (phase, starter) = (PHASES[phase], Starter::ALL[starter]);
        let what = format!("SIG{signal} to {asked:?}, twice: {twice}, in {phase}, by {starter:?}");
        // The first rank passes every point.
        let held = if asked == Asked::Rank(1) && !phase.contains('-') { 1 } else { 0 };
        let file = run.place.path(format!("{}.held", phase.split_once(':').unwrap().0));
        let (mut commands, variable) = starter.commands(&run);
        let mut children: Vec<Child> = Vec::new();
        for command in &mut commands {
            heeding_signals(command);
            command.env("NIBBLE_FAULT", format!("{held}/hold@{phase}")).env("NIBBLE_SIGNAL_WINDOW", "86400");
            children.push(command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap());
        }
        while !file.exists() {
            let ended = children.iter_mut().find_map(|child| child.try_wait().unwrap());
            assert_eq!(ended, None, "{what}: one ended before {phase}");
            std::thread::yield_now();
        }
        let started: Vec<u32> = children.iter().map(Child::id).collect();
        let ranks = [0, 1].map(|rank| {
            let variable = format!("{variable}={rank}");
            let process = processes_in(&run.place).into_iter().find(|process| process.has(&variable));
            process.unwrap_or_else(|| panic!("{what}: no process with {variable}")).id
        });
        let asked: Vec<u32> = match asked {
            Asked::Rank(rank) => vec![ranks[rank]],
            Asked::All if starter == Starter::Launch => [&started[..], &ranks].concat(),
            Asked::Launcher | Asked::All => started,
        };
        for process in asked.iter().chain(asked.iter().filter(|_| twice)) {
            send(signal, *process);
        }
        // A launcher passes it on in its own time, and who is the first rank tells.
        if asked.contains(&children[0].id()) {
            let mut said = BufReader::new(children[0].stderr.take().unwrap());
            let mut line = String::new();
            while !line.contains("the run ends after this step") {
                line.clear();
                assert!(said.read_line(&mut line).unwrap() > 0, "{what}: the signal is not told of");
            }
            children[0].stderr = Some(said.into_inner());
        }
        std::fs::remove_file(&file).unwrap();
        for child in children {
            let out = child.wait_with_output().unwrap();
            assert_eq!(out.status.code(), Some(code), "{what}: {}", String::from_utf8_lossy(&out.stderr));
        }
        assert!(processes_in(&run.place).is_empty(), "{what}: a process is left");
        let saved = std::fs::read_dir(run.place.path("run/checkpoints")).unwrap();
        let names: Vec<PathBuf> = saved.map(|entry| entry.unwrap().path()).collect();
        let whole = names.iter().filter(|name| name.join("state.json").exists()).count();
        assert!((1..=2).contains(&whole), "{what}: {names:?}");
        let unfinished = |name: &PathBuf| {
            !name.ends_with(".lock") && name.file_name().unwrap().to_str().unwrap().starts_with('.')
        };
        assert!(!names.iter().any(unfinished), "{what}: {names:?}");
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
