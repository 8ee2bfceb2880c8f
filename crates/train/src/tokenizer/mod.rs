//! Text to token ids and back: bytes, the built-in language's symbols, or a `tokenizer.json` through the crate `tokenizers`, with the ids
//! of the Python package.
//!
//! In data the text of a control token is plain text ([`Tokenizer::encode`]); in prompts and chat templates it is the token
//! ([`Tokenizer::encode_with_control`]). [`Framing`] is what stands around documents, [`TextStream`] decodes text while its tokens come
//! one by one, and [`ChatTemplate`] renders a conversation as text and marks the parts that are learned.
//!
//! A configuration opens its tokenizer once, when it is first asked, and its clones share it (`config/tokens.rs`). The tokenizer's files
//! are copied unchanged into the run's folder and into each checkpoint; a run that resumes reads these copies.

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

/// The file of a tokenizer, as Hugging Face's `tokenizers` reads it.
pub const TOKENIZER_FILE: &str = "tokenizer.json";

/// Beside it, what `transformers` puts around a text.
pub const SETTINGS_FILE: &str = "tokenizer_config.json";

/// Beside both, how a conversation is written, where that is a file of its own.
pub const CHAT_TEMPLATE_FILE: &str = "chat_template.jinja";

/// What makes token ids of text, and text of token ids.
///
/// Two tokenizers are the same where they are written alike ([`Tokenizer::to_json`]).
pub trait Tokenizer: fmt::Debug + Send + Sync {
    /// Ids are below this. A model may have rows to spare.
    fn vocab_size(&self) -> usize;

    /// The ids of a text. Nothing is put before or behind them, and the text of a control token is text: a document that has `<|endoftext|>` in it
    /// does not end there.
    ///
    /// # Errors
    /// [`Error::Tokenizer`], or [`Error::Config`] with the key `prompt`, for a text that has no ids.
    fn encode(&self, text: &str) -> Result<Vec<i32>>;

    /// [`Tokenizer::encode`], but the text of a control token is that token, as in the text that a chat template makes.
    ///
    /// # Errors
    /// As [`Tokenizer::encode`].
    fn encode_with_control(&self, text: &str) -> Result<Vec<i32>> {
        self.encode(text)
    }

    /// The ids of texts that follow one another, of each its own: those of the whole text, where none of its tokens lies across two of them; else each text
    /// is made tokens of up to its end, as a model sees a prompt. `continues`: more text stands before the first one, so that nothing is put before it that
    /// texts begin with. `control`: as [`Tokenizer::encode_with_control`].
    ///
    /// # Errors
    /// As [`Tokenizer::encode`].
    fn encode_parts(&self, parts: &[&str], control: bool, _continues: bool) -> Result<Vec<Vec<i32>>> {
        parts
            .iter()
            .map(|part| if control { self.encode_with_control(part) } else { self.encode(part) })
            .collect()
    }

    /// The bytes of the ids, one text; an id beyond the vocabulary becomes U+FFFD. A character may take several tokens, so that those of a
    /// part of a text need not be UTF-8.
    fn decode_bytes(&self, ids: &[i32]) -> Vec<u8>;

    /// The same tokenizer as a `tokenizer.json` of Hugging Face's `tokenizers`.
    fn to_json(&self) -> String;

    /// What its tokens are, in a message: "bytes".
    fn tokens(&self) -> String;

    /// What an id stands for, as the vocabulary writes it.
    fn token(&self, id: i32) -> Option<String>;

    /// The id of what the vocabulary, or the list of added tokens, writes so.
    fn token_id(&self, _token: &str) -> Option<i32> {
        None
    }

    /// Whether an id is that of a token that was added to the vocabulary, as those that mark the parts of a conversation are.
    fn is_control(&self, _id: i32) -> bool {
        false
    }

    /// The token that every text begins with, as its files say.
    fn bos(&self) -> Option<i32> {
        None
    }

    /// The token that its files call `bos_token`, whether or not texts begin with it.
    fn named_bos(&self) -> Option<i32> {
        self.bos()
    }

    /// The token that a document ends with, as its files say.
    fn eos(&self) -> Option<i32> {
        None
    }

    /// What a text may begin after, where none is given.
    ///
    /// # Errors
    /// As [`Tokenizer::encode`].
    fn opening(&self) -> Result<Vec<i32>>;

    /// How a conversation is written: the chat template of this name that came with it, or the one without a name.
    ///
    /// # Errors
    /// [`Error::Tokenizer`] for what is no template.
    fn chat_template(&self, _name: &str) -> Result<Option<ChatTemplate>> {
        Ok(None)
    }

    /// The files by which others read it, by their names.
    fn files(&self) -> Vec<(&'static str, String)> {
        vec![(TOKENIZER_FILE, self.to_json()), (SETTINGS_FILE, transformers_tokenizer())]
    }

    /// Whether its tokens are known to be pieces of text.
    fn has_text(&self) -> bool {
        true
    }

    /// What one token is: `byte` or `token`.
    fn unit(&self) -> &'static str {
        "token"
    }

    /// The text of the ids; bytes that are not UTF-8 become U+FFFD.
    fn decode(&self, ids: &[i32]) -> String {
        String::from_utf8_lossy(&self.decode_bytes(ids)).into_owned()
    }
}

/// A tokenizer that several hold.
pub type SharedTokenizer = Arc<dyn Tokenizer>;

/// This program's own, none of which needs a file.
#[must_use]
pub fn built_in() -> [SharedTokenizer; 2] {
    [Arc::new(Bytes), Arc::new(Symbols)]
}

/// Whether an id means the same in both, as far as both have ids.
#[must_use]
pub fn agree(a: &dyn Tokenizer, b: &dyn Tokenizer) -> bool {
    let both = a.vocab_size().min(b.vocab_size()) as i32;
    a.to_json() == b.to_json() || (0..both).all(|id| a.token(id) == b.token(id))
}

/// Opens a `tokenizer.json`, or that of a folder.
///
/// # Errors
/// [`Error::Io`] where it cannot be read; [`Error::Tokenizer`] for what is none.
pub fn open(path: &Path) -> Result<SharedTokenizer> {
    let file = if path.is_dir() { path.join(TOKENIZER_FILE) } else { path.to_owned() };
    if path.is_dir() && !file.exists() {
        return Err(Error::Tokenizer { path: path.to_owned(), why: absent(path) });
    }
    let text = hugging_face::read(&file)?;
    match built_in().into_iter().find(|own| own.to_json() == text) {
        // What a folder says besides is not forgotten.
        Some(own) if settings::Settings::beside(&file)?.is_nothing() => Ok(own),
        _ => Ok(Arc::new(HuggingFace::of(&file, text)?)),
    }
}

/// [`open`], where a folder has the file.
///
/// # Errors
/// As [`open`].
pub fn of_folder(dir: &Path) -> Result<Option<SharedTokenizer>> {
    dir.join(TOKENIZER_FILE).exists().then(|| open(dir)).transpose()
}

/// Why a folder has no tokenizer that is read here.
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

/// What stands for an id beyond the vocabulary.
const NO_TOKEN: &str = "\u{fffd}";

/// `tokenizer.json` of BPE without merges: every entry of the vocabulary stays its own token.
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

/// `tokenizer_config.json` beside it, by which `AutoTokenizer` of Hugging Face's `transformers` takes `tokenizer.json` as it stands. Without
/// the file it goes by the model's type, and Qwen's tokenizer normalizes a text before (NFC), and Llama's begins it with a token.
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

    /// A chat template, or a token that texts end with, beside this program's own tokenizer is read as beside any other.
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

    /// `AutoTokenizer` takes the class from here, and with it nothing but what `tokenizer.json` says: no text is changed before its ids.
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
