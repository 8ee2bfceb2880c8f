//! Text to token ids and back.

mod bytes;
mod symbols;

use serde_json::{Value, json};
use std::fmt;
use std::sync::Arc;

use crate::error::Result;

pub use bytes::{BYTE_VOCAB, Bytes};
pub use symbols::Symbols;

/// What makes token ids of text, and text of token ids.
///
/// Two tokenizers are the same where they are written alike ([`Tokenizer::to_json`]).
pub trait Tokenizer: fmt::Debug + Send + Sync {
    /// Ids are below this. A model may have rows to spare.
    fn vocab_size(&self) -> usize;

    /// The ids of a text. Nothing is put before or behind them.
    ///
    /// # Errors
    /// [`Error::Config`](crate::Error::Config) with the key `prompt` for a text that has no ids.
    fn encode(&self, text: &str) -> Result<Vec<i32>>;

    /// The bytes of the ids, one text; an id beyond the vocabulary becomes U+FFFD. A character may take several tokens, so that those of a
    /// part of a text need not be UTF-8.
    fn decode_bytes(&self, ids: &[i32]) -> Vec<u8>;

    /// The same tokenizer as a `tokenizer.json` of Hugging Face's `tokenizers`.
    fn to_json(&self) -> String;

    /// What its tokens are, in a message: "bytes".
    fn tokens(&self) -> String;

    /// What a text may begin after, where none is given.
    fn opening(&self) -> &str;

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
