//! What a user gives by mistake and what strangers' files hold: each is refused by its name, and what is advised can be done.

use crate::Place;
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::process::Command;

/// What a command with these variables says, and its exit code.
fn with_variables(mut command: Command, variables: &[(&str, &[u8])]) -> (Option<i32>, String) {
    for (name, value) in variables {
        command.env(name, OsStr::from_bytes(value));
    }
    let out = command.output().unwrap();
    (out.status.code(), String::from_utf8_lossy(&out.stderr).into_owned())
}

#[test]
fn a_variable_that_is_no_text_is_refused_by_its_name() {
    let place = Place::with_text();
    let wrong: &[u8] = b"4\xff";
    for name in ["NIBBLE_THREADS", "NIBBLE_ISA", "NIBBLE_RANK", "NIBBLE_SECRET", "NIBBLE_DEADLINE"] {
        for args in [["train", "--dry-run"], ["recipe", "bf16"]] {
            let (code, said) = with_variables(place.command(&args), &[(name, wrong)]);
            assert_eq!((code, said), (Some(2), format!("error: {name}: is no UTF-8 text, expected one\n")));
        }
    }
    let (code, said) = with_variables(place.command(&["train"]), &[("MASTER_ADDR", wrong)]);
    assert_eq!((code, said), (Some(2), "error: MASTER_ADDR: is no UTF-8 text, expected one\n".into()));
    // Paths may be any bytes, and who asks what is set is told.
    let (code, said) = with_variables(place.command(&["recipe", "bf16"]), &[("NIBBLE_CUBIN_CACHE", wrong)]);
    assert_eq!((code, said.as_str()), (Some(0), ""));
    let mut doctor = place.command(&["doctor"]);
    let out = doctor.env("NIBBLE_THREADS", OsStr::from_bytes(wrong)).output().unwrap();
    assert!(String::from_utf8_lossy(&out.stdout).contains("NIBBLE_THREADS = `4\u{fffd}`"));
    let mut recipe = place.command(&["recipe", "bf16"]);
    let out = recipe.env(OsStr::from_bytes(b"NIBBLE_\xff"), "1").output().unwrap();
    assert!(String::from_utf8_lossy(&out.stderr).contains("NIBBLE_\u{fffd} is set, and nothing reads it"));
}

#[test]
fn ranks_without_a_place_to_meet_are_told_what_is_missing() {
    let place = Place::with_text();
    let rank: [(&str, &[u8]); 2] = [("RANK", b"1"), ("WORLD_SIZE", b"2")];
    for more in [&[][..], &[("LOCAL_RANK", &b"1"[..]), ("LOCAL_WORLD_SIZE", b"2")]] {
        let (code, said) = with_variables(place.command(&["train"]), &[&rank[..], more].concat());
        assert_eq!(code, Some(2));
        for part in
            ["MASTER_ADDR is not set", "MASTER_PORT", "--rendezvous HOST:PORT", "not a rank among others"]
        {
            assert!(said.contains(part), "{said}");
        }
    }
}

#[test]
fn a_launcher_shows_the_version_and_the_help_of_what_it_launches() {
    let place = Place::new();
    for asked in ["--version", "--help"] {
        let shown = place.nibble(&["launch", "--ranks", "2", "--", "train", asked]).ok();
        assert_eq!(shown.stdout, place.nibble(&["train", asked]).ok().stdout);
    }
}

/// A run whose folder is called as a built-in configuration is goes on as it says.
#[test]
fn advice_on_a_run_called_as_a_configuration_can_be_followed() {
    let place = Place::with_text();
    let begin = ["--set", "run.dir=tiny"];
    place.train(&[&begin[..], &["--set", "train.steps=4"]].concat()).ok().contains("nibble report ./tiny");
    let error = place.train(&begin).failed(2);
    assert!(error.contains("`nibble train ./tiny --resume` continues it"), "{error}");
    place.nibble(&["train", "./tiny", "--resume", "--set", "train.steps=6"]).ok();
}

#[test]
fn lists_of_nothing_are_refused_by_their_key() {
    let place = Place::with_text();
    for (asked, key) in [
        ("eval.tasks=[\"\"]", "`eval.tasks`: lists a file without a name"),
        ("eval.tasks=[\"quiz.jsonl\", \" \"]", "`eval.tasks`: lists a file without a name"),
        ("data.mixture=[]", "`data.mixture`: is empty"),
    ] {
        let error = place.train(&["--dry-run", "--set", asked]).failed(2);
        assert!(error.contains(key), "{error}");
    }
    for (text, key) in [
        ("[data]\nmixture = []\n", "mine.toml:2: `data.mixture`: is empty"),
        ("model = []\n", "mine.toml:1: `model`: is [], expected one table"),
        ("[model]\nrope_scaling = []\n", "mine.toml:2: `model.rope_scaling`: is [], expected one table"),
    ] {
        std::fs::write(place.path("mine.toml"), text).unwrap();
        let error = place.nibble(&["train", "mine.toml", "--dry-run"]).failed(2);
        assert!(error.contains(key), "{error}");
    }
}

/// A name of a megabyte does not fill the screen, and the key of an override has a line.
#[test]
fn names_are_told_as_far_as_people_read() {
    let place = Place::with_text();
    let long = "n".repeat(1 << 20);
    for text in [
        format!("{long} = 1\n"),
        format!("recipe = \"{long}\"\n"),
        format!("[train]\nschedule = \"{long}\"\n"),
    ] {
        std::fs::write(place.path("long.toml"), text).unwrap();
        let error = place.nibble(&["train", "long.toml", "--dry-run"]).failed(2);
        assert!(error.len() < 10_000 && error.contains("nnn... (1048"), "{} bytes", error.len());
    }
    let recipe = "extends = \"fp8-flow\"\n\n[[override]]\nset.expert.fprop.x = { format = \"mxfp4\", foo = 1 }\n\n\
                  [[override]]\nset.expert.saved.h = { format = \"mxfp9\" }\n";
    let single = recipe.split_inclusive("foo = 1 }\n").next().unwrap();
    std::fs::write(place.path("mine.toml"), single).unwrap();
    let error = place.nibble(&["recipe", "mine.toml"]).failed(2);
    assert!(error.contains("mine.toml:4: `override.set.expert.fprop.x`: no field \"foo\""), "{error}");
    std::fs::write(place.path("mine.toml"), recipe.replace(", foo = 1", "")).unwrap();
    let error = place.nibble(&["recipe", "mine.toml"]).failed(2);
    assert!(error.contains("mine.toml:7: `override[2].set.expert.saved.h"), "{error}");
}

/// As many steps as there are numbers for: nothing goes through them one by one.
#[test]
fn a_run_of_the_most_steps_there_are_begins() {
    let place = Place::with_text();
    let huge = ["train.shards", "train.batch_size", "run.ranks"].map(|key| format!("{key}={}", 1u64 << 62));
    let set = huge.iter().flat_map(|change| ["--set", change.as_str()]);
    let asked: Vec<&str> = set.chain(["--set", "run.dp=3", "--dry-run"]).collect();
    let error = place.train(&asked).failed(2);
    assert!(error.contains("`run.ranks`: is 4611686018427387904, expected at most 1048576"), "{error}");
    let most = "train.steps=9223372036854775807";
    for more in
        ["train.quantization_every=0", "train.quantization_every=9223372036854775807", "train.schedule=wsd"]
    {
        place.train(&["--dry-run", "--set", most, "--set", more]).ok();
    }
}

/// Parts of a pair that are missing or no files are named, and nobody waits for them.
#[test]
fn pairs_of_megatron_are_two_files() {
    let place = Place::new();
    let numbers = |all: &[u64]| all.iter().flat_map(|n| n.to_le_bytes()).collect::<Vec<u8>>();
    let index = [
        &b"MMIDIDX\0\0"[..],
        &numbers(&[1]),
        &[4],
        &numbers(&[1, 2]),
        &20i32.to_le_bytes(),
        &numbers(&[0, 0, 1]),
    ];
    let (index, ids) = (index.concat(), [7, 0, 0, 0].repeat(20));
    let (bin, idx) = (place.path("m.bin"), place.path("m.idx"));
    let pipe = |path| assert!(Command::new("mkfifo").arg(path).status().unwrap().success());
    let failed = |source: &str| place.nibble(&["data", source]).failed(2);
    std::fs::write(&idx, &index).unwrap();
    for source in ["m.idx", "."] {
        let error = failed(source);
        assert!(
            error.contains("m.bin: cannot be read: No such file") && error.contains("the ids of ./m.idx")
                || error.contains("the ids of m.idx"),
            "{error}"
        );
    }
    pipe(&bin);
    for source in ["m.idx", "m.bin", "."] {
        let error = failed(source);
        assert!(error.contains("m.bin: cannot be read: is a pipe"), "{error}");
    }
    std::fs::remove_file(&idx).unwrap();
    std::fs::remove_file(&bin).unwrap();
    std::fs::write(&bin, &ids).unwrap();
    pipe(&idx);
    for source in ["m.idx", "m.bin", "."] {
        let error = failed(source);
        assert!(error.contains("m.idx: cannot be read: is a pipe"), "{error}");
    }
    // In capitals they are a pair, too.
    std::fs::write(place.path("N.IDX"), &index).unwrap();
    std::fs::write(place.path("N.BIN"), &ids).unwrap();
    for source in ["N.IDX", "N.BIN"] {
        place.nibble(&["data", source]).ok().contains("Megatron's token ids");
    }
}

/// What is packed twice is told as that, whatever it is called.
#[test]
fn what_is_packed_twice_is_told() {
    use std::io::Write;
    let place = Place::with_text();
    let packed = |bytes: &[u8]| {
        let mut packed = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
        packed.write_all(bytes).unwrap();
        packed.finish().unwrap()
    };
    let twice = packed(&packed(&crate::text()));
    let thrice = packed(&twice);
    let zstd = packed(b"\x28\xb5\x2f\xfdrest");
    for (name, bytes, inner) in [
        ("a.txt.gz", &twice, "gzip"),
        ("a.jsonl.gz", &twice, "gzip"),
        ("a.parquet.gz", &thrice, "gzip"),
        ("a.bin.gz", &zstd, "zstd"),
    ] {
        std::fs::write(place.path(name), bytes).unwrap();
        let error = place.nibble(&["data", name]).failed(2);
        assert!(error.contains(&format!("is {inner} inside gzip")) && error.contains("`gzip -d`"), "{error}");
    }
}

/// What is wrong with the file of a model names the file, whichever command reads it.
#[test]
fn a_models_file_is_named_by_every_command_that_reads_it() {
    let place = Place::with_text();
    place.train(&["--set", "train.steps=2", "--set", "run.dir=run"]).ok();
    place.nibble(&["export", "run", "model"]).ok();
    let json = String::from_utf8(crate::read(place.path("model/config.json"))).unwrap();
    for (from, to, expected) in [
        (
            "\"num_experts\": 4",
            "\"num_experts\": \"x\"",
            "config.json: `num_experts`: is \"x\", expected a whole number",
        ),
        (
            "\"num_experts_per_tok\": 2",
            "\"num_experts_per_tok\": 9",
            "config.json: `num_experts_per_tok`: is 9, more than num_experts = 4",
        ),
        (
            "\"rope_scaling\": null",
            "\"rope_scaling\": 5",
            "config.json: `rope_scaling`: is 5, expected an object",
        ),
        (
            "\"vocab_size\": 256",
            "\"vocab_size\": 0",
            "config.json: `vocab_size`: is 0, expected a whole number from 1",
        ),
    ] {
        assert!(json.contains(from), "{from}: {json}");
        std::fs::write(place.path("model/config.json"), json.replacen(from, to, 1)).unwrap();
        for args in [
            &["train", "small.toml", "--from", "model"][..],
            &["generate", "model", "--prompt", "a"],
            &["eval", "model", "--set", "data.source=text.txt"],
            &["export", "model", "again"],
        ] {
            let error = place.nibble(args).failed(2);
            assert!(error.contains(expected), "{args:?}: {error}");
        }
    }
}
