//! `tokenizer_config.json` and `chat_template.jinja` beside a tokenizer: what others put around a text.

use std::path::Path;

use serde_json::Value;

use super::{CHAT_TEMPLATE_FILE, SETTINGS_FILE, TOKENIZER_FILE};
use crate::error::{Error, Result};
use crate::files;

/// What the files say.
#[derive(Debug, Clone, Default)]
pub(super) struct Settings {
    /// `tokenizer_config.json`, as it was.
    pub text: Option<String>,
    /// `chat_template.jinja`, as it was.
    pub chat_template_file: Option<String>,
    /// The text of the token that a text begins with.
    pub bos_token: Option<String>,
    /// That of the token that a text ends with.
    pub eos_token: Option<String>,
    /// Whether a text begins with it, where that is said.
    pub add_bos_token: Option<bool>,
}

impl Settings {
    /// Those beside a tokenizer's file. A file of another name has none: what lies there may be of another tokenizer.
    pub fn beside(tokenizer: &Path) -> Result<Self> {
        if tokenizer.file_name().is_none_or(|name| name != TOKENIZER_FILE) {
            return Ok(Self::default());
        }
        let read = |name: &str| {
            let path = tokenizer.with_file_name(name);
            let text = path.exists().then(|| files::read_text(&path, files::MOST_TEXT));
            text.transpose().map_err(Error::io(&path))
        };
        let mut settings = Self { chat_template_file: read(CHAT_TEMPLATE_FILE)?, ..Self::default() };
        let Some(text) = read(SETTINGS_FILE)? else { return Ok(settings) };
        let path = tokenizer.with_file_name(SETTINGS_FILE);
        let fail = |why: String| Error::Tokenizer { path: path.clone(), why };
        let json: Value = serde_json::from_str(&text).map_err(|e| fail(format!("is no JSON: {e}")))?;
        if !json.is_object() {
            return Err(fail("is no JSON object".into()));
        }
        let token = |key: &str| match &json[key] {
            Value::Null => Ok(None),
            Value::String(token) => Ok(Some(token.clone())),
            other => match other["content"].as_str() {
                Some(token) => Ok(Some(token.to_owned())),
                None => {
                    Err(fail(format!("`{key}` is {other}, expected a text, or an object with `content`")))
                }
            },
        };
        settings.bos_token = token("bos_token")?;
        settings.eos_token = token("eos_token")?;
        settings.add_bos_token = match &json["add_bos_token"] {
            Value::Null => None,
            Value::Bool(add) => Some(*add),
            other => return Err(fail(format!("`add_bos_token` is {other}, expected true or false"))),
        };
        settings.text = Some(text);
        Ok(settings)
    }
}
