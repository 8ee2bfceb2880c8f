//! Conversations: messages with roles. The answers are the targets.

use std::sync::Arc;
use std::time::{Duration, UNIX_EPOCH};

use serde::Serialize;

use super::{Content, Piece};
use crate::config::DataConfig;
use crate::error::{Error, Result};
use crate::tokenizer::{ANSWERS, ChatTemplate, Conversation, Rendered, SharedTokenizer};

/// The key of a row's messages, and the template that renders them.
#[derive(Debug, Clone, Serialize)]
pub(in crate::data) struct Chat {
    key: String,
    /// The template's text. The text is part of the cache key, because another template gives other tokens.
    written: String,
    #[serde(skip)]
    template: Arc<ChatTemplate>,
}

impl PartialEq for Chat {
    fn eq(&self, other: &Self) -> bool {
        (&self.key, &self.written) == (&other.key, &other.written)
    }
}

impl Eq for Chat {}

/// 26 July 2024. Templates that print the current date print this date, so that the tokens of a conversation do not depend on the day.
const DAY: Duration = Duration::from_secs(1_721_952_000);

impl Chat {
    /// The chat template for `data.messages_key`; `None` if this key is not set.
    ///
    /// # Errors
    /// Returns [`Error::Config`] if the tokenizer has no chat template, and [`Error::Tokenizer`] if the template cannot be read.
    pub fn of(config: &DataConfig, tokenizer: Option<&SharedTokenizer>) -> Result<Option<Self>> {
        let key = config.messages_key.clone();
        if key.is_empty() {
            return Ok(None);
        }
        let template = tokenizer.map(|tokenizer| tokenizer.chat_template("")).transpose()?.flatten();
        let Some(template) = template else {
            let tokens = tokenizer.map_or("bytes".into(), |tokenizer| tokenizer.tokens());
            let why =
                format!("is \"{key}\", but the tokens are {tokens}, which come without a chat template");
            return Err(Error::config("data.messages_key", why));
        };
        let template = template.at(UNIX_EPOCH + DAY)?;
        Ok(Some(Self { key, written: template.source().to_owned(), template: Arc::new(template) }))
    }

    /// The documents that the chat template renders from a row. The error is the reason why the row has no document. A row has several
    /// documents if the template renders earlier answers differently later in the conversation.
    pub fn documents(&self, row: &[u8]) -> Result<Vec<Piece>, String> {
        let row = std::str::from_utf8(row).map_err(|e| {
            format!("is no UTF-8 (byte {} of it is none), expected JSON", e.valid_up_to() + 1)
        })?;
        let conversation = Conversation::of_row(row, &self.key)?;
        let rendered = self.template.render(&conversation).map_err(|e| e.to_string())?;
        if rendered.iter().flat_map(|of| &of.answers).all(std::ops::Range::is_empty) {
            return Err(self.without_answer(&conversation));
        }
        Ok(rendered.into_iter().map(|of| Piece::whole(Content::Chat(parts(of)))).collect())
    }

    /// The reason why a conversation has no targets.
    fn without_answer(&self, conversation: &Conversation) -> String {
        let roles = conversation.roles();
        let why = match &roles[..] {
            [] => "it has no message".into(),
            _ if conversation.learns_none() => {
                format!("its messages of the role {ANSWERS} say that they are not learnt")
            }
            _ if roles.iter().any(|role| role == ANSWERS) => {
                format!("what the chat template writes for the role {ANSWERS} is empty")
            }
            [one] => format!("its only role is {one}; the role of an answer is {ANSWERS}"),
            _ => {
                let roles = roles.into_iter().take(MOST_ROLES).collect::<Vec<_>>().join(", ");
                format!("its roles are {roles}; the role of an answer is {ANSWERS}")
            }
        };
        format!("\"{}\" has no answer: {why}", self.key)
    }

    /// Resets the limit on the template's work (its work budget) for a new file.
    pub fn begin_file(&self) {
        self.template.begin_file();
    }

    /// Whether the template has used up its work budget for this file. No single row can use up the budget. A used-up budget is therefore
    /// an error of the file, and no row is left out.
    pub fn is_spent(&self) -> bool {
        self.template.is_spent()
    }
}

/// The parts of a text. Each part has a flag that says whether it is an answer.
fn parts(Rendered { text, answers }: Rendered) -> Vec<(String, bool)> {
    let (mut parts, mut at) = (Vec::new(), 0);
    let mut add = |text: &str, is_target| {
        if !text.is_empty() {
            parts.push((text.to_owned(), is_target));
        }
    };
    for answer in answers {
        add(&text[at..answer.start], false);
        at = answer.end;
        add(&text[answer], true);
    }
    add(&text[at..], false);
    parts
}

/// Number of roles that an error message lists.
const MOST_ROLES: usize = 8;
