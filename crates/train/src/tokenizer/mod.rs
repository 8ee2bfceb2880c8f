//! Converts text to token ids and back. The tokenizer is bytes, the built-in language's symbols, or a `tokenizer.json`, which the crate
//! `tokenizers` reads with the same ids as the Python package.
//!
//! In data, the text of a control token is plain text ([`Tokenizer::encode`]). In prompts and chat templates, this text becomes the token
//! ([`Tokenizer::encode_with_control`]). [`Framing`] contains the tokens around documents, [`TextStream`] decodes text token by token, and
//! [`ChatTemplate`] renders a conversation as text and marks its answers.
//!
//! A configuration opens its tokenizer once, at the first use, and clones of the configuration share the tokenizer (`config/tokens.rs`).
//! The tokenizer's files are copied unchanged into the run's folder and into each checkpoint. A resumed run reads these copies.

mod begun;
mod bytes;
mod chat;
mod framing;
mod growth;
mod hugging_face;
mod ids;
mod listed;
mod parts;
mod settings;
mod stream;
mod symbols;

use serde_json::{Value, json};
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::error::{Error, Result};

pub(crate) use begun::begin_texts_with;
pub use bytes::{BYTE_VOCAB, Bytes};
pub use chat::{ANSWERS, ChatTemplate, Conversation, Rendered};
pub use framing::{AUTO, Framing, NONE};
pub use hugging_face::HuggingFace;
pub use ids::Ids;
pub(crate) use listed::{ADDED_FILE, NAMES_FILE};
pub use stream::TextStream;
pub use symbols::Symbols;

/// The file of a tokenizer, in the format of Hugging Face's `tokenizers`.
pub const TOKENIZER_FILE: &str = "tokenizer.json";

/// The file with the settings of `transformers`, in the folder of `tokenizer.json`.
pub const SETTINGS_FILE: &str = "tokenizer_config.json";

/// The file of the chat template, in the folder of `tokenizer.json`. A template may also be stored in the settings instead.
pub const CHAT_TEMPLATE_FILE: &str = "chat_template.jinja";

/// Converts text to token ids and back.
///
/// Two tokenizers are equal if their JSON texts are equal ([`Tokenizer::to_json`]).
pub trait Tokenizer: fmt::Debug + Send + Sync {
    /// Exclusive upper bound of token ids. A model's embedding may have more rows.
    fn vocab_size(&self) -> usize;

    /// The ids of a text. No tokens are added around the text. The text of a control token is plain text, so a document that contains
    /// `<|endoftext|>` does not end there.
    ///
    /// # Errors
    /// Returns [`Error::Tokenizer`], or [`Error::Config`] with the key `prompt`, for a text that has no ids.
    fn encode(&self, text: &str) -> Result<Vec<i32>>;

    /// Like [`Tokenizer::encode`], but the text of a control token becomes this token, as in a rendered chat template.
    ///
    /// # Errors
    /// Returns the errors of [`Tokenizer::encode`].
    fn encode_with_control(&self, text: &str) -> Result<Vec<i32>> {
        self.encode(text)
    }

    /// The ids of consecutive texts, separately for each text. If no token crosses a boundary, the result has the ids of the concatenated
    /// text. Otherwise each text is tokenized up to its end, as a model sees a prompt. `continues` says that other text precedes the first
    /// text, so no prefix of a new text is added. If `control` is true, control tokens are encoded as in
    /// [`Tokenizer::encode_with_control`].
    ///
    /// # Errors
    /// Returns the errors of [`Tokenizer::encode`].
    fn encode_parts(&self, parts: &[&str], control: bool, _continues: bool) -> Result<Vec<Vec<i32>>> {
        parts
            .iter()
            .map(|part| if control { self.encode_with_control(part) } else { self.encode(part) })
            .collect()
    }

    /// The bytes of the ids as one text. An id beyond the vocabulary becomes U+FFFD. A character may consist of several tokens, so the
    /// bytes of a part of a text need not be UTF-8.
    fn decode_bytes(&self, ids: &[i32]) -> Vec<u8>;

    /// This tokenizer as the text of a `tokenizer.json` for Hugging Face's `tokenizers`.
    fn to_json(&self) -> String;

    /// The kind of the tokenizer's tokens, for a message: "bytes".
    fn tokens(&self) -> String;

    /// The string that the vocabulary has for an id.
    fn token(&self, id: i32) -> Option<String>;

    /// The id of a string that is in the vocabulary or among the added tokens.
    fn token_id(&self, _token: &str) -> Option<i32> {
        None
    }

    /// Whether an id is an added token, such as a token that marks a part of a conversation.
    fn is_control(&self, _id: i32) -> bool {
        false
    }

    /// The token at the beginning of every text, according to the tokenizer's files.
    fn bos(&self) -> Option<i32> {
        None
    }

    /// The token that the tokenizer's files call `bos_token`, whether or not texts begin with this token.
    fn named_bos(&self) -> Option<i32> {
        self.bos()
    }

    /// The token at the end of a document, according to the tokenizer's files.
    fn eos(&self) -> Option<i32> {
        None
    }

    /// The ids from which text generation starts if there is no prompt.
    ///
    /// # Errors
    /// Returns the errors of [`Tokenizer::encode`].
    fn opening(&self) -> Result<Vec<i32>>;

    /// The tokenizer's chat template of this name; an empty name means the unnamed template.
    ///
    /// # Errors
    /// Returns [`Error::Tokenizer`] for an invalid template.
    fn chat_template(&self, _name: &str) -> Result<Option<ChatTemplate>> {
        Ok(None)
    }

    /// The tokenizer's files for other tools: names and contents.
    fn files(&self) -> Vec<(&'static str, String)> {
        vec![(TOKENIZER_FILE, self.to_json()), (SETTINGS_FILE, transformers_tokenizer())]
    }

    /// Whether the text of the tokenizer's tokens is known.
    fn has_text(&self) -> bool {
        true
    }

    /// The unit of a token: `byte` or `token`.
    fn unit(&self) -> &'static str {
        "token"
    }

    /// The text of the ids. Bytes that are not UTF-8 become U+FFFD.
    fn decode(&self, ids: &[i32]) -> String {
        String::from_utf8_lossy(&self.decode_bytes(ids)).into_owned()
    }
}

/// A shared tokenizer.
pub type SharedTokenizer = Arc<dyn Tokenizer>;

/// The built-in tokenizers, which need no file.
#[must_use]
pub fn built_in() -> [SharedTokenizer; 2] {
    [Arc::new(Bytes), Arc::new(Symbols)]
}

/// Whether every id that exists in both tokenizers has the same meaning in both.
#[must_use]
pub fn agree(a: &dyn Tokenizer, b: &dyn Tokenizer) -> bool {
    let both = a.vocab_size().min(b.vocab_size()) as i32;
    a.to_json() == b.to_json() || (0..both).all(|id| a.token(id) == b.token(id))
}

/// Opens a `tokenizer.json`, or the `tokenizer.json` in a folder.
///
/// # Errors
/// Returns [`Error::Io`] if the file cannot be read, and [`Error::Tokenizer`] if the file is invalid.
pub fn open(path: &Path) -> Result<SharedTokenizer> {
    let file = if path.is_dir() { path.join(TOKENIZER_FILE) } else { path.to_owned() };
    if path.is_dir() && !file.exists() {
        return Err(Error::Tokenizer { path: path.to_owned(), why: absent(path) });
    }
    let text = hugging_face::read(&file)?;
    match built_in().into_iter().find(|own| own.to_json() == text) {
        // The built-in tokenizer is used only if the folder has no other settings, because these must not be ignored.
        Some(own) if settings::Settings::beside(&file)?.is_nothing() => Ok(own),
        _ => Ok(Arc::new(HuggingFace::of(&file, text)?)),
    }
}

/// Like [`open`], but returns `None` for a folder without a `tokenizer.json`.
///
/// # Errors
/// Returns the errors of [`open`].
pub fn of_folder(dir: &Path) -> Result<Option<SharedTokenizer>> {
    dir.join(TOKENIZER_FILE).exists().then(|| open(dir)).transpose()
}

/// The reason why a folder has no supported tokenizer.
fn absent(dir: &Path) -> String {
    let others = ["tokenizer.model", "vocab.json", "tiktoken.model"];
    let other: Option<PathBuf> = others.iter().map(|name| dir.join(name)).find(|path| path.exists());
    match other {
        None => {
            format!("has no {TOKENIZER_FILE}, which says what the tokens of a text are: set data.tokenizer")
        }
        Some(other) => format!(
            "has {} and no {TOKENIZER_FILE}, which alone is read here; `AutoTokenizer.from_pretrained(...).save_pretrained(...)` of \
             transformers writes one",
            other.file_name().unwrap_or_default().display()
        ),
    }
}

/// The text of an id that is beyond the vocabulary.
const NO_TOKEN: &str = "\u{fffd}";

/// The `tokenizer.json` of a BPE tokenizer without merges, so that every entry of the vocabulary is a token.
fn without_merges(vocab: impl Iterator<Item = char>, pre_tokenizer: &Value, decoder: &Value) -> String {
    let vocab: serde_json::Map<String, Value> =
        vocab.enumerate().map(|(id, symbol)| (symbol.to_string(), json!(id))).collect();
    let model = json!({"type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
        "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "ignore_merges": false,
        "vocab": vocab, "merges": []});
    let whole = json!({"version": "1.0", "truncation": null, "padding": null, "added_tokens": [],
        "normalizer": null, "pre_tokenizer": pre_tokenizer, "post_processor": null, "decoder": decoder, "model": model});
    format!("{whole:#}\n")
}

/// The matching `tokenizer_config.json`, which makes `AutoTokenizer` of Hugging Face's `transformers` use `tokenizer.json` unchanged.
/// Without this file, the model's type determines the tokenizer class: Qwen's class normalizes texts (NFC), and Llama's class adds BOS.
#[must_use]
pub fn transformers_tokenizer() -> String {
    let config = json!({"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": false,
        "model_input_names": ["input_ids", "attention_mask"]});
    format!("{config:#}\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_beyond_the_vocabulary_do_not_stop_decoding() {
        assert_eq!(Bytes.decode(&[65, 300, -1, 66]), "A\u{fffd}\u{fffd}B");
        assert_eq!(Symbols.decode(&[0, 99]), "(\u{fffd}");
    }

    /// A chat template or an EOS token in the folder of a built-in tokenizer is used in the same way as with any other tokenizer.
    #[test]
    fn what_lies_beside_the_bytes_is_read() {
        let dir = tempfile::tempdir().unwrap();
        Bytes
            .files()
            .into_iter()
            .for_each(|(name, text)| std::fs::write(dir.path().join(name), text).unwrap());
        let open = || open(dir.path()).unwrap();
        assert_eq!(open().unit(), "byte");
        let template = dir.path().join(CHAT_TEMPLATE_FILE);
        std::fs::write(&template, "{{ messages[0].content }}").unwrap();
        assert!(open().chat_template("").unwrap().is_some());
        assert_eq!(open().encode("é").unwrap(), Bytes.encode("é").unwrap());
        std::fs::remove_file(&template).unwrap();
        std::fs::write(dir.path().join(SETTINGS_FILE), r#"{"eos_token": "A"}"#).unwrap();
        assert_eq!(open().eos(), Some(65));
    }

    /// With this file, `AutoTokenizer` uses only `tokenizer.json`, so no text is changed before tokenization.
    #[test]
    fn transformers_is_told_to_take_the_tokenizer_as_it_stands() {
        let of = |text: &str| serde_json::from_str::<Value>(text).unwrap_or_default();
        let config = of(&transformers_tokenizer());
        assert_eq!(config["tokenizer_class"], "PreTrainedTokenizerFast");
        assert_eq!(config["clean_up_tokenization_spaces"], false);
        for tokenizer in built_in() {
            let whole = of(&tokenizer.to_json());
            assert_eq!(whole["normalizer"], Value::Null, "{tokenizer:?}");
            assert_eq!(whole["added_tokens"], json!([]), "{tokenizer:?}");
            let vocab = whole["model"]["vocab"].as_object().map(serde_json::Map::len);
            assert_eq!(vocab, Some(tokenizer.vocab_size()));
        }
    }
}
