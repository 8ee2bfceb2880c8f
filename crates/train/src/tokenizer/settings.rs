//! `tokenizer_config.json` and `chat_template.jinja` beside a tokenizer: what others put around a text.

use std::collections::BTreeMap;
use std::path::Path;

use serde_json::Value;

use super::{CHAT_TEMPLATE_FILE, SETTINGS_FILE, TOKENIZER_FILE};
use crate::error::{Error, Result};
use crate::files;

/// The name of the chat template that has none.
pub(super) const DEFAULT: &str = "default";

/// The keys of tokens that have a name.
const NAMED: [&str; 7] =
    ["bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"];

/// What the files say.
#[derive(Debug, Clone, Default)]
pub(super) struct Settings {
    /// `tokenizer_config.json`, as it was.
    pub text: Option<String>,
    /// `chat_template.jinja`, as it was.
    pub chat_template_file: Option<String>,
    /// Chat templates by their names; the one without is "default".
    pub chat_templates: BTreeMap<String, String>,
    /// The texts of the tokens that have a name, such as `pad_token`.
    pub tokens: BTreeMap<String, String>,
    /// Whether a text begins with it, where that is said.
    pub add_bos_token: Option<bool>,
}

impl Settings {
    /// Whether no token has a name, and conversations are written in no way.
    pub fn is_nothing(&self) -> bool {
        self.tokens.is_empty() && self.chat_templates.is_empty()
    }

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
        // The file counts where both have one.
        let in_file = settings.chat_template_file.clone().map(|template| (DEFAULT.to_owned(), template));
        let Some(text) = read(SETTINGS_FILE)? else {
            settings.chat_templates.extend(in_file);
            return Ok(settings);
        };
        let path = tokenizer.with_file_name(SETTINGS_FILE);
        let fail = |why: String| Error::Tokenizer { path: path.clone(), why };
        let json: Value = serde_json::from_str(&text).map_err(|e| fail(format!("is no JSON: {e}")))?;
        let Some(keys) = json.as_object() else { return Err(fail("is no JSON object".into())) };
        for (key, value) in keys.iter().filter(|(key, _)| NAMED.contains(&key.as_str())) {
            match value.as_str().or_else(|| value["content"].as_str()) {
                Some(token) => drop(settings.tokens.insert(key.clone(), token.to_owned())),
                None if value.is_null() => {}
                None => {
                    let why = format!("`{key}` is {value}, expected a text, or an object with `content`");
                    return Err(fail(why));
                }
            }
        }
        settings.chat_templates = templates(&json["chat_template"]).ok_or_else(|| {
            fail("`chat_template` is neither a text nor a list of objects with `name` and `template`".into())
        })?;
        settings.chat_templates.extend(in_file);
        settings.add_bos_token = match &json["add_bos_token"] {
            Value::Null => None,
            Value::Bool(add) => Some(*add),
            other => return Err(fail(format!("`add_bos_token` is {other}, expected true or false"))),
        };
        settings.text = Some(text);
        Ok(settings)
    }
}

/// The chat templates that a key holds: one, several with names, or none.
fn templates(value: &Value) -> Option<BTreeMap<String, String>> {
    match value {
        Value::Null => Some(BTreeMap::new()),
        Value::String(template) => Some(BTreeMap::from([(DEFAULT.to_owned(), template.clone())])),
        Value::Array(all) => {
            let one =
                |one: &Value| Some((one["name"].as_str()?.to_owned(), one["template"].as_str()?.to_owned()));
            all.iter().map(one).collect()
        }
        _ => None,
    }
}
