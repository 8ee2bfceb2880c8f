//! Tests of conversations in JSON Lines. A chat template renders the conversations, and the answers are targets.

use std::fs;
use std::path::Path;

use crate::config::{Config, OnError};
use crate::data::{Dataset, NO_TARGET};
use crate::tokenizer;

const TEMPLATE: &str = "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|endoftext|>{% endfor %}\
    {% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}";

/// Creates a folder with a tokenizer and a file of these lines.
fn place(template: Option<&str>, lines: &str) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    let own = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/tokenizers/qwen/tokenizer.json");
    fs::copy(own, dir.path().join("tokenizer.json")).unwrap();
    if let Some(template) = template {
        fs::write(dir.path().join("chat_template.jinja"), template).unwrap();
    }
    fs::write(dir.path().join("talks.jsonl"), lines).unwrap();
    dir
}

fn config(dir: &Path) -> Config {
    let path = |name: &str| dir.join(name).display().to_string();
    let sets = [
        format!("data.source={}", path("talks.jsonl")),
        format!("data.tokenizer={}", dir.display()),
        format!("data.cache_dir={}", path("caches")),
        "data.messages_key=talk".into(),
        "data.seq_len=8".into(),
        "model.vocab_size=0".into(),
    ];
    Config::load("tiny", &sets).unwrap()
}

#[test]
fn answers_alone_are_learnt() {
    let line = r#"{"id": 1, "talk": [{"role": "user", "content": "a <|im_start|> b"}, {"role": "assistant", "content": "the answer"}]}"#;
    let dir = place(Some(TEMPLATE), &format!("{line}\n").repeat(200));
    let data = Dataset::of(&config(dir.path())).unwrap();
    let tokenizer = tokenizer::open(dir.path()).unwrap();
    let ids = |text: &str| tokenizer.encode_with_control(text).unwrap();
    let prompt = ids("<|im_start|>user\na <|im_start|> b<|endoftext|><|im_start|>assistant\n");
    let answer = ids("the answer<|endoftext|>");
    let one: Vec<i32> = [&prompt[..], &answer[..]].concat();
    let batch = data.valid_batch(0, 40).unwrap();
    // Whole documents are held out, so the first held-out token begins a document.
    for (at, (input, target)) in batch.inputs.iter().zip(&batch.targets).enumerate() {
        assert_eq!(*input, one[at % one.len()], "token {at}");
        let next = (at + 1) % one.len();
        assert_eq!(*target, if next >= prompt.len() { one[next] } else { NO_TARGET }, "target {at}");
    }
    assert!(batch.counted() > 0);
}

#[test]
fn a_row_that_is_no_conversation_is_named_or_left_out() {
    let good =
        r#"{"talk": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "an answer"}]}"#;
    let refuses =
        "{% if messages[0].role != 'user' %}{{ raise_exception('begin with a question') }}{% endif %}"
            .to_owned()
            + TEMPLATE;
    for (row, why) in [
        (r#"{"text": "x"}"#, "has no \"talk\", but \"text\"; data.messages_key names another"),
        (r#"{"talk": "x"}"#, "\"talk\" is a text, expected a list"),
        (r#"{"talk": [{"content": "x"}]}"#, "\"talk\" has no text `role` in message 1, but \"content\""),
        (
            r#"{"talk": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]}"#,
            "\"talk\" has no text `role` in message 1, but \"from\", \"value\"",
        ),
        (
            r#"{"talk": [{"role": "user", "content": "q"}, {"role": "gpt", "content": "a"}]}"#,
            "\"talk\" has no answer: its roles are user, gpt; the role of an answer is assistant",
        ),
        (
            r#"{"talk": [{"role": "user", "content": "q"}]}"#,
            "\"talk\" has no answer: its only role is user; the role of an answer is assistant",
        ),
        (r#"{"talk": [{"role": "system", "content": "x"}]}"#, "begin with a question"),
        ("[1]", "is a list, expected an object"),
        ("{", "is no JSON"),
    ] {
        let dir = place(Some(&refuses), &format!("{}{row}\n", format!("{good}\n").repeat(100)));
        let mut config = config(dir.path());
        let error = Dataset::of(&config).unwrap_err().to_string();
        assert!(error.contains("talks.jsonl: line 101: ") && error.contains(why), "{error}");
        config.data.on_error = OnError::Skip;
        Dataset::of(&config).unwrap();
    }
}

/// A conversation with an empty answer would have no targets.
#[test]
fn an_answer_without_a_text_is_none() {
    let rows = |content: &str| {
        let row = format!(
            r#"{{"talk": [{{"role": "user", "content": "q"}}, {{"role": "assistant", "content": "{content}"}}]}}"#
        );
        row + "\n"
    };
    let bare = "{% for message in messages %}{{ message.content }}{% endfor %}";
    let marked = "{% for message in messages %}{% generation %}{% if message.role == 'assistant' %}{{ message.content }}{% endif %}\
        {% endgeneration %}{% endfor %}";
    for template in [bare, marked] {
        let dir = place(Some(template), &(rows("an answer").repeat(100) + &rows("")));
        let mut config = config(dir.path());
        let error = Dataset::of(&config).unwrap_err().to_string();
        let why =
            "line 101: \"talk\" has no answer: what the chat template writes for the role assistant is empty";
        assert!(error.contains("talks.jsonl") && error.contains(why), "{error}");
        config.data.on_error = OnError::Skip;
        Dataset::of(&config).unwrap();
    }
    let dir = place(Some("x"), "{\"talk\": []}\n");
    let error = Dataset::of(&config(dir.path())).unwrap_err().to_string();
    assert!(error.contains("line 1: \"talk\" has no answer: it has no message"), "{error}");
}

/// The template uses a row's other keys, or the row is refused with an error that names the key, even if only one of many rows has such
/// keys.
#[test]
fn what_a_row_says_besides_is_used_or_refused() {
    let talk = r#""talk": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "an answer"}]"#;
    let template = "{% if tools %}<|im_start|>tools{% for tool in tools %} {{ tool.name }}{% endfor %}{% endif %}{{ mood }}".to_owned() + TEMPLATE;
    let said = |besides: &str| {
        let row = format!("{{{talk}{besides}}}\n");
        let rows = format!("{{{talk}}}\n").repeat(500) + &row;
        let dir = place(Some(&template), &rows);
        let mut config = config(dir.path());
        let text = Dataset::of(&config).map_err(|e| e.to_string()).map(|data| {
            let tokenizer = tokenizer::open(dir.path()).unwrap();
            let tail = data.valid_batch(0, usize::MAX).unwrap();
            tokenizer.decode(&tail.inputs)
        });
        config.data.on_error = OnError::Skip;
        (text, Dataset::of(&config).unwrap().given(0)[0].left_out.rows)
    };
    for (besides, text) in [
        (r#", "tools": [{"name": "add"}, {"name": "sub"}]"#, "<|im_start|>tools add sub<|im_start|>user"),
        (r#", "tools": "[{\"name\": \"add\"}]""#, "<|im_start|>tools add<|im_start|>user"),
        (r#", "chat_template_kwargs": {"mood": "sad"}"#, "sad<|im_start|>user"),
        (r#", "tools": null, "images": [], "system": "", "weight": 1, "id": 3"#, "<|im_start|>user"),
    ] {
        let (found, left_out) = said(besides);
        assert!(found.as_ref().is_ok_and(|found| found.contains(text)), "{besides}: {found:?}");
        assert_eq!(left_out, 0, "{besides}");
    }
    for (besides, why) in [
        (r#", "tools": "add""#, "\"tools\" is no JSON"),
        (r#", "tools": {"name": "add"}"#, "\"tools\" is an object, expected a list of objects"),
        (r#", "tools": ["add"]"#, "\"tools\" has a text as number 1"),
        (r#", "chat_template_kwargs": "x""#, "\"chat_template_kwargs\" is a text, expected an object"),
        (
            r#", "chat_template_kwargs": {"tools": []}"#,
            "\"chat_template_kwargs\" has \"tools\", which is no variable",
        ),
        (
            r#", "chat_template_kwargs": {"enable_thinking": false}"#,
            "has \"enable_thinking\", which the chat template never names",
        ),
        (r#", "functions": [{"name": "add"}]"#, "has \"functions\""),
        (r#", "system": "be brief""#, "has \"system\""),
        (r#", "images": ["a.png"]"#, "has \"images\""),
        (r#", "weight": 0"#, "has \"weight\""),
        (r#", "documents": [{"text": "x"}]"#, "has \"documents\""),
    ] {
        let (found, left_out) = said(besides);
        let error = found.unwrap_err();
        assert!(error.contains("talks.jsonl: line 501: ") && error.contains(why), "{besides}: {error}");
        assert_eq!(left_out, 1, "{besides}");
    }
}

/// Several keys of a message can say whether the message is a target. Keys that the template does not render are refused.
#[test]
fn what_a_message_says_besides_is_used_or_refused() {
    let marked = "{% for message in messages %}<|im_start|>{{ message.role }}\n{% if message.role == 'assistant' %}{% generation %}\
        {{ message.content }}<|endoftext|>{% endgeneration %}{% else %}{{ message.content }}<|endoftext|>{% endif %}{% endfor %}";
    let said = |template: &str, first: &str, question: &str| {
        let row = format!(
            r#"{{"talk": [{{"role": "user", "content": "q"{question}}}, {{"role": "assistant", "content": "one"{first}}},
                {{"role": "user", "content": "r"}}, {{"role": "assistant", "content": "two"}}]}}"#
        );
        let dir = place(Some(template), &format!("{}\n", row.replace('\n', " ")).repeat(100));
        let data = Dataset::of(&config(dir.path())).map_err(|e| e.to_string())?;
        let batch = data.valid_batch(0, usize::MAX).unwrap();
        let learnt: Vec<i32> = batch.targets.into_iter().filter(|target| *target != NO_TARGET).collect();
        let text = tokenizer::open(dir.path()).unwrap().decode(&learnt);
        Ok::<_, String>(["one", "two"].map(|answer| text.contains(answer)))
    };
    for template in [TEMPLATE, marked] {
        for (key, one, zero) in [
            ("weight", "1", "0"),
            ("weight", "1.0", "0.0"),
            ("train", "true", "false"),
            ("training", "true", "false"),
            ("loss", "true", "false"),
            ("masked", "false", "true"),
        ] {
            let with = |value: &str| said(template, &format!(", \"{key}\": {value}"), "");
            assert_eq!(with(one), Ok([true, true]), "{key}");
            assert_eq!(with(zero), Ok([false, true]), "{key}");
            assert_eq!(with("null"), Ok([true, true]), "{key}");
            for other in ["0.5", "\"no\"", "[]"] {
                let error = with(other).unwrap_err();
                assert!(error.contains(&format!("in message 2, \"{key}\": ")), "{error}");
            }
        }
        assert_eq!(said(template, "", r#", "weight": 0, "train": false"#), Ok([true, true]));
        for (first, question, why) in [
            (
                r#", "weight": 1, "train": false"#,
                "",
                "in message 2, \"weight\" and \"train\", which contradict",
            ),
            ("", r#", "train": true"#, "in message 1, \"train\": true, and its role is user"),
            (r#", "train_detail": [{"begin_offset": 0}]"#, "", "in message 2, \"train_detail\""),
            (
                r#", "function_call": {"name": "f"}"#,
                "",
                "message 2 has \"function_call\", which the chat template never names",
            ),
            (r#", "tool_calls": [{"id": 1}]"#, "", "message 2 has \"tool_calls\""),
            (r#", "reasoning_content": "hm""#, "", "message 2 has \"reasoning_content\""),
            (r#", "thinking": "hm""#, "", "message 2 has \"reasoning_content\" or \"thinking\""),
            ("", r#", "images": ["a.png"]"#, "message 1 has \"image\" or \"images\""),
        ] {
            let error = said(template, first, question).unwrap_err();
            assert!(error.contains("talks.jsonl: line 1: ") && error.contains(why), "{error}");
        }
        assert_eq!(
            said(template, r#", "tool_calls": [], "thinking": "", "name": "x""#, ""),
            Ok([true, true])
        );
    }
    let error = said(TEMPLATE, r#", "weight": 0}, {"role": "user", "content": ""#, "");
    assert!(error.is_err() || error == Ok([false, true]));
}

/// A template that does too much work for every row stops the file early, for every value of `data.on_error`.
#[test]
fn a_template_does_so_much_for_a_file() {
    let row =
        r#"{"talk": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "an answer"}]}"#;
    let endless = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}".to_owned()
        + TEMPLATE;
    let dir = place(Some(&endless), &format!("{row}\n").repeat(300));
    let mut config = config(dir.path());
    for on_error in [OnError::Stop, OnError::Skip] {
        config.data.on_error = on_error;
        let error = Dataset::of(&config).unwrap_err().to_string();
        let why =
            "chat_template.jinja: its chat template: line 1: takes more steps than its conversations warrant";
        assert!(error.contains("talks.jsonl: line 1: ") && error.contains(why), "{error}");
    }
}

#[test]
fn a_template_is_needed_and_another_one_is_another_cache() {
    let line = "{\"talk\": [{\"role\": \"user\", \"content\": \"q\"}, {\"role\": \"assistant\", \"content\": \"an answer\"}]}\n";
    let dir = place(None, &line.repeat(100));
    let error = Dataset::of(&config(dir.path())).unwrap_err().to_string();
    assert!(
        error.contains("`data.messages_key`: is \"talk\"") && error.contains("without a chat template"),
        "{error}"
    );
    let hash = |template: &str| {
        fs::write(dir.path().join("chat_template.jinja"), template).unwrap();
        Dataset::of(&config(dir.path())).unwrap().sha256()
    };
    let first = hash(TEMPLATE);
    assert_ne!(hash(&TEMPLATE.replace("<|im_start|>", "<")), first);
    assert_eq!(hash(TEMPLATE), first);
}
