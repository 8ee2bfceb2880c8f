//! How runs end: what is on the disk when the end is not the planned one.

use crate::Place;

#[test]
fn the_last_steps_are_saved_before_the_last_evaluation() {
    let place = Place::with_text();
    // A step whose gradients are numbers, and that leaves weights of which BF16 has none.
    let wild = [
        "train.steps=1",
        "train.warmup_steps=0",
        "train.lr=3.4e38",
        "train.min_lr=3.4e38",
        "train.weight_decay=0",
        "checkpoint.every=0",
        "run.dir=run",
    ];
    let set: Vec<&str> = wild.iter().flat_map(|change| ["--set", *change]).collect();
    let done = place.train(&[&set[..], &["--recipe", "bf16"]].concat());
    assert!(done.stdout.contains("checkpoint: run/checkpoints/step-00000001"), "{}", done.stdout);
    assert!(place.path("run/loss.svg").exists());
    let told = |error: String| {
        let parts = [
            "held-out loss",
            "diverges",
            "train.lr (now 3.4e38)",
            "train.warmup_steps (now 0)",
            "If there is a checkpoint of this step",
        ];
        parts.iter().for_each(|part| assert!(error.contains(part), "no {part:?} in {error}"));
    };
    told(done.failed(1));
    assert!(place.path("run/checkpoints/step-00000001/state.json").exists());
    assert_eq!(crate::losses(place.path("run/metrics.jsonl")).len(), 1);
    let error = place.nibble(&["eval", "run"]).failed(1);
    assert!(error.contains("held-out loss") && !error.contains("train."), "{error}");
}

#[test]
fn a_long_evaluation_says_how_far_it_is() {
    let place = Place::new();
    let small = "model.layers=1 model.d_model=32 model.heads=2 model.kv_heads=1 model.expert_ffn=32 train.batch_size=4 \
        train.steps=1 train.warmup_steps=0 run.dir=run run.device=cpu";
    let set: Vec<&str> = small.split_whitespace().flat_map(|change| ["--set", change]).collect();
    let done = place.nibble(&[&["train", "tiny"], &set[..]].concat()).ok();
    assert!(!done.stdout.contains("evaluation: batch"), "in a log: {}", done.stdout);
    let done = place.nibble(&["eval", "run"]).ok();
    done.contains("evaluation: batch 26 of 256").contains("evaluation: batch 256 of 256");
    assert_eq!(done.stdout.matches("evaluation: batch").count(), 10, "{}", done.stdout);
}

/// A run that says each of its steps: more lines than a pipe holds, so it cannot end before they are read.
const LONG: [&str; 12] = [
    "--set",
    "train.steps=1200",
    "--set",
    "data.seq_len=32",
    "--set",
    "train.batch_size=2",
    "--set",
    "checkpoint.every=1000",
    "--recipe",
    "bf16",
    "--set",
    "run.threads=1",
];

/// Makes a process heed signals that whoever started the tests ignores: `nohup`, or `&` in a script.
#[cfg(unix)]
pub fn heeding_signals(command: &mut std::process::Command) {
    use std::os::unix::process::CommandExt;
    let heed = || {
        for signal in [libc::SIGHUP, libc::SIGINT, libc::SIGTERM] {
            // SAFETY: the default action is one that the system knows.
            unsafe { libc::signal(signal, libc::SIG_DFL) };
        }
        Ok(())
    };
    // SAFETY: between fork and exec `heed` calls nothing but `signal`, which is allowed there.
    unsafe { command.pre_exec(heed) };
}

/// Starts such a run and reads what it says up to a line that contains this.
fn started(place: &Place, args: &[&str], until: &str) -> (std::process::Child, Vec<String>) {
    std::fs::write(place.path("small.toml"), crate::SMALL).unwrap();
    let mut command = place.command(&[&["train", "small.toml"], &LONG[..], args].concat());
    #[cfg(unix)]
    heeding_signals(&mut command);
    said_until(&mut command, until)
}

/// Starts a process and reads what it says up to a line that contains this.
fn said_until(command: &mut std::process::Command, until: &str) -> (std::process::Child, Vec<String>) {
    use std::io::{BufRead, BufReader};
    use std::process::Stdio;
    let mut run = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    // Byte by byte: what has not been asked for stays in the pipe.
    let mut said = Vec::new();
    let mut pipe = BufReader::with_capacity(1, run.stdout.take().unwrap());
    while !said.last().is_some_and(|line: &String| line.contains(until)) {
        let mut line = String::new();
        assert!(pipe.read_line(&mut line).unwrap() > 0, "no {until} in {said:?}");
        said.push(line);
    }
    run.stdout = Some(pipe.into_inner());
    (run, said)
}

/// Starts such a run and sends a signal to it once it has said a step. Returns its exit code and what it printed.
#[cfg(unix)]
fn signalled(place: &Place, signal: &str, args: &[&str]) -> (Option<i32>, String, String) {
    let (run, said) = started(place, args, "step: 1 ");
    let kill = format!("kill -{signal} {}", run.id());
    assert!(std::process::Command::new("sh").args(["-c", &kill]).status().unwrap().success());
    let out = run.wait_with_output().unwrap();
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    (out.status.code(), said.concat() + &text(&out.stdout), text(&out.stderr))
}

#[cfg(unix)]
#[test]
fn a_signal_ends_a_run_after_its_step_and_nothing_is_lost() {
    let place = Place::with_text();
    place.train(&[&LONG[..], &["--set", "eval.every=0", "--set", "run.dir=whole"]].concat()).ok();
    for (signal, code, ranks) in
        [("INT", 130, "run.ranks=1"), ("TERM", 143, "run.ranks=2"), ("HUP", 129, "run.ranks=1")]
    {
        let dir = format!("run.dir={signal}");
        let args = ["--set", &dir, "--set", "eval.every=0", "--set", ranks];
        let (ended, said, stderr) = signalled(&place, signal, &args);
        assert_eq!(ended, Some(code), "{said}\n{stderr}");
        assert!(stderr.contains(&format!("SIG{signal}: the run ends after this step")), "{stderr}");
        assert!(said.contains("stopped after ") && !said.contains("held-out loss"), "{said}");
        assert!(said.contains(&format!("to resume: nibble train {signal} --resume")), "{said}");
        assert!(place.path(signal).join("loss.svg").exists());
        // The last step that was said is in the checkpoint: what goes on is the next one.
        let last = said.lines().rfind(|line| line.starts_with("step: ")).unwrap().to_owned();
        let last = last.split_whitespace().nth(1).unwrap();
        let done = place.nibble(&["train", signal, "--resume"]).ok();
        done.contains(&format!("continuing after step {last}\n"));
        let model =
            |dir: &str| crate::read(place.path(dir).join("checkpoints/step-00001200/model.safetensors"));
        assert!(model(signal) == model("whole"), "other weights");
    }
}

/// The run is held before its last evaluation: the signal comes before the first batch of that.
#[cfg(all(unix, debug_assertions))]
#[test]
fn a_signal_cuts_the_last_evaluation_short_and_the_next_process_makes_it() {
    use std::io::Read;
    let place = Place::with_text();
    for (signal, code, ranks) in
        [("INT", 130, "run.ranks=1"), ("TERM", 143, "run.ranks=2"), ("HUP", 129, "run.ranks=1")]
    {
        let dir = format!("run.dir={signal}");
        std::fs::write(place.path("small.toml"), crate::SMALL).unwrap();
        let mut command =
            place.command(&["train", "small.toml", "--set", "eval.every=11", "--set", &dir, "--set", ranks]);
        command.env("NIBBLE_FAULT", "hold@steps-done:1");
        heeding_signals(&mut command);
        let (mut run, said) = said_until(&mut command, "step: 12 ");
        let kill = format!("kill -{signal} {}", run.id());
        assert!(std::process::Command::new("sh").args(["-c", &kill]).status().unwrap().success());
        let mut told = [0; 64];
        assert!(run.stderr.as_mut().unwrap().read(&mut told).unwrap() > 0, "the signal has been taken");
        while std::fs::remove_file(place.path("steps-done.held")).is_err() {
            assert!(run.try_wait().unwrap().is_none(), "ended before it was held");
            std::thread::yield_now();
        }
        let out = run.wait_with_output().unwrap();
        let said = said.concat() + &String::from_utf8_lossy(&out.stdout);
        assert!(crate::read(place.path(signal).join("loss.svg")).starts_with(b"<svg"), "{said}");
        assert_eq!(out.status.code(), Some(code), "{said}");
        assert!(said.contains("stopped after 12 of 12 steps"), "{said}");
        assert!(said.contains("checkpoints/step-00000012"), "{said}");
        assert!(
            said.contains("step: 11  held-out loss") && !said.contains("step: 12  held-out loss"),
            "{said}"
        );
        // The next process evaluates, and writes no checkpoint.
        let done = place.nibble(&["train", signal, "--resume"]).ok();
        done.contains("continuing after step 12")
            .contains("step: 12  held-out loss")
            .contains("done: 12 steps");
        assert_eq!(done.stdout.matches("checkpoint: ").count(), 1, "{}", done.stdout);
    }
}

#[cfg(unix)]
#[test]
fn a_run_that_ignores_hangups_goes_on() {
    let place = Place::with_text();
    std::fs::write(place.path("small.toml"), crate::SMALL).unwrap();
    // As `nohup` starts it.
    let mut shell = place.program("sh");
    shell.args(["-c", r#"trap "" HUP; exec "$NIBBLE" train small.toml --set eval.every=0 "$@""#, "sh"]);
    shell.args(LONG).env("NIBBLE", env!("CARGO_BIN_EXE_nibble"));
    let (run, _) = said_until(&mut shell, "step: 1 ");
    let kill = format!("kill -HUP {}", run.id());
    assert!(std::process::Command::new("sh").args(["-c", &kill]).status().unwrap().success());
    let out = run.wait_with_output().unwrap();
    let said = String::from_utf8_lossy(&out.stdout).into_owned();
    assert!(out.status.success() && said.contains("done: 1,200 steps"), "{said}");
}

#[test]
fn a_picture_is_drawn_at_every_evaluation_and_of_several_runs() {
    let place = Place::with_text();
    let (mut run, _) = started(&place, &["--set", "run.dir=a"], "step: 5  held-out loss");
    run.kill().unwrap();
    run.wait().unwrap();
    assert!(crate::read(place.path("a/loss.svg")).starts_with(b"<svg"));
    place.train(&["--set", "run.dir=b"]).ok();
    let own = crate::read(place.path("b/loss.svg"));
    std::fs::remove_file(place.path("b/loss.svg")).unwrap();
    place.nibble(&["plot", "b"]).ok().contains("picture: b/loss.svg");
    assert!(crate::read(place.path("b/loss.svg")) == own, "the picture that the run drew itself");
    assert!(String::from_utf8(own).unwrap().contains("nats/byte"));
    place.nibble(&["plot", "a", "b"]).ok().contains("picture: losses.svg");
    place.nibble(&["plot", "b", "--output", "c.svg"]).ok();
    assert!(place.path("c.svg").exists());
    let error = place.nibble(&["plot", "nowhere"]).failed(2);
    assert!(error.contains("nowhere/metrics.jsonl"), "{error}");
}
