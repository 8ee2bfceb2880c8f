//! What ends `nibble launch` and its ranks besides a rank's own failure: signals, ranks that nobody hears, and the end of the launcher itself.

use crate::endings::heeding_signals;
use crate::{Place, SMALL};
use std::io::{BufRead, BufReader, Read};
use std::path::PathBuf;
use std::process::{Child, ChildStderr, Command, Stdio};

/// `nibble launch` with these options of a run in the folder `run`, in which this goes wrong.
fn launch(options: &[&str], fault: &str) -> (Place, Command) {
    let place = Place::with_text();
    std::fs::write(place.path("small.toml"), SMALL).unwrap();
    let run = ["--", "train", "small.toml", "--set", "run.dir=run"];
    let mut command = place.command(&[&["launch"], options, &run[..]].concat());
    heeding_signals(&mut command);
    command.env("NIBBLE_FAULT", fault).stdout(Stdio::null()).stderr(Stdio::piped());
    (place, command)
}

/// Whether the run has come to its end.
fn is_done(place: &Place) -> bool {
    place.path("run/checkpoints/step-00000012").exists()
}

/// A launcher whose first rank is held before its third step.
struct Held {
    place: Place,
    launcher: Child,
    stderr: BufReader<ChildStderr>,
    file: PathBuf,
}

impl Held {
    fn new(options: &[&str]) -> Self {
        let (place, mut command) = launch(options, "0/hold@step-begins:3");
        let mut launcher = command.spawn().unwrap();
        let stderr = BufReader::new(launcher.stderr.take().unwrap());
        let file = place.path("step-begins.held");
        while !file.exists() {
            assert!(launcher.try_wait().unwrap().is_none(), "ended before {}", file.display());
            std::thread::yield_now();
        }
        Self { place, launcher, stderr, file }
    }

    /// Sends signals to the launcher, one after another.
    fn send(&self, signals: &[&str]) {
        signals.iter().for_each(|signal| send(signal, self.launcher.id()));
    }

    /// Waits until the first rank has said that it has a signal.
    fn told(&mut self) {
        let mut line = String::new();
        while !line.contains("the run ends after this step") {
            line.clear();
            assert!(self.stderr.read_line(&mut line).unwrap() > 0, "the signal is not told of");
        }
    }

    /// The launcher's exit code, and what was said until all who could say something had ended.
    fn ended(&mut self) -> (Option<i32>, String) {
        let code = self.launcher.wait().unwrap().code();
        let mut said = String::new();
        self.stderr.read_to_string(&mut said).unwrap();
        (code, said)
    }
}

/// Sends a signal to a process.
pub fn send(signal: &str, process: u32) {
    let kill = format!("kill -{signal} {process}");
    assert!(Command::new("sh").args(["-c", &kill]).status().unwrap().success());
}

#[test]
fn whoever_insists_ends_the_run_and_it_is_not_started_again() {
    let mut held = Held::new(&["--ranks", "2", "--max-restarts", "3"]);
    held.send(&["INT"]);
    held.told();
    held.send(&["TERM", "HUP"]);
    let (code, said) = held.ended();
    assert!(matches!(code, Some(129 | 143)), "{code:?}: {said}");
    assert!(!said.contains("restart") && !said.contains("error"), "{said}");
    assert!(!is_done(&held.place));
}

#[test]
#[cfg(target_os = "linux")]
fn a_run_that_fails_after_a_signal_is_not_started_again() {
    let mut held = Held::new(&["--ranks", "2", "--max-restarts", "3"]);
    held.send(&["TERM"]);
    held.told();
    let killed = nibble_ranks(held.launcher.id());
    assert_eq!(killed.len(), 2);
    send("KILL", killed[0]);
    let (code, said) = held.ended();
    assert_eq!(code, Some(1), "{said}");
    assert!(said.contains("it was killed by SIGKILL") && !said.contains("restart"), "{said}");
    assert!(!is_done(&held.place));
}

#[test]
#[cfg(target_os = "linux")]
fn a_signal_between_two_starts_ends_the_launcher() {
    let mut held = Held::new(&["--ranks", "2", "--max-restarts", "3"]);
    // It finds the signal and the end of all ranks at once.
    held.send(&["STOP", "TERM"]);
    for rank in nibble_ranks(held.launcher.id()) {
        send("KILL", rank);
    }
    held.send(&["CONT"]);
    let (code, said) = held.ended();
    // The second, where ranks were there again before the signal was heeded.
    assert!(matches!(code, Some(1 | 143)), "{code:?}: {said}");
    assert!(!is_done(&held.place));
}

/// The children of a process.
#[cfg(target_os = "linux")]
fn nibble_ranks(launcher: u32) -> Vec<u32> {
    let tasks = std::fs::read_dir(format!("/proc/{launcher}/task")).unwrap();
    let children = tasks.map(|task| std::fs::read_to_string(task.unwrap().path().join("children")).unwrap());
    children.flat_map(|of| of.split_whitespace().map(|id| id.parse().unwrap()).collect::<Vec<_>>()).collect()
}

#[test]
fn ranks_that_all_stop_are_ended() {
    let (_place, mut command) = launch(&["--ranks", "2", "--deadline", "2"], "sigstop@step-begins:3");
    let out = command.output().unwrap();
    let said = String::from_utf8_lossy(&out.stderr);
    assert_eq!(out.status.code(), Some(1), "{said}");
    assert!(said.contains("nothing was heard from it for 1 s"), "{said}");
}

#[test]
#[cfg(target_os = "linux")]
fn a_rank_that_is_alone_ends_with_its_launcher() {
    let mut held = Held::new(&["--ranks", "1"]);
    held.launcher.kill().unwrap();
    held.launcher.wait().unwrap();
    held.told();
    std::fs::remove_file(&held.file).unwrap();
    // The rank has the launcher's stderr: its end is the rank's.
    held.ended();
    assert!(!is_done(&held.place));
}
