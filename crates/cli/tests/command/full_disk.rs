//! A disk that is full from any write of a run on: what is there then goes on to the same bytes, or has not begun.

use crate::kill::Undisturbed;
use nibble_testkit::Breadth;

/// Fewer checkpoints, and so fewer writes.
const FEWER: [&str; 2] = ["--set", "checkpoint.every=6"];

#[test]
fn a_disk_that_is_full_at_any_write_costs_no_bit_and_makes_no_other_run() {
    let run = Undisturbed::with(1, &FEWER);
    // Daily about one write of three.
    for n in (1..).filter(|n| Breadth::of_tests().takes(*n, 3)) {
        let fault = format!("full@write:{n}");
        let (out, said) = run.disturbed("run", &fault, &[]);
        if out.status.success() {
            // The configuration, the logs, a line of each for twelve steps, two checkpoints of five files.
            assert!(n > 40, "{n} writes are not all");
            run.assert_resumes("run", &fault);
            return;
        }
        assert_eq!(out.status.code(), Some(1), "{fault}: {said}");
        assert!(said.starts_with("error: run/") && said.contains("No space left"), "{fault}: {said}");
        let config = run.place.path("run/config.toml");
        if config.exists() {
            // By its directory alone it goes on under what is stored there.
            let whole = crate::read(run.place.path("whole/config.toml"));
            let whole = String::from_utf8(whole).unwrap().replace("\"whole\"", "\"run\"");
            let stored = String::from_utf8(crate::read(&config)).unwrap();
            assert_eq!(stored, whole, "{fault}");
        }
        run.assert_resumes("run", &fault);
    }
}

#[test]
fn a_configuration_that_is_none_is_refused_or_taken_from_the_checkpoint() {
    let run = Undisturbed::new(1);
    let file = run.place.path("run/config.toml");
    let foreign = ["", "[train]\nsteps = 3\n", "# mine"];
    // Before the first checkpoint nothing else knows it.
    for text in foreign {
        let (out, said) = run.disturbed("run", "kill@step-begins:1", &[]);
        assert!(out.status.code().is_none(), "{said}");
        std::fs::write(&file, text).unwrap();
        for args in [
            &["train", "run", "--resume"][..],
            &["train", "run/config.toml"],
            &["train", "small.toml", "--set", "run.dir=run", "--resume"],
            &["report", "run"],
            &["plot", "run"],
        ] {
            let error = run.place.nibble(args).failed(2);
            assert!(
                error.contains("run/config.toml: is not the configuration of a run"),
                "{args:?}: {error}"
            );
            assert!(error.contains("put the file back"), "{args:?}: {error}");
        }
        std::fs::remove_dir_all(run.place.path("run")).unwrap();
    }
    for text in foreign {
        let (out, said) = run.disturbed("run", "kill@step-begins:7", &[]);
        assert!(out.status.code().is_none(), "{said}");
        std::fs::write(&file, text).unwrap();
        let plot = run.place.nibble(&["plot", "run"]);
        assert_eq!(plot.code, Some(0), "{}", plot.stderr);
        assert!(
            plot.stderr.contains("the configuration is that of run/checkpoints/step-"),
            "{}",
            plot.stderr
        );
        let more = run.place.nibble(&["train", "run", "--resume"]);
        assert_eq!(more.code, Some(0), "{}", more.stderr);
        assert!(more.stderr.starts_with("warning: run/config.toml: is not the"), "{}", more.stderr);
        run.assert_resumes("run", text);
    }
}
