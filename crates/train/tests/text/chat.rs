//! Conversations as text, equal to what Python's `transformers` makes of them: `chat/make.py` has made the cases.

use nibble_train::tokenizer::{self, ChatTemplate, Conversation};
use serde_json::Value;
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, UNIX_EPOCH};

fn file(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/chat").join(name)
}

fn tokens() -> BTreeMap<String, String> {
    [("bos_token", "<s>"), ("eos_token", "</s>")].map(|(name, text)| (name.into(), text.into())).into()
}

/// The template of this name, at the time that the script says.
fn template(name: &str) -> ChatTemplate {
    let path = file(&format!("{name}.jinja"));
    let text = fs::read_to_string(&path).unwrap();
    let template = ChatTemplate::new(&path, &text, &tokens()).unwrap();
    template.at(UNIX_EPOCH + Duration::from_secs(1_721_984_461)).unwrap()
}

fn cases() -> Vec<Value> {
    serde_json::from_str(&fs::read_to_string(file("cases.json")).unwrap()).unwrap()
}

#[test]
fn texts_are_those_of_python() {
    let cases = cases();
    assert!(cases.len() > 30);
    for case in &cases {
        let name = case["template"].as_str().unwrap();
        let messages = Conversation::from_json(case["messages"].as_str().unwrap()).unwrap();
        let prompt = case["prompt"].as_bool().unwrap();
        match template(name).text(&messages, prompt) {
            Ok(text) => assert_eq!(Some(text.as_str()), case["text"].as_str(), "{name}"),
            Err(error) => {
                let (error, expected) = (error.to_string(), case["error"].as_str().expect(name));
                assert!(error.contains(&format!("{name}.jinja: its chat template: {expected}")), "{error}");
            }
        }
    }
}

#[test]
fn answers_in_generation_blocks_are_those_of_python() {
    let with_answers: Vec<Value> = cases().into_iter().filter(|case| case["answers"].is_array()).collect();
    assert_eq!(with_answers.len(), 3);
    for case in with_answers {
        let messages = Conversation::from_json(case["messages"].as_str().unwrap()).unwrap();
        let rendered = template("generation").render(&messages).unwrap().remove(0);
        assert_eq!(rendered.text, case["text"]);
        let answers: Vec<&str> =
            rendered.answers.iter().map(|answer| &rendered.text[answer.clone()]).collect();
        assert_eq!(Value::from(answers), case["answers"]);
    }
}

/// Without such blocks an answer is what its message adds to the prompt of those before it.
#[test]
fn answers_follow_their_prompts() {
    let talk = r#"[{"role": "system", "content": "S"}, {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"}, {"role": "assistant", "content": "d"}]"#;
    let messages = Conversation::from_json(talk).unwrap();
    for (name, answers) in [
        ("llama3", ["b<|eot_id|>", "d<|eot_id|>"]),
        ("deepseek", ["b<｜end▁of▁sentence｜>", "d<｜end▁of▁sentence｜>"]),
    ] {
        let rendered = template(name).render(&messages).unwrap().remove(0);
        let found: Vec<&str> = rendered.answers.iter().map(|answer| &rendered.text[answer.clone()]).collect();
        assert_eq!(found, answers, "{name}");
    }
    let one = Conversation::from_json(
        r#"[{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]"#,
    );
    let rendered = template("gpt_oss").render(&one.unwrap()).unwrap().remove(0);
    assert_eq!(&rendered.text[rendered.answers[0].clone()], "<|channel|>final<|message|>b<|return|>");
}

/// Where a template writes earlier answers otherwise as a conversation goes on, each answer is learnt once, and behind the very text that a model sees when
/// it answers.
#[test]
fn each_answer_is_learnt_as_it_is_given() {
    let cases: Vec<Value> = serde_json::from_str(&fs::read_to_string(file("turns.json")).unwrap()).unwrap();
    let mut split = 0;
    for case in &cases {
        let name = case["template"].as_str().unwrap();
        let messages = Conversation::from_json(case["messages"].as_str().unwrap()).unwrap();
        let rendered = template(name).render(&messages).unwrap();
        split += usize::from(rendered.len() > 1);
        let mut found: Vec<[&str; 2]> = Vec::new();
        for of in &rendered {
            assert!(!of.answers.is_empty(), "{name}");
            let is_given = |text: &Value| text == of.text.as_str();
            let whole = case["answers"].as_array().unwrap().iter().any(|answer| is_given(&answer[1]));
            assert!(whole || is_given(&case["whole"]), "{name}: {:?}", of.text);
            found.extend(of.answers.iter().map(|answer| [&of.text[..answer.start], &of.text[..answer.end]]));
        }
        let expected: Vec<[&str; 2]> = case["answers"]
            .as_array()
            .unwrap()
            .iter()
            .map(|one| [0, 1].map(|at| one[at].as_str().unwrap()))
            .collect();
        assert_eq!(found, expected, "{name}");
    }
    assert!(split > 3 && split < cases.len());
}

/// Answers that do not follow what is written before one are refused, and it is said what is written.
#[test]
fn an_answer_that_does_not_follow_its_prompt_is_named() {
    let one = r#"[{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]"#;
    let text = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<assistant><think>{% endif %}";
    let template = ChatTemplate::new(Path::new("t.jinja"), text, &tokens()).unwrap();
    let error = template.render(&Conversation::from_json(one).unwrap()).unwrap_err().to_string();
    let why = "message 2 does not follow what the chat template of t.jinja writes before an answer to those before it: where that goes on with \"<think>\", \
               the conversation with the message has \"b\"";
    assert!(error.contains(why), "{error}");
}

/// Rows with tools and variables, as TRL gives them to `apply_chat_template`.
#[test]
fn rows_are_written_as_python_writes_them() {
    let cases: Vec<Value> = serde_json::from_str(&fs::read_to_string(file("rows.json")).unwrap()).unwrap();
    assert!(cases.len() > 3);
    for case in cases {
        let row = Conversation::of_row(case["row"].as_str().unwrap(), "messages").unwrap();
        assert_eq!(template("qwen").text(&row, false).unwrap(), case["text"]);
        let rendered = template("qwen").render(&row).unwrap().remove(0);
        assert_eq!(rendered.text[..rendered.answers[0].start], case["prompt"]);
    }
}

#[test]
fn what_is_no_conversation_or_no_template_is_named() {
    for (json, why) in [
        ("{", "`messages`: are no JSON"),
        ("3", "`messages`: is a number, expected a list of messages"),
        (r#"[{"role": "user"}, {"content": "x"}]"#, "has no text `role` in message 2"),
        (r#"["user"]"#, "has no text `role` in message 1"),
    ] {
        let error = Conversation::from_json(json).unwrap_err().to_string();
        assert!(error.contains(why), "{error}");
    }
    let refused =
        |text: &str| ChatTemplate::new(Path::new("t.jinja"), text, &tokens()).unwrap_err().to_string();
    for text in ["{% if %}", "{{ a", "{% generation %}", "{% unheard %}"] {
        assert!(
            refused(text).contains("t.jinja: its chat template cannot be read: line 1"),
            "{}",
            refused(text)
        );
    }
    // One that does not end is ended.
    let endless = "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}{% endfor %}{% endfor %}{% endfor %}";
    let endless = ChatTemplate::new(Path::new("t.jinja"), endless, &tokens()).unwrap();
    assert!(endless.text(&Conversation::from_json("[]").unwrap(), false).is_err());
}

#[test]
fn templates_come_from_the_tokenizers_files() {
    let dir = tempfile::tempdir().unwrap();
    let write = |name: &str, text: &str| fs::write(dir.path().join(name), text).unwrap();
    let tokenizer = file("../tokenizers/qwen/tokenizer.json");
    fs::copy(tokenizer, dir.path().join("tokenizer.json")).unwrap();
    let text = |name: &str| {
        let template = tokenizer::open(dir.path()).unwrap().chat_template(name).unwrap()?;
        Some(template.text(&Conversation::from_json("[]").unwrap(), false).unwrap())
    };
    assert_eq!(text(""), None);
    write(
        "tokenizer_config.json",
        r#"{"chat_template": "one {{ eos_token }}", "eos_token": {"content": "<think>"}}"#,
    );
    assert_eq!(text("").as_deref(), Some("one <think>"));
    write(
        "tokenizer_config.json",
        r#"{"chat_template": [{"name": "default", "template": "a"}, {"name": "tool_use", "template": "b"}]}"#,
    );
    assert_eq!((text("").as_deref(), text("tool_use").as_deref(), text("rag")), (Some("a"), Some("b"), None));
    write("chat_template.jinja", "c\n");
    assert_eq!((text("").as_deref(), text("tool_use").as_deref()), (Some("c"), Some("b")));
    write("tokenizer_config.json", r#"{"chat_template": 3}"#);
    let error = tokenizer::open(dir.path()).unwrap_err().to_string();
    assert!(error.contains("`chat_template` is neither a text nor a list"), "{error}");
}
