//! Limits on the effect of a `tokenizer.json` on a text before tokenization: how much longer the text may become, and how long this may
//! take.
//!
//! The steps in such a file form a small program: twenty-five steps that double each letter turn a word into gigabytes. The JSON is checked
//! step by step before a tokenizer is built from it. If all steps together can still enlarge a text much, every text is first passed
//! through the steps piece by piece, as a trial.

use serde::Deserialize;
use serde_json::Value;
use tokenizers::{NormalizedString, Normalizer, NormalizerWrapper};

/// Largest number of steps of one kind. Published files have up to ten steps.
const MOST_STEPS: usize = 64;
/// Largest nesting depth of sequences.
const MOST_DEPTH: usize = 4;
/// Worst-case growth factor of a text up to which no trial is needed. For example, a space becomes three bytes in SentencePiece's files.
const FREELY: f64 = 16.0;
/// Largest product of the worst-case growth factors of all steps.
const MOST_GROWTH: f64 = 1e6;
/// Largest worst-case growth factor of one step.
const MOST_OF_STEP: f64 = 64.0;
/// Largest actual growth factor of a text in a trial. The text may also grow by this many KiB.
const TRIED: usize = 64;
/// Number of bytes of a piece in a trial.
const PART: usize = 1024;
/// Largest total size in bytes of all added tokens while they are loaded.
const MOST_ADDED: f64 = 64e6;
/// Largest number of letters of a word, because `WordPiece` tries all substrings of a word. Published files set 100 letters.
const MOST_WORD: u64 = 10_000;
/// Largest number of bytes of a token. Published tokens have some hundred bytes.
pub(super) const MOST_TOKEN: usize = 4096;
/// Largest number of ids that may be added around a text.
const MOST_AROUND: usize = 10_000;

/// The parts of a `tokenizer.json` that change texts.
#[derive(Deserialize)]
struct Shape {
    #[serde(default)]
    normalizer: Value,
    #[serde(default)]
    pre_tokenizer: Value,
    #[serde(default)]
    post_processor: Value,
    #[serde(default)]
    decoder: Value,
    #[serde(default)]
    added_tokens: Option<Vec<Added>>,
    #[serde(default)]
    model: Option<Model>,
}

#[derive(Deserialize)]
struct Model {
    #[serde(default)]
    vocab: Value,
    #[serde(default)]
    max_input_chars_per_word: Option<u64>,
}

#[derive(Deserialize)]
struct Added {
    #[serde(default)]
    content: String,
}

/// The combined effect of the steps of one kind.
#[derive(Default)]
struct Steps {
    count: usize,
    growth: f64,
    tables: usize,
}

/// Checks a `tokenizer.json`. Returns whether each text needs a trial before it is passed to this file's tokenizer.
///
/// # Errors
/// Returns the part of the file that exceeds a limit.
pub(super) fn check(text: &str) -> Result<bool, String> {
    let shape: Shape =
        serde_json::from_str(text).map_err(|error| format!("is no tokenizer that can be read: {error}"))?;
    let normalizer = steps("normalizer", &shape.normalizer)?;
    steps("pre_tokenizer", &shape.pre_tokenizer)?;
    steps("decoder", &shape.decoder)?;
    around(&shape.post_processor)?;
    let tokens = shape.added_tokens.iter().flatten().map(|added| added.content.len());
    let longest =
        tokens.chain(shape.model.as_ref().map(|model| longest_text(&model.vocab))).max().unwrap_or(0);
    if longest > MOST_TOKEN {
        return Err(format!("has a token of {longest} bytes, more than {MOST_TOKEN}"));
    }
    let added: usize = shape.added_tokens.iter().flatten().map(|added| added.content.len()).sum();
    if normalizer.growth > FREELY && added as f64 * normalizer.growth > MOST_ADDED {
        return Err("has a `normalizer` that may make its `added_tokens` too long".into());
    }
    let longest = shape.model.and_then(|model| model.max_input_chars_per_word);
    if let Some(longest) = longest.filter(|longest| *longest > MOST_WORD) {
        return Err(format!(
            "has `max_input_chars_per_word` {longest}, more than {MOST_WORD}: a long word would take too long"
        ));
    }
    Ok(normalizer.growth > FREELY)
}

/// Length of the longest string in a value, in bytes. The length is limited because the crate `tokenizers` stores some vocabularies as
/// tries, whose destructors recurse once per letter.
fn longest_text(of: &Value) -> usize {
    match of {
        Value::String(text) => text.len(),
        Value::Array(all) => all.iter().map(longest_text).max().unwrap_or(0),
        Value::Object(all) => all.iter().map(|(key, of)| key.len().max(longest_text(of))).max().unwrap_or(0),
        _ => 0,
    }
}

fn steps(part: &str, json: &Value) -> Result<Steps, String> {
    let mut all = Steps { growth: 1.0, ..Steps::default() };
    all.add(json, 0).map_err(|why| format!("has a `{part}` {why}"))?;
    // Only a normalizer can be tried separately, so other parts must not grow much.
    let most = if part == "normalizer" { MOST_GROWTH } else { FREELY };
    if all.growth > most {
        return Err(format!("has a `{part}` whose steps may make a text {:.0} times as long", all.growth));
    }
    Ok(all)
}

impl Steps {
    fn add(&mut self, json: &Value, depth: usize) -> Result<(), String> {
        if depth > MOST_DEPTH {
            return Err(format!("of sequences within sequences, more than {MOST_DEPTH} deep"));
        }
        if let Some(all) =
            ["normalizers", "pretokenizers", "decoders"].iter().find_map(|key| json[*key].as_array())
        {
            return all.iter().try_for_each(|one| self.add(one, depth + 1));
        }
        if json.is_null() {
            return Ok(());
        }
        self.count += 1;
        if self.count > MOST_STEPS {
            return Err(format!("of more than {MOST_STEPS} steps"));
        }
        if let Some(regex) = json["pattern"]["Regex"].as_str() {
            check_regex(regex)?;
        }
        let growth = self.growth_of(json)?;
        if growth > MOST_OF_STEP {
            return Err(format!("with a step that may make a text {growth:.0} times as long"));
        }
        self.growth *= growth;
        Ok(())
    }

    /// Worst-case growth factor of a step. Unicode normalization is idempotent, so repetitions add no growth.
    fn growth_of(&mut self, json: &Value) -> Result<f64, String> {
        let length = |text: &Value| text.as_str().map_or(0, str::len) as f64;
        let kind = json["type"].as_str().unwrap_or_default();
        if let Some(table) = json["precompiled_charsmap"].as_str() {
            let longest = longest_of_table(table);
            self.tables += 1;
            return match longest <= 64 {
                true if self.tables == 1 => Ok(1.0),
                _ => Ok(longest as f64),
            };
        }
        if json.get("content").is_some() && json.get("pattern").is_some() {
            let pattern = length(&json["pattern"]["String"]);
            return Ok(match pattern == 0.0 {
                // The content may be inserted before each letter.
                true => length(&json["content"]) + 1.0,
                false => (length(&json["content"]) / pattern).max(1.0),
            });
        }
        if json.get("prepend").is_some_and(Value::is_string) {
            return match length(&json["prepend"]) <= MOST_TOKEN as f64 {
                true => Ok(1.0),
                false => Err(format!("that puts more than {MOST_TOKEN} bytes before a text")),
            };
        }
        Ok(match kind {
            // Each space becomes a character of up to four bytes.
            "Metaspace" => length(&json["replacement"]).max(1.0),
            "BPEDecoder" if length(&json["suffix"]) == 0.0 => 2.0,
            // Each byte becomes a character of up to two bytes.
            "ByteLevel" | "" => 2.0,
            _ => 1.0,
        })
    }
}

/// The longest replacement in a SentencePiece table. The replacements follow the table's trie one after the other, and each ends with a
/// zero byte.
fn longest_of_table(base64: &str) -> usize {
    let (mut bytes, mut bits, mut held) = (Vec::with_capacity(base64.len() / 4 * 3), 0_u32, 0);
    for byte in base64.bytes() {
        let six = match byte {
            b'A'..=b'Z' => byte - b'A',
            b'a'..=b'z' => byte - b'a' + 26,
            b'0'..=b'9' => byte - b'0' + 52,
            b'+' => 62,
            b'/' => 63,
            _ => break,
        };
        (bits, held) = (bits << 6 | u32::from(six), held + 6);
        if held >= 8 {
            held -= 8;
            bytes.push((bits >> held) as u8);
        }
    }
    let Some((size, rest)) = bytes.split_first_chunk::<4>() else { return 0 };
    let texts = rest.get(u32::from_le_bytes(*size) as usize..).unwrap_or_default();
    texts.split(|byte| *byte == 0).map(<[u8]>::len).max().unwrap_or(0)
}

/// Checks the tokens that the post-processor adds around a text. The post-processor may add at most one copy of the text, and a limited
/// number of ids.
fn around(json: &Value) -> Result<(), String> {
    let fail = |why: &str| Err(format!("has a `post_processor` that {why}"));
    let processors: Vec<&Value> = match json["processors"].as_array() {
        Some(all) => all.iter().collect(),
        None => vec![json],
    };
    if processors.len() > MOST_STEPS {
        return fail(&format!("has more than {MOST_STEPS} steps"));
    }
    let (mut ids, mut is_nested) = (0, false);
    for processor in processors {
        is_nested |= json["processors"].is_array() && processor["processors"].is_array();
        for key in ["single", "pair"] {
            let pieces = processor[key].as_array().map_or(&[][..], Vec::as_slice);
            let texts = |name: &str| pieces.iter().filter(|piece| piece["Sequence"]["id"] == name).count();
            if texts("A") > 1 || texts("B") > 1 {
                return fail("writes a text more than once");
            }
            for piece in pieces {
                let token = piece["SpecialToken"]["id"].as_str().unwrap_or_default();
                ids += processor["special_tokens"][token]["ids"].as_array().map_or(1, Vec::len);
            }
        }
    }
    match (is_nested, ids > MOST_AROUND) {
        (true, _) => fail("has sequences within a sequence"),
        (_, true) => fail(&format!("puts more than {MOST_AROUND} ids around a text")),
        _ => Ok(()),
    }
}

/// Refuses a regular expression that may take very long. Such an expression has back-references; or nested unbounded repetitions together
/// with look-around or similar features, which need backtracking; or repetitions that expand too much.
fn check_regex(regex: &str) -> Result<(), String> {
    let fail = |why: &str| {
        Err(format!("with a regular expression that {why}: {:?}", regex.chars().take(80).collect::<String>()))
    };
    if regex.len() > 16 << 10 {
        return fail("is longer than 16 KiB");
    }
    let tries = ["(?=", "(?!", "(?<=", "(?<!", "(?>", "*+", "++", "?+", "}+", "\\G", "(?("];
    let tries = tries.iter().any(|mark| regex.contains(mark));
    // The entries are the open groups: whether the group has an unbounded repetition, and how often the group's contents are expanded.
    let mut groups = vec![(false, 1_u64)];
    let mut chars = regex.chars().peekable();
    let (mut class, mut last) = (0_usize, (false, 1_u64));
    while let Some(c) = chars.next() {
        match c {
            '\\' => {
                let next = chars.next();
                let is_reference = class == 0 && matches!(next, Some('1'..='9' | 'k' | 'g'));
                if is_reference {
                    return fail("refers to what it has found");
                }
                last = (false, 1);
            }
            '[' => class += 1,
            ']' if class > 0 => (class, last) = (class - 1, (false, 1)),
            _ if class > 0 => {}
            '(' => groups.push((false, 1)),
            ')' if groups.len() > 1 => last = groups.pop().unwrap_or_default(),
            '*' | '+' | '{' => {
                let counts: String = match c {
                    '{' => chars.by_ref().take_while(|c| *c != '}').collect(),
                    _ => ",".into(),
                };
                let is_endless = counts.ends_with(',');
                let is_count = c != '{' || counts.starts_with(|c: char| c.is_ascii_digit());
                let most = counts.split(',').filter_map(|count| count.trim().parse::<u64>().ok()).max();
                if is_count && is_endless && last.0 && tries && chars.peek() != Some(&'+') {
                    return fail("repeats a repetition, and looks around");
                }
                let written = last.1.saturating_mul(most.unwrap_or(1).max(1));
                if written > 10_000 {
                    return fail("is written out more than 10000 times");
                }
                if let Some(group) = groups.last_mut() {
                    *group = (group.0 || is_count && is_endless, group.1.max(written));
                }
                last = (is_count && is_endless, written);
                // The next character may be the mark of a lazy or possessive repetition, which is skipped.
                chars.next_if(|c| matches!(c, '?' | '+'));
            }
            _ => last = (false, 1),
        }
        if matches!(c, ')') {
            // An outer group inherits these properties from its inner groups.
            let (endless, written) = last;
            if let Some(group) = groups.last_mut() {
                *group = (group.0 || endless, group.1.max(written));
            }
        }
    }
    Ok(())
}

/// Tries the normalizer on a text piece by piece, and measures the growth after each step.
///
/// # Errors
/// Returns an error if the text becomes too long, and passes on the errors of a step.
pub(super) fn try_text(normalizer: Option<&NormalizerWrapper>, text: &str) -> Result<(), String> {
    let Some(normalizer) = normalizer else { return Ok(()) };
    let mut steps = Vec::new();
    flatten(normalizer, &mut steps);
    let (mut rest, mut made) = (text, 0_usize);
    while !rest.is_empty() {
        let mut end = PART.min(rest.len());
        while !rest.is_char_boundary(end) {
            end += 1;
        }
        let (part, others) = rest.split_at(end);
        rest = others;
        let mut changed = NormalizedString::from(part);
        for step in &steps {
            step.normalize(&mut changed).map_err(|e| e.to_string())?;
            if made + changed.get().len() > (TRIED + 1) * text.len() + (TRIED << 10) {
                return Err(format!("the `normalizer` makes it more than {TRIED} times as long"));
            }
        }
        made += changed.get().len();
    }
    match made > FREELY as usize * text.len() + (TRIED << 10) {
        true => Err(format!("the `normalizer` makes it more than {FREELY} times as long")),
        false => Ok(()),
    }
}

fn flatten<'a>(of: &'a NormalizerWrapper, into: &mut Vec<&'a NormalizerWrapper>) {
    match of {
        NormalizerWrapper::Sequence(all) => all.as_ref().iter().for_each(|one| flatten(one, into)),
        one => into.push(one),
    }
}
