//! Conversations as text: the chat templates that published models bring along, with what Hugging Face's `transformers` gives them.

mod date;
mod python;

use std::collections::BTreeMap;
use std::fmt;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use minijinja::value::{Kwargs, ValueKind};
use minijinja::{AutoEscape, Environment, ErrorKind, Value, context};
use minijinja_contrib::pycompat::unknown_method_callback;

use crate::error::{Error, Result};
use crate::json_rows::no_json;

/// A conversation: messages with roles, as JSON has them.
#[derive(Debug, Clone)]
pub struct Conversation {
    messages: Vec<Value>,
}

impl Conversation {
    /// The messages of a JSON text: a list of objects. Keys keep their order, and those whose value is null are left out.
    ///
    /// # Errors
    /// [`Error::Config`] with the key `messages`, for what is none; the caller knows of which file and row.
    pub fn from_json(json: &str) -> Result<Self> {
        let read = serde_json::from_str(json).map_err(|e| format!("are no JSON: {e}"));
        read.and_then(|messages| Self::of(&messages)).map_err(|why| Error::config("messages", why))
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
        Self::of(&messages).map_err(|why| format!("\"{key}\" {why}"))
    }

    fn of(messages: &Value) -> Result<Self, String> {
        if messages.kind() != ValueKind::Seq {
            return Err(format!("is {}, expected a list of messages", python::kind(messages)));
        }
        let all = messages.try_iter().map_err(|e| e.to_string())?;
        let messages = all.enumerate().map(|(number, message)| match Role::of(&message) {
            Some(_) => Ok(message_of(&message)),
            None => Err(format!("has no text `role` in message {}", number + 1)),
        });
        Ok(Self { messages: messages.collect::<Result<_, String>>()? })
    }
}

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
    environment: Environment<'static>,
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

/// The names of the template, and of it with marks around answers.
const PLAIN: &str = "chat";
const MARKED: &str = "marked";

/// The filters that stand where `{% generation %}` stood.
const BARE_FILTER: &str = "nibble_answer";
const MARK_FILTER: &str = "nibble_marked_answer";

/// Around an answer while it is looked for; characters that Unicode keeps out of texts.
const BEGIN: char = '\u{fdd0}';
const END: char = '\u{fdd1}';

/// Instructions that one conversation takes, at most: a template is a program of others, which need not end.
const MOST_WORK: u64 = 50_000_000;

impl ChatTemplate {
    /// A template, which stands in the file `path`. `tokens`: what it may name, such as `bos_token`.
    ///
    /// # Errors
    /// [`Error::Tokenizer`] naming the file, for what is no template.
    pub fn new(path: &Path, text: &str, tokens: &BTreeMap<String, String>) -> Result<Self> {
        let fail = |e: &minijinja::Error| Error::Tokenizer {
            path: path.to_owned(),
            why: format!("its chat template cannot be read: {}", said(e)),
        };
        let mut environment = environment();
        let (plain, has_generation) = without_generation(text, BARE_FILTER);
        environment.add_template_owned(PLAIN, plain).map_err(|e| fail(&e))?;
        if has_generation {
            let marked = without_generation(text, MARK_FILTER).0;
            environment.add_template_owned(MARKED, marked).map_err(|e| fail(&e))?;
        }
        Ok(Self {
            path: path.to_owned(),
            source: text.to_owned(),
            environment,
            tokens: tokens.clone(),
            has_generation,
        })
    }

    /// As it was written.
    #[must_use]
    pub fn source(&self) -> &str {
        &self.source
    }

    /// The same template on another day: `strftime_now` is of this time, in UTC. Without it, of now.
    #[must_use]
    pub fn at(mut self, time: SystemTime) -> Self {
        self.environment.add_function("strftime_now", move |format: &str| date::strftime(time, format));
        self
    }

    /// The text of a conversation, with the beginning of an answer if that is asked for.
    ///
    /// # Errors
    /// [`Error::Tokenizer`] naming the template's file, with what it says.
    pub fn text(&self, of: &Conversation, add_generation_prompt: bool) -> Result<String> {
        self.rendered(PLAIN, &of.messages, add_generation_prompt)
    }

    fn rendered(&self, name: &str, messages: &[Value], add_generation_prompt: bool) -> Result<String> {
        let context = context! {
            messages => messages,
            tools => (),
            documents => (),
            add_generation_prompt => add_generation_prompt,
            ..Value::from_serialize(&self.tokens)
        };
        let template = self.environment.get_template(name).and_then(|template| template.render(context));
        template.map_err(|e| self.fail(said(&e)))
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
        let text = self.rendered(PLAIN, &of.messages, false)?;
        let answers = match self.has_generation {
            true => self.marked(&of.messages, &text)?,
            false => self.added(&of.messages, &text)?,
        };
        Ok(Rendered { text, answers })
    }

    /// What stands in `{% generation %}`.
    fn marked(&self, messages: &[Value], text: &str) -> Result<Vec<Range<usize>>> {
        let marked = self.rendered(MARKED, messages, false)?;
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
    fn added(&self, messages: &[Value], text: &str) -> Result<Vec<Range<usize>>> {
        let mut answers: Vec<Range<usize>> = Vec::new();
        for (number, message) in messages.iter().enumerate() {
            if Role::of(message).as_deref() != Some("assistant") {
                continue;
            }
            let prompt = self.rendered(PLAIN, &messages[..number], true)?;
            let whole = match number + 1 == messages.len() {
                true => text.to_owned(),
                false => self.rendered(PLAIN, &messages[..=number], false)?,
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
fn said(error: &minijinja::Error) -> String {
    let line = error.line().map_or(String::new(), |line| format!("line {line}: "));
    match error.kind() {
        // What the template itself says.
        ErrorKind::InvalidOperation if error.detail().is_some_and(|detail| detail.starts_with(RAISED)) => {
            error.detail().unwrap_or_default().trim_start_matches(RAISED).to_owned()
        }
        kind => match error.detail() {
            Some(detail) => format!("{line}{kind}: {detail}"),
            None => format!("{line}{kind}"),
        },
    }
}

/// Before what a template raises.
const RAISED: &str = "raised: ";

/// What templates may use.
fn environment() -> Environment<'static> {
    let mut environment = Environment::new();
    environment.set_trim_blocks(true);
    environment.set_lstrip_blocks(true);
    environment.set_auto_escape_callback(|_| AutoEscape::None);
    environment.set_unknown_method_callback(unknown_method_callback);
    environment.set_fuel(Some(MOST_WORK));
    environment.set_formatter(|out, _state, value| {
        let text = python::text(value);
        std::fmt::Write::write_str(out, &text).map_err(minijinja::Error::from)
    });
    environment.add_function("raise_exception", |message: &str| -> Result<Value, minijinja::Error> {
        Err(minijinja::Error::new(ErrorKind::InvalidOperation, format!("{RAISED}{message}")))
    });
    environment.add_function("strftime_now", |format: &str| date::strftime(SystemTime::now(), format));
    environment.add_filter("string", |value: Value| python::text(&value));
    environment.add_filter("indent", python::indent);
    environment.add_filter("tojson", |value: Value, options: Kwargs| {
        let indent: Option<usize> = options.get("indent")?;
        // What Python's function takes besides, with the values that it has here.
        let _: (Option<bool>, Option<bool>, Option<Value>) =
            (options.get("ensure_ascii")?, options.get("sort_keys")?, options.get("separators")?);
        options.assert_all_used()?;
        python::json(&value, indent)
    });
    environment.add_filter(BARE_FILTER, |value: Value| value);
    environment.add_filter(MARK_FILTER, |value: String| format!("{BEGIN}{value}{END}"));
    environment
}

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
