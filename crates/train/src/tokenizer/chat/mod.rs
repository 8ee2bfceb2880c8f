//! Conversations as text: the chat templates that published models bring along, with what Hugging Face's `transformers` gives them.

mod bounds;
mod builtins;
mod date;
mod engine;
mod guard;
mod python;

use std::collections::BTreeMap;
use std::fmt;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use minijinja::value::ValueKind;
use minijinja::{ErrorKind, Value, context};

use self::bounds::{EXCEEDED, Warrant};
use self::engine::{Engine, Failure};
use crate::error::{Error, Result};
use crate::json_rows::no_json;

/// A conversation: messages with roles, as JSON has them.
#[derive(Debug, Clone)]
pub struct Conversation {
    messages: Vec<Value>,
    /// Bytes that it had as JSON.
    bytes: usize,
}

impl Conversation {
    /// The messages of a JSON text: a list of objects. Keys keep their order, and those whose value is null are left out.
    ///
    /// # Errors
    /// [`Error::Config`] with the key `messages`, for what is none; the caller knows of which file and row.
    pub fn from_json(json: &str) -> Result<Self> {
        let read = serde_json::from_str(json).map_err(|e| format!("are no JSON: {e}"));
        read.and_then(|messages| Self::of(&messages, json.len()))
            .map_err(|why| Error::config("messages", why))
    }

    /// The messages that an object has under this key.
    ///
    /// # Errors
    /// What is wrong with the object; the caller knows of which file and row.
    pub fn of_row(json: &str, key: &str) -> Result<Self, String> {
        let row: Value = serde_json::from_str(json).map_err(|error| no_json(&error))?;
        if row.kind() != ValueKind::Map {
            return Err(format!(
                "is {}, expected an object: a line of JSON lines is one",
                python::kind(&row)
            ));
        }
        let messages = row.get_attr(key).map_err(|e| e.to_string())?;
        if messages.is_undefined() {
            let keys: Vec<String> =
                row.try_iter().into_iter().flatten().take(8).map(|key| format!("\"{key}\"")).collect();
            let there =
                if keys.is_empty() { "and no other key".into() } else { format!("but {}", keys.join(", ")) };
            return Err(format!("has no \"{key}\", {there}; data.messages_key names another"));
        }
        Self::of(&messages, json.len()).map_err(|why| format!("\"{key}\" {why}"))
    }

    fn of(messages: &Value, bytes: usize) -> Result<Self, String> {
        if messages.kind() != ValueKind::Seq {
            return Err(format!("is {}, expected a list of messages", python::kind(messages)));
        }
        let all = messages.try_iter().map_err(|e| e.to_string())?;
        let messages = all.enumerate().map(|(number, message)| match Role::of(&message) {
            Some(_) => Ok(message_of(&message)),
            None => Err(format!("has no text `role` in message {}{}", number + 1, keys_of(&message))),
        });
        Ok(Self { messages: messages.collect::<Result<_, String>>()?, bytes })
    }

    /// The roles of its messages, each once, in order.
    #[must_use]
    pub fn roles(&self) -> Vec<String> {
        let mut roles = Vec::new();
        for role in self.messages.iter().filter_map(Role::of) {
            if !roles.contains(&role) {
                roles.push(role);
            }
        }
        roles
    }
}

/// The keys that a message has instead, for what is said of it.
fn keys_of(message: &Value) -> String {
    if message.kind() != ValueKind::Map {
        return format!(", which is {}", python::kind(message));
    }
    let keys: Vec<String> =
        message.try_iter().into_iter().flatten().take(8).map(|key| format!("\"{key}\"")).collect();
    if keys.is_empty() { String::new() } else { format!(", but {}", keys.join(", ")) }
}

/// The role of a message that is an answer.
pub const ANSWERS: &str = "assistant";

/// The role of a message.
struct Role;

impl Role {
    fn of(message: &Value) -> Option<String> {
        message.get_attr("role").ok()?.as_str().map(str::to_owned)
    }
}

/// A message as templates see it: without nulls, and its reasoning under the names that templates know.
fn message_of(message: &Value) -> Value {
    let keys = message.try_iter().into_iter().flatten();
    let mut pairs: Vec<(Value, Value)> = keys
        .filter_map(|key| Some((key.clone(), message.get_item(&key).ok()?)))
        .filter(|(_, value)| !value.is_none())
        .collect();
    let get =
        |name: &str| pairs.iter().find(|(key, _)| key.as_str() == Some(name)).map(|(_, value)| value.clone());
    let reasoning = ["reasoning_content", "thinking", "reasoning"].into_iter().find_map(get);
    if let Some(reasoning) = reasoning {
        if get("thinking").is_none() {
            pairs.insert(0, ("thinking".into(), reasoning.clone()));
        }
        match pairs.iter_mut().find(|(key, _)| key.as_str() == Some("reasoning_content")) {
            Some((_, value)) => *value = reasoning,
            None => pairs.push(("reasoning_content".into(), reasoning)),
        }
    }
    Value::from_iter(pairs)
}

/// A conversation that a template has made a text of.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rendered {
    /// The text.
    pub text: String,
    /// The bytes of it that are answers, what a model is to learn, in order and apart.
    pub answers: Vec<Range<usize>>,
}

/// How a conversation is written.
pub struct ChatTemplate {
    /// Where it stands.
    path: PathBuf,
    source: String,
    engine: Engine,
    /// Texts of tokens that templates put in, by their names.
    tokens: BTreeMap<String, String>,
    /// Whether it says itself what an answer is.
    has_generation: bool,
}

impl fmt::Debug for ChatTemplate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ChatTemplate").field("path", &self.path).finish_non_exhaustive()
    }
}

/// The numbers of the engine's programs: the template, and it with marks around answers.
const PLAIN: usize = 0;
const MARKED: usize = 1;

/// The filters that stand where `{% generation %}` stood.
const BARE_FILTER: &str = "nibble_answer";
const MARK_FILTER: &str = "nibble_marked_answer";

/// Around an answer while it is looked for; characters that Unicode keeps out of texts.
const BEGIN: char = '\u{fdd0}';
const END: char = '\u{fdd1}';

/// Instructions that one conversation takes, at most: a template is a program of others, which need not end. Most are stopped earlier, by `bounds`.
const MOST_WORK: u64 = 100_000_000;

impl ChatTemplate {
    /// A template, which stands in the file `path`. `tokens`: what it may name, such as `bos_token`.
    ///
    /// # Errors
    /// [`Error::Tokenizer`] naming the file, for what is no template.
    pub fn new(path: &Path, text: &str, tokens: &BTreeMap<String, String>) -> Result<Self> {
        let (engine, has_generation) = Self::start(path, text, None)?;
        Ok(Self {
            path: path.to_owned(),
            source: text.to_owned(),
            engine,
            tokens: tokens.clone(),
            has_generation,
        })
    }

    /// The engine of a template, and whether it says itself what an answer is.
    fn start(path: &Path, text: &str, time: Option<SystemTime>) -> Result<(Engine, bool)> {
        let (plain, has_generation) = without_generation(text, BARE_FILTER);
        let mut texts = vec![("chat", plain)];
        if has_generation {
            texts.push(("marked", without_generation(text, MARK_FILTER).0));
        }
        let engine = Engine::start(texts, time).map_err(|failure| Error::Tokenizer {
            path: path.to_owned(),
            why: format!("its chat template cannot be read: {}", said(&failure)),
        })?;
        Ok((engine, has_generation))
    }

    /// As it was written.
    #[must_use]
    pub fn source(&self) -> &str {
        &self.source
    }

    /// The same template on another day: `strftime_now` is of this time, in UTC. Without it, of now.
    ///
    /// # Errors
    /// [`Error::Tokenizer`] where no thread can be started for it.
    pub fn at(mut self, time: SystemTime) -> Result<Self> {
        self.engine = Self::start(&self.path, &self.source, Some(time))?.0;
        Ok(self)
    }

    /// Begins a file of conversations: what a template may do beyond what its conversations warrant is counted for a file.
    pub fn begin_file(&self) {
        self.engine.bounds.begin_file();
    }

    /// Whether the conversations since then have used all of that. No other is then to be asked for: each may take as long.
    #[must_use]
    pub fn is_spent(&self) -> bool {
        self.engine.bounds.is_spent()
    }

    /// The text of a conversation, with the beginning of an answer if that is asked for.
    ///
    /// # Errors
    /// [`Error::Tokenizer`] naming the template's file, with what it says.
    pub fn text(&self, of: &Conversation, add_generation_prompt: bool) -> Result<String> {
        self.rendered(PLAIN, of, of.messages.len(), add_generation_prompt)
    }

    /// The text of so many of the messages.
    fn rendered(
        &self,
        program: usize,
        of: &Conversation,
        count: usize,
        add_generation_prompt: bool,
    ) -> Result<String> {
        let messages = &of.messages[..count];
        let context = context! {
            messages => messages,
            tools => (),
            documents => (),
            add_generation_prompt => add_generation_prompt,
            ..Value::from_serialize(&self.tokens)
        };
        let warrant = Warrant { messages: count, bytes: of.bytes };
        self.engine.run(program, context, warrant).map_err(|failure| self.fail(said(&failure)))
    }

    fn fail(&self, why: String) -> Error {
        Error::Tokenizer { path: self.path.clone(), why: format!("its chat template: {why}") }
    }

    /// The text of a whole conversation, and which parts of it are answers: what stands in `{% generation %}`, where the template has it; else what each
    /// message of the role `assistant` adds to the beginning of an answer to the messages before it.
    ///
    /// # Errors
    /// As [`ChatTemplate::text`]; [`Error::Config`] with the key `messages`, naming the message whose answer does not follow that beginning.
    pub fn render(&self, of: &Conversation) -> Result<Rendered> {
        let text = self.rendered(PLAIN, of, of.messages.len(), false)?;
        let answers = match self.has_generation {
            true => self.marked(of, &text)?,
            false => self.added(of, &text)?,
        };
        Ok(Rendered { text, answers })
    }

    /// What stands in `{% generation %}`.
    fn marked(&self, of: &Conversation, text: &str) -> Result<Vec<Range<usize>>> {
        let marked = self.rendered(MARKED, of, of.messages.len(), false)?;
        let (mut answers, mut begin, mut at) = (Vec::new(), None, 0);
        let mut bare = String::with_capacity(text.len());
        for c in marked.chars() {
            match (c, begin) {
                (BEGIN, None) => begin = Some(at),
                (END, Some(start)) => {
                    answers.push(start..at);
                    begin = None;
                }
                _ => {
                    bare.push(c);
                    at += c.len_utf8();
                }
            }
        }
        match bare == text && begin.is_none() {
            true => Ok(answers.into_iter().filter(|answer| !answer.is_empty()).collect()),
            false => Err(self.fail(
                "what it does with `generation` blocks changes them, so that they say no answers".into(),
            )),
        }
    }

    /// What each answer adds.
    fn added(&self, of: &Conversation, text: &str) -> Result<Vec<Range<usize>>> {
        let messages = &of.messages;
        let mut answers: Vec<Range<usize>> = Vec::new();
        for (number, message) in messages.iter().enumerate() {
            if Role::of(message).as_deref() != Some(ANSWERS) {
                continue;
            }
            let prompt = self.rendered(PLAIN, of, number, true)?;
            let whole = match number + 1 == messages.len() {
                true => text.to_owned(),
                false => self.rendered(PLAIN, of, number + 1, false)?,
            };
            let follows = whole.starts_with(&prompt) && text.starts_with(&whole);
            let from = answers.last().map_or(0, |last| last.end);
            if !follows || prompt.len() < from {
                let why = format!(
                    "message {} does not follow what the chat template of {} writes before an answer to those before it; a template with {{% generation %}} \
                     would say what the answers are",
                    number + 1,
                    self.path.display()
                );
                return Err(Error::config("messages", why));
            }
            answers.push(prompt.len()..whole.len());
        }
        Ok(answers)
    }
}

/// What an error of a template says, in one line.
fn said(failure: &Failure) -> String {
    let error = match failure {
        Failure::Said(error) => error,
        Failure::Broken => return "the engine of templates fails on it".into(),
    };
    let line = error.line().map_or(String::new(), |line| format!("line {line}: "));
    let detail = error.detail().unwrap_or_default();
    match error.kind() {
        // What the template itself says.
        ErrorKind::InvalidOperation if detail.starts_with(RAISED) => {
            detail.trim_start_matches(RAISED).to_owned()
        }
        ErrorKind::InvalidOperation if detail.starts_with(EXCEEDED) => {
            format!("{line}{}", detail.trim_start_matches(EXCEEDED))
        }
        kind if detail.is_empty() => format!("{line}{kind}"),
        kind => format!("{line}{kind}: {detail}"),
    }
}

/// Before what a template raises.
const RAISED: &str = "raised: ";

/// The template with a block of this filter for each `{% generation %}`, and whether there was one. Of blocks of other names there are none in the engine.
fn without_generation(text: &str, filter: &str) -> (String, bool) {
    let (mut out, mut rest, mut found) = (String::new(), text, false);
    while let Some(start) = rest.find("{%") {
        let (before, tag) = rest.split_at(start);
        out += before;
        let Some(end) = tag.find("%}") else {
            rest = tag;
            break;
        };
        let inside = &tag[2..end];
        let name = inside.trim_start_matches(['-', '+']).trim_end_matches(['-', '+']).trim();
        let instead = match name {
            "generation" => inside.replacen("generation", &format!("filter {filter}"), 1),
            "endgeneration" => inside.replacen("endgeneration", "endfilter", 1),
            _ => inside.to_owned(),
        };
        found |= name == "generation";
        out += &format!("{{%{instead}%}}");
        rest = &tag[end + 2..];
    }
    (out + rest, found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn generation_blocks_become_filters_and_nothing_else_changes() {
        let text = "{%- if a %}{%- generation -%} x {%+ endgeneration %}{% endif %}{{ generation }} {% ";
        let (out, found) = without_generation(text, "f");
        assert!(found);
        assert_eq!(out, "{%- if a %}{%- filter f -%} x {%+ endfilter %}{% endif %}{{ generation }} {% ");
        assert_eq!(
            without_generation("{% if a %}b{% endif %}", "f"),
            ("{% if a %}b{% endif %}".into(), false)
        );
    }
}
