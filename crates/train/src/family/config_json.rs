//! `config.json`, both ways: what a key of it is here is said once, in a table of [`Field`]s.

use super::Family;
use crate::config::ModelConfig;
use crate::error::{Error, Result};
use crate::files;
use serde_json::{Map, Value};
use std::cell::RefCell;
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

/// A key of `config.json`.
#[derive(Debug, Clone, Copy)]
pub struct Field {
    /// `hidden_size`.
    key: &'static str,
    /// Another name that files have for it.
    or_key: Option<&'static str>,
    is: Is,
    /// What it is where the file does not say it, as JSON; none where it must.
    absent: Option<&'static str>,
}

/// What a key is here.
#[derive(Debug, Clone, Copy)]
enum Is {
    Size(fn(&mut ModelConfig) -> &mut usize),
    Number(fn(&mut ModelConfig) -> &mut f64),
    Switch(fn(&mut ModelConfig) -> &mut bool),
    /// Always this, JSON: the decoder has nothing else.
    Always(&'static str),
}

impl Field {
    /// A whole number.
    pub const fn size(key: &'static str, of: fn(&mut ModelConfig) -> &mut usize) -> Self {
        Self { key, or_key: None, is: Is::Size(of), absent: None }
    }

    /// A number.
    pub const fn number(key: &'static str, of: fn(&mut ModelConfig) -> &mut f64) -> Self {
        Self { key, or_key: None, is: Is::Number(of), absent: None }
    }

    /// True or false.
    pub const fn switch(key: &'static str, of: fn(&mut ModelConfig) -> &mut bool) -> Self {
        Self { key, or_key: None, is: Is::Switch(of), absent: None }
    }

    /// A key with one value, JSON, that the decoder has: any other is refused. It is that where the file does not say it.
    pub const fn always(key: &'static str, value: &'static str) -> Self {
        Self { key, or_key: None, is: Is::Always(value), absent: Some(value) }
    }

    /// The same, which is this, JSON, where the file does not say it or says `null`.
    #[must_use]
    pub const fn or(self, absent: &'static str) -> Self {
        Self { absent: Some(absent), ..self }
    }

    /// The same, which files may call otherwise; it is written under the first name.
    #[must_use]
    pub const fn also(self, key: &'static str) -> Self {
        Self { or_key: Some(key), ..self }
    }

    /// Its key.
    #[must_use]
    pub fn key(&self) -> &'static str {
        self.key
    }

    /// Whether what it says in JSON is JSON.
    #[cfg(test)]
    pub(super) fn is_json(&self) -> bool {
        let only = if let Is::Always(only) = self.is { Some(only) } else { None };
        let mut said = only.into_iter().chain(self.absent);
        said.all(|json| serde_json::from_str::<Value>(json).is_ok())
    }

    fn read(&self, json: &ConfigJson, model: &mut ModelConfig) -> Result<()> {
        let said = json.get(self.key).or_else(|| self.or_key.and_then(|key| json.get(key)));
        let value = match (said, self.absent) {
            (Some(value), _) => value.clone(),
            (None, Some(absent)) => literal(absent),
            (None, None) => return Err(json.error(self.key, "is not there, and is needed")),
        };
        let wrong = |expected: &str| json.error(self.key, format!("is {value}, expected {expected}"));
        match self.is {
            Is::Size(of) => {
                let size = value.as_u64().and_then(|size| usize::try_from(size).ok());
                *of(model) = size.ok_or_else(|| wrong("a whole number"))?;
            }
            Is::Number(of) => *of(model) = value.as_f64().ok_or_else(|| wrong("a number"))?,
            Is::Switch(of) => *of(model) = value.as_bool().ok_or_else(|| wrong("true or false"))?,
            Is::Always(only) => {
                let same = match (value.as_f64(), literal(only).as_f64()) {
                    (Some(is), Some(only)) => is == only,
                    _ => value == literal(only),
                };
                if !same {
                    let why = format!("is {value}, which the decoder does not have: it has {only} alone");
                    return Err(json.error(self.key, why));
                }
            }
        }
        Ok(())
    }

    fn write(&self, model: &mut ModelConfig) -> (String, Value) {
        let value = match self.is {
            Is::Size(of) => Value::from(*of(model)),
            Is::Number(of) => Value::from(*of(model)),
            Is::Switch(of) => Value::from(*of(model)),
            Is::Always(only) => literal(only),
        };
        (self.key.to_owned(), value)
    }
}

/// A table's JSON, which a test reads.
fn literal(json: &str) -> Value {
    serde_json::from_str(json).unwrap_or_default()
}

/// Keys that say nothing of what a model computes.
const OF_NO_INTEREST: &[&str] = &[
    "_name_or_path",
    "architectures",
    "auto_map",
    "bos_token_id",
    "dtype",
    "eos_token_id",
    "ep_size",
    "id2label",
    "initializer_range",
    "label2id",
    "max_window_layers",
    "model_type",
    "output_router_logits",
    "pad_token_id",
    "pretraining_tp",
    "sliding_window",
    "torch_dtype",
    "transformers_version",
    "use_cache",
    "output_attentions",
    "output_hidden_states",
    "return_dict",
    "chunk_size_feed_forward",
    "is_encoder_decoder",
    "problem_type",
    "_attn_implementation_autoset",
    "layer_types",
    "nibble_balance",
    "quantization_config",
    "router_z_loss_coef",
];

/// A `config.json`, and which of its keys have been asked for.
#[derive(Debug)]
pub struct ConfigJson {
    path: PathBuf,
    keys: Map<String, Value>,
    asked: RefCell<BTreeSet<String>>,
}

impl ConfigJson {
    /// The longest that is believed, in bytes.
    const LONGEST: u64 = 4 << 20;

    /// That of a folder.
    ///
    /// # Errors
    /// [`Error::Io`] where there is none; [`Error::Config`] where it is no JSON object.
    pub fn open(path: &Path) -> Result<Self> {
        let text = files::read_text(path, Self::LONGEST).map_err(Error::io(path))?;
        Self::parse(path, &text)
    }

    /// Of these keys, from nowhere.
    pub(super) fn of(keys: Map<String, Value>) -> Self {
        Self { path: PathBuf::new(), keys, asked: RefCell::default() }
    }

    /// From its text.
    ///
    /// # Errors
    /// [`Error::Config`] where it is no JSON object.
    pub fn parse(path: &Path, text: &str) -> Result<Self> {
        let error = |why: String| Error::Config {
            key: String::new(),
            file: Some(path.to_owned()),
            line: None,
            why,
            suggestion: None,
        };
        match serde_json::from_str(text) {
            Ok(Value::Object(keys)) => Ok(Self { path: path.to_owned(), keys, asked: RefCell::default() }),
            Ok(_) => Err(error("is no JSON object".into())),
            Err(e) => Err(error(format!("is no JSON: {e}"))),
        }
    }

    /// What it says of a key; none where that is `null`.
    pub fn get(&self, key: &str) -> Option<&Value> {
        self.asked.borrow_mut().insert(key.to_owned());
        self.keys.get(key).filter(|value| !value.is_null())
    }

    /// What it says of a key that is a whole number.
    ///
    /// # Errors
    /// [`Error::Config`] where it is something else.
    pub fn size(&self, key: &str) -> Result<Option<usize>> {
        let size = |value: &Value| value.as_u64().and_then(|size| usize::try_from(size).ok());
        let read = |value: &Value| {
            size(value).ok_or_else(|| self.error(key, format!("is {value}, expected a whole number")))
        };
        self.get(key).map(read).transpose()
    }

    /// What it says of a key that is a number.
    ///
    /// # Errors
    /// [`Error::Config`] where it is something else.
    pub fn number(&self, key: &str) -> Result<Option<f64>> {
        let read = |value: &Value| {
            value.as_f64().ok_or_else(|| self.error(key, format!("is {value}, expected a number")))
        };
        self.get(key).map(read).transpose()
    }

    /// Says that these keys count for nothing.
    pub fn pass_over(&self, keys: &[&str]) {
        self.asked.borrow_mut().extend(keys.iter().map(|key| (*key).to_owned()));
    }

    /// What is wrong with a key.
    pub fn error(&self, key: &str, why: impl Into<String>) -> Error {
        let file = Some(self.path.clone());
        Error::Config { key: key.to_owned(), file, line: None, why: why.into(), suggestion: None }
    }

    /// Keys that nobody has asked for and that may say something of the model.
    pub fn passed_over(&self) -> Vec<&str> {
        let asked = self.asked.borrow();
        let known = |key: &str| asked.contains(key) || OF_NO_INTEREST.contains(&key);
        let keys = self.keys.iter().filter(|(key, value)| !value.is_null() && !known(key));
        keys.map(|(key, _)| key.as_str()).collect()
    }
}

/// What a family's `config.json` says of a model.
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

/// The model of a family's `config.json`.
///
/// # Errors
/// [`Error::Config`] naming a key whose value the decoder does not have.
pub(super) fn read(family: &dyn Family, json: &ConfigJson) -> Result<ModelConfig> {
    // Without what only other models have.
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
    Ok(model)
}
