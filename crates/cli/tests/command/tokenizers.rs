//! A run with a tokenizer of its own: what goes on, generates and is exported has it, also where the file that was named is gone.

use crate::{Place, read};

const TOKENIZER: &str = include_str!("../../../train/tests/tokenizers/llama3/tokenizer.json");

#[test]
fn a_tokenizer_goes_along_with_a_run() {
    let place = Place::with_text();
    std::fs::create_dir(place.path("made")).unwrap();
    std::fs::write(place.path("made/tokenizer.json"), TOKENIZER).unwrap();
    let settings = r#"{"eos_token": "<think>"}"#;
    std::fs::write(place.path("made/tokenizer_config.json"), settings).unwrap();
    let sets =
        ["data.source=random", "model.vocab_size=0", "data.tokenizer=made", "run.dir=run", "train.steps=2"];
    let sets: Vec<&str> = sets.iter().flat_map(|set| ["--set", set]).collect();
    place.train(&sets).ok();
    assert_eq!(read(place.path("run/model-files/tokenizer.json")), TOKENIZER.as_bytes());
    std::fs::remove_dir_all(place.path("made")).unwrap();
    place.nibble(&["train", "run", "--resume", "--set", "train.steps=3"]).ok();
    place.nibble(&["export", "run", "folder"]).ok();
    assert_eq!(read(place.path("folder/tokenizer.json")), TOKENIZER.as_bytes());
    // Where a text ends is said to `transformers` too.
    let generation: serde_json::Value =
        serde_json::from_slice(&read(place.path("folder/generation_config.json"))).unwrap();
    let tokenizer = nibble_train::tokenizer::open(&place.path("folder")).unwrap();
    assert_eq!(generation["eos_token_id"], tokenizer.eos().unwrap());
    let of = |path: &str, prompt: &str| {
        let args =
            ["generate", path, "--prompt", prompt, "--tokens", "12", "--temperature", "0", "--device", "cpu"];
        place.nibble(&args).ok().stdout
    };
    for path in ["run", "folder"] {
        assert!(of(path, "the sea").starts_with("the sea"), "{path}");
        assert!(of(path, "").ends_with('\n'), "{path}");
    }
    let error = place.nibble(&["train", "run", "--resume", "--set", "data.tokenizer=other.json"]).failed(2);
    assert!(error.contains("other.json"), "{error}");
    // A model that has no row for each token is refused, by both numbers.
    std::fs::write(place.path("tokenizer.json"), TOKENIZER).unwrap();
    let error =
        place.train(&["--set", "data.tokenizer=tokenizer.json", "--set", "model.vocab_size=500"]).failed(2);
    assert!(error.contains("but the tokenizer has 1003 tokens"), "{error}");
}

/// A key of tokens, which is compared with the tokenizer wherever that is.
const OF_TOKENS: &[&str] = &["--set", "data.bos_token=none"];

/// Goes on with a run whose parents are gone, and looks at it in every other way.
#[track_caller]
fn assert_goes_on(place: &Place, run: &str, steps: u64, more: &[&str]) {
    let steps_set = format!("train.steps={steps}");
    let done = place.nibble(&["train", run, "--resume", "--set", &steps_set]).ok();
    done.contains(&format!("done: {steps} steps"));
    place.nibble(&[&["eval", run, "--device", "cpu"], more].concat()).ok().contains("held-out loss");
    place.nibble(&["generate", run, "--tokens", "4", "--device", "cpu", "--prompt", "nib"]).ok();
    let folder = format!("{run}-{steps}-exported");
    place.nibble(&["export", run, &folder]).ok();
    place.nibble(&["generate", &folder, "--tokens", "4", "--device", "cpu", "--prompt", "nib"]).ok();
}

/// Of bytes, which no parent has a file of beside its weights: a parent, and a parent of a parent.
#[test]
fn a_run_goes_on_without_the_runs_that_it_descends_from() {
    let place = Place::with_text();
    place.train(&["--set", "run.dir=first", "--set", "train.steps=2"]).ok();
    for (from, dir) in [("first", "second"), ("second", "third")] {
        let sets = format!("run.dir={dir}");
        place.train(&["--init-from", from, "--set", &sets, "--set", "train.steps=2"]).ok();
        assert!(place.path(dir).join("model-files/tokenizer.json").exists(), "{dir}");
    }
    std::fs::remove_dir_all(place.path("first")).unwrap();
    assert_goes_on(&place, "second", 3, OF_TOKENS);
    std::fs::remove_dir_all(place.path("second")).unwrap();
    assert_goes_on(&place, "third", 3, OF_TOKENS);
    // The command that began it names what is gone, and says what does not need it.
    std::fs::write(
        place.path("begins.toml"),
        format!("{}\n", crate::SMALL.replace("steps = 12", "steps = 4\ninit_from = \"second\"")),
    )
    .unwrap();
    let error = place.nibble(&["train", "begins.toml", "--resume", "--set", "run.dir=third"]).failed(2);
    assert!(error.contains("second") && error.contains("nibble train RUN_DIR --resume"), "{error}");
    // As programs wrote it that kept no copy for bytes, and moved.
    std::fs::remove_dir_all(place.path("third/model-files")).unwrap();
    std::fs::rename(place.path("third"), place.path("elsewhere")).unwrap();
    assert_goes_on(&place, "elsewhere", 4, OF_TOKENS);
}

/// With a tokenizer or without one, on text and on random tokens; and with one that is named by itself.
#[test]
fn a_run_goes_on_without_the_folder_that_it_began_with() {
    let place = Place::with_text();
    place.train(&["--set", "run.dir=first", "--set", "train.steps=2"]).ok();
    for (dir, data, with_tokenizer) in
        [("text", "text.txt", true), ("bytes", "text.txt", false), ("random", "random", false)]
    {
        let folder = format!("{dir}-model");
        place.nibble(&["export", "first", &folder]).ok();
        if !with_tokenizer {
            std::fs::remove_file(place.path(&folder).join("tokenizer.json")).unwrap();
        }
        let sets = [format!("run.dir={dir}"), format!("data.source={data}")];
        place
            .train(&["--from", &folder, "--set", &sets[0], "--set", &sets[1], "--set", "train.steps=2"])
            .ok();
        std::fs::remove_dir_all(place.path(&folder)).unwrap();
        let of_tokens = if data == "random" { &[] } else { OF_TOKENS };
        assert_goes_on(&place, dir, 3, of_tokens);
    }
    std::fs::create_dir(place.path("made")).unwrap();
    place.nibble(&["export", "first", "model"]).ok();
    std::fs::rename(place.path("model/tokenizer.json"), place.path("made/tokenizer.json")).unwrap();
    let sets = ["run.dir=named", "data.tokenizer=made", "train.steps=2"];
    let sets: Vec<&str> = sets.iter().flat_map(|set| ["--set", set]).collect();
    place.train(&[&["--from", "model"][..], &sets].concat()).ok();
    for gone in ["model", "made"] {
        std::fs::remove_dir_all(place.path(gone)).unwrap();
    }
    assert_goes_on(&place, "named", 3, OF_TOKENS);
}
