//! Reads special tokens and chat templates from `tokenizer_config.json` and `chat_template.jinja` in a tokenizer's folder.

use std::collections::BTreeMap;
use std::path::Path;

use serde_json::{Map, Value};

use super::listed::{Listed, object, read};
use super::{CHAT_TEMPLATE_FILE, SETTINGS_FILE, TOKENIZER_FILE, transformers_tokenizer};
use crate::error::{Error, Result};

/// The name under which the unnamed chat template is stored.
pub(super) const DEFAULT: &str = "default";

/// The settings in `tokenizer_config.json` and `chat_template.jinja`.
#[derive(Debug, Clone, Default)]
pub(super) struct Settings {
    /// The text of `tokenizer_config.json`, including token names that come from another file.
    pub text: Option<String>,
    /// The text of `chat_template.jinja`.
    pub chat_template_file: Option<String>,
    /// Chat templates by name. A template without a name is stored under the name "default".
    pub chat_templates: BTreeMap<String, String>,
    /// The texts of named tokens, such as `pad_token`.
    pub tokens: BTreeMap<String, String>,
    /// Tokens that must be added to the tokenizer.
    pub listed: Listed,
    /// Whether a text begins with the BOS token; `None` if the files do not say.
    pub add_bos_token: Option<bool>,
}

impl Settings {
    /// Whether there are no named or listed tokens and no chat templates.
    pub fn is_nothing(&self) -> bool {
        self.tokens.is_empty() && self.chat_templates.is_empty() && self.listed.is_empty()
    }

    /// The settings in the folder of a `tokenizer.json`. If the tokenizer's file has another name, there are no settings, because the
    /// folder's settings may belong to another tokenizer.
    pub fn beside(tokenizer: &Path) -> Result<Self> {
        if tokenizer.file_name().is_none_or(|name| name != TOKENIZER_FILE) {
            return Ok(Self::default());
        }
        let path = tokenizer.with_file_name(SETTINGS_FILE);
        let fail = |why: String| Error::Tokenizer { path: path.clone(), why };
        let mut settings =
            Self { chat_template_file: read(tokenizer, CHAT_TEMPLATE_FILE)?, ..Self::default() };
        settings.text = read(tokenizer, SETTINGS_FILE)?;
        let mut keys = match &settings.text {
            Some(text) => object(&path, text)?,
            None => Map::new(),
        };
        settings.chat_templates = templates(&keys.get("chat_template").cloned().unwrap_or_default())
            .ok_or_else(|| {
                fail(
                    "`chat_template` is neither a text nor a list of objects with `name` and `template`"
                        .into(),
                )
            })?;
        // The template in a separate file takes precedence over the template in the key.
        let in_file = settings.chat_template_file.clone().map(|template| (DEFAULT.to_owned(), template));
        settings.chat_templates.extend(in_file);
        settings.add_bos_token = match keys.get("add_bos_token") {
            None | Some(Value::Null) => None,
            Some(Value::Bool(add)) => Some(*add),
            Some(other) => return Err(fail(format!("`add_bos_token` is {other}, expected true or false"))),
        };
        if keys.get("split_special_tokens") == Some(&Value::Bool(true)) {
            let why = "`split_special_tokens` is true, by which `transformers` takes control tokens of a conversation for text; leave it out";
            return Err(fail(why.into()));
        }
        settings.listed = Listed::of(tokenizer, &mut keys)?;
        for (key, token) in &settings.listed.named {
            settings.tokens.insert(key.clone(), token.content.clone());
        }
        if settings.listed.is_renamed {
            if settings.text.is_none() {
                // If `tokenizer_class` were missing, `transformers` would choose the class by the model's type.
                let mut whole = object(&path, &transformers_tokenizer())?;
                whole.extend(keys);
                keys = whole;
            }
            settings.text = Some(format!("{:#}\n", Value::from(keys)));
        }
        Ok(settings)
    }
}

/// The chat templates under a key: no template, one unnamed template, or several named templates.
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
