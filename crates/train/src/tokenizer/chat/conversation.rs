//! Conversations in rows of data: the messages, and the other keys of a row.

use minijinja::Value;
use minijinja::value::ValueKind;

use super::python;
use crate::error::{Error, Result};
use crate::json_rows::{RowKey, no_json};
use crate::words;

/// The role of a message that is an answer.
pub const ANSWERS: &str = "assistant";

/// A conversation: messages with roles, as in JSON, and other variables for the chat template.
#[derive(Debug, Clone)]
pub struct Conversation {
    pub(super) messages: Vec<Value>,
    /// For each message, whether the message is a target if it is an answer.
    pub(super) learnt: Vec<bool>,
    /// The tools that an answer may call.
    pub(super) tools: Option<Value>,
    /// Other variables of the template, by name.
    pub(super) variables: Vec<(String, Value)>,
    /// Size of the conversation's JSON in bytes.
    pub(super) bytes: usize,
}

/// The keys that are read from a row in addition to the messages.
const TOOLS: &str = "tools";
const VARIABLES: &str = "chat_template_kwargs";

/// Parameter names of `apply_chat_template`, which no template variable can have.
const TAKEN: &str = "\
    messages conversation tools chat_template add_generation_prompt continue_final_message tokenize \
    padding truncation max_length return_tensors return_dict return_assistant_tokens_mask \
    tokenizer_kwargs";

impl Conversation {
    /// Reads messages from a JSON text, which must be a list of objects. Keys keep their order, and keys whose value is null are left out.
    ///
    /// # Errors
    /// Returns [`Error::Config`] with the key `messages` for invalid messages. The caller must add the file and the row.
    pub fn from_json(json: &str) -> Result<Self> {
        let read = serde_json::from_str(json).map_err(|e| format!("are no JSON: {e}"));
        read.and_then(|messages| Self::of(&messages, json.len()))
            .map_err(|why| Error::config("messages", why))
    }

    /// Reads the messages under this key of an object, and the object's keys `tools` and `chat_template_kwargs`, as TRL does.
    ///
    /// # Errors
    /// What is invalid in the object, or a key that other trainers read and Nibble does not. The caller must add the file and the row.
    pub fn of_row(json: &str, key: &str) -> Result<Self, String> {
        let row: Value = serde_json::from_str(json).map_err(|error| no_json(&error))?;
        if row.kind() != ValueKind::Map {
            return Err(format!("is {}, expected an object: a row is one", python::kind(&row)));
        }
        let messages = row.get_attr(key).map_err(|e| e.to_string())?;
        if messages.is_undefined() {
            let keys: Vec<String> =
                row.try_iter().into_iter().flatten().take(8).map(|key| format!("\"{key}\"")).collect();
            let there =
                if keys.is_empty() { "and no other key".into() } else { format!("but {}", keys.join(", ")) };
            return Err(format!("has no \"{key}\", {there}; data.messages_key names another"));
        }
        let mut of = Self::of(&messages, json.len()).map_err(|why| format!("\"{key}\" {why}"))?;
        for (name, value) in pairs(&row).filter(|(name, value)| name != key && !is_nothing(value)) {
            match name.as_str() {
                TOOLS => of.tools = Some(tools(&value)?),
                VARIABLES => of.variables = variables(&value)?,
                _ => RowKey::of(&name).map_or(Ok(()), |known| known.refuse(is_yes(&value)))?,
            }
        }
        Ok(of)
    }

    fn of(messages: &Value, bytes: usize) -> Result<Self, String> {
        if messages.kind() != ValueKind::Seq {
            return Err(format!("is {}, expected a list of messages", python::kind(messages)));
        }
        let (mut all, mut learnt) = (Vec::new(), Vec::new());
        for (number, message) in (1..).zip(messages.try_iter().map_err(|e| e.to_string())?) {
            let Some(role) = role_of(&message) else {
                return Err(format!("has no text `role` in message {number}{}", keys_of(&message)));
            };
            learnt
                .push(is_learnt(&message, &role).map_err(|why| format!("has, in message {number}, {why}"))?);
            all.push(message_of(&message));
        }
        Ok(Self { messages: all, learnt, tools: None, variables: Vec::new(), bytes })
    }

    /// The distinct roles of the conversation's messages, in order.
    #[must_use]
    pub fn roles(&self) -> Vec<String> {
        let mut roles = Vec::new();
        for role in self.messages.iter().filter_map(role_of) {
            if !roles.contains(&role) {
                roles.push(role);
            }
        }
        roles
    }

    /// The indices of the messages that are answers.
    pub(super) fn answers(&self) -> impl DoubleEndedIterator<Item = usize> + '_ {
        (0..self.messages.len()).filter(|at| role_of(&self.messages[*at]).as_deref() == Some(ANSWERS))
    }

    /// Whether the conversation has answers, but every answer is marked as not a target.
    #[must_use]
    pub fn learns_none(&self) -> bool {
        self.answers().next().is_some() && self.answers().all(|at| !self.learnt[at])
    }

    /// Checks that the chat template names every key of the conversation. The value of a key that the template never names would be lost.
    pub(super) fn require_named_by(&self, template: &str) -> Result<(), String> {
        let lost = |said: String| {
            Err(format!(
                "{said}, which the chat template never names, so that it would be lost: take it out of the row, or another template"
            ))
        };
        if self.tools.is_some() && !names(template, TOOLS) {
            return lost(format!("the row has \"{TOOLS}\""));
        }
        let is_lost = |(name, value): &&(String, Value)| !value.is_none() && !names(template, name);
        if let Some((name, _)) = self.variables.iter().find(is_lost) {
            return lost(format!("\"{VARIABLES}\" of the row has \"{name}\""));
        }
        for (number, message) in (1..).zip(&self.messages) {
            for spellings in WRITTEN {
                let is_said = spellings.iter().any(|key| {
                    message.get_attr(key).is_ok_and(|value| !value.is_undefined() && !is_nothing(&value))
                });
                if is_said && !spellings.iter().any(|key| names(template, key)) {
                    return lost(format!("message {number} has \"{}\"", spellings.join("\" or \"")));
                }
            }
        }
        Ok(())
    }
}

/// Keys of messages that a template must render. Each key is listed with its alternative names.
const WRITTEN: &[&[&str]] = &[
    &["tool_calls"],
    &["function_call"],
    &["tools"],
    &["functions"],
    &["reasoning_content", "thinking", "reasoning"],
    &["image", "images"],
    &["audio", "audios"],
    &["video", "videos"],
];

/// Whether a template contains this name as a word.
fn names(template: &str, name: &str) -> bool {
    let is_word = |c: char| c.is_alphanumeric() || c == '_';
    template.match_indices(name).any(|(at, _)| {
        !template[..at].ends_with(is_word) && !template[at + name.len()..].starts_with(is_word)
    })
}

/// The keys and values of an object.
fn pairs(of: &Value) -> impl Iterator<Item = (String, Value)> + '_ {
    let keys = of.try_iter().into_iter().flatten();
    keys.filter_map(|key| Some((key.as_str()?.to_owned(), of.get_item(&key).ok()?)))
}

/// Whether a value is null or empty.
fn is_nothing(value: &Value) -> bool {
    value.is_none() || value.len() == Some(0)
}

/// The value of a switch: true for true or 1, false for false or 0, and `None` for any other value.
fn is_yes(value: &Value) -> Option<bool> {
    match value.kind() {
        ValueKind::Bool => Some(value.is_true()),
        ValueKind::Number => match f64::try_from(value.clone()) {
            Ok(0.0) => Some(false),
            Ok(1.0) => Some(true),
            _ => None,
        },
        _ => None,
    }
}

/// The tools of a row: a list of objects, or such a list as JSON text.
fn tools(value: &Value) -> Result<Value, String> {
    let fail =
        |why: String| format!("\"{TOOLS}\" {why}, expected a list of objects, or a text that is one in JSON");
    let parsed = match value.as_str() {
        Some(text) => serde_json::from_str(text).map_err(|e| fail(no_json(&e)))?,
        None => value.clone(),
    };
    if parsed.kind() != ValueKind::Seq {
        return Err(fail(format!("is {}", python::kind(&parsed))));
    }
    let all = parsed.try_iter().map_err(|e| e.to_string())?;
    match (1..).zip(all).find(|(_, tool)| tool.kind() != ValueKind::Map) {
        Some((number, other)) => Err(fail(format!("has {} as number {number}", python::kind(&other)))),
        None => Ok(parsed),
    }
}

/// The template variables of a row.
fn variables(value: &Value) -> Result<Vec<(String, Value)>, String> {
    if value.kind() != ValueKind::Map {
        return Err(format!("\"{VARIABLES}\" is {}, expected an object", python::kind(value)));
    }
    let all: Vec<(String, Value)> = pairs(value).collect();
    match all.iter().find(|(name, _)| words::has(TAKEN, name)) {
        Some((name, _)) => Err(format!(
            "\"{VARIABLES}\" has \"{name}\", which is no variable that a row can give to a template"
        )),
        None => Ok(all),
    }
}

/// Whether a message is a target if it is an answer, according to the keys that other trainers use for this purpose.
fn is_learnt(message: &Value, role: &str) -> Result<bool, String> {
    const SAY: [(&str, bool); 8] = [
        ("weight", true),
        ("loss_weight", true),
        ("loss_scale", true),
        ("loss", true),
        ("train", true),
        ("training", true),
        ("masked", false),
        ("mask", false),
    ];
    let mut said: Option<(&str, bool)> = None;
    for (key, value) in pairs(message).filter(|(_, value)| !value.is_none()) {
        if ["train_detail", "training_detail"].contains(&key.as_str()) && !is_nothing(&value) {
            return Err(format!("\"{key}\", and of an answer all is learnt or nothing"));
        }
        let Some((key, means)) = SAY.into_iter().find(|(known, _)| *known == key) else { continue };
        let Some(is_yes) = is_yes(&value) else {
            return Err(format!(
                "\"{key}\": {value}, expected 0 or 1, true or false: an answer is learnt or not"
            ));
        };
        let learns = is_yes == means;
        match said {
            Some((other, before)) if before != learns => {
                return Err(format!("\"{other}\" and \"{key}\", which contradict each other"));
            }
            _ => said = Some((key, learns)),
        }
    }
    match said {
        // Some data sets give every message a weight of 1, so a weight on a question is accepted. But `train` on a question means that the
        // question should be learnt.
        Some((key @ ("train" | "training" | "loss"), true)) if role != ANSWERS => Err(format!(
            "\"{key}\": true, and its role is {role}: messages of the role {ANSWERS} alone are learnt"
        )),
        said => Ok(said.is_none_or(|(_, learns)| learns)),
    }
}

/// The keys of a message, for an error message about a missing key.
fn keys_of(message: &Value) -> String {
    if message.kind() != ValueKind::Map {
        return format!(", which is {}", python::kind(message));
    }
    let keys: Vec<String> =
        message.try_iter().into_iter().flatten().take(8).map(|key| format!("\"{key}\"")).collect();
    if keys.is_empty() { String::new() } else { format!(", but {}", keys.join(", ")) }
}

/// The role of a message.
fn role_of(message: &Value) -> Option<String> {
    message.get_attr("role").ok()?.as_str().map(str::to_owned)
}

/// A message in the form that templates get: without nulls, and with its reasoning under the names that templates use.
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
