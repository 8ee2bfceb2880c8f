//! The configuration of a run's training data.

use serde::{Deserialize, Serialize};

use super::is_default;
use crate::tokenizer::AUTO;

/// The table `[data]`: the source of the tokens.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct DataConfig {
    /// The source of the tokens. `synthetic` means the built-in language. `random` means uniformly random ids below `model.vocab_size`, for
    /// speed measurements. `mixture` means the sources in the key `mixture`, and is set automatically. Any other value of `source` is the
    /// path of a file or folder, or a glob. In a folder, the files of known kinds are read in order of their names. Files contain text,
    /// JSON Lines, JSON arrays, Parquet, or token ids. Files of text and JSON may be compressed with gzip or zstd.
    pub source: String,
    /// The IDX file (the file format of MNIST) with the labels of the images in `source`. Only image classifiers (`model.image_size`) have
    /// labels.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub labels: String,
    /// The IDX file with the held-out images of an image classifier.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub valid_source: String,
    /// The labels of `valid_source`.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub valid_labels: String,
    /// Whether to read a file as plain bytes, even if it begins like an archive, an image or another binary format.
    #[serde(skip_serializing_if = "is_default")]
    pub bytes: bool,
    /// The tokenizer of text: the path of a `tokenizer.json`, or of a folder that contains a `tokenizer.json`. If `tokenizer` is empty, the
    /// tokenizer of the model in `train.init_from` is used. If both keys are empty, each byte of a text is a token.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub tokenizer: String,
    /// The token before each document: `auto` for the token that the tokenizer's files specify, `none` for no token, or the token's text.
    #[serde(skip_serializing_if = "is_auto")]
    pub bos_token: String,
    /// The token after each document: `auto` for the token that the tokenizer's files specify, `none` for no token, or the token's text.
    #[serde(skip_serializing_if = "is_auto")]
    pub eos_token: String,
    /// In JSON and Parquet files, the key or column with the text of a document.
    #[serde(skip_serializing_if = "is_usual_text_key")]
    pub text_key: String,
    /// The key or column that contains prompts, whose tokens are not training targets. `answer_key` names the key of the answers. If
    /// `prompt_key` is empty, documents are plain texts.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub prompt_key: String,
    /// The key or column of the answer to a prompt.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub answer_key: String,
    /// In JSON files, the key that contains the messages of a conversation. The chat template of the tokenizer converts the messages to
    /// text. Only the tokens of answers are training targets.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub messages_key: String,
    /// Several sources with weights. Each source provides the fraction `weight / sum of weights` of the training sequences. If `mixture` is
    /// empty, `source` is the only source.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub mixture: Vec<MixtureSource>,
    /// What the run does with a data row that cannot be read. With `stop`, an unreadable row prevents the start of the run. With `skip`,
    /// the run leaves the row out, counts it, and reports it.
    #[serde(skip_serializing_if = "is_default")]
    pub on_error: OnError,
    /// Folder of token caches. If `cache_dir` is empty, the token caches are in the folder `nibble/data` of the user's cache folder.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub cache_dir: String,
    /// Number of tokens of a sequence.
    pub seq_len: usize,
    /// Whether documents in one sequence are separated. If documents are separated, positions restart at each document, and no token
    /// attends to or predicts a token of another document.
    #[serde(skip_serializing_if = "is_default")]
    pub document_mask: bool,
    /// Fraction of the tokens that is held out for evaluation. The held-out tokens are whole documents at the end, or the end of a single
    /// document. The built-in language has held-out records of its own, separate from the training records.
    pub valid_fraction: f64,
}

impl Default for DataConfig {
    fn default() -> Self {
        Self {
            source: SYNTHETIC.into(),
            labels: String::new(),
            valid_source: String::new(),
            valid_labels: String::new(),
            bytes: false,
            tokenizer: String::new(),
            bos_token: AUTO.into(),
            eos_token: AUTO.into(),
            text_key: USUAL_TEXT_KEY.into(),
            prompt_key: String::new(),
            answer_key: String::new(),
            messages_key: String::new(),
            mixture: Vec::new(),
            on_error: OnError::default(),
            cache_dir: String::new(),
            seq_len: 128,
            document_mask: false,
            valid_fraction: 0.1,
        }
    }
}

impl DataConfig {
    /// The sources of the data with their weights: the sources of the mixture, or the only source.
    #[must_use]
    pub fn sources(&self) -> Vec<MixtureSource> {
        match self.mixture.is_empty() {
            true => vec![MixtureSource { source: self.source.clone(), weight: 1.0 }],
            false => self.mixture.clone(),
        }
    }

    /// A description of the data's sources in one line.
    #[must_use]
    pub fn described(&self) -> String {
        if self.mixture.is_empty() {
            return self.source.clone();
        }
        let one = |MixtureSource { source, weight }: &MixtureSource| format!("{source} ({weight})");
        self.mixture.iter().map(one).collect::<Vec<_>>().join(", ")
    }
}

/// One source of a mixture.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MixtureSource {
    /// The source's file, folder or glob.
    pub source: String,
    /// The source's share of the sequences, relative to the other weights.
    #[serde(default = "usual_weight")]
    pub weight: f64,
}

fn usual_weight() -> f64 {
    1.0
}

/// What the run does with a data row that cannot be read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum OnError {
    /// The first bad row is an error.
    #[default]
    Stop,
    /// Bad rows are left out and counted.
    Skip,
}

/// Whether the token is `auto`. Stored configurations omit this value.
fn is_auto(token: &str) -> bool {
    token == AUTO
}

/// The default of [`DataConfig::text_key`]. Stored configurations omit this value.
pub(crate) const USUAL_TEXT_KEY: &str = "text";

fn is_usual_text_key(key: &str) -> bool {
    key == USUAL_TEXT_KEY
}

/// The value of `data.source` that means the built-in language.
pub const SYNTHETIC: &str = "synthetic";

/// The value of `data.source` that means random tokens.
pub const RANDOM: &str = "random";

/// The value of `data.source` that means the sources of `data.mixture`.
pub const MIXTURE: &str = "mixture";
