//! Tokens that are missing in `tokenizer.json` but listed in other files of its folder. `AutoTokenizer` of `transformers` adds these tokens
//! too.
//!
//! `added_tokens_decoder` of `tokenizer_config.json` lists all such tokens. If this key is absent, as in older folders,
//! `special_tokens_map.json` contains the named tokens, and `added_tokens.json` contains the ids of other tokens. Keys such as `bos_token`
//! and `additional_special_tokens` may list more tokens.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use serde_json::{Map, Value, json};
use tokenizers::AddedToken;

use super::SETTINGS_FILE;
use super::growth::MOST_TOKEN;
use crate::error::{Error, Result};
use crate::files;

/// The files that older folders have instead of the key `added_tokens_decoder`.
pub(crate) const NAMES_FILE: &str = "special_tokens_map.json";
pub(crate) const ADDED_FILE: &str = "added_tokens.json";

/// The keys of named tokens, in the order in which `transformers` adds them.
const NAMED: [&str; 7] =
    ["bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"];

/// The key that lists tokens with their ids.
const DECODER: &str = "added_tokens_decoder";
/// The new and the old key for lists of unnamed tokens.
const EXTRA: [&str; 2] = ["extra_special_tokens", "additional_special_tokens"];

/// Reads a file in the folder of a tokenizer; `None` if there is no such file.
pub(super) fn read(tokenizer: &Path, name: &str) -> Result<Option<String>> {
    let path = tokenizer.with_file_name(name);
    let text = path.exists().then(|| files::read_text(&path, files::MOST_TEXT));
    text.transpose().map_err(Error::io(&path))
}

/// A file's contents as a JSON object.
pub(super) fn object(path: &Path, text: &str) -> Result<Map<String, Value>> {
    let fail = |why: String| Error::Tokenizer { path: path.to_owned(), why };
    match serde_json::from_str(text).map_err(|e| fail(format!("is no JSON: {e}")))? {
        Value::Object(keys) => Ok(keys),
        _ => Err(fail("is no JSON object".into())),
    }
}

/// The tokens that the files of a folder list.
#[derive(Debug, Clone, Default)]
pub(super) struct Listed {
    /// Tokens with an id, each with the file that specifies the id.
    with_ids: BTreeMap<u32, (AddedToken, PathBuf)>,
    /// Whether the ids in `tokenizer.json` take precedence over the ids in `with_ids`.
    yields: bool,
    /// Tokens with a name.
    pub named: Vec<(String, AddedToken)>,
    /// Tokens with neither an id nor a name.
    extra: Vec<AddedToken>,
    /// Whether [`NAMES_FILE`] changes the token of a name.
    pub is_renamed: bool,
}

impl Listed {
    /// Whether no token is listed.
    pub fn is_empty(&self) -> bool {
        self.with_ids.is_empty() && self.named.is_empty() && self.extra.is_empty()
    }

    /// The tokens that a tokenizer's folder lists. `keys` are the keys of `tokenizer_config.json`; this function adds names from other
    /// files.
    pub fn of(tokenizer: &Path, keys: &mut Map<String, Value>) -> Result<Self> {
        let mut listed = Self::default();
        let path = tokenizer.with_file_name(SETTINGS_FILE);
        match keys.get(DECODER) {
            None | Some(Value::Null) => listed.read_older(tokenizer, keys)?,
            Some(decoder) => {
                let entries = decoder.as_object().ok_or_else(|| wrong(&path, DECODER, decoder))?;
                for (id, value) in entries {
                    let token = token_of(value, None).filter(|_| value.is_object());
                    let (Ok(id), Some(token)) = (id.parse(), token) else {
                        return Err(wrong(&path, &format!("{DECODER}[\"{id}\"]"), value));
                    };
                    listed.with_ids.insert(id, (token, path.clone()));
                }
            }
        }
        let by_content: BTreeMap<String, AddedToken> =
            listed.with_ids.values().map(|(token, _)| (token.content.clone(), token.clone())).collect();
        let own = keys.keys().filter(|key| key.ends_with("_token") && !NAMED.contains(&key.as_str()));
        let own: Vec<&str> = own.map(String::as_str).collect();
        for key in NAMED.into_iter().chain(own) {
            match (&keys.get(key), NAMED.contains(&key)) {
                (None | Some(Value::Null), _) => {}
                (Some(value), _) if value.as_str() == Some("") => {}
                // Other keys with this ending may be switches, so they are skipped.
                (Some(value), false) if !value.is_string() && !value.is_object() => {}
                (Some(value), _) => {
                    let token = token_of(value, Some(true)).ok_or_else(|| wrong(&path, key, value))?;
                    let known = by_content.get(&token.content).filter(|_| value.is_string()).cloned();
                    listed.named.push((key.to_owned(), known.unwrap_or(token).special(true)));
                }
            }
        }
        listed.read_extra(&path, keys)?;
        Ok(listed)
    }

    /// Reads the separate files of older folders.
    fn read_older(&mut self, tokenizer: &Path, keys: &mut Map<String, Value>) -> Result<()> {
        if let Some(text) = read(tokenizer, NAMES_FILE)? {
            for (key, value) in object(&tokenizer.with_file_name(NAMES_FILE), &text)? {
                if !value.is_null() && keys.get(&key) != Some(&value) {
                    self.is_renamed = true;
                    keys.insert(key, value);
                }
            }
        }
        let Some(text) = read(tokenizer, ADDED_FILE)? else { return Ok(()) };
        let path = tokenizer.with_file_name(ADDED_FILE);
        let lists = EXTRA.iter().filter_map(|key| keys.get(*key)?.as_array()).flatten();
        let special: BTreeSet<String> = NAMED
            .iter()
            .filter_map(|key| keys.get(*key))
            .chain(lists)
            .filter_map(|value| token_of(value, Some(true)))
            .map(|token| token.content)
            .collect();
        for (content, id) in object(&path, &text)? {
            let Some(id_of) = id.as_u64().and_then(|id| u32::try_from(id).ok()) else {
                return Err(wrong(&path, &content, &id));
            };
            let is_special = special.contains(&content);
            self.with_ids.insert(id_of, (AddedToken::from(content, is_special), path.clone()));
        }
        self.yields = true;
        Ok(())
    }

    /// Reads tokens that have no name, or a name that is not in [`NAMED`].
    fn read_extra(&mut self, path: &Path, keys: &Map<String, Value>) -> Result<()> {
        let is_said =
            |key: &&str| keys.get(*key).is_some_and(|value| !value.is_null() && *value != json!([]));
        let Some(key) = EXTRA.into_iter().find(is_said) else { return Ok(()) };
        let value = &keys[key];
        let of = |value: &Value| token_of(value, Some(true)).ok_or_else(|| wrong(path, key, value));
        match value {
            Value::Array(all) => self.extra = all.iter().map(of).collect::<Result<_>>()?,
            Value::Object(all) => {
                let all = all.iter().map(|(name, value)| Ok((name.clone(), of(value)?)));
                self.named.extend(all.collect::<Result<Vec<_>>>()?);
            }
            other => return Err(wrong(path, key, other)),
        }
        Ok(())
    }

    /// Adds the missing tokens to a tokenizer. Returns whether there were missing tokens.
    ///
    /// # Errors
    /// Returns [`Error::Tokenizer`] naming the file and the token, if a token gets another id than the file specifies.
    pub fn add_to(&self, tokenizer: &mut tokenizers::Tokenizer) -> Result<bool> {
        let own = tokenizer.get_added_vocabulary().get_added_tokens_decoder().clone();
        let with_ids: Vec<(&u32, &(AddedToken, PathBuf))> =
            self.with_ids.iter().filter(|(id, _)| !self.yields || !own.contains_key(id)).collect();
        let mut add: Vec<AddedToken> = with_ids
            .iter()
            .map(|(_, (token, _))| token)
            .filter(|token| !own.values().any(|known| known == *token))
            .cloned()
            .collect();
        let mut contents: BTreeSet<String> = own.values().map(|known| known.content.clone()).collect();
        contents.extend(add.iter().map(|token| token.content.clone()));
        // An unknown named token, such as a padding token, is created only if an extra token follows, because the named token then shifts
        // the id of the extra token.
        let invents = |token: &AddedToken| tokenizer.token_to_id(&token.content).is_none();
        let extra = self.extra.iter().any(|token| !contents.contains(&token.content) && invents(token));
        let named = self.named.iter().map(|(_, token)| token).filter(|token| extra || !invents(token));
        for token in named.chain(&self.extra) {
            if contents.insert(token.content.clone()) {
                add.push(token.clone());
            }
        }
        let is_any = !add.is_empty();
        tokenizer.add_tokens(add).map_err(|e| {
            let path =
                self.with_ids.values().next().map_or_else(|| SETTINGS_FILE.into(), |(_, path)| path.clone());
            Error::Tokenizer { path, why: format!("lists tokens that cannot be added: {e}") }
        })?;
        for (id, (token, path)) in with_ids {
            let has = tokenizer.token_to_id(&token.content);
            if has != Some(*id) {
                let has = has.map_or("none".to_owned(), |has| has.to_string());
                let why = format!(
                    "says that {:?} has the id {id}; with the tokens of tokenizer.json it has {has}",
                    token.content
                );
                return Err(Error::Tokenizer { path: path.clone(), why });
            }
        }
        Ok(is_any)
    }
}

/// The text of a `tokenizer.json`, with the added tokens of this tokenizer.
///
/// # Errors
/// Returns an error for an invalid text.
pub(super) fn with_tokens(text: &str, tokenizer: &tokenizers::Tokenizer) -> Result<String, String> {
    let mut json: Value = serde_json::from_str(text).map_err(|e| e.to_string())?;
    let added: BTreeMap<u32, AddedToken> =
        tokenizer.get_added_vocabulary().get_added_tokens_decoder().clone().into_iter().collect();
    json["added_tokens"] = added
        .into_iter()
        .map(|(id, token)| {
            json!({"id": id, "content": token.content, "single_word": token.single_word, "lstrip": token.lstrip,
                "rstrip": token.rstrip, "normalized": token.normalized, "special": token.special})
        })
        .collect();
    Ok(format!("{json:#}\n"))
}

/// Reads a token in a file: a text, or an object. `special` says whether the token is special, if this is known.
fn token_of(value: &Value, special: Option<bool>) -> Option<AddedToken> {
    let content = value
        .as_str()
        .or_else(|| value["content"].as_str())
        .filter(|content| (1..=MOST_TOKEN).contains(&content.len()))?;
    let flag = |key: &str| value.get(key).and_then(Value::as_bool);
    let special = special.or(flag("special")).unwrap_or(false);
    let mut token = AddedToken::from(content, special);
    token.normalized = flag("normalized").unwrap_or(token.normalized);
    for (key, has) in [
        ("single_word", &mut token.single_word),
        ("lstrip", &mut token.lstrip),
        ("rstrip", &mut token.rstrip),
    ] {
        *has = flag(key).unwrap_or(false);
    }
    Some(token)
}

fn wrong(path: &Path, key: &str, value: &Value) -> Error {
    let shown: String = value.to_string().chars().take(80).collect();
    let expected = match key.ends_with("_token") {
        true => "a text, or an object with `content`",
        false => "tokens, each a text or an object with `content`, and their ids",
    };
    Error::Tokenizer { path: path.to_owned(), why: format!("`{key}` is {shown}, expected {expected}") }
}
