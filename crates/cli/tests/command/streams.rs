//! Standard output and standard error that take nothing, and names that would give orders to a terminal.

use crate::every::{self, Command};
use crate::{Done, Place};
use std::fs::File;
use std::process::{Output, Stdio};

/// How a command ends whose streams are these; a closed one is closed by a shell.
fn ended(place: &Place, command: &Command, redirect: &str) -> Output {
    let inner = command.process(place);
    let mut shell = place.program("sh");
    shell.arg("-c").arg(format!("exec \"$@\" {redirect}")).arg("sh").arg(inner.get_program());
    shell.args(inner.get_args()).env("NIBBLE_THREADS", "1");
    shell.output().unwrap()
}

fn assert_no_panic(out: &Output, what: &str) {
    for text in [&out.stdout, &out.stderr] {
        let text = String::from_utf8_lossy(text);
        assert!(!text.contains("panicked") && !text.contains("internal error"), "{what}: {text}");
    }
    assert!(out.status.code().is_some(), "{what}: {:?}", out.status);
}

#[test]
fn outputs_that_take_nothing_are_no_defect() {
    let place = every::place();
    for command in every::ALL {
        for (redirect, code) in [(">&-", 0), (">/dev/full", 1), ("2>&-", 0), ("2>/dev/full", 0)] {
            let what = format!("{:?} {redirect}", command.args);
            let out = ended(&place, command, redirect);
            assert_no_panic(&out, &what);
            assert_eq!(out.status.code(), Some(code), "{what}: {}", String::from_utf8_lossy(&out.stderr));
            if code == 1 {
                let said = String::from_utf8_lossy(&out.stderr).into_owned();
                let told = said.lines().find(|line| !line.starts_with("computed under recipe "));
                assert!(
                    told.is_some_and(|line| line.starts_with("error: standard output: ")),
                    "{what}: {said}"
                );
            }
            command.clear(&place);
        }
        // A pipe whose reader has gone wanted no more.
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        let out = command.process(&place).stdout(writer).output().unwrap();
        assert_no_panic(&out, &format!("{:?} | true", command.args));
        assert_eq!(out.status.code(), Some(0), "{:?} | true", command.args);
        command.clear(&place);
    }
}

#[test]
fn errors_and_help_that_nobody_takes_keep_their_exit_codes() {
    let place = Place::new();
    let full = || File::options().write(true).open("/dev/full").unwrap();
    for args in
        [&["eval", "nowhere"][..], &["--bad"], &["train", "--set", "x"], &["quantize", "a", "b", "--back"]]
    {
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        for stderr in [Stdio::from(full()), Stdio::from(writer)] {
            let out = place.command(args).stderr(stderr).output().unwrap();
            assert_eq!(out.status.code(), Some(2), "{args:?}");
        }
    }
    for args in [&["--help"][..], &["train", "--help"], &["help", "quantize"], &["--version"]] {
        let out = place.command(args).stdout(full()).output().unwrap();
        assert_eq!(out.status.code(), Some(1), "{args:?}");
        assert!(String::from_utf8_lossy(&out.stderr).starts_with("error: standard output: "), "{args:?}");
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        let out = place.command(args).stdout(writer).output().unwrap();
        assert_eq!((out.status.code(), out.stderr), (Some(0), Vec::new()), "{args:?}");
    }
    // A warning that nobody takes.
    let out = place.command(&["recipe"]).env("NIBBLE_UNREAD", "1").stderr(full()).output().unwrap();
    assert_eq!(out.status.code(), Some(0));
}

/// What a terminal would take for an order to clear itself.
const ORDER: &str = "\x1b[2J";

fn assert_no_orders(done: &Done, what: &str) {
    for text in [&done.stdout, &done.stderr] {
        let order = text.chars().find(|c| c.is_control() && !matches!(c, '\n' | '\t'));
        assert!(order.is_none(), "{what}: {order:?} in {text:?}");
    }
}

fn assert_shown(done: &Done, what: &str) {
    assert_no_orders(done, what);
    let all = format!("{}{}", done.stdout, done.stderr);
    // A value of a configuration is shown as TOML has it.
    assert!(all.contains(r"\u{1b}[2J") || all.contains(r"\u001B[2J"), "{what}: {all}");
}

#[test]
fn names_give_no_orders_to_a_terminal() {
    let place = every::place();
    let (run, recipe, tensors) = (format!("run{ORDER}"), format!("r{ORDER}.toml"), format!("t{ORDER}.st"));
    let description = "description = \"a \\u001b[2J study\"\nextends = \"bf16\"\n";
    std::fs::write(place.path(&recipe), description).unwrap();
    let set_dir = format!("run.dir={run}");
    let trained = place.nibble(&["train", "small.toml", "--recipe", &recipe, "--set", &set_dir]).ok();
    assert_shown(&trained, "train");
    let header = r#"{"w\u001b[2J":{"dtype":"F32","shape":[1,32],"data_offsets":[0,128]}}"#;
    let values = [&f32::NAN.to_le_bytes()[..], &[0; 124]].concat();
    let file = [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), &values].concat();
    std::fs::write(place.path(&tensors), file).unwrap();
    let bad = format!("a{ORDER}");
    let bad_set = format!("train.lr={ORDER}");
    let html = format!("{bad}.html");
    for (args, code) in [
        (vec!["train", "small.toml", "--recipe", &recipe, "--dry-run"], 0),
        (vec!["train", &bad], 2),
        (vec!["train", "--set", &bad_set], 2),
        (vec!["train", "--set", &bad], 2),
        (vec!["train", &run, "--resume"], 0),
        (vec!["eval", &bad], 2),
        (vec!["generate", &bad], 2),
        (vec!["plot", &run], 0),
        (vec!["report", &run, "--out", &html], 0),
        (vec!["recipe", &recipe], 0),
        (vec!["recipe", &bad], 2),
        (vec!["data", &bad], 2),
        (vec!["quantize", &tensors, "out.st", "--format", "mxfp4", "--device", "cpu"], 0),
        (vec!["quantize", &tensors, "out.st", "--format", "mxfp4", "--only", &bad], 2),
        (vec!["inspect", "small.toml", "--out", &bad], 0),
    ] {
        let done = place.nibble(&args);
        assert_eq!(done.code, Some(code), "{args:?}: {}{}", done.stdout, done.stderr);
        assert_shown(&done, &format!("{args:?}"));
    }
    // What is no argument at all is told without them.
    for args in [vec!["quantize", &tensors, "out.st", "--format", &bad], vec![&bad]] {
        let done = place.nibble(&args);
        assert_eq!(done.code, Some(2), "{args:?}: {}", done.stderr);
        assert_no_orders(&done, &format!("{args:?}"));
    }
    let warned = place.command(&["recipe"]).env(format!("NIBBLE_{ORDER}"), "1").output().unwrap();
    assert!(String::from_utf8_lossy(&warned.stderr).contains(r"NIBBLE_\u{1b}[2J is set"));
}
