//! Models that were trained before, from which a run may begin: folders as the Hugging Face family of tools writes them, and checkpoints of other runs.

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

/// What a folder of a model has beside its tensors, of which a run keeps copies, and an export gets them.
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

/// The folder of a run with what lay beside the weights that it began with, and its tokenizer's files, for who exports it.
pub const COMPANIONS_DIR: &str = "model-files";

/// What a generation begins and ends with.
pub(crate) const GENERATION_FILE: &str = "generation_config.json";

/// `config.json`.
const CONFIG: &str = "config.json";

/// A model in a folder, as published.
#[derive(Debug)]
pub struct Pretrained {
    path: PathBuf,
    /// Whose names its tensors have.
    pub family: &'static dyn Family,
    /// Its sizes.
    pub model: ModelConfig,
    /// What is told of it: keys of `config.json` that nothing here reads.
    pub notes: Vec<String>,
}

impl Pretrained {
    /// Reads what a folder says of its model. No tensor is read, but for a head beside an embedding to which the file ties it: where they differ both are
    /// kept, as `transformers` does.
    ///
    /// # Errors
    /// [`Error::Io`] where there is no `config.json`; [`Error::Config`] naming what of it the decoder does not have; [`Error::Checkpoint`] for a head that cannot be
    /// read.
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

    /// Where it is.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Its tensors, none of which is read yet: those of `model.safetensors.index.json`, or of `model.safetensors`.
    ///
    /// # Errors
    /// [`Error::Checkpoint`] for a file that is missing or damaged.
    pub fn tensors(&self) -> Result<Tensors> {
        Tensors::of_folder(&self.path)
    }

    /// The tensors that this model has there, and which rows of parameters they are.
    #[must_use]
    pub fn named(&self) -> Vec<Named> {
        self.family.tensors(&ModelSpec::new(&self.model))
    }

    /// Whether a tensor is none of the model's: a head that is the embedding, frequencies that are computed, what the family passes over.
    #[must_use]
    pub fn passes_over(&self, name: &str) -> bool {
        let is_tied = self.model.tie_embeddings && name == HEAD;
        is_tied || name.ends_with("rotary_emb.inv_freq") || self.family.passes_over(name, &self.model)
    }

    /// Its tokenizer; none where it has no file of one.
    ///
    /// # Errors
    /// As [`tokenizer::open`].
    pub fn tokenizer(&self) -> Result<Option<SharedTokenizer>> {
        tokenizer::of_folder(&self.path)
    }
}

/// The tensors of logits and of tokens.
const HEAD: &str = "lm_head.weight";
const EMBEDDING: &str = "model.embed_tokens.weight";

/// Whether a folder has a head that is not the embedding. What is wrong with its tensors is told when they are taken.
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

/// Whether a folder has a model as the Hugging Face family of tools writes it, and is no checkpoint of a run.
#[must_use]
pub fn is_folder(path: &Path) -> bool {
    path.join(CONFIG).is_file() && !path.join(STATE_FILE).exists()
}

/// Only E4M3 with blocks of 128 by 128 can be read, as DeepSeek-V3 is published.
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

/// What `train.init_from` names.
#[derive(Debug)]
pub enum Initial {
    /// A folder as published.
    Folder(Pretrained),
    /// A checkpoint of another run, whose files are compared with their checksums as they are read.
    Checkpoint(Checkpoint),
}

impl Initial {
    /// Opens a folder with a model, or a checkpoint of a run.
    ///
    /// # Errors
    /// As [`Pretrained::open`], or [`Error::Checkpoint`]; [`Error::Config`] where it is neither.
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

    /// Its sizes.
    ///
    /// # Errors
    /// [`Error::Config`] for what an earlier program stored.
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
    /// The tokenizer of its tokens; none where that is not known, as of random ones.
    ///
    /// # Errors
    /// As [`tokenizer::open`]; [`Error::Config`] for what an earlier program stored.
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

/// The key that names it.
const KEY: &str = "train.init_from";

/// What does not need it.
const GOES_ON: &str = "a run that started from it resumes without it: nibble train RUN_DIR --resume";

/// The path that a run stores of what `train.init_from` names: of a run its newest whole checkpoint.
///
/// # Errors
/// [`Error::Config`] where a run has none.
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

/// Where the files are that lie beside the weights of what `train.init_from` names: of a run's checkpoint those that the run began with.
#[must_use]
pub fn companions_of(from: &Path) -> PathBuf {
    match from.parent().and_then(Path::parent).filter(|_| from.join(STATE_FILE).exists()) {
        Some(run) => run.join(COMPANIONS_DIR),
        None => from.to_owned(),
    }
}

/// The tokens that a text ends at by what a folder says: `eos_token_id`, one or a list, of its `generation_config.json`, or of its `config.json` where it has
/// no such file.
///
/// # Errors
/// [`Error::Io`]; [`Error::Config`] naming the file, for what is no such thing.
pub fn ends_of_texts(dir: &Path) -> Result<Vec<i32>> {
    let Some(file) =
        [GENERATION_FILE, CONFIG].map(|name| dir.join(name)).into_iter().find(|file| file.exists())
    else {
        return Ok(Vec::new());
    };
    ends_of(&json_of(&file)?).map_err(|why| wrong(&file, ENDS, why))
}

/// What says the tokens that a text ends at.
const ENDS: &str = "eos_token_id";

fn wrong(file: &Path, key: &str, why: String) -> Error {
    Error::Config { key: key.into(), file: Some(file.to_owned()), line: None, why, suggestion: None }
}

/// The object that a file is.
fn json_of(file: &Path) -> Result<Value> {
    let text = files::read_text(file, files::MOST_TEXT).map_err(Error::io(file))?;
    let json: Value = serde_json::from_str(&text).map_err(|e| wrong(file, "", format!("is no JSON: {e}")))?;
    if json.is_object() { Ok(json) } else { Err(wrong(file, "", "is no JSON object".into())) }
}

/// What `generation_config.json` of a folder says.
pub(crate) fn generation_of(dir: &Path) -> Result<Value> {
    json_of(&dir.join(GENERATION_FILE))
}

/// The tokens of `eos_token_id`, each once.
///
/// # Errors
/// What it is instead.
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

/// Copies what a folder has beside its tensors, if it has it.
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

/// Of these what is not the tokenizer's. Where a folder has no file of it, one says what its `config.json` says of the ends of texts, as `transformers`
/// takes it.
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
