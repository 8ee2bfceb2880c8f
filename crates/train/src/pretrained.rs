//! Pretrained models from which a run may start: folders of Hugging Face tools, and checkpoints of other runs.

use crate::checkpoint::{BLOCK, Checkpoint, STATE_FILE, Tensors, latest_valid};
use crate::config::{Config, ModelConfig};
use crate::error::{Error, Result};
use crate::family::{self, ConfigJson, Family, Named};
use crate::files;
use crate::spec::ModelSpec;
use crate::tokenizer::{
    self, ADDED_FILE, CHAT_TEMPLATE_FILE, NAMES_FILE, SETTINGS_FILE, SharedTokenizer, TOKENIZER_FILE,
};
use serde_json::{Value, json};
use std::fs;
use std::path::{Path, PathBuf};

/// Files of a model's folder other than tensors; a run keeps copies for its exports.
pub const COMPANIONS: [&str; 9] = [
    TOKENIZER_FILE,
    SETTINGS_FILE,
    "tokenizer.model",
    NAMES_FILE,
    ADDED_FILE,
    "vocab.json",
    "merges.txt",
    CHAT_TEMPLATE_FILE,
    GENERATION_FILE,
];

/// The folder within a run's folder with copies of these files, and of its tokenizer's files, for exports.
pub const COMPANIONS_DIR: &str = "model-files";

/// The settings of generation.
pub(crate) const GENERATION_FILE: &str = "generation_config.json";

/// `config.json`.
const CONFIG: &str = "config.json";

/// A published model in a folder.
#[derive(Debug)]
pub struct Pretrained {
    path: PathBuf,
    /// The family whose names its tensors have.
    pub family: &'static dyn Family,
    /// Its configuration.
    pub model: ModelConfig,
    /// Notes about keys of `config.json` that are not read.
    pub notes: Vec<String>,
}

impl Pretrained {
    /// Reads the description of a folder's model. Tensors are not read, except an output head that `config.json` ties to the embedding: if
    /// they differ, both are kept, as in `transformers`.
    ///
    /// # Errors
    /// [`Error::Io`] without a `config.json`; [`Error::Config`] naming an unsupported value; [`Error::Checkpoint`] for a head that cannot
    /// be read.
    pub fn open(path: &Path) -> Result<Self> {
        let mut json = ConfigJson::open(&path.join(CONFIG))?;
        let (family, mut model) = family::read(&mut json)?;
        check_quantization(&json)?;
        let keys = json.passed_over();
        let file = path.join(CONFIG);
        let mut notes = Vec::new();
        if !keys.is_empty() {
            notes.push(format!(
                "{}: nothing here reads {}; if these keys change what the model computes, it computes something else here",
                file.display(),
                keys.join(", ")
            ));
        }
        if model.tie_embeddings && has_own_head(path, &model)? {
            model.tie_embeddings = false;
            notes.push(format!(
                "{}: tie_word_embeddings is true, but {HEAD} differs from {EMBEDDING}: both are loaded, and no longer tied",
                file.display()
            ));
        }
        Ok(Self { path: path.to_owned(), family, model, notes })
    }

    /// Its folder.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Its tensors, to be read on demand: those of `model.safetensors.index.json`, or of `model.safetensors`.
    ///
    /// # Errors
    /// [`Error::Checkpoint`] for a file that is missing or damaged.
    pub fn tensors(&self) -> Result<Tensors> {
        Tensors::of_folder(&self.path)
    }

    /// The tensors of this model in the folder, and the rows of parameters that they contain.
    #[must_use]
    pub fn named(&self) -> Vec<Named> {
        self.family.tensors(&ModelSpec::new(&self.model))
    }

    /// Whether a tensor is not part of the model: a tied head, RoPE frequencies, or a tensor that the family ignores.
    #[must_use]
    pub fn passes_over(&self, name: &str) -> bool {
        let is_tied = self.model.tie_embeddings && name == HEAD;
        is_tied || name.ends_with("rotary_emb.inv_freq") || self.family.passes_over(name, &self.model)
    }

    /// Its tokenizer; `None` if it has no file of one.
    ///
    /// # Errors
    /// As [`tokenizer::open`].
    pub fn tokenizer(&self) -> Result<Option<SharedTokenizer>> {
        tokenizer::of_folder(&self.path)
    }
}

/// The output head and the embedding.
const HEAD: &str = "lm_head.weight";
const EMBEDDING: &str = "model.embed_tokens.weight";

/// Whether a folder has a head that differs from the embedding. Errors of its tensors are reported when they are taken.
fn has_own_head(path: &Path, model: &ModelConfig) -> Result<bool> {
    const AT_ONCE: usize = 1 << 20;
    let Ok(mut tensors) = Tensors::of_folder(path) else { return Ok(false) };
    let shape = [model.vocab_size, model.d_model];
    let [Ok(head), Ok(embedding)] = [HEAD, EMBEDDING].map(|name| tensors.find(name, &shape)) else {
        return Ok(false);
    };
    let (mut a, mut b) = (Vec::new(), Vec::new());
    for at in (0..head.num_values()).step_by(AT_ONCE) {
        let count = AT_ONCE.min(head.num_values() - at);
        for (stored, values) in [(&head, &mut a), (&embedding, &mut b)] {
            values.resize(count, 0.0);
            tensors.read(stored, at, values)?;
        }
        if a != b {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Whether a folder is a model of Hugging Face tools, rather than a run's checkpoint.
#[must_use]
pub fn is_folder(path: &Path) -> bool {
    path.join(CONFIG).is_file() && !path.join(STATE_FILE).exists()
}

/// Checks that quantized weights are E4M3 with 128 × 128 blocks, as DeepSeek-V3 is published.
fn check_quantization(json: &ConfigJson) -> Result<()> {
    const KEY: &str = "quantization_config";
    let Some(table) = json.get(KEY) else { return Ok(()) };
    let is = |key: &str, expected: Value| table.get(key).is_none_or(|is| *is == expected);
    let known = table.get("quant_method").and_then(Value::as_str) == Some("fp8")
        && is("weight_block_size", json!([BLOCK, BLOCK]))
        && is("fmt", json!("e4m3"));
    match known {
        true => Ok(()),
        false => Err(json.error(KEY, format!("is {table}, expected quant_method \"fp8\" with blocks of 128 by 128, the only quantized weights that can be read"))),
    }
}

/// The model in `train.init_from`.
#[derive(Debug)]
pub enum Initial {
    /// A published folder.
    Folder(Pretrained),
    /// A checkpoint of another run, whose files are verified while they are read.
    Checkpoint(Checkpoint),
}

impl Initial {
    /// Opens a folder with a model, or a run's checkpoint.
    ///
    /// # Errors
    /// As [`Pretrained::open`], or [`Error::Checkpoint`]; [`Error::Config`] if it is neither.
    pub fn open(path: &Path) -> Result<Self> {
        if path.join(STATE_FILE).exists() {
            return Ok(Self::Checkpoint(Checkpoint::open_unread(path)?));
        }
        if is_folder(path) {
            return Ok(Self::Folder(Pretrained::open(path)?));
        }
        let why = format!(
            "is {}, which has neither a model's {CONFIG} nor a run's checkpoint; {GOES_ON}",
            path.display()
        );
        Err(Error::config(KEY, why))
    }

    /// Its configuration.
    ///
    /// # Errors
    /// [`Error::Config`] for an invalid stored configuration.
    pub fn model(&self) -> Result<ModelConfig> {
        match self {
            Self::Folder(folder) => Ok(folder.model.clone()),
            Self::Checkpoint(checkpoint) => {
                Ok(Config::from_text(&checkpoint.position().config, checkpoint.path(), &[])?.model)
            }
        }
    }
}

impl Initial {
    /// Its tokenizer; `None` if unknown, as for random tokens.
    ///
    /// # Errors
    /// As [`tokenizer::open`]; [`Error::Config`] for an invalid stored configuration.
    pub fn tokenizer(&self) -> Result<Option<SharedTokenizer>> {
        match self {
            Self::Folder(folder) => folder.tokenizer(),
            Self::Checkpoint(checkpoint) => {
                let stored = Config::from_text(&checkpoint.position().config, checkpoint.path(), &[])?;
                Ok(tokenizer::of_folder(checkpoint.path())?.filter(|own| stored.is_known(&**own)))
            }
        }
    }
}

/// The key of the model.
const KEY: &str = "train.init_from";

/// When the model is not needed.
const GOES_ON: &str = "a run that started from it resumes without it: nibble train RUN_DIR --resume";

/// The path that a run stores for `train.init_from`: for a run's folder, its newest complete checkpoint.
///
/// # Errors
/// [`Error::Config`] if a run has none.
pub(crate) fn resolved(path: &Path) -> Result<PathBuf> {
    if path.join(STATE_FILE).exists() || is_folder(path) || !path.is_dir() {
        return Ok(path.to_owned());
    }
    match latest_valid(path)?.checkpoint {
        Some(checkpoint) => Ok(checkpoint.path().to_owned()),
        None => {
            let why = format!(
                "is {}, which has neither a model's {CONFIG} nor a whole checkpoint; {GOES_ON}",
                path.display()
            );
            Err(Error::config(KEY, why))
        }
    }
}

/// The folder of the companion files of `train.init_from`: for a run's checkpoint, the run's copies.
#[must_use]
pub fn companions_of(from: &Path) -> PathBuf {
    match from.parent().and_then(Path::parent).filter(|_| from.join(STATE_FILE).exists()) {
        Some(run) => run.join(COMPANIONS_DIR),
        None => from.to_owned(),
    }
}

/// The tokens that end a text according to a folder: `eos_token_id`, an id or a list, of its `generation_config.json`, or of its
/// `config.json` without such a file.
///
/// # Errors
/// [`Error::Io`]; [`Error::Config`] naming the file, for an invalid value.
pub fn ends_of_texts(dir: &Path) -> Result<Vec<i32>> {
    let Some(file) =
        [GENERATION_FILE, CONFIG].map(|name| dir.join(name)).into_iter().find(|file| file.exists())
    else {
        return Ok(Vec::new());
    };
    ends_of(&json_of(&file)?).map_err(|why| wrong(&file, ENDS, why))
}

/// The key of the tokens that end a text.
const ENDS: &str = "eos_token_id";

fn wrong(file: &Path, key: &str, why: String) -> Error {
    Error::Config { key: key.into(), file: Some(file.to_owned()), line: None, why, suggestion: None }
}

/// A file's contents as a JSON object.
fn json_of(file: &Path) -> Result<Value> {
    let text = files::read_text(file, files::MOST_TEXT).map_err(Error::io(file))?;
    let json: Value = serde_json::from_str(&text).map_err(|e| wrong(file, "", format!("is no JSON: {e}")))?;
    if json.is_object() { Ok(json) } else { Err(wrong(file, "", "is no JSON object".into())) }
}

/// The contents of a folder's `generation_config.json`.
pub(crate) fn generation_of(dir: &Path) -> Result<Value> {
    json_of(&dir.join(GENERATION_FILE))
}

/// The distinct tokens of `eos_token_id`.
///
/// # Errors
/// The invalid value.
pub(crate) fn ends_of(json: &Value) -> Result<Vec<i32>, String> {
    let all = match &json[ENDS] {
        Value::Null => Vec::new(),
        Value::Array(ids) => ids.iter().collect(),
        id => vec![id],
    };
    let mut ends = Vec::new();
    for id in all {
        let id = id.as_i64().and_then(|id| i32::try_from(id).ok()).filter(|id| *id >= 0);
        let id =
            id.ok_or_else(|| format!("is {}, expected the id of a token or a list of them", json[ENDS]))?;
        if !ends.contains(&id) {
            ends.push(id);
        }
    }
    Ok(ends)
}

/// Copies the companion files that a folder has.
///
/// # Errors
/// [`Error::Io`].
pub fn copy_companions(from: &Path, to: &Path) -> Result<()> {
    COMPANIONS
        .into_iter()
        .filter(|name| *name != GENERATION_FILE)
        .try_for_each(|name| copy(name, from, to))?;
    copy_generation(from, to)
}

/// Copies the companion files other than the tokenizer's. Without a `generation_config.json`, one is created with the end tokens of
/// `config.json`, as `transformers` does.
pub(crate) fn copy_generation(from: &Path, to: &Path) -> Result<()> {
    copy(GENERATION_FILE, from, to)?;
    let ends = if from.join(GENERATION_FILE).exists() { Vec::new() } else { ends_of_texts(from)? };
    if ends.is_empty() {
        return Ok(());
    }
    let says = json!({"_from_model_config": true, ENDS: ends});
    files::make_folder(to).map_err(Error::io(to))?;
    let file = to.join(GENERATION_FILE);
    fs::write(&file, format!("{says:#}\n")).map_err(Error::io(&file))
}

fn copy(name: &str, from: &Path, to: &Path) -> Result<()> {
    let file = from.join(name);
    if file.is_file() {
        crate::files::make_folder(to).map_err(Error::io(to))?;
        fs::copy(&file, to.join(name)).map_err(Error::io(&file))?;
    }
    Ok(())
}
