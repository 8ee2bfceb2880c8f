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
