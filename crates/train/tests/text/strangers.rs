//! Chat templates and tokenizers of strangers: whatever they are made to do, they end, in bounded memory, and say what was too much.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::Instant;

use nibble_testkit::{Breadth, alone};
use nibble_train::tokenizer::{ChatTemplate, Conversation, HuggingFace, Tokenizer};
use serde_json::{Value, json};

/// Rows of a file.
const ROWS: usize = 300;

/// From here on this process takes so many bytes more, at most, where the system can be told so.
#[cfg(not(target_os = "linux"))]
fn limit_memory(_: u64) {}

#[cfg(target_os = "linux")]
fn limit_memory(more: u64) {
    let Ok(statm) = std::fs::read_to_string("/proc/self/statm") else { return };
    let pages: u64 = statm.split(' ').next().unwrap().parse().unwrap();
    let most = pages * 4096 + more;
    let limit = libc::rlimit { rlim_cur: most, rlim_max: most };
    // SAFETY: the limit is a value of this function.
    assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_AS, &limit) }, 0);
}

/// The last text of so many rows by a template, or the first error.
fn rows(template: &str, count: usize) -> Result<String, String> {
    let template =
        ChatTemplate::new(Path::new("t.jinja"), template, &BTreeMap::new()).map_err(|e| e.to_string())?;
    let row = r#"[{"role": "user", "content": "a question"}, {"role": "assistant", "content": "an answer"}]"#;
    let row = Conversation::from_json(row).map_err(|e| e.to_string())?;
    let mut text = String::new();
    for _ in 0..count {
        text = template.text(&row, false).map_err(|e| e.to_string())?;
    }
    Ok(text)
}

fn set(times: usize, what: &str) -> String {
    format!("{{% set x = 'abcdefgh' %}}{{% set l = [1] %}}{}", format!("{{% set {what} %}}").repeat(times))
}

fn expression(of: impl AsRef<str>) -> String {
    format!("{{{{ {} }}}}", of.as_ref())
}

/// A loop that never ends, in whose inside this stands.
fn endless(inside: &str) -> String {
    let ends = "{% endfor %}".repeat(3);
    let begins = ["a", "b", "c"].map(|name| format!("{{% for {name} in range(99999) %}}")).concat();
    format!("{{% set ns = namespace(x='abcdefgh', l=[1], n=0) %}}{begins}{inside}{ends}")
}

/// What nests.
fn deep(times: usize) -> Vec<String> {
    let times_of = |open: &str, inside: &str, close: &str| {
        expression(open.repeat(times) + inside + &close.repeat(times))
    };
    let blocks = |open: &str, close: &str| open.repeat(times) + "x" + &close.repeat(times);
    vec![
        times_of("not ", "1", ""),
        times_of("-", "1", ""),
        times_of("(", "1", ")"),
        times_of("[", "1", "]"),
        times_of("{1:", "1", "}"),
        times_of("x[", "1", "]"),
        times_of("f(", "1", ")"),
        times_of("", "1", "|string"),
        times_of("", "1", "|default(1)"),
        times_of("", "x", ".a"),
        times_of("", "x", "[0]"),
        times_of("", "x", "[0:]"),
        times_of("", "x", "()"),
        times_of("", "1", " is defined"),
        times_of("", "1", " is not none"),
        times_of("", "1", " ~ 1"),
        times_of("", "1", " + 1"),
        times_of("", "1", " * 1"),
        times_of("", "1", " ** 1"),
        times_of("", "1", " - 1"),
        times_of("", "1", " and 1"),
        times_of("", "1", " or 1"),
        times_of("", "1", " in [1]"),
        times_of("", "1", " < 1"),
        times_of("1 if 0 else ", "1", ""),
        times_of("", "1", " if 1"),
        times_of("(1,", "1", ")"),
        times_of("not (", "1", ")"),
        times_of("-(", "1", ")"),
        blocks("{% if 1 %}", "{% endif %}"),
        blocks("{% for a in [1] %}", "{% endfor %}"),
        blocks("{% with a = 1 %}", "{% endwith %}"),
        blocks("{% set a %}", "{% endset %}"),
        blocks("{% filter upper %}", "{% endfilter %}"),
        blocks("{% macro m() %}", "{% endmacro %}"),
        blocks("{% call m() %}", "{% endcall %}"),
        blocks("{% autoescape true %}", "{% endautoescape %}"),
        blocks("{% generation %}", "{% endgeneration %}"),
        format!("{{% if 0 %}}{}{{% endif %}}", "{% elif 0 %}".repeat(times)),
        format!("{{% if 0 %}}{}{}", "{% else %}{% if 0 %}".repeat(times), "{% endif %}".repeat(times)),
        format!("{{% for {}a{} in [1] %}}{{% endfor %}}", "(".repeat(times), ")".repeat(times)),
        format!("{{% set {}a{} = 1 %}}", "(".repeat(times), ")".repeat(times)),
        format!("{{% set a{} = 1 %}}", ".b".repeat(times)),
        format!("{{% filter upper{} %}}x{{% endfilter %}}", "|upper".repeat(times)),
        format!("{{% for a in [1]{} %}}{{% endfor %}}", "|list".repeat(times)),
    ]
}

/// What becomes twice as much with each statement.
fn doublings() -> Vec<String> {
    let mut all: Vec<String> = [
        "x = x ~ x",
        "x = x + x",
        "x = x * 2",
        "x = 2 * x",
        "x = [x, x]|join",
        "x = [x, x]|join('')",
        "x = x|replace('a', 'aa')|replace('b', 'bb') ~ x",
        "x = x|replace('', 'a')",
        "x = x.replace('a', 'aaaaaaaaaaaaaaaa')",
        "x = '%s%s'|format(x, x)",
        "x = '{0}{0}'.format(x)",
        "x = ''.join([x, x])",
        "x = x.join(['a', 'b', 'c'])",
        "x = [x, x]|string",
        "x = [x, x]|tojson",
        "x = {'a': x, 'b': x}|tojson",
        "x = x|tojson|tojson",
        "x = x ~ x|upper",
        "x = x|list + x|list",
        "l = l + l",
        "l = l * 2",
        "l = [l, l]",
        "l = {'a': l, 'b': l}",
        "l = [l, l]|list",
        "l = (l + l)|list",
        "l = (l + l)[0:]",
        "l = (l * 2)|reverse",
        "l = [l, l]|map('list')|list",
        "l = l|batch(2, l)|list",
        "l = dict(a=l, b=l)",
        "l = namespace(a=l, b=l)",
        "x = x|escape|replace('&', '&&')",
        "x = (x ~ x)[0:]",
        "x = (x ~ x)[::-1]",
        "x = (x ~ x)|indent(8)",
    ]
    .into_iter()
    .map(|what| set(60, what) + "{{ x }}{{ l }}")
    .collect();
    let twice = |open: &str, close: &str| open.repeat(40) + "{{ x }}" + &close.repeat(40);
    all.push("{% set x = 'abcdefgh' %}".to_owned() + &"{% set x %}{{ x }}{{ x }}{% endset %}".repeat(60));
    all.push("{% set x = 'a' %}".to_owned() + &twice("{% for y in [1, 2] %}", "{% endfor %}"));
    all.push("{% macro m(x) %}{{ m(x ~ x) }}{% endmacro %}{{ m('abcdefgh') }}".into());
    all.push("{% macro m(x) %}{{ m(x) }}{{ m(x) }}{% endmacro %}{{ m('abcdefgh') }}".into());
    all.push("{% macro m() %}{% do m() %}{% do m() %}{% endmacro %}{{ m() }}".into());
    all.push(
        "{% macro m() %}{{ caller() }}{{ caller() }}{% endmacro %}".to_owned()
            + &"{% call m() %}".repeat(40)
            + "x"
            + &"{% endcall %}".repeat(40),
    );
    all.push("{% for y in [[1]] recursive %}{{ loop([y, y]) }}{{ loop([y, y]) }}{% endfor %}".into());
    all.push("{% for y in [[1]] recursive %}{{ loop(loop.index ~ x) }}{% endfor %}".into());
    all.push("{% block b %}{{ self.b() }}{{ self.b() }}{% endblock %}".into());
    all
}

/// What takes long, or makes much, in one go.
fn at_once() -> Vec<String> {
    let expressions = [
        "2 in [1] * 1000000000",
        "[1] * 1000000000 == [1] * 1000000000",
        "[1] * 1000000000 < [1] * 1000000000 < [1]",
        "([1] * 1000000000)|length",
        "([1] * 1000000000)|list",
        "([1] * 1000000000)[999999999]",
        "([1] * 1000000000)|last",
        "([1] * 1000000000)|sort|first",
        "([1] * 1000000000)|join",
        "[1] * 9223372036854775807 * 9223372036854775807",
        "'a' * 1000000000",
        "'a' * 99999999 ~ 'a' * 99999999",
        "'a' * 99999999 * 2",
        "10 ** 9 * 'a'",
        "('a' * 9999999)|list",
        "('a ' * 9999999)|split",
        "('a ' * 9999999).split()",
        "('a\n' * 9999999).splitlines()",
        "('a' * 9999999).split('')",
        "('a' * 9999999)|map('list')|list",
        "'a'|indent(1000000000)",
        "'a\nb'|indent(1000000000)",
        "'a\nb'|indent(18446744073709551615)",
        "'a'|indent(width=1000000000, first=true)",
        "('\n' * 1000000)|indent(1000)",
        "[[[1]]]|tojson(indent=1000000000)",
        "[[[1]]]|tojson(indent=18446744073709551615)",
        "'%1000000000d'|format(1)",
        "'%01000000000d'|format(1)",
        "'%.1000000000f'|format(1.5)",
        "'%*d'|format(1000000000, 1)",
        "'{:1000000000}'.format(1)",
        "'{:>1000000000}'.format('a')",
        "'{:.1000000000f}'.format(1.5)",
        "'{:{}}'.format(1, 1000000000)",
        "('a' * 1000000)|replace('a', 'a' * 1000000)",
        "('a' * 1000000).replace('a', 'a' * 1000000)",
        "('a' * 1000000)|replace('', 'a' * 1000000)",
        "range(99999)|join('a' * 1000000)",
        "('a' * 1000000).join(range(99999))",
        "range(99999)|map('join', 'a' * 1000000)|list",
        "range(99999)|map('string')|map('indent', 1000000)|list",
        "range(99999)|map('string')|map('replace', '', 'a' * 1000000)|list",
        "range(99999)|select('in', range(99999)|list)|list",
        "range(99999)|reject('in', range(99999)|list)|list",
        "range(99999)|map('default', range(99999)|list)|list|tojson",
        "range(1000000000)",
        "range(0, 9223372036854775807)",
        "[1]|batch(1000000000, 0)|list",
        "[1]|batch(1000000000)|list",
        "[1]|slice(1000000000)|list",
        "range(99999)|zip(range(99999))|list * 100000",
        "range(99999)|list * 1000000",
        "'a'.count('')",
        "9 ** 9 ** 9 ** 9",
        "'%s' * 1000000 % ('a' * 1000000)",
        "debug()",
        "[1]|chain([2])",
    ];
    expressions.into_iter().map(expression).collect()
}

/// What does a little very often.
fn loops() -> Vec<String> {
    let mut all: Vec<String> = [
        "",
        "x",
        "{{ a }}",
        "{% if a in messages %}x{% endif %}",
        "{% set ns.n = ns.n + 1 %}",
        "{% set ns.x = ns.x ~ 'a' %}",
        "{% set ns.x = ns.x ~ ns.x %}",
        "{% set ns.l = [ns.l] %}",
        "{% set ns.l = {'a': ns.l} %}",
        "{% set ns.l = [ns.l, ns.l] %}",
        "{% set ns.l = ns.l + [1] %}",
        "{% set ns.l = ns.l + ns.l %}",
        "{% set ns.l = [] + ns.l[1:] + [] %}",
        "{% set ns.l = ns.l * 1 %}",
        "{% set ns.l = ns.l[0:] %}",
        "{% set ns.l = ns.l[::-1] %}",
        "{% set ns.l = ns.l|reverse %}",
        "{% set ns.l = ns.l|batch(1) %}",
        "{% set ns.l = ns.l|batch(1)|list %}",
        "{% set ns.l = dict(a=ns.l) %}",
        "{% set ns.l = dict(a=ns.l).items() %}",
        "{% set ns.l = dict(a=ns.l).values() %}",
        "{% set ns.l = dict(a=ns.l)|items %}",
        "{% set ns.l = ns.l|map('list') %}",
        "{% set ns.l = namespace(x=ns.l) %}",
        "{% set ns.l = [ns.l]|zip([1]) %}",
        "{% macro m() %}{{ ns.l }}{{ b }}{% endmacro %}{% set ns.l = m %}",
        "{% set q = ns.l %}{% macro m() %}{{ q }}{% endmacro %}{% set ns.l = [m] %}",
        "{% if range(99999)|list == range(99999)|list %}x{% endif %}",
        "{% if 'a' in range(99999) %}x{% endif %}",
        "{{ range(99999)[99998] }}",
        "{{ range(99999)|last }}",
        "{{ range(99999)|length }}",
        "{{ loop.changed(range(99999)|list) }}",
        "{{ loop.cycle(1, 2) }}",
        "{{ messages|tojson }}",
        "{% filter upper %}x{% endfilter %}",
        "{% include ['a', 'b'] ignore missing %}",
    ]
    .map(endless)
    .into();
    let long = "y".repeat(100_000);
    all.push(endless(&long));
    all.push(endless(&format!("{{% set x = x ~ '{long}' %}}")));
    all.push(endless(&format!("{{% if x == '{long}' %}}{{% endif %}}")));
    all.push("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}".into());
    all.push("{% for a in range(99999) if 1 in range(99999) %}{% endfor %}".into());
    all.push("{% set ns = namespace(l=[]) %}{% for a in range(60) %}{% set ns.l = ns.l + ns.l %}{% endfor %}{% for a in ns.l %}{% endfor %}x".into());
    all
}

/// Values that hold themselves would be read without an end, and never freed.
fn cycles() -> Vec<String> {
    let begin = "{% set ns = namespace() %}";
    [
        "{% set ns.a = ns %}{{ ns }}",
        "{% set ns.a = [ns] %}{{ ns }}",
        "{% set ns.a = {'b': ns} %}{{ ns }}",
        "{% set ns.a = dict(b=ns) %}{{ ns }}",
        "{% set ns.a = namespace(b=ns) %}{{ ns }}",
        "{% set ns.a = [[]]|map('default', ns)|list %}{{ ns }}",
        "{% set ns.a = [1]|batch(2, ns)|list %}{{ ns }}",
        "{% set ns.a = [1]|slice(2, ns)|list %}{{ ns }}",
        "{% set ns.a = [1]|map(attribute='q', default=ns)|list %}{{ ns }}",
        "{% set ns.a = {}.get('a', ns) %}{{ ns }}",
        "{% set other = namespace() %}{% set other.a = ns %}{% set ns.a = other %}{{ ns }}",
    ]
    .map(|rest| begin.to_owned() + rest)
    .into()
}

/// Templates that end after all, and what they write.
const HARMLESS: [(&str, &str); 3] = [
    ("{% set x = 'abcdefgh' %}{% set l = [1] %}{% set x = x|escape", "abcdefgh[1]"),
    ("{{ 'a'.count('') }}", "2"),
    ("{% set ns = namespace(l=[]) %}", "x"),
];

/// Runs them over a file of rows each, in little memory; daily about one of three.
fn check(templates: &[String]) {
    limit_memory(1 << 30);
    let breadth = Breadth::of_tests();
    let mut longest = 0.0f64;
    for (_, template) in templates.iter().enumerate().filter(|(nth, _)| breadth.takes(*nth, 3)) {
        let start: String = template.chars().take(150).collect();
        let harmless = HARMLESS.iter().find(|(begins, _)| template.starts_with(begins));
        let begun = Instant::now();
        let done = rows(template, ROWS);
        longest = longest.max(begun.elapsed().as_secs_f64());
        match (done, harmless) {
            (Ok(text), Some((_, expected))) => assert_eq!(text, *expected, "{start:?}"),
            (Ok(text), None) => panic!("{start:?} writes {} bytes", text.len()),
            (Err(error), _) => {
                assert!(error.contains("t.jinja") && error.len() < 1000, "{start:?}: {error}");
                assert!(!error.contains("fails on it"), "{start:?}: {error}");
                assert!(harmless.is_none(), "{start:?}: {error}");
            }
        }
    }
    println!("the longest of them took {longest:.2} s for {ROWS} rows");
}

#[test]
fn templates_nest_so_far() {
    alone(module_path!(), "templates_nest_so_far", || {
        check(&[100_000, 3000].into_iter().flat_map(deep).collect::<Vec<_>>());
        // What is let through has a text, or an error of its own.
        for template in deep(1900).into_iter().step_by(Breadth::of_tests().either(1, 3)) {
            if let Err(error) = rows(&template, 1) {
                assert!(error.contains("t.jinja") && !error.contains("fails on it"), "{error}");
            }
        }
    });
}

#[test]
fn templates_grow_so_far() {
    alone(module_path!(), "templates_grow_so_far", || check(&doublings()));
}

#[test]
fn templates_do_so_much_at_once() {
    alone(module_path!(), "templates_do_so_much_at_once", || check(&at_once()));
}

#[test]
fn templates_do_so_much_in_all() {
    alone(module_path!(), "templates_do_so_much_in_all", || check(&[loops(), cycles()].concat()));
}

/// A tokenizer of bytes with these changes.
fn tokenizer(changes: &[(&str, Value)]) -> String {
    let vocab: serde_json::Map<String, Value> =
        ('a'..='z').chain(['\u{2581}', ' ']).enumerate().map(|(id, c)| (c.to_string(), json!(id))).collect();
    let model = json!({"type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
        "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "vocab": vocab, "merges": []});
    let mut whole = json!({"version": "1.0", "truncation": null, "padding": null, "added_tokens": [],
        "normalizer": null, "pre_tokenizer": null, "post_processor": null, "decoder": null, "model": model});
    for (key, value) in changes {
        whole[*key] = value.clone();
    }
    whole.to_string()
}

fn replace(pattern: &Value, content: &str) -> Value {
    json!({"type": "Replace", "pattern": pattern, "content": content})
}

fn normalizers(all: Vec<Value>) -> (&'static str, Value) {
    ("normalizer", json!({"type": "Sequence", "normalizers": all}))
}

/// Tokenizers that make much of a text, or take long.
fn hostile_tokenizers() -> Vec<String> {
    let text = |pattern: &str, content: &str| replace(&json!({"String": pattern}), content);
    let regex = |regex: &str| replace(&json!({"Regex": regex}), "");
    let split = |regex: &str| json!({"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": false});
    let byte_level =
        json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false, "use_regex": false});
    let pre = |all: Vec<Value>| ("pre_tokenizer", json!({"type": "Sequence", "pretokenizers": all}));
    let decoders = |all: Vec<Value>| ("decoder", json!({"type": "Sequence", "decoders": all}));
    let template = |pieces: Vec<Value>, ids: usize| {
        let ids: Vec<usize> = (0..ids).map(|id| id % 20).collect();
        let tokens: Vec<&str> = ids.iter().map(|_| "a").collect();
        json!({"type": "TemplateProcessing", "single": pieces, "pair": [{"Sequence": {"id": "A", "type_id": 0}}],
            "special_tokens": {"a": {"id": "a", "ids": ids, "tokens": tokens}}})
    };
    let (whole, token) =
        (json!({"Sequence": {"id": "A", "type_id": 0}}), json!({"SpecialToken": {"id": "a", "type_id": 0}}));
    let mut all = vec![
        tokenizer(&[normalizers(vec![text("a", "aa"); 25])]),
        tokenizer(&[normalizers(vec![text("a", "aa"); 14])]),
        tokenizer(&[normalizers(vec![text("a", "aaaaaaaa"); 6])]),
        tokenizer(&[normalizers(vec![text("", "a"); 25])]),
        tokenizer(&[normalizers(vec![replace(&json!({"Regex": "."}), "aa"); 25])]),
        tokenizer(&[normalizers(vec![replace(&json!({"Regex": ""}), "a"); 25])]),
        tokenizer(&[normalizers(vec![replace(&json!({"Regex": "a|b"}), "ab"); 16])]),
        tokenizer(&[normalizers(vec![text("a", &"a".repeat(100_000))])]),
        tokenizer(&[normalizers((0..40).map(|n| text(["ab", "b"][n % 2], ["ba", "ab"][n % 2])).collect())]),
        tokenizer(&[normalizers(vec![json!({"type": "ByteLevel"}); 25])]),
        tokenizer(&[normalizers(vec![json!({"type": "NFKD"}); 10_000])]),
        tokenizer(&[normalizers(vec![json!({"type": "Prepend", "prepend": "a".repeat(1 << 20)})])]),
        tokenizer(&[pre(vec![byte_level.clone(); 25])]),
        tokenizer(&[pre(vec![split("a"); 10_000])]),
        tokenizer(&[pre(vec![
            json!({"type": "Metaspace", "replacement": " ", "prepend_scheme": "always", "split": false});
            1000
        ])]),
        tokenizer(&[decoders(vec![text("a", "aa"); 25])]),
        tokenizer(&[decoders(vec![json!({"type": "BPEDecoder", "suffix": ""}); 25])]),
        tokenizer(&[decoders(vec![json!({"type": "Fuse"}); 10_000])]),
        tokenizer(&[("post_processor", template(vec![whole.clone(); 2], 1))]),
        tokenizer(&[("post_processor", template(vec![whole, token.clone()], 100_000))]),
        tokenizer(&[("post_processor", template(vec![token; 1000], 1000))]),
        tokenizer(&[(
            "model",
            json!({"type": "WordPiece", "unk_token": "a", "continuing_subword_prefix": "##",
            "max_input_chars_per_word": 1_000_000_000, "vocab": {"a": 0}}),
        )]),
        tokenizer(&[(
            "model",
            json!({"type": "Unigram", "unk_id": 0, "byte_fallback": false,
            "vocab": (1..200).map(|n| json!(["a".repeat(n * 100), -1.0])).collect::<Vec<_>>()}),
        )]),
        tokenizer(&[(
            "model",
            json!({"type": "WordLevel", "unk_token": "a", "vocab": {"a": 4_000_000_000_u32}}),
        )]),
    ];
    for slow in [
        r"(?:a+)+(?!b)",
        r"(?:a*)*(?=b)",
        r"((?:a|b+)*c)*(?<!d)",
        r"(?:(?:a{2,})|b)+(?>c)",
        r"(a+)\1",
        r"(?<x>a+)\k<x>",
        r"(?:(?:(?:(?=a)a){100}){100}){100}",
        r"(?:(?=a)a){100000000}",
        r"(?:a{1000}){1000}",
    ] {
        all.push(tokenizer(&[normalizers(vec![regex(slow)])]));
        all.push(tokenizer(&[pre(vec![split(slow)])]));
    }
    for times in [100, 100_000] {
        let nest = |part: &str, of: &str| {
            let open = format!(r#"{{"type":"Sequence","{of}":["#).repeat(times);
            let whole = tokenizer(&[(part, json!("HERE"))]);
            whole.replace("\"HERE\"", &(open + &"]}".repeat(times)))
        };
        all.extend([nest("normalizer", "normalizers"), nest("pre_tokenizer", "pretokenizers")]);
        all.extend([nest("decoder", "decoders"), nest("post_processor", "processors")]);
        let whole = tokenizer(&[normalizers(vec![regex("HERE")])]);
        all.push(whole.replace("HERE", &("(".repeat(times) + &")".repeat(times))));
    }
    all
}

#[test]
fn tokenizers_grow_so_far() {
    alone(module_path!(), "tokenizers_grow_so_far", || {
        limit_memory(1 << 30);
        // What is built for each is freed again.
        let mut longest = 0.0f64;
        for (number, json) in hostile_tokenizers().into_iter().enumerate() {
            let begun = Instant::now();
            let open = HuggingFace::of(Path::new("other.json"), json);
            let done = open.and_then(|tokenizer| {
                let text = "a word ".repeat(200);
                (0..ROWS).try_fold(0, |ids, _| tokenizer.encode(&text).map(|more| ids + more.len()))
            });
            longest = longest.max(begun.elapsed().as_secs_f64());
            match done.map_err(|e| e.to_string()) {
                Ok(ids) => panic!("{number}: {ids} ids"),
                Err(error) => {
                    assert!(error.contains("other.json") && error.len() < 1000, "{number}: {error}")
                }
            }
        }
        println!("the longest of them took {longest:.2} s for {ROWS} rows");
    });
}

/// What published files do is done as before.
#[test]
fn tokenizers_may_write_a_space_in_three_bytes() {
    let sentence_piece = tokenizer(&[normalizers(vec![
        json!({"type": "Prepend", "prepend": "\u{2581}"}),
        replace(&json!({"String": " "}), "\u{2581}"),
    ])]);
    let tokenizer = HuggingFace::of(Path::new("other.json"), sentence_piece).unwrap();
    assert_eq!(tokenizer.encode("a b").unwrap(), [26, 0, 26, 1]);
}
