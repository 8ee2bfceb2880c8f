//! `nibble generate`: many prompts, conversations, and where texts end.

use crate::{Done, Place};
use serde_json::{Value, json};

const TOKENIZER: &str = include_str!("../../../train/tests/tokenizers/llama3/tokenizer.json");

/// A run of a few steps on bytes.
fn trained() -> Place {
    let place = Place::with_text();
    place.train(&["--set", "run.dir=run"]).ok();
    place
}

/// What `nibble generate` prints of this model.
fn generated(place: &Place, model: &str, args: &[&str]) -> String {
    place.nibble(&[&["generate", model, "--device", "cpu"], args].concat()).ok().stdout
}

/// The lines of JSON that it prints.
fn lines(place: &Place, model: &str, args: &[&str]) -> Vec<Value> {
    generated(place, model, args).lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

#[test]
fn a_prompt_that_is_longer_than_the_model_sees_is_told() {
    let place = trained();
    let prompt = "four bits ".repeat(20);
    let of = |prompt: &str| {
        place.nibble(&["generate", "run", "--prompt", prompt, "--tokens", "1", "--device", "cpu"])
    };
    let told = of(&prompt);
    assert_eq!(told.code, Some(0));
    assert!(told.stderr.contains("a prompt has 200 tokens, more than the 64 positions"), "{}", told.stderr);
    of(&prompt[..64]).ok();
}

/// A text is computed under the run's own recipe, a folder's under BF16, or under the one that is named; which one is said beside the text.
#[test]
fn what_a_text_is_computed_in_is_said_and_may_be_named() {
    let place = trained();
    place.nibble(&["export", "run", "model"]).ok();
    let of = |model: &str, more: &[&str]| {
        let args = [
            "generate",
            model,
            "--device",
            "cpu",
            "--tokens",
            "40",
            "--temperature",
            "0",
            "--prompt",
            "four",
        ];
        let done = place.nibble(&[&args[..], more].concat()).ok();
        let told = done.stderr.strip_prefix("computed under recipe ").unwrap();
        assert!(told.contains(", on cpu") && told.lines().count() == 1, "{told}");
        (told.split(' ').next().unwrap().to_owned(), done.stdout)
    };
    let own = of("run", &[]);
    assert_eq!((own.0.as_str(), of("model", &[]).0.as_str()), ("mxfp4-hopper", "bf16"));
    assert_eq!(of("run", &["--recipe", "mxfp4-hopper"]), own);
    for name in ["f32", "hif4"] {
        assert_eq!([of("run", &["--recipe", name]).0, of("model", &["--recipe", name]).0], [name; 2]);
    }
    // A file of one's own; a wrong name is told like everywhere.
    std::fs::write(place.path("mine.toml"), "extends = \"f32\"\n").unwrap();
    assert_eq!(of("run", &["--recipe", "mine.toml"]), ("mine".to_owned(), of("run", &["--recipe", "f32"]).1));
    let error = place.nibble(&["generate", "run", "--recipe", "bf61"]).failed(2);
    assert!(error.contains("bf61") && error.contains("bf16"), "{error}");
}

#[test]
fn each_prompt_of_a_file_has_a_text_of_its_own() {
    let place = trained();
    std::fs::write(
        place.path("all.jsonl"),
        "{\"prompt\": \"nib\"}\n\n{\"prompt\": \"nibb\"}\n{\"prompt\": \"\"}\n{\"prompt\": \"nib\"}\n",
    )
    .unwrap();
    std::fs::write(place.path("others.txt"), "nib\nfour bits, and a longer prompt\n").unwrap();
    let all = lines(&place, "run", &["--prompts", "all.jsonl", "--tokens", "30"]);
    let prompts: Vec<&Value> = all.iter().map(|line| &line["prompt"]).collect();
    assert_eq!(prompts, ["nib", "nibb", "", "nib"]);
    assert!(all.iter().all(|line| line["ended"] == "length"), "{all:?}");
    // The first is that of the command line; the same prompt again has other random numbers.
    let one = generated(&place, "run", &["--prompt", "nib", "--tokens", "30"]);
    assert_eq!(one, format!("nib{}\n", all[0]["completion"].as_str().unwrap()));
    assert_ne!(all[0]["completion"], all[3]["completion"]);
    let others = lines(&place, "run", &["--prompts", "others.txt", "--tokens", "30"]);
    assert_eq!(others[0], all[0], "what the others are changes nothing");
    // A prompt that is the beginning of the one before, and that text's only token: its caches are not gone on with.
    let short = lines(&place, "run", &["--prompts", "all.jsonl", "--tokens", "1"]);
    for (short, long) in short.iter().zip(&all) {
        let [short, long] = [short, long].map(|line| line["completion"].as_str().unwrap());
        assert!(long.starts_with(short.trim_end_matches('\u{fffd}')), "{short:?} {long:?}");
    }
}

#[test]
fn a_text_ends_before_a_stop_text() {
    let place = trained();
    let greedy = ["--prompt", "nibble ", "--tokens", "60", "--temperature", "0"];
    let whole = generated(&place, "run", &greedy);
    let text = whole.strip_prefix("nibble ").unwrap();
    // Two bytes that the model writes, each of which is a token.
    let stop = &text[10..12];
    let at = text.find(stop).unwrap();
    let args = [&greedy[..], &["--stop", stop, "--stop", "never that"]].concat();
    assert_eq!(generated(&place, "run", &args), format!("nibble {}\n", &text[..at]));
    std::fs::write(place.path("one.txt"), "nibble \n").unwrap();
    let from_file = ["--prompts", "one.txt", "--tokens", "60", "--temperature", "0", "--stop", stop];
    let lines = lines(&place, "run", &from_file);
    assert_eq!(lines, [json!({"prompt": "nibble ", "completion": &text[..at], "ended": "stop"})]);
    // What might have been the beginning of one is printed where the text ends.
    let held = format!("{}\u{1}", &whole[whole.len() - 3..whole.len() - 1]);
    assert_eq!(generated(&place, "run", &[&greedy[..], &["--stop", &held]].concat()), whole);
}

/// `model`: a folder whose tokenizer has a chat template, and which was not taught anything.
fn with_chat_template() -> Place {
    let place = Place::with_text();
    std::fs::create_dir(place.path("made")).unwrap();
    std::fs::write(place.path("made/tokenizer.json"), TOKENIZER).unwrap();
    let template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}\
        {% if add_generation_prompt %}assistant:{% endif %}";
    let settings = json!({"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": template});
    std::fs::write(place.path("made/tokenizer_config.json"), settings.to_string()).unwrap();
    let sets =
        ["data.source=random", "model.vocab_size=0", "data.tokenizer=made", "run.dir=run", "train.steps=2"];
    let sets: Vec<&str> = sets.iter().flat_map(|set| ["--set", set]).collect();
    place.train(&sets).ok();
    place.nibble(&["export", "run", "model"]).ok();
    place
}

#[test]
fn a_message_is_answered_by_the_chat_template() {
    let place = with_chat_template();
    let tail = ["--tokens", "12", "--ignore-eos"];
    let plain = |text: &str| {
        // The same ids: this tokenizer's texts begin with no token, so that the template's text is gone on from as it stands.
        let out = generated(&place, "model", &[&["--prompt", text], &tail[..]].concat());
        out.strip_prefix(text).unwrap().to_owned()
    };
    for model in ["model", "run"] {
        let chat = ["--chat", "--prompt", "the sea"];
        let answer = generated(&place, model, &[&chat[..], &tail].concat());
        assert_eq!(answer, plain("user: the sea\nassistant:"), "{model}");
        let answer = generated(&place, model, &[&chat[..], &["--system", "be brief"], &tail].concat());
        assert_eq!(answer, plain("system: be brief\nuser: the sea\nassistant:"), "{model}");
    }
    let messages = json!([{"role": "user", "content": "the sea"}]);
    std::fs::write(place.path("talk.jsonl"), json!({ "messages": messages }).to_string()).unwrap();
    let told = lines(&place, "model", &[&["--prompts", "talk.jsonl"], &tail[..]].concat());
    assert_eq!(told[0]["messages"], messages);
    assert_eq!(format!("{}\n", told[0]["completion"].as_str().unwrap()), plain("user: the sea\nassistant:"));
}

#[test]
fn a_text_ends_at_the_tokens_of_generation_config() {
    let place = with_chat_template();
    let args = ["--prompt", "the sea", "--tokens", "12", "--temperature", "0"];
    let whole = generated(&place, "model", &args);
    let ended = |ends: Value| {
        std::fs::write(place.path("model/generation_config.json"), json!({"eos_token_id": ends}).to_string())
            .unwrap();
        generated(&place, "model", &args)
    };
    let every: Vec<i32> = (0..1003).collect();
    assert_eq!(ended(json!(every)), "the sea\n");
    assert_eq!(generated(&place, "model", &[&args[..], &["--ignore-eos"]].concat()), whole);
    assert_eq!(ended(json!(null)), whole);
    std::fs::write(place.path("one.txt"), "the sea").unwrap();
    ended(json!(every));
    let told = lines(&place, "model", &["--prompts", "one.txt"]);
    assert_eq!(told, [json!({"prompt": "the sea", "completion": "", "ended": "eos"})]);
    // Without that file `config.json` says them, also to a run that begins with the folder.
    std::fs::remove_file(place.path("model/generation_config.json")).unwrap();
    let config = std::fs::read(place.path("model/config.json")).unwrap();
    let mut config: Value = serde_json::from_slice(&config).unwrap();
    config["eos_token_id"] = json!(every);
    std::fs::write(place.path("model/config.json"), config.to_string()).unwrap();
    assert_eq!(generated(&place, "model", &args), "the sea\n");
    place.train(&["--from", "model", "--set", "run.dir=next", "--set", "train.steps=2"]).ok();
    assert_eq!(generated(&place, "next", &args), "the sea\n");
    place.nibble(&["export", "next", "copy"]).ok();
    assert_eq!(generated(&place, "copy", &args), "the sea\n");
    std::fs::write(place.path("model/generation_config.json"), r#"{"eos_token_id": "end"}"#).unwrap();
    let error = place.nibble(&["generate", "model"]).failed(2);
    assert!(error.contains("generation_config.json") && error.contains("`eos_token_id`"), "{error}");
}

/// What a command that has done its work writes beside its output.
#[track_caller]
fn errors(done: Done) -> String {
    assert_eq!(done.code, Some(0), "{}", done.stderr);
    done.stderr
}

/// A run on conversations, whose template writes this behind a message.
fn conversing(behind: &str) -> (Place, String) {
    let place = Place::with_text();
    std::fs::create_dir(place.path("made")).unwrap();
    std::fs::write(place.path("made/tokenizer.json"), TOKENIZER).unwrap();
    let template = format!(
        "{{% for m in messages %}}{{{{ m.role }}}}: {{{{ m.content }}}}{behind}\n{{% endfor %}}{{% if add_generation_prompt %}}assistant:{{% endif %}}"
    );
    let settings = json!({"chat_template": template, "eos_token": "<|endoftext|>"});
    std::fs::write(place.path("made/tokenizer_config.json"), settings.to_string()).unwrap();
    let talk = json!([{"role": "user", "content": "two"}, {"role": "assistant", "content": "four"}]);
    std::fs::write(place.path("talks.jsonl"), format!("{}\n", json!({ "messages": talk })).repeat(300))
        .unwrap();
    let sets = [
        "data.source=talks.jsonl",
        "data.messages_key=messages",
        "data.document_mask=true",
        "data.tokenizer=made",
        "model.vocab_size=0",
        "data.cache_dir=caches",
        "train.steps=60",
        "train.lr=1e-2",
        "run.dir=run",
    ];
    let sets: Vec<&str> = sets.iter().flat_map(|set| ["--set", set]).collect();
    let told = errors(place.train(&sets));
    (place, told)
}

/// A token that ends no text by the tokenizer's files ends an answer where the chat template writes it behind one, in a run and in its export.
#[test]
fn an_answer_ends_at_the_token_that_the_template_writes_behind_it() {
    let (place, told) = conversing("<|im_start|>");
    assert_eq!(told, "");
    place.nibble(&["export", "run", "folder"]).ok();
    let generation: Value =
        serde_json::from_slice(&std::fs::read(place.path("folder/generation_config.json")).unwrap()).unwrap();
    let tokenizer = nibble_train::tokenizer::open(&place.path("made")).unwrap();
    let ends = ["<|endoftext|>", "<|im_start|>"].map(|token| tokenizer.token_id(token).unwrap());
    assert_eq!(generation["eos_token_id"], json!(ends));
    let args = ["--chat", "--prompt", "two", "--temperature", "0", "--tokens", "9"];
    for model in ["run", "folder"] {
        assert_eq!(generated(&place, model, &args), " four\n", "{model}");
        let whole = generated(&place, model, &[&args[..], &["--ignore-eos"]].concat());
        assert!(whole.starts_with(" four<|im_start|>\n"), "{model}: {whole}");
    }
}

/// Where no token ends an answer, it is told by every command that has to do with answers.
#[test]
fn a_template_that_never_ends_an_answer_is_told() {
    let (place, told) = conversing("");
    let warns = |told: &str| {
        told.contains("warning: the chat template writes no control token after a learnt answer")
    };
    assert!(warns(&told), "{told}");
    let chat = ["generate", "run", "--chat", "--prompt", "two", "--tokens", "3", "--device", "cpu"];
    assert!(warns(&errors(place.nibble(&chat))));
    let data = ["data", "talks.jsonl", "--tokenizer", "made", "--set", "data.messages_key=messages"];
    assert!(warns(&errors(place.nibble(&data))));
    place.nibble(&["export", "run", "folder"]).ok();
    let generation = std::fs::read(place.path("folder/generation_config.json")).unwrap();
    let generation: Value = serde_json::from_slice(&generation).unwrap();
    assert!(generation["eos_token_id"].is_number(), "{generation}");
}

#[test]
fn mistakes_are_named() {
    let place = trained();
    for (name, text) in [
        ("none.jsonl", "\n"),
        ("some.csv", "a"),
        ("bad.jsonl", "{\"prompt\": \"a\"}\n{\"text\": \"b\"}\n"),
        ("empty.txt", "a\n\nb\n"),
        ("talk.jsonl", "{\"messages\": [{\"role\": \"user\", \"content\": \"a\"}]}\n"),
    ] {
        std::fs::write(place.path(name), text).unwrap();
    }
    let cases: [(&[&str], &[&str]); 13] = [
        (&["--top-p", "0"], &["--top-p", "got 0"]),
        (&["--top-p", "2"], &["--top-p", "at most 1"]),
        (&["--stop", ""], &["--stop", "empty"]),
        (&["--prompt", "a", "--prompts", "empty.txt"], &["--prompt", "--prompts"]),
        (&["--prompts", "none.jsonl"], &["none.jsonl", "has no prompts"]),
        (&["--prompts", "nowhere.jsonl"], &["nowhere.jsonl"]),
        (&["--prompts", "some.csv"], &["some.csv", ".jsonl", ".txt"]),
        (&["--prompts", "bad.jsonl"], &["bad.jsonl, line 2", "\"text\""]),
        (&["--prompts", "empty.txt"], &["empty.txt, line 2"]),
        (&["--prompts", "talk.jsonl"], &["talk.jsonl, line 1", "has no chat template"]),
        (&["--chat"], &["--chat", "--prompt"]),
        (&["--chat", "--prompt", "a"], &["has no chat template", "bytes"]),
        (&["--system", "a"], &["--chat"]),
    ];
    for (args, expected) in cases {
        let done = place.nibble(&[&["generate", "run"], args].concat());
        assert_eq!(done.stdout, "", "{args:?}");
        let error = done.failed(2);
        assert!(expected.iter().all(|part| error.contains(part)), "{args:?}: {error}");
    }
}
