//! Reads and writes `config.json`. A table of [`Field`]s defines the meaning of each key, for both directions.

use super::Family;
use crate::config::{ModelConfig, check_model, in_words_of};
use crate::error::{Error, Result};
use crate::files;
use crate::words;
use nibble_core::shortened;
use serde_json::{Map, Value};
use std::cell::RefCell;
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

/// A key of `config.json`.
#[derive(Debug, Clone, Copy)]
pub struct Field {
    /// The key's name, such as `hidden_size`.
    key: &'static str,
    /// An alternative name of the key in files.
    or_key: Option<&'static str>,
    is: Is,
    /// The default for a missing key, as JSON; `None` if the key is required.
    absent: Option<&'static str>,
    /// The value that `null` means, as JSON; `None` if `null` is refused.
    null: Option<&'static str>,
}

/// What corresponds to a key in Nibble.
#[derive(Debug, Clone, Copy)]
enum Is {
    Size(fn(&mut ModelConfig) -> &mut usize),
    Count(fn(&mut ModelConfig) -> &mut usize),
    Number(fn(&mut ModelConfig) -> &mut f64),
    Switch(fn(&mut ModelConfig) -> &mut bool),
    /// The key always has this value, given as JSON. The decoder supports no other value.
    Always(&'static str),
}

impl Field {
    /// A field whose value is an integer above 0.
    pub const fn size(key: &'static str, of: fn(&mut ModelConfig) -> &mut usize) -> Self {
        Self { key, or_key: None, is: Is::Size(of), absent: None, null: None }
    }

    /// A field whose value is an integer that may be 0.
    pub const fn count(key: &'static str, of: fn(&mut ModelConfig) -> &mut usize) -> Self {
        Self { key, or_key: None, is: Is::Count(of), absent: None, null: None }
    }

    /// A field whose value is a number above 0.
    pub const fn number(key: &'static str, of: fn(&mut ModelConfig) -> &mut f64) -> Self {
        Self { key, or_key: None, is: Is::Number(of), absent: None, null: None }
    }

    /// A field whose value is true or false.
    pub const fn switch(key: &'static str, of: fn(&mut ModelConfig) -> &mut bool) -> Self {
        Self { key, or_key: None, is: Is::Switch(of), absent: None, null: None }
    }

    /// A field for which only the JSON value `value` is supported. `value` is also the default for a missing key. If a file has another
    /// value in this field, reading the file fails.
    pub const fn always(key: &'static str, value: &'static str) -> Self {
        Self { key, or_key: None, is: Is::Always(value), absent: Some(value), null: None }
    }

    /// The same field with the JSON value `absent` as default for a missing key.
    #[must_use]
    pub const fn or(self, absent: &'static str) -> Self {
        Self { absent: Some(absent), ..self }
    }

    /// The same field, where a `null` in a file stands for the JSON value in the argument `null`.
    #[must_use]
    pub const fn or_null(self, null: &'static str) -> Self {
        Self { null: Some(null), ..self }
    }

    /// The same field with `key` as an alternative name, which is recognized when a file is read. When a file is written, the field has its
    /// first name.
    #[must_use]
    pub const fn also(self, key: &'static str) -> Self {
        Self { or_key: Some(key), ..self }
    }

    /// The field's name.
    #[must_use]
    pub fn key(&self) -> &'static str {
        self.key
    }

    /// Whether the field's JSON texts are valid.
    #[cfg(test)]
    pub(super) fn is_json(&self) -> bool {
        let only = if let Is::Always(only) = self.is { Some(only) } else { None };
        let mut said = only.into_iter().chain(self.absent).chain(self.null);
        said.all(|json| serde_json::from_str::<Value>(json).is_ok())
    }

    fn read(&self, json: &ConfigJson, model: &mut ModelConfig) -> Result<()> {
        let key = self.said(json)?;
        let (otherwise, error) = match json.is_null(key) {
            true => (self.null, json.error(key, "is null, which it may not be")),
            false => (self.absent, json.missing(self.key)),
        };
        // A default may be 0, although a value in the file may not be 0.
        let usual = || otherwise.map(literal).ok_or(error);
        let whole =
            |usual: Value| usual.as_u64().and_then(|size| usize::try_from(size).ok()).unwrap_or_default();
        match self.is {
            Is::Size(of) => *of(model) = json.size(key)?.map_or_else(|| usual().map(whole), Ok)?,
            Is::Count(of) => *of(model) = json.count(key)?.map_or_else(|| usual().map(whole), Ok)?,
            Is::Number(of) => {
                let number = |usual: Value| usual.as_f64().unwrap_or_default();
                *of(model) = json.above_zero(key)?.map_or_else(|| usual().map(number), Ok)?;
            }
            Is::Switch(of) => {
                let switch = |usual: Value| usual.as_bool().unwrap_or_default();
                *of(model) = json.switch(key)?.map_or_else(|| usual().map(switch), Ok)?;
            }
            Is::Always(only) => {
                let value = json.get(key).cloned().map_or_else(usual, Ok)?;
                let same = match (value.as_f64(), literal(only).as_f64()) {
                    (Some(is), Some(only)) => is == only,
                    _ => value == literal(only),
                };
                if !same {
                    let why = format!(
                        "is {}, which the decoder does not have: it has {only} alone",
                        in_short(&value)
                    );
                    return Err(json.error(key, why));
                }
            }
        }
        Ok(())
    }

    /// The name that this file uses for the field. If the file does not have the key, the field's first name.
    fn said(&self, json: &ConfigJson) -> Result<&'static str> {
        let Some(other) = self.or_key else { return Ok(self.key) };
        match (json.get(self.key), json.get(other)) {
            (Some(one), Some(another)) if one != another => {
                let (is, that) = (in_short(another), in_short(one));
                Err(json.error(other, format!("is {is}, and {}, which means the same, is {that}", self.key)))
            }
            (None, Some(_)) => Ok(other),
            _ => Ok(self.key),
        }
    }

    fn write(&self, model: &mut ModelConfig) -> (String, Value) {
        let value = match self.is {
            Is::Size(of) | Is::Count(of) => Value::from(*of(model)),
            Is::Number(of) => Value::from(*of(model)),
            Is::Switch(of) => Value::from(*of(model)),
            Is::Always(only) => literal(only),
        };
        (self.key.to_owned(), value)
    }
}

/// Parses a JSON text from a table of fields. A test checks that the text is valid.
fn literal(json: &str) -> Value {
    serde_json::from_str(json).unwrap_or_default()
}

/// A value, shortened for error messages.
fn in_short(value: &Value) -> String {
    shortened(&value.to_string()).into_owned()
}

/// Keys that do not affect the computation of a model.
pub(super) const OF_NO_INTEREST: &str = "\
    _name_or_path architectures auto_map bos_token_id dtype eos_token_id ep_size id2label \
    initializer_range label2id max_window_layers model_type output_router_logits pad_token_id \
    pretraining_tp sliding_window torch_dtype transformers_version use_cache output_attentions \
    output_hidden_states return_dict chunk_size_feed_forward is_encoder_decoder problem_type \
    _attn_implementation_autoset layer_types nibble_balance quantization_config router_z_loss_coef";

/// A parsed `config.json`, which records the keys that have been read.
#[derive(Debug)]
pub struct ConfigJson {
    path: PathBuf,
    keys: Map<String, Value>,
    asked: RefCell<BTreeSet<String>>,
    /// Default base of the RoPE frequencies.
    pub(super) usual_theta: f64,
}

impl ConfigJson {
    /// Largest accepted size of the file, in bytes.
    const LONGEST: u64 = 4 << 20;

    /// Opens and parses the `config.json` at `path`.
    ///
    /// # Errors
    /// Returns [`Error::Io`] if the file does not exist, and [`Error::Config`] if the file is not a JSON object.
    pub fn open(path: &Path) -> Result<Self> {
        let text = files::read_text(path, Self::LONGEST).map_err(Error::io(path))?;
        Self::parse(path, &text)
    }

    /// Creates a value from these keys, without a file.
    pub(super) fn of(keys: Map<String, Value>) -> Self {
        Self { path: PathBuf::new(), keys, asked: RefCell::default(), usual_theta: USUAL_THETA }
    }

    /// Parses the text of a `config.json`.
    ///
    /// # Errors
    /// Returns [`Error::Config`] if the text is not a JSON object.
    pub fn parse(path: &Path, text: &str) -> Result<Self> {
        let error = |why: String| Error::config("", why).in_file(path);
        match serde_json::from_str(text) {
            Ok(Value::Object(keys)) => Ok(Self { path: path.to_owned(), ..Self::of(keys) }),
            Ok(_) => Err(error("is no JSON object".into())),
            Err(e) => Err(error(format!("is no JSON: {e}"))),
        }
    }

    /// The value of a key; `None` if the key is missing or `null`. A key inside a table is written with a dot: `rope_scaling.factor`.
    pub fn get(&self, key: &str) -> Option<&Value> {
        self.asked.borrow_mut().insert(key.to_owned());
        let value = match key.split_once('.') {
            Some((table, name)) => self.keys.get(table)?.get(name),
            None => self.keys.get(key),
        };
        value.filter(|value| !value.is_null())
    }

    /// Whether the value of a key is `null`.
    pub(super) fn is_null(&self, key: &str) -> bool {
        self.keys.get(key).is_some_and(Value::is_null)
    }

    /// Inserts the defaults of a configuration class for missing keys.
    pub(super) fn fill(&mut self, absent: &[(&str, &str)]) {
        for (key, usual) in absent {
            self.keys.entry(*key).or_insert_with(|| literal(usual));
        }
    }

    /// The value of a key, converted by `read`.
    fn read<'a, T>(
        &'a self,
        key: &str,
        expected: &str,
        read: impl Fn(&'a Value) -> Option<T>,
    ) -> Result<Option<T>> {
        let wrong = |value: &Value| self.error(key, format!("is {}, expected {expected}", in_short(value)));
        self.get(key).map(|value| read(value).ok_or_else(|| wrong(value))).transpose()
    }

    /// The value of a key that must be an integer above 0.
    ///
    /// # Errors
    /// Returns [`Error::Config`] if the value is not an integer above 0.
    pub fn size(&self, key: &str) -> Result<Option<usize>> {
        let expected = format!("a whole number from 1 to {MOST}");
        self.read(key, &expected, |value| whole(value).filter(|size| *size > 0))
    }

    /// The value of a key that must be a non-negative integer.
    ///
    /// # Errors
    /// Returns [`Error::Config`] if the value is not a non-negative integer.
    pub fn count(&self, key: &str) -> Result<Option<usize>> {
        self.read(key, &format!("a whole number from 0 to {MOST}"), whole)
    }

    /// The value of a key that must be a non-negative number.
    ///
    /// # Errors
    /// Returns [`Error::Config`] if the value is not a non-negative number.
    pub fn number(&self, key: &str) -> Result<Option<f64>> {
        self.read(key, "a number of at least 0", |value| single(value).filter(|number| *number >= 0.0))
    }

    /// The value of a key that must be a number above 0.
    ///
    /// # Errors
    /// Returns [`Error::Config`] if the value is not a number above 0.
    pub fn above_zero(&self, key: &str) -> Result<Option<f64>> {
        // Kernels compute in single precision, which would round a smaller number to zero.
        let above = |value: &Value| single(value).filter(|number| *number as f32 > 0.0);
        self.read(key, "a number above 0 in the range of single precision", above)
    }

    /// The value of a key that must be true or false.
    ///
    /// # Errors
    /// Returns [`Error::Config`] if the value is neither true nor false.
    pub fn switch(&self, key: &str) -> Result<Option<bool>> {
        self.read(key, "true or false", Value::as_bool)
    }

    /// The value of a key that must be a string.
    ///
    /// # Errors
    /// Returns [`Error::Config`] if the value is not a string.
    pub fn word(&self, key: &str) -> Result<Option<&str>> {
        self.read(key, "a text", Value::as_str)
    }

    /// The value of a key that must be a table (a JSON object).
    ///
    /// # Errors
    /// Returns [`Error::Config`] if the value is not a table.
    pub fn table(&self, key: &str) -> Result<Option<&Map<String, Value>>> {
        self.read(key, "an object", Value::as_object)
    }

    /// The error that reports a missing key.
    pub fn missing(&self, key: &str) -> Error {
        self.error(key, "is not there, and is needed")
    }

    /// Marks keys as read, so that `passed_over` does not report them.
    pub fn pass_over(&self, keys: &[&str]) {
        self.asked.borrow_mut().extend(keys.iter().map(|key| (*key).to_owned()));
    }

    /// An error about a key, with the reason `why`.
    pub fn error(&self, key: &str, why: impl Into<String>) -> Error {
        Error::config(key, why).in_file(&self.path)
    }

    /// Replaces the name of a configuration key in an error by the name of the key in this file.
    fn named(&self, mut error: Error) -> Error {
        let here = |text: &str| in_words_of(text, |name| self.keys.contains_key(name));
        if let Error::Config { key, why, .. } = &mut error {
            (*key, *why) = (here(key), here(why));
        }
        error
    }

    /// The keys of the file that were not read, although they may affect the model.
    pub fn passed_over(&self) -> Vec<String> {
        let asked = self.asked.borrow();
        let known = |key: &str| asked.contains(key) || words::has(OF_NO_INTEREST, key);
        let keys = self.keys.iter().filter(|(_, value)| !value.is_null());
        let mut unread = Vec::new();
        for (key, value) in keys {
            let inside = format!("{key}.");
            if !known(key) {
                unread.push(key.clone());
            } else if asked.iter().any(|asked| asked.starts_with(&inside)) {
                // The keys of this table are read one by one, so unread keys of the table are reported too.
                let inner = value.as_object().into_iter().flatten().filter(|(_, value)| !value.is_null());
                let inner = inner.map(|(name, _)| format!("{inside}{name}"));
                unread.extend(inner.filter(|key| !asked.contains(key)));
            }
        }
        unread
    }
}

/// The default base of the RoPE frequencies (`default_theta`) in most configuration classes.
const USUAL_THETA: f64 = 10_000.0;

/// Largest accepted size. The size is limited because row and element indices are 32-bit.
const MOST: usize = i32::MAX as usize;

fn whole(value: &Value) -> Option<usize> {
    value.as_u64().and_then(|size| usize::try_from(size).ok()).filter(|size| *size <= MOST)
}

/// A number, if single precision can represent it. Kernels compute in single precision.
fn single(value: &Value) -> Option<f64> {
    value.as_f64().filter(|number| (*number as f32).is_finite())
}

/// Writes the `config.json` of a model in a family.
pub(super) fn written(family: &dyn Family, model: &ModelConfig) -> Value {
    let mut model = model.clone();
    let mut keys = Map::new();
    keys.insert("architectures".into(), Value::from(vec![family.architecture()]));
    keys.insert("model_type".into(), family.name().into());
    keys.extend(family.fields().into_iter().map(|field| field.write(&mut model)));
    keys.insert("dtype".into(), "float32".into());
    keys.insert("torch_dtype".into(), "float32".into());
    family.write_rest(&model, &mut keys);
    Value::Object(keys)
}

/// Reads the model of a family's `config.json`.
///
/// # Errors
/// [`Error::Config`] naming a key with an unsupported value.
pub(super) fn read(family: &dyn Family, json: &mut ConfigJson) -> Result<ModelConfig> {
    json.fill(family.absent());
    let json = &*json;
    // These values replace defaults that do not apply to every model.
    let mut model = ModelConfig {
        experts: 0,
        top_k: 0,
        expert_ffn: 0,
        norm_topk_prob: false,
        aux_loss_coef: 0.0,
        z_loss_coef: 0.0,
        ..ModelConfig::default()
    };
    family.fields().iter().try_for_each(|field| field.read(json, &mut model))?;
    family.read_rest(json, &mut model)?;
    check_model(&model).map_err(|error| json.named(error).in_file(&json.path))?;
    Ok(model)
}
