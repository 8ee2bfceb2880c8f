//! Tokenizers in files: the ids that Python's `tokenizers` gives, on text of all planes, and what is said of files that are none.
//!
//! `tokenizers/make.py` makes the files and the digests.

mod text;

use nibble_testkit::Breadth;
use nibble_train::config::Config;
use nibble_train::tokenizer::{self, Bytes, Framing, SharedTokenizer, Symbols, TextStream, Tokenizer};
use sha2::{Digest, Sha256};
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

const NAMES: [&str; 6] = ["gpt2", "llama3", "qwen", "deepseek", "o200k", "llama2"];

fn folder(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/tokenizers").join(name)
}

fn hex(bytes: impl IntoIterator<Item = u8>) -> String {
    Sha256::digest(bytes.into_iter().collect::<Vec<u8>>()).iter().map(|byte| format!("{byte:02x}")).collect()
}

fn digest(ids: &[i32]) -> String {
    hex(ids.iter().flat_map(|id| id.to_le_bytes()))[..16].to_owned()
}

#[test]
fn the_text_is_that_of_the_script() {
    let all = (0..text::CHUNKS).flat_map(|number| text::chunk(number).into_bytes());
    assert_eq!(hex(all), "d6d107d0bb695705c23c8f687c0ca931ea4dd3a1557feba60887da4243268c64");
}

/// Chunk by chunk, so that a difference says where it is; control tokens recognised in every eighth.
#[test]
fn ids_are_those_of_python() {
    // Daily a third of the texts, others for each tokenizer.
    let is_taken =
        |turn: usize, number: usize| Breadth::of_tests().either(true, (turn + number).is_multiple_of(3));
    let check = |(turn, name): (usize, &str), texts: &[String]| {
        let tokenizer = tokenizer::open(&folder(name)).unwrap();
        let golden = fs::read_to_string(folder(name).join("ids.txt")).unwrap();
        assert_eq!(golden.lines().count(), texts.len(), "{name}");
        let numbered = golden.lines().zip(texts).enumerate();
        for (number, (line, text)) in numbered.filter(|(number, _)| is_taken(turn, *number)) {
            let (plain, control) = line.split_once(' ').unwrap();
            assert_eq!(digest(&tokenizer.encode(text).unwrap()), plain, "{name}, chunk {number}");
            if number % 8 == 0 {
                let ids = tokenizer.encode_with_control(text).unwrap();
                assert_eq!(digest(&ids), control, "{name}, chunk {number}, with control tokens");
            }
        }
    };
    let texts: Vec<String> = (0..text::CHUNKS).map(text::chunk).collect();
    let (check, texts) = (&check, &texts[..]);
    std::thread::scope(|scope| {
        for named in NAMES.into_iter().enumerate() {
            scope.spawn(move || check(named, texts));
        }
    });
}

/// What comes token by token is the text of all of them, though a character may take several tokens and a first one lose its space.
#[test]
fn streamed_text_is_that_of_all_tokens() {
    let named = NAMES.map(|name| tokenizer::open(&folder(name)).unwrap());
    let own: [SharedTokenizer; 1] = [Arc::new(Bytes)];
    for tokenizer in named.iter().chain(&own) {
        for text in
            [text::chunk(7).as_str(), "", " a  b", "日本語 \u{1F600}\u{1F468}\u{200D}\u{1F469} e\u{301}"]
        {
            let ids = tokenizer.encode(text).unwrap();
            let mut stream = TextStream::new(&**tokenizer);
            let mut streamed: Vec<u8> = ids.iter().flat_map(|id| stream.push(*id)).collect();
            streamed.extend(stream.finish());
            assert!(streamed == tokenizer.decode_bytes(&ids), "{tokenizer:?}");
            // And after a prompt only what is new.
            let (before, new) = ids.split_at(ids.len().min(1));
            let mut stream = TextStream::after(&**tokenizer, before);
            let mut streamed = tokenizer.decode_bytes(before);
            streamed.extend(new.iter().flat_map(|id| stream.push(*id)));
            streamed.extend(stream.finish());
            if !tokenizer.decode(before).ends_with('\u{fffd}') {
                assert!(streamed == tokenizer.decode_bytes(&ids), "{tokenizer:?}");
            }
        }
        // Ids that are of no text end nothing, and wait for ever nowhere.
        let mut stream = TextStream::new(&**tokenizer);
        let size = tokenizer.vocab_size() as u64;
        let ids: Vec<i32> = (0..2000).map(|i| (text::draw(i) % (size + 2)) as i32).collect();
        let mut given: Vec<usize> = Vec::new();
        for id in &ids {
            given.push(stream.push(*id).len());
        }
        assert!(given.windows(16).all(|given| given.iter().any(|bytes| *bytes > 0)), "{tokenizer:?}");
    }
}

/// Text goes there and back, but for what a normalizer changes.
#[test]
fn text_comes_back() {
    for name in NAMES.into_iter().filter(|name| *name != "qwen") {
        let tokenizer = tokenizer::open(&folder(name)).unwrap();
        let text = text::chunk(3);
        assert!(tokenizer.decode(&tokenizer.encode(&text).unwrap()) == text, "{name}");
        assert_eq!(tokenizer.decode(&[-1, i32::MAX]), "\u{fffd}\u{fffd}", "{name}");
        let all = (0..tokenizer.vocab_size() as i32).filter_map(|id| tokenizer.token(id));
        assert!(all.enumerate().all(|(id, token)| tokenizer.token_id(&token) == Some(id as i32)), "{name}");
    }
}

#[test]
fn a_control_token_in_a_text_is_text() {
    let tokenizer = tokenizer::open(&folder("qwen")).unwrap();
    let control = tokenizer.token_id("<|endoftext|>").unwrap();
    let text = "a<|endoftext|>b";
    assert!(!tokenizer.encode(text).unwrap().contains(&control));
    assert!(tokenizer.encode_with_control(text).unwrap().contains(&control));
    assert_eq!(tokenizer.decode(&tokenizer.encode(text).unwrap()), text);
    // One that is added and is no control token is a token everywhere.
    let thinks = tokenizer.token_id("<think>").unwrap();
    assert!(tokenizer.encode("<think>").unwrap() == [thinks]);
}

/// A copy of a tokenizer with this `tokenizer_config.json`.
fn with_settings(name: &str, settings: &str) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    fs::copy(folder(name).join("tokenizer.json"), dir.path().join("tokenizer.json")).unwrap();
    fs::write(dir.path().join("tokenizer_config.json"), settings).unwrap();
    dir
}

#[test]
fn documents_are_framed_as_the_files_and_the_keys_say() {
    let framing = |dir: &Path, bos: &str, eos: &str| {
        let tokenizer = tokenizer::open(dir).unwrap();
        Framing::of(&*tokenizer, bos, eos).map_err(|e| e.to_string())
    };
    let id = |token: &str| tokenizer::open(&folder("llama3")).unwrap().token_id(token);
    let (end, start) = (id("<|endoftext|>"), id("<|im_start|>"));
    // What the file itself puts before a text; nothing says what a document ends with.
    let bare = framing(&folder("llama3"), "auto", "auto").unwrap();
    assert_eq!(bare, Framing { bos: end, eos: None });
    assert_eq!(bare.frame(vec![1, 2]), [end.unwrap(), 1, 2]);
    for (settings, bos, eos) in [
        (r#"{"bos_token": "<|endoftext|>", "eos_token": "<|im_start|>"}"#, end, start),
        (
            r#"{"bos_token": {"content": "<|im_start|>"}, "eos_token": null, "add_bos_token": true}"#,
            start,
            None,
        ),
        (
            r#"{"bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>", "add_bos_token": false}"#,
            None,
            end,
        ),
        (r#"{"bos_token": "<|im_start|>"}"#, None, None),
    ] {
        let dir = with_settings("llama3", settings);
        assert_eq!(framing(dir.path(), "auto", "auto"), Ok(Framing { bos, eos }), "{settings}");
        assert_eq!(
            framing(dir.path(), "none", "<think>").unwrap(),
            Framing { bos: None, eos: id("<think>") }
        );
        assert_eq!(framing(dir.path(), "none", "none").unwrap().frame(vec![7]), [7]);
    }
    let error = framing(&folder("qwen"), "<s>", "auto").unwrap_err();
    assert!(
        error.contains("`data.bos_token`: is \"<s>\", expected \"auto\", \"none\" or a token"),
        "{error}"
    );
    assert_eq!(Framing::of(&Symbols, "auto", "auto").unwrap(), Framing::default());
}

#[test]
fn what_is_no_tokenizer_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("tokenizer.json");
    let refused = |text: &str, why: &str| {
        fs::write(&path, text).unwrap();
        for path in [&path, dir.path()] {
            let error = tokenizer::open(path).unwrap_err();
            assert!(error.is_user_error(), "{error}");
            let error = error.to_string();
            assert!(error.contains("tokenizer.json") && error.contains(why), "{error}");
        }
    };
    let whole = fs::read_to_string(folder("llama2").join("tokenizer.json")).unwrap();
    refused("", "is no tokenizer that can be read");
    refused("[1, 2]", "is no tokenizer that can be read");
    refused(&whole[..whole.len() / 2], "is no tokenizer that can be read");
    refused(&whole.replace("\"dropout\":null", "\"dropout\":0.1"), "has a `dropout`");
    refused(&Symbols.to_json().replace("\"type\": \"BPE\"", "\"type\": \"Unheard\""), "is no tokenizer");
    fs::write(&path, &whole).unwrap();
    for (settings, why) in [
        ("{", "is no JSON"),
        ("[]", "is no JSON object"),
        (r#"{"eos_token": 3}"#, "`eos_token` is 3, expected a text"),
        (r#"{"add_bos_token": "yes"}"#, "`add_bos_token` is \"yes\", expected true or false"),
        (r#"{"eos_token": "<end>"}"#, "`eos_token` is \"<end>\", which is no token of"),
    ] {
        fs::write(dir.path().join("tokenizer_config.json"), settings).unwrap();
        let error = tokenizer::open(dir.path()).unwrap_err().to_string();
        assert!(error.contains("tokenizer_config.json") && error.contains(why), "{error}");
    }
    // Of a file by another name nothing beside it is read.
    fs::rename(&path, dir.path().join("mine.json")).unwrap();
    tokenizer::open(&dir.path().join("mine.json")).unwrap();
    let error = tokenizer::open(dir.path()).unwrap_err().to_string();
    assert!(error.contains("has no tokenizer.json"), "{error}");
    fs::write(dir.path().join("tokenizer.model"), "").unwrap();
    let error = tokenizer::open(dir.path()).unwrap_err().to_string();
    assert!(error.contains("has tokenizer.model and no tokenizer.json"), "{error}");
    assert!(tokenizer::of_folder(dir.path()).unwrap().is_none());
}

/// A file that was used to cut texts, and to fill them up, does neither here, and is carried on as it was.
#[test]
fn texts_are_not_cut() {
    let dir = tempfile::tempdir().unwrap();
    let whole = fs::read_to_string(folder("gpt2").join("tokenizer.json")).unwrap();
    let cut = r#""truncation":{"direction":"Right","max_length":4,"strategy":"LongestFirst","stride":0}"#;
    let filled = r#""padding":{"strategy":{"Fixed":9},"direction":"Right","pad_to_multiple_of":null,"pad_id":0,"pad_type_id":0,"pad_token":"!"}"#;
    let changed = whole.replace("\"truncation\":null", cut).replace("\"padding\":null", filled);
    assert!(changed.len() > whole.len() + cut.len());
    fs::write(dir.path().join("tokenizer.json"), &changed).unwrap();
    let (usual, other) = (tokenizer::open(&folder("gpt2")).unwrap(), tokenizer::open(dir.path()).unwrap());
    for text in ["a", &text::chunk(1)] {
        assert_eq!(usual.encode(text).unwrap(), other.encode(text).unwrap());
    }
    assert_eq!(other.to_json(), changed);
    assert!(tokenizer::agree(&*usual, &*other) && !tokenizer::agree(&*usual, &Bytes));
}

#[test]
fn a_configuration_has_the_tokenizer_that_it_names() {
    let named = |sets: &[&str]| {
        let path = format!("data.tokenizer={}", folder("qwen").display());
        let sets: Vec<String> =
            sets.iter().map(ToString::to_string).chain([path, "data.source=a.txt".into()]).collect();
        Config::load("tiny", &sets)
    };
    let config = named(&["model.vocab_size=0"]).unwrap();
    let tokenizer = config.tokenizer().unwrap().unwrap();
    assert_eq!((config.model.vocab_size, config.unit()), (tokenizer.vocab_size(), "token"));
    let again = config.clone().tokenizer().unwrap().unwrap();
    assert!(Arc::ptr_eq(&tokenizer, &again), "it is opened once");
    assert_eq!(config.framing().unwrap(), Framing::default());
    named(&["model.vocab_size=1024"]).unwrap();
    let error = named(&["model.vocab_size=1002"]).unwrap_err().to_string();
    assert!(error.contains("`model.vocab_size`: is 1002, but the tokenizer has 1003 tokens"), "{error}");
    let error = named(&["model.vocab_size=0", "data.eos_token=<end>"]).unwrap_err().to_string();
    assert!(error.contains("`data.eos_token`: is \"<end>\""), "{error}");
    let ends = named(&["model.vocab_size=0", "data.eos_token=<|endoftext|>"]).unwrap();
    assert_eq!(ends.framing().unwrap().eos, tokenizer.token_id("<|endoftext|>"));
    // What a run has stored is read also where the file is gone.
    let stored = ends.resolved_toml().unwrap().replace("tokenizers/qwen", "tokenizers/gone");
    let stored = Config::from_text(&stored, Path::new("config.toml"), &[]).unwrap();
    assert_eq!(stored.unit(), "token");
    assert!(stored.tokenizer().unwrap_err().to_string().contains("tokenizers/gone"));
}
