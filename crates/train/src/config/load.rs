//! Loads a [`Config`] from TOML text and overrides, and checks it. Errors name the file and line of a value.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use toml::{Table, Value};

use super::absent::absent;
use super::asked::Written;
use super::init::fill_model;
use super::preset::{in_shell, preset, preset_names};
use super::values::{in_short, insert, join, lookup, settings};
use super::{
    Activation, Balance, CheckpointConfig, Combine, Config, DataConfig, EvalConfig, GroupScore, InitState,
    LayerAttention, MIXTURE, MixtureSource, ModelConfig, NormKind, OnError, Reductions, RopeScaling,
    RunConfig, SYNTHETIC, Scores, TrainConfig, foreign,
};
use crate::checks::recipe_file;
use crate::error::{Error, Result};
use crate::files;
use crate::pretrained::is_folder;
use crate::recompute::Scope;

/// Former keys, with the current replacement of each.
const FORMER_KEYS: [(&str, &str); 1] =
    [("model.remake_expert_input", "is now a scope of train.recompute: add \"expert_input\" to that list")];

/// Where a configuration's text comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Source {
    /// The configuration is built in.
    BuiltIn,
    /// A user wrote the configuration.
    Asked,
    /// A run stored the configuration.
    Stored,
}

/// The line of the file that sets each dotted key.
type Lines = BTreeMap<String, usize>;

impl Config {
    /// Loads the configuration that a user requests: a built-in configuration by name, or a TOML file by path. Then applies `overrides`.
    /// Each override has the form `key=value`, with a dotted key and a TOML value; a bare word is a string.
    ///
    /// The returned configuration is validated and has no open values: `model.vocab_size` and `run.dir` are filled in. In a user's file, a
    /// setting that is not used is an error. In a configuration file that a run has written, unused settings are allowed, because the run
    /// writes every key.
    ///
    /// # Errors
    /// Returns [`Error::Config`] for an unknown name or key, a wrong type, an impossible value, or an unused setting. Returns [`Error::Io`]
    /// for an unreadable file.
    pub fn load(name_or_path: &str, overrides: &[String]) -> Result<Self> {
        let path = Path::new(name_or_path);
        if let Some(text) = preset(name_or_path) {
            let file = PathBuf::from(format!("configs/{name_or_path}.toml"));
            return Self::read(&text, &file, overrides, Source::BuiltIn, Vec::new());
        }
        let looks_like_a_path = path.extension().is_some() || path.components().count() > 1 || path.exists();
        if !looks_like_a_path {
            let why = format!(
                "no built-in configuration is called \"{name_or_path}\" (there are: {}){}",
                preset_names().collect::<Vec<_>>().join(", "),
                absent(name_or_path)
            );
            return Err(Error::config("", why).suggesting(closest(name_or_path, preset_names())));
        }
        if is_folder(path) {
            let why = format!(
                "{name_or_path} is a model folder, not a configuration: name a configuration, and start from the model by --from, as in nibble train tiny --from {}",
                in_shell(path)
            );
            return Err(Error::config("", why));
        }
        Self::asked(&read_text(path)?, path, overrides)
    }

    /// Loads the configuration that a run has stored, which contains every key. Then applies `overrides`, and checks them in the same way
    /// as the settings in a user's file.
    ///
    /// # Errors
    /// Returns the same errors as [`Config::load`], except that the file may contain unused settings.
    pub fn stored(path: &Path, overrides: &[String]) -> Result<Self> {
        Self::from_text(&read_text(path)?, path, overrides)
    }

    /// Like [`Config::load`], but parses the TOML text `text`. Error messages name `file`. The default name of the run is the name of
    /// `file` without its extension.
    ///
    /// # Errors
    /// Returns [`Error::Config`], with the same causes as in [`Config::load`].
    pub fn asked(text: &str, file: &Path, overrides: &[String]) -> Result<Self> {
        Self::read(text, file, overrides, Source::Asked, Vec::new())
    }

    /// Like [`Config::stored`], but parses the TOML text `text`. Error messages name `file`. The default name of the run is the name of
    /// `file` without its extension.
    ///
    /// # Errors
    /// Returns [`Error::Config`], with the same causes as in [`Config::stored`].
    pub fn from_text(text: &str, file: &Path, overrides: &[String]) -> Result<Self> {
        Self::stored_beside(text, file, overrides, Vec::new())
    }

    /// Like [`Config::from_text`], for a run with a copy of its tokenizer in one of these folders. The files that the keys name may no
    /// longer exist.
    pub(crate) fn stored_beside(
        text: &str,
        file: &Path,
        overrides: &[String],
        kept: Vec<PathBuf>,
    ) -> Result<Self> {
        Self::read(text, file, overrides, Source::Stored, kept)
    }

    fn read(text: &str, file: &Path, overrides: &[String], of: Source, kept: Vec<PathBuf>) -> Result<Self> {
        let known = Value::try_from(Self::with_every_key()).map_err(|e| Error::config("", e.to_string()))?;
        let mut merged = Table::new();
        let mut lines = Lines::new();
        let source = ConfigText { text, file, known: &known };
        source.merge(&mut merged, &mut lines)?;
        // A run stores every key. The stored values were checked at the run's start, and are not checked again.
        let is_stored = Self::default().settings()?.keys().all(|key| lines.contains_key(key));
        let asked = of != Source::Stored && !is_stored;
        let mut set = BTreeSet::new();
        for text in overrides {
            let (key, value) = parse_override(text, &known)?;
            lines.remove(&key);
            insert(&mut merged, &key, value);
            set.insert(key);
        }
        name_one_data(&mut merged, &set);
        if asked || set.contains("train.init_from") {
            let own = |key: &str| set.contains(key) || of == Source::Asked && lines.contains_key(key);
            fill_model(&mut merged, &own).map_err(|error| source.located(error, &lines))?;
        }
        leave_out_experts(&mut merged);
        let mut config: Self =
            Value::Table(merged).try_into().map_err(|e: toml::de::Error| Error::config("", e.message()))?;
        config.resolve(file)?;
        if !kept.is_empty() {
            let stored = Self::from_text(text, file, &[])?;
            config.keep_tokenizer(&stored, kept);
        }
        let written = |key: &str| match set.contains(key) {
            true => Some(Written::Override),
            false => (asked && lines.contains_key(key)).then_some(Written::File),
        };
        let checked = config.validate().and_then(|()| config.check_asked(&written));
        let of_tokens = ["data.tokenizer", "data.bos_token", "data.eos_token", "model.vocab_size"];
        let asks_of_tokens = asked || of_tokens.iter().any(|key| set.contains(*key));
        let checked = checked.and_then(|()| if asks_of_tokens { config.check_tokens() } else { Ok(()) });
        checked.map_err(|error| source.located(error, &lines))?;
        Ok(config)
    }

    /// The files that a command reads for this configuration: the configuration's own file, and the files of the recipe, the data and the
    /// tokenizer. `name_or_path` is the argument with which the configuration was loaded.
    pub fn files(&self, name_or_path: &str) -> Vec<PathBuf> {
        let own = preset(name_or_path).is_none().then_some(name_or_path);
        let texts = if self.is_text() { self.data.sources() } else { Vec::new() };
        let texts = texts.into_iter().map(|one| PathBuf::from(one.source));
        let tokenizer = Some(self.data.tokenizer.as_str()).filter(|path| !path.is_empty());
        let named = [own, tokenizer].into_iter().flatten().map(PathBuf::from);
        named.chain(recipe_file::files_of(&self.recipe)).chain(texts).collect()
    }

    /// Every dotted key of a configuration, in alphabetical order.
    #[must_use]
    pub fn keys() -> Vec<String> {
        // The conversion to TOML always succeeds; a test checks this.
        settings("", &Self::with_every_key()).unwrap_or_default().into_keys().collect()
    }

    /// A configuration whose TOML contains every key, including keys that are omitted at their default.
    fn with_every_key() -> Self {
        let data = DataConfig {
            labels: "labels-idx1-ubyte".into(),
            valid_source: "valid-idx3-ubyte".into(),
            valid_labels: "valid-labels-idx1-ubyte".into(),
            bytes: true,
            tokenizer: "tokenizer.json".into(),
            bos_token: "none".into(),
            eos_token: "none".into(),
            text_key: "content".into(),
            prompt_key: "prompt".into(),
            answer_key: "answer".into(),
            messages_key: "messages".into(),
            mixture: vec![MixtureSource { source: "a.txt".into(), weight: 1.0 }],
            on_error: OnError::Skip,
            cache_dir: "cache".into(),
            document_mask: true,
            ..DataConfig::default()
        };
        let rope_scaling = RopeScaling { factor: 1.0, ..RopeScaling::default() };
        let model = ModelConfig {
            activation: Activation::Gelu,
            attention_sinks: true,
            balance: Balance::Batch,
            causal: false,
            group_score: GroupScore::Top2,
            groups: 2,
            image_size: 28,
            kv_rank: 1,
            max_positions: 1 << 20,
            mlp_bias: true,
            norm: NormKind::Layer,
            o_bias: true,
            patch_size: 7,
            q_rank: 1,
            qkv_bias: true,
            rope_dim: 1,
            rope_scaling,
            route_scale: 2.0,
            router_bias: true,
            scores: Scores::Sigmoid,
            sliding_window: 4096,
            sliding_window_layers: vec![LayerAttention::Sliding, LayerAttention::Full],
            top_groups: 1,
            ..ModelConfig::default()
        };
        let train = TrainConfig {
            init_from: "folder".into(),
            init_state: InitState::All,
            expert_shards: 2,
            combine: Some(Combine::Tree),
            router_bias_rate: 0.0,
            force_load_balance: true,
            quantization_every: 1,
            ..TrainConfig::default()
        };
        let eval = EvalConfig { tasks: vec!["quiz.jsonl".into()], ..EvalConfig::default() };
        let run =
            RunConfig { dp: 2, capacity_factor: 2.0, reductions: Reductions::Nccl, ..RunConfig::default() };
        let checkpoint = CheckpointConfig { file_mib: 1, keep_spikes: 2, ..CheckpointConfig::default() };
        Self { data, model, train, eval, run, checkpoint, ..Self::default() }
    }

    /// Fills in the values that depend on other keys.
    fn resolve(&mut self, file: &Path) -> Result<()> {
        if !self.data.mixture.is_empty() && self.data.source == SYNTHETIC {
            self.data.source = MIXTURE.into();
        }
        if self.model.vocab_size == 0
            && let Some(tokenizer) = self.tokenizer()?
        {
            self.model.vocab_size = tokenizer.vocab_size();
        }
        if self.run.dir.is_empty() {
            let name = file.file_stem().map_or("run".into(), |stem| stem.to_string_lossy().into_owned());
            if ["", ".", ".."].contains(&name.as_str()) {
                let why = format!(
                    "is not set, and {} names no directory: give the file another name, or set run.dir",
                    file.display()
                );
                return Err(Error::config("run.dir", why));
            }
            self.run.dir = format!("runs/{name}");
        }
        Ok(())
    }

    /// The keys that affect a run's results and differ between `earlier` and `self`. Each string has the form `key: earlier → now`. A
    /// resumed run should refuse to start if the returned list is not empty. The list ignores settings that change reports and speed but no
    /// weight: the tables `eval`, `checkpoint` and `run`, and the keys `train.recompute` and `train.quantization_every`. The setting
    /// `run.reductions = "nccl"` is ignored too, although sums with NCCL are not reproducible. `train.combine` is ignored if `self` leaves
    /// the key unset.
    ///
    /// # Errors
    /// The errors of [`Config::resolved_toml`].
    pub fn changes_since(&self, earlier: &Self) -> Result<Vec<String>> {
        let (mut now, mut before) = (self.going_on_from(earlier).settings()?, earlier.settings()?);
        // An older run did not store this key, and used the key's default.
        for all in [&mut now, &mut before] {
            all.entry("train.combine".to_owned())
                .or_insert_with(|| in_short(&Combine::default().name().into()));
        }
        // The `data` keys in this list determine the tokens, and the tokens themselves are compared.
        let reported_only = "eval. checkpoint. run. train.recompute train.quantization_every data.bytes data.text_key \
            data.prompt_key data.answer_key data.messages_key data.on_error data.cache_dir";
        let keys: BTreeSet<&String> = now.keys().chain(before.keys()).collect();
        let changes = keys
            .into_iter()
            .filter(|key| !reported_only.split(' ').any(|table| key.starts_with(table)))
            .filter_map(|key| {
                let [old, value] =
                    [&before, &now].map(|all| all.get(key).map_or("the default", String::as_str));
                (old != value).then(|| format!("{key}: {old} → {value}"))
            })
            .collect();
        Ok(changes)
    }

    /// Every setting that [`Config::resolved_toml`] writes: its dotted key, and its value as TOML.
    ///
    /// # Errors
    /// The errors of [`Config::resolved_toml`].
    pub(crate) fn settings(&self) -> Result<BTreeMap<String, String>> {
        settings("", self)
    }

    /// The [`Config::changes_since`] that prevent resuming. The allowed changes are more steps, an explicit `train.expert_shards` (above
    /// its default of 1), and an explicit `train.combine`.
    pub(crate) fn changes_to_refuse(&self, earlier: &Self) -> Result<Vec<String>> {
        let mut changes = self.changes_since(earlier)?;
        let (steps, parts) = (self.train.steps > earlier.train.steps, self.train.expert_shards > 1);
        let may = [("train.steps: ", steps), ("train.expert_shards: ", parts), ("train.combine: ", true)];
        changes.retain(|change| !may.iter().any(|(key, may)| *may && change.starts_with(key)));
        Ok(changes)
    }
}

/// Removes the file's mixture if an override sets `data.source`, and the file's source if an override sets `data.mixture`.
fn name_one_data(merged: &mut Table, set: &BTreeSet<String>) {
    let Some(Value::Table(data)) = merged.get_mut("data") else { return };
    match ["data.source", "data.mixture"].map(|key| set.contains(key)) {
        [true, false] if data.get("source") != Some(&Value::String(MIXTURE.into())) => {
            data.remove("mixture");
        }
        [false, true] => {
            data.insert("source".into(), Value::String(MIXTURE.into()));
        }
        _ => {}
    }
}

/// In a model without experts, sets the experts' keys that the user has not written to 0 or false instead of their defaults.
fn leave_out_experts(merged: &mut Table) {
    let Some(Value::Table(model)) = merged.get_mut("model") else { return };
    if model.get("experts") != Some(&Value::Integer(0)) {
        return;
    }
    let none = [
        ("top_k", Value::Integer(0)),
        ("expert_ffn", Value::Integer(0)),
        ("norm_topk_prob", Value::Boolean(false)),
        ("aux_loss_coef", Value::Float(0.0)),
        ("z_loss_coef", Value::Float(0.0)),
    ];
    for (key, value) in none {
        model.entry(key).or_insert(value);
    }
}

/// Reads the text of a configuration or a recipe.
pub(crate) fn read_text(path: &Path) -> Result<String> {
    files::read_text(path, files::MOST_TEXT).map_err(Error::io(path))
}

/// A TOML text, the text's file, and all keys that may appear in the text.
struct ConfigText<'a> {
    text: &'a str,
    file: &'a Path,
    known: &'a Value,
}

impl ConfigText<'_> {
    /// Checks every key and value of the text, and merges the text into `merged`.
    fn merge(&self, merged: &mut Table, lines: &mut Lines) -> Result<()> {
        let syntax = |error: toml::de::Error| Error::Config {
            key: String::new(),
            file: Some(self.file.to_path_buf()),
            line: error.span().map(|span| self.line(span.start)),
            why: match error.message() {
                text if ["overflowed", "i128"].iter().any(|word| text.contains(word)) => {
                    "a number is too large: integers go up to 2^63 - 1, other numbers to 1.8e308".to_owned()
                }
                text => text.to_owned(),
            },
            suggestion: None,
        };
        let values: Table = toml::from_str(self.text).map_err(syntax)?;
        let spans = toml::de::DeTable::parse(self.text).map_err(syntax)?;
        self.merge_table("", &values, spans.get_ref(), merged, lines)
    }

    fn merge_table(
        &self,
        prefix: &str,
        values: &Table,
        spans: &toml::de::DeTable<'_>,
        merged: &mut Table,
        lines: &mut Lines,
    ) -> Result<()> {
        for (name, span) in spans {
            let key = join(prefix, name.get_ref());
            // Both parsers read the same text, so they find the same keys.
            let Some(value) = values.get(name.get_ref().as_ref()) else { continue };
            match (value, span.get_ref().as_table(), lookup(self.known, &key)) {
                (Value::Table(values), Some(spans), Some(Value::Table(_))) => {
                    self.merge_table(&key, values, spans, merged, lines)?;
                }
                _ => {
                    lines.insert(key.clone(), self.line(name.span().start));
                    check_leaf(&key, value, self.known).map_err(|error| self.located(error, lines))?;
                    insert(merged, &key, value.clone());
                }
            }
        }
        Ok(())
    }

    /// Adds file and line to an error about a key, if the file sets the key.
    fn located(&self, mut error: Error, lines: &Lines) -> Error {
        if let Error::Config { key, file: file @ None, line, .. } = &mut error
            && let Some(found) = lines.get(key)
        {
            (*file, *line) = (Some(self.file.to_owned()), Some(*found));
        }
        error
    }

    /// The line of a byte offset, counted from 1.
    fn line(&self, offset: usize) -> usize {
        self.text.bytes().take(offset).filter(|&byte| byte == b'\n').count() + 1
    }
}

/// Splits an override such as `train.steps=100` and parses its value: as TOML if the TOML value fits the key, otherwise as a string.
fn parse_override(text: &str, known: &Value) -> Result<(String, Value)> {
    let Some((key, value)) = text.split_once('=') else {
        return Err(Error::config(text, "an override reads `key=value`, and this has no `=`"));
    };
    let (key, value) = (key.trim().to_owned(), value.trim());
    if key.is_empty() {
        return Err(Error::config("", format!("an override reads `key=value`, and `={value}` has no key")));
    }
    if let Some(Value::Table(table)) = lookup(known, &key) {
        let one = table.keys().next().map(String::as_str).unwrap_or_default();
        let why = format!(
            "is a table, which an override would replace whole; set its keys, such as `{key}.{one}=...`"
        );
        return Err(Error::config(key, why));
    }
    let bare = Value::String(value.to_owned());
    let typed = match toml::from_str::<Table>(&format!("value = {value}")) {
        // If the value contains a newline and further TOML, the table has more than one key. The value is then a string.
        Ok(mut table) if table.len() == 1 => table.remove("value").unwrap_or_else(|| bare.clone()),
        _ => bare.clone(),
    };
    match check_leaf(&key, &typed, known) {
        Ok(()) => Ok((key, typed)),
        // A path called 2024 is still a path. If the value fits neither as TOML nor as a string, the first error is the better error.
        Err(error) => check_leaf(&key, &bare, known).map_or(Err(error), |()| Ok((key, bare))),
    }
}

/// Checks that `key` exists and that the value has the right type, by deserializing the value into the configuration's own types.
fn check_leaf(key: &str, value: &Value, known: &Value) -> Result<()> {
    if let Some((_, why)) = FORMER_KEYS.iter().find(|(former, _)| *former == key) {
        return Err(Error::config(key, *why));
    }
    let Some(default) = lookup(known, key) else {
        if let Some(meaning) = foreign::of_key(key) {
            return Err(Error::config(key, format!("unknown key; {}", meaning.of_key())));
        }
        let keys = settings("", known)?;
        let sections = known.as_table().into_iter().flatten().map(|(name, _)| name.as_str());
        let suggestion = closest(key, keys.keys().map(String::as_str).chain(sections));
        return Err(Error::config(key, "unknown key").suggesting(suggestion));
    };
    // Serde would accept a list as the fields of a struct, in order.
    if default.is_table() && !value.is_table() {
        return Err(Error::config(key, expected(value, default).unwrap_or_default()));
    }
    let mut alone = Table::new();
    insert(&mut alone, key, value.clone());
    let parsed: Result<Config, toml::de::Error> = Value::Table(alone).try_into();
    parsed.map(drop).map_err(|error| {
        let why = expected(value, default).unwrap_or_else(|| error.message().trim().to_owned());
        Error::config(key, why).suggesting(if key == "train.recompute" {
            misspelt_scope(value)
        } else {
            None
        })
    })
}

/// The value found and the type expected; `None` if the default does not reveal the type.
fn expected(value: &Value, default: &Value) -> Option<String> {
    let wanted = match default {
        Value::Integer(_) => "a whole number from 0 to 2^63 - 1",
        Value::Float(_) => "a number that double precision holds",
        Value::Boolean(_) => "true or false",
        Value::Table(_) => "one table, under its name in brackets",
        _ => return None,
    };
    let mut is = match value {
        Value::Array(items) if items.iter().any(Value::is_table) => "a list of tables".to_owned(),
        other => in_short(other),
    };
    let digits = is.chars().count();
    if digits > LONGEST {
        is = format!("{}... ({digits} characters)", is.chars().take(LONGEST / 2).collect::<String>());
    }
    Some(format!("is {is}, expected {wanted}"))
}

/// Largest length, in characters, of a value that a message quotes in full.
const LONGEST: usize = 40;

/// The valid name that is most similar to the first unknown recomputation scope in a list.
fn misspelt_scope(value: &Value) -> Option<String> {
    let names = || Scope::ALL.into_iter().map(Scope::name);
    let entries = value.as_array()?.iter().filter_map(Value::as_str);
    let words = entries.map(|entry| entry.split_once('@').map_or(entry, |(scope, _)| scope));
    let unknown = words.into_iter().find(|word| !names().any(|name| name == *word))?;
    closest(unknown, names())
}

/// The candidate that is most similar to `word`; `None` if no candidate is similar.
fn closest<'a>(word: &str, candidates: impl Iterator<Item = &'a str>) -> Option<String> {
    let last = |key: &str| key.rsplit('.').next().unwrap_or(key).to_owned();
    // A word that is much longer than any name cannot match, and the comparison would take long.
    if word.len() > 4 * LONGEST {
        return None;
    }
    candidates
        .map(|candidate| {
            // A correct name in the wrong table (`steps` for `train.steps`) counts as a misspelling.
            let whole = strsim::jaro_winkler(word, candidate);
            let tail = strsim::jaro_winkler(&last(word), &last(candidate)) * 0.99;
            (whole.max(tail), candidate)
        })
        .filter(|(score, _)| *score > 0.8)
        .max_by(|a, b| a.0.total_cmp(&b.0))
        .map(|(_, candidate)| candidate.to_owned())
}
