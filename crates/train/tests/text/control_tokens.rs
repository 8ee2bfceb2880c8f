//! Control tokens, and texts that follow one another, as Python's `transformers` and `tokenizers` have them: `tokenizers/control.py` and `tokenizers/parts.py`
//! have made the cases.

use nibble_train::tokenizer::{self, ChatTemplate};
use serde_json::Value;
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

fn file(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/tokenizers").join(name)
}

fn json(path: &Path) -> Value {
    serde_json::from_str(&fs::read_to_string(path).unwrap()).unwrap()
}

fn ids(value: &Value) -> Vec<i32> {
    value.as_array().unwrap().iter().map(|id| id.as_i64().unwrap() as i32).collect()
}

/// A folder with a tokenizer and what lies beside it.
fn place(folder: &str, files: &Value) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    fs::copy(file(folder).join("tokenizer.json"), dir.path().join("tokenizer.json")).unwrap();
    for (name, content) in files.as_object().unwrap() {
        fs::write(dir.path().join(name), content.to_string()).unwrap();
    }
    dir
}

#[test]
fn control_tokens_are_those_of_python() {
    let cases = json(&file("control.json"));
    for case in cases.as_array().unwrap() {
        let name = case["name"].as_str().unwrap();
        let dir = place("qwen", &case["files"]);
        let tokenizer = tokenizer::open(dir.path()).unwrap_or_else(|e| panic!("{name}: {e}"));
        // What a run copies is the same tokenizer.
        let copy = tempfile::tempdir().unwrap();
        for (name, text) in tokenizer.files() {
            fs::write(copy.path().join(name), text).unwrap();
        }
        for tokenizer in [&tokenizer, &tokenizer::open(copy.path()).unwrap()] {
            assert_eq!(tokenizer.eos().map(i64::from), case["eos"].as_i64(), "{name}");
            assert_eq!(tokenizer.vocab_size() as u64, case["size"].as_u64().unwrap(), "{name}");
            for (text, expected) in
                case["texts"].as_array().unwrap().iter().zip(case["ids"].as_array().unwrap())
            {
                let found = tokenizer.encode_with_control(text.as_str().unwrap()).unwrap();
                assert_eq!(found, ids(expected), "{name}: {text}");
            }
        }
    }
}

/// Names of tokens in an older file alone are those of a tokenizer that others take as it stands.
#[test]
fn names_of_an_older_file_alone_are_kept() {
    let dir = place("qwen", &serde_json::json!({"special_tokens_map.json": {"eos_token": "<|im_start|>"}}));
    let tokenizer = tokenizer::open(dir.path()).unwrap();
    assert_eq!(tokenizer.eos(), tokenizer.token_id("<|im_start|>"));
    let files: BTreeMap<&str, String> = tokenizer.files().into_iter().collect();
    let settings: Value = serde_json::from_str(&files["tokenizer_config.json"]).unwrap();
    assert_eq!(settings["eos_token"], "<|im_start|>");
    assert_eq!(settings["tokenizer_class"], "PreTrainedTokenizerFast");
}

/// White space beside a control token that takes it along is that token's, whatever part it stands in.
#[test]
fn a_control_token_takes_white_space_of_other_parts_along() {
    let cases = json(&file("control.json"));
    let case = cases.as_array().unwrap().iter().find(|case| case["name"] == "other flags").unwrap();
    let tokenizer = tokenizer::open(place("qwen", &case["files"]).path()).unwrap();
    let whole = case["texts"][2].as_str().unwrap();
    let (first, rest) = whole.split_at(whole.find("<|eot|>").unwrap());
    let (eot, rest) = rest.split_at("<|eot|>".len());
    assert!(first.ends_with("  ") && rest.starts_with("  "));
    let found = tokenizer.encode_parts(&[first, eot, rest], true, false).unwrap();
    assert_eq!(found[1], [tokenizer.token_id(eot).unwrap()]);
    assert_eq!(found.concat(), ids(&case["ids"][2]));
}

#[test]
fn control_tokens_that_contradict_the_tokenizer_are_named() {
    let token = |content: &str| serde_json::json!({"content": content, "special": true});
    for (name, files, why) in [
        (
            "tokenizer_config.json",
            serde_json::json!({"added_tokens_decoder": {"7": token("<|im_end|>")}}),
            "\"<|im_end|>\" has the id 7; with the tokens of tokenizer.json it has 1003",
        ),
        (
            "tokenizer_config.json",
            serde_json::json!({"added_tokens_decoder": {"x": token("a")}}),
            "`added_tokens_decoder[\"x\"]`",
        ),
        (
            "tokenizer_config.json",
            serde_json::json!({"added_tokens_decoder": {"1003": "a"}}),
            "`added_tokens_decoder[\"1003\"]`",
        ),
        (
            "tokenizer_config.json",
            serde_json::json!({"added_tokens_decoder": [1]}),
            "`added_tokens_decoder` is [1]",
        ),
        (
            "tokenizer_config.json",
            serde_json::json!({"additional_special_tokens": [3]}),
            "`additional_special_tokens` is 3",
        ),
        (
            "added_tokens.json",
            serde_json::json!({"<|im_end|>": 5}),
            "\"<|im_end|>\" has the id 5; with the tokens",
        ),
        ("added_tokens.json", serde_json::json!({"<|im_end|>": "5"}), "`<|im_end|>` is \"5\""),
        (
            "tokenizer_config.json",
            serde_json::json!({"split_special_tokens": true}),
            "`split_special_tokens` is true",
        ),
        ("added_tokens.json", serde_json::json!([]), "is no JSON object"),
    ] {
        let dir = place("qwen", &serde_json::json!({ name: files }));
        let error = tokenizer::open(dir.path()).unwrap_err().to_string();
        assert!(error.contains(name) && error.contains(why), "{error}");
    }
}

#[test]
fn texts_that_follow_one_another_have_the_tokens_of_the_whole() {
    let cases = json(&file("parts.json"));
    let (mut tokenizers, mut cut) = (BTreeMap::new(), 0);
    for case in cases.as_array().unwrap() {
        let name = case["name"].as_str().unwrap();
        let tokenizer = tokenizers.entry(name).or_insert_with(|| {
            let mut whole = json(&file(case["folder"].as_str().unwrap()).join("tokenizer.json"));
            for (key, value) in case["changes"].as_object().unwrap() {
                whole[key] = value.clone();
            }
            let dir = tempfile::tempdir().unwrap();
            fs::write(dir.path().join("tokenizer.json"), whole.to_string()).unwrap();
            tokenizer::open(dir.path()).unwrap()
        });
        let parts: Vec<&str> =
            case["parts"].as_array().unwrap().iter().map(|part| part.as_str().unwrap()).collect();
        let expected: Vec<Vec<i32>> = case["ids"].as_array().unwrap().iter().map(ids).collect();
        assert_eq!(tokenizer.encode_parts(&parts, true, false).unwrap(), expected, "{name}: {parts:?}");
        let is_cut = case["is_cut"].as_bool().unwrap();
        cut += usize::from(is_cut);
        if !is_cut {
            let whole = tokenizer.encode_with_control(&parts.concat()).unwrap();
            assert_eq!(expected.concat(), whole, "{name}: {parts:?}");
        }
    }
    assert!(cut > 10 && cut < 40);
}

/// A piece of a long text, too, begins no text.
#[test]
fn a_piece_that_goes_on_begins_no_text() {
    let tokenizer = tokenizer::open(&file("llama2")).unwrap();
    let text = "the end of it, and more. ".repeat(100);
    let (first, second) = text.split_at(text.len() / 2);
    let whole = tokenizer.encode(&text).unwrap();
    let pieces = [
        tokenizer.encode_parts(&[first], false, false).unwrap().concat(),
        tokenizer.encode_parts(&[second], false, true).unwrap().concat(),
    ];
    assert_eq!(pieces.concat(), whole);
    assert_ne!([pieces[0].clone(), tokenizer.encode(second).unwrap()].concat(), whole);
    assert_eq!(tokenizer.encode_parts(&[""], false, true).unwrap(), [[0; 0]]);
}

/// What ends an answer is the first control token that is learnt behind its text, whatever else the template writes there.
#[test]
fn the_token_behind_an_answer_ends_it() {
    let dir = place(
        "qwen",
        &serde_json::json!({"tokenizer_config.json": {"additional_special_tokens": ["<|im_end|>", "<|call|>"]}}),
    );
    let tokenizer = tokenizer::open(dir.path()).unwrap();
    let [end, call, text] =
        ["<|im_end|>", "<|call|>", "<|endoftext|>"].map(|token| tokenizer.token_id(token).unwrap());
    let header = "{% for m in messages %}<|im_start|>{{ m.role }}\n";
    let footer = "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}";
    let of = |body: &str| {
        let template = format!("{header}{body}{footer}");
        ChatTemplate::new(Path::new("t.jinja"), &template, &BTreeMap::new())
            .unwrap()
            .ends_of_answers(&*tokenizer)
            .unwrap()
    };
    assert_eq!(of("{{ m.content }}<|im_end|>\n"), Some(vec![end]));
    assert_eq!(of("<think>\n{{ m.content }}\n\n<|im_end|>\n<|endoftext|>"), Some(vec![end]));
    assert_eq!(of("{{ m.content | trim }}<|endoftext|>"), Some(vec![text]));
    assert_eq!(
        of("{{ m.content }}{% if m.tool_calls %}<|im_start|>f<|call|>{% else %}<|im_end|>{% endif %}"),
        Some(vec![end, call])
    );
    assert_eq!(of("{{ m.content }}\n\n"), Some(vec![]));
    assert_eq!(of("{{ m.content }}</s>"), Some(vec![]));
    assert_eq!(of("{% generation %}{{ m.content }}{% endgeneration %}<|im_end|>"), Some(vec![]));
    assert_eq!(of("{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}"), Some(vec![end]));
    assert_eq!(of("{{ raise_exception('no') }}"), None);
}
