//! Prompts from the command line or from a file, as plain text or as conversations.

use nibble_command::error::{Error, Result};
use nibble_train::files;
use nibble_train::json_rows;
use nibble_train::tokenizer::{Conversation, Framing, Tokenizer};
use serde_json::{Map, Value, json};
use std::path::{Path, PathBuf};

/// Options that select the prompts.
#[derive(Debug, clap::Args)]
pub struct Prompts {
    /// Text to continue; the output begins with this text. By default, generation starts from the BOS token, or from the EOS token if there
    /// is no BOS token; from a line break if tokens are bytes; from `(` in the built-in synthetic language.
    #[arg(long, value_name = "TEXT", conflicts_with = "prompts")]
    prompt: Option<String>,
    /// Continues each prompt in FILE. For each prompt, prints one line of JSON: the prompt, its completion, and the reason why the
    /// completion ended (`length`, `stop` or `eos`). In a .jsonl file, each line is a JSON object with the key "prompt" (a text) or
    /// "messages" (a conversation). In a .txt file, each line is a prompt.
    #[arg(long, value_name = "FILE")]
    prompts: Option<PathBuf>,
    /// Formats the prompt as a user message with the tokenizer's chat template, and prints only the assistant's answer.
    #[arg(long)]
    chat: bool,
    /// System message of the conversation, which precedes the user message of --chat.
    #[arg(long, value_name = "TEXT", requires = "chat")]
    system: Option<String>,
}

/// Maximum size of a file of prompts in bytes, because the whole file is read into memory.
const MOST_BYTES: u64 = 1 << 30;

/// A prompt, with a note of where it came from.
pub struct Prompt {
    /// The file and line of the prompt.
    place: Option<String>,
    content: Content,
}

/// The content of a prompt.
enum Content {
    Text(String),
    /// The messages as written in the file, and as input of a chat template.
    Conversation(Value, Conversation),
}

impl Prompts {
    /// Reads all prompts, in order.
    ///
    /// # Errors
    /// The error names the file and the invalid line.
    pub fn read(&self) -> Result<Vec<Prompt>> {
        let prompts = match &self.prompts {
            Some(file) => of_file(file)?,
            None => {
                let text = self.prompt.clone().unwrap_or_default();
                vec![Prompt { place: None, content: Content::Text(text) }]
            }
        };
        for Prompt { place, content } in &prompts {
            let wrong = match content {
                Content::Text(text) if self.chat && text.is_empty() => {
                    "--chat: there is no message, expected --prompt TEXT or --prompts FILE"
                }
                Content::Conversation(..) if self.system.is_some() => {
                    "has \"messages\", which include the system message: write it there instead of --system"
                }
                _ => continue,
            };
            return Err(Error::usage(at(place.as_deref(), wrong)));
        }
        Ok(prompts)
    }

    /// Whether any of the prompts is a conversation that an assistant's answer continues.
    pub fn has_chat(&self, prompts: &[Prompt]) -> bool {
        self.chat || prompts.iter().any(|prompt| matches!(prompt.content, Content::Conversation(..)))
    }

    /// Whether the prompts come from a file; if so, each prompt is printed with its completion as JSON.
    pub fn are_of_a_file(&self) -> bool {
        self.prompts.is_some()
    }

    /// The prompt of the command line, which is printed before its completion; `None` for prompts of a file.
    pub fn told_first(&self) -> &str {
        self.prompt.as_deref().filter(|_| !self.chat).unwrap_or_default()
    }

    /// The token ids of each prompt. The tokenizer's chat template renders a conversation. A plain text gets the same leading token as the
    /// documents of the training data.
    ///
    /// # Errors
    /// Returns an error if a text encodes to no tokens, if a conversation renders to no text, or if a required chat template is missing.
    pub fn ids(
        &self,
        prompts: &[Prompt],
        tokenizer: &dyn Tokenizer,
        framing: Framing,
    ) -> Result<Vec<Vec<i32>>> {
        let template = if self.has_chat(prompts) { tokenizer.chat_template("")? } else { None };
        let written = |conversation: &Conversation| -> Result<Vec<i32>> {
            let template = template.as_ref().ok_or_else(|| no_template(tokenizer))?;
            Ok(tokenizer.encode_with_control(&template.text(conversation, true)?)?)
        };
        let ids = |Prompt { place, content }: &Prompt| {
            let ids = match content {
                Content::Text(text) if self.chat => self.conversation_of(text).and_then(|c| written(&c)),
                Content::Text(text) => plain(text, tokenizer, framing),
                Content::Conversation(_, conversation) => written(conversation),
            };
            match ids {
                Ok(ids) if ids.is_empty() => {
                    Err(Error::usage(at(place.as_deref(), "the prompt has no tokens")))
                }
                Err(Error::Usage(why)) => Err(Error::usage(at(place.as_deref(), &why))),
                other => other,
            }
        };
        prompts.iter().map(ids).collect()
    }

    /// A conversation with a user message, after the system message if there is one.
    fn conversation_of(&self, text: &str) -> Result<Conversation> {
        let system = self.system.iter().map(|system| json!({"role": "system", "content": system}));
        let messages: Vec<Value> = system.chain([json!({"role": "user", "content": text})]).collect();
        Ok(Conversation::from_json(&Value::from(messages).to_string())?)
    }
}

impl Prompt {
    /// A line of JSON with the prompt, its completion, and the reason why generation stopped.
    pub fn told_with(&self, completion: &[u8], ended: &str) -> String {
        let (key, said) = match &self.content {
            Content::Text(text) => ("prompt", json!(text)),
            Content::Conversation(messages, _) => ("messages", messages.clone()),
        };
        let completion = json!(String::from_utf8_lossy(completion));
        format!("{{\"{key}\": {said}, \"completion\": {completion}, \"ended\": \"{ended}\"}}\n")
    }
}

/// The token ids of a plain text.
fn plain(text: &str, tokenizer: &dyn Tokenizer, framing: Framing) -> Result<Vec<i32>> {
    let mut ids = match text {
        "" => tokenizer.opening()?,
        text => tokenizer.encode_with_control(text)?,
    };
    if let Some(bos) = framing.bos.filter(|bos| ids.first() != Some(bos)) {
        ids.insert(0, bos);
    }
    Ok(ids)
}

fn no_template(tokenizer: &dyn Tokenizer) -> Error {
    Error::usage(format!(
        "the model's tokenizer has no chat template to turn a conversation into text; its tokens are {}. Without --chat a prompt is continued \
         as plain text",
        tokenizer.tokens()
    ))
}

/// Adds the prompt's file and line in front of an error.
fn at(place: Option<&str>, why: &str) -> String {
    place.map_or_else(|| why.to_owned(), |place| format!("{place}: {why}"))
}

/// The prompts of a file.
fn of_file(path: &Path) -> Result<Vec<Prompt>> {
    let extension = path.extension().unwrap_or_default().to_string_lossy().to_lowercase();
    let is_json = match extension.as_str() {
        "jsonl" => true,
        "txt" => false,
        _ => {
            let why = "expected FILE.jsonl, one JSON object per line, or FILE.txt, one prompt per line";
            return Err(Error::usage(format!("--prompts {}: {why}", path.display())));
        }
    };
    let text = files::read_text(path, MOST_BYTES).map_err(Error::io(path))?;
    let contents: Vec<(usize, Result<Content, String>)> = match is_json {
        true => json_rows::objects(&text)
            .map(|(number, line, row)| (number, row.and_then(|row| content(line, &row))))
            .collect(),
        false => (1..).zip(text.strip_prefix('\u{feff}').unwrap_or(&text).lines().map(plain_line)).collect(),
    };
    let prompt = |(number, content): (usize, Result<Content, String>)| {
        let place = format!("{}, line {number}", path.display());
        match content {
            Ok(content) => Ok(Prompt { place: Some(place), content }),
            Err(why) => Err(Error::usage(at(Some(&place), &why))),
        }
    };
    let prompts = contents.into_iter().map(prompt).collect::<Result<Vec<_>>>()?;
    match prompts.is_empty() {
        true => Err(Error::usage(format!("--prompts {}: has no prompts", path.display()))),
        false => Ok(prompts),
    }
}

/// Parses a line of a .txt file.
fn plain_line(line: &str) -> Result<Content, String> {
    match line {
        "" => Err("is empty, expected a prompt".into()),
        line => Ok(Content::Text(line.to_owned())),
    }
}

/// The content of a line's JSON object; the error describes what is invalid.
fn content(line: &str, row: &Map<String, Value>) -> Result<Content, String> {
    match (row.get("prompt"), row.get("messages")) {
        (Some(_), Some(_)) => Err("has both \"prompt\" and \"messages\", expected one of them".into()),
        (Some(Value::String(text)), None) => {
            json_rows::require_prompt_alone(row)?;
            Ok(Content::Text(text.clone()))
        }
        (Some(other), None) => Err(format!("\"prompt\" is {other}, expected a text")),
        (None, Some(Value::Array(all))) if all.is_empty() => Err("\"messages\" has no message".into()),
        (None, Some(messages)) => {
            Ok(Content::Conversation(messages.clone(), Conversation::of_row(line, "messages")?))
        }
        (None, None) => {
            let keys: Vec<String> = row.keys().take(8).map(|key| format!("{key:?}")).collect();
            let there = if keys.is_empty() { "no key at all".into() } else { keys.join(", ") };
            Err(format!("has neither \"prompt\" nor \"messages\", but {there}"))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_wrong_with_a_line_is_said() {
        for (line, why) in [
            ("{\"prompt\": 3}", "\"prompt\" is 3, expected a text"),
            ("{\"text\": \"a\"}", "has neither \"prompt\" nor \"messages\", but \"text\""),
            ("{}", "no key at all"),
            ("{\"prompt\": \"a\", \"messages\": []}", "has both"),
            ("{\"prompt\": \"a\", \"tools\": [{}]}", "has \"tools\""),
            ("{\"prompt\": \"a\", \"system\": \"b\"}", "has \"system\""),
            ("{\"messages\": [{\"role\": \"user\"}], \"system\": \"b\"}", "has \"system\""),
            ("{\"messages\": []}", "has no message"),
            ("{\"messages\": \"a\"}", "expected a list"),
            ("{\"messages\": [{\"content\": \"a\"}]}", "`role`"),
        ] {
            let said = json_rows::object(line).and_then(|row| content(line, &row)).err().unwrap_or_default();
            assert!(said.contains(why), "{line}: {said}");
        }
    }
}
