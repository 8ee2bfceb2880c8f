//! Pretrained models from which a run may start: Hugging Face model folders, and checkpoints of other runs.

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

/// The files in a model's folder other than the files of tensors. A run copies these files, so that its exports contain them.
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

/// The folder within a run's folder that contains copies of the companion files and of the tokenizer's files, for exports.
pub const COMPANIONS_DIR: &str = "model-files";

/// The file with the settings of generation.
pub(crate) const GENERATION_FILE: &str = "generation_config.json";

/// The file with the model's configuration.
const CONFIG: &str = "config.json";

/// A published model in a folder.
#[derive(Debug)]
pub struct Pretrained {
    path: PathBuf,
    /// The model family that names the folder's tensors.
    pub family: &'static dyn Family,
    /// The model's configuration.
    pub model: ModelConfig,
    /// Notes about keys of `config.json` that Nibble does not read.
    pub notes: Vec<String>,
}

impl Pretrained {
    /// Reads the description of a folder's model. Tensors are not read, with one exception: an output head that `config.json` ties to the
    /// embedding. If the values of the head and the embedding differ, the model keeps both tensors, as `transformers` does.
    ///
    /// # Errors
    /// Returns [`Error::Io`] if there is no `config.json`, [`Error::Config`] naming an unsupported value, and [`Error::Checkpoint`] for a
    /// head that cannot be read.
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

    /// The model's folder.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The model's tensors, which are read on demand: the tensors of `model.safetensors.index.json`, or of `model.safetensors`.
    ///
    /// # Errors
    /// Returns [`Error::Checkpoint`] for a file that is missing or damaged.
    pub fn tensors(&self) -> Result<Tensors> {
        Tensors::of_folder(&self.path)
    }

    /// The tensors of this model in the folder, each with the parameter rows that the tensor contains.
    #[must_use]
    pub fn named(&self) -> Vec<Named> {
        self.family.tensors(&ModelSpec::new(&self.model))
    }

    /// Whether a tensor in the folder is not part of the model: a tied head, RoPE frequencies, or a tensor that the family ignores.
    #[must_use]
    pub fn passes_over(&self, name: &str) -> bool {
        let is_tied = self.model.tie_embeddings && name == HEAD;
        is_tied || name.ends_with("rotary_emb.inv_freq") || self.family.passes_over(name, &self.model)
    }

    /// The model's tokenizer; `None` if the folder has no tokenizer file.
    ///
    /// # Errors
    /// Returns the errors of [`tokenizer::open`].
    pub fn tokenizer(&self) -> Result<Option<SharedTokenizer>> {
        tokenizer::of_folder(&self.path)
    }
}

/// The names of the output head and the embedding.
const HEAD: &str = "lm_head.weight";
const EMBEDDING: &str = "model.embed_tokens.weight";

/// Whether a folder has a head that differs from the embedding. Errors of these tensors are reported later, when the tensors are taken.
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

/// Whether a folder is a Hugging Face model folder and not a run's checkpoint.
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

/// The initial model of a run (`train.init_from`).
#[derive(Debug)]
pub enum Initial {
    /// A published folder.
    Folder(Pretrained),
    /// A checkpoint of another run. The checkpoint's files are verified while they are read.
    Checkpoint(Checkpoint),
}

impl Initial {
    /// Opens a folder with a model, or a run's checkpoint.
    ///
    /// # Errors
    /// Returns the errors of [`Pretrained::open`], [`Error::Checkpoint`] for an unreadable checkpoint, and [`Error::Config`] if `path` is
    /// neither a model folder nor a checkpoint.
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

    /// The initial model's configuration.
    ///
    /// # Errors
    /// Returns [`Error::Config`] for an invalid stored configuration.
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
    /// The initial model's tokenizer; `None` if unknown, as for a run on random tokens.
    ///
    /// # Errors
    /// Returns the errors of [`tokenizer::open`], and [`Error::Config`] for an invalid stored configuration.
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

/// The configuration key of the initial model.
const KEY: &str = "train.init_from";

/// A sentence that says when the initial model is not needed.
const GOES_ON: &str = "a run that started from it resumes without it: nibble train RUN_DIR --resume";

/// The path that a run stores for `train.init_from`. If the path is a run's folder, the newest complete checkpoint is stored.
///
/// # Errors
/// Returns [`Error::Config`] if a run's folder has no complete checkpoint.
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

/// The folder with the companion files for `train.init_from`. If `train.init_from` is a run's checkpoint, this is the folder of the run's
/// copies.
#[must_use]
pub fn companions_of(from: &Path) -> PathBuf {
    match from.parent().and_then(Path::parent).filter(|_| from.join(STATE_FILE).exists()) {
        Some(run) => run.join(COMPANIONS_DIR),
        None => from.to_owned(),
    }
}

/// The ids of the tokens that end a text: `eos_token_id` (an id or a list) in the folder's `generation_config.json`. If there is no such
/// file, `eos_token_id` of `config.json` contains the ids.
///
/// # Errors
/// Returns [`Error::Io`], and [`Error::Config`] naming the file, for an invalid value.
pub fn ends_of_texts(dir: &Path) -> Result<Vec<i32>> {
    let Some(file) =
        [GENERATION_FILE, CONFIG].map(|name| dir.join(name)).into_iter().find(|file| file.exists())
    else {
        return Ok(Vec::new());
    };
    ends_of(&json_of(&file)?).map_err(|why| wrong(&file, ENDS, why))
}

/// The key of the end-of-text tokens.
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
/// Returns the invalid value.
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

/// Copies the companion files that exist in the folder `from` to the folder `to`.
///
/// # Errors
/// Returns [`Error::Io`] if a call of the operating system fails.
pub fn copy_companions(from: &Path, to: &Path) -> Result<()> {
    COMPANIONS
        .into_iter()
        .filter(|name| *name != GENERATION_FILE)
        .try_for_each(|name| copy(name, from, to))?;
    copy_generation(from, to)
}

/// Copies the companion files other than the tokenizer's. If there is no `generation_config.json`, creates one with the end-of-text tokens
/// of `config.json`, as `transformers` does.
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
