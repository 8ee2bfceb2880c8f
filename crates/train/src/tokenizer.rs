//! Text to token ids and back: bytes, or the symbols of the built-in language.

use serde_json::{Map, Value, json};

use crate::data::synthetic::{SYNTHETIC_VOCAB, render_symbol, symbol_of};
use crate::error::{Error, Result};

/// Token ids of byte-level text: one a byte.
pub const BYTE_VOCAB: usize = 256;

/// A tokenizer without a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Tokenizer {
    /// A token is a byte.
    Bytes,
    /// A token is a symbol of the built-in language, written as one character.
    Synthetic,
}

impl Tokenizer {
    /// Ids are below this.
    #[must_use]
    pub fn vocab_size(self) -> usize {
        match self {
            Self::Bytes => BYTE_VOCAB,
            Self::Synthetic => SYNTHETIC_VOCAB,
        }
    }

    /// The ids of a text.
    ///
    /// # Errors
    /// [`Error::Config`] with the key `prompt` for a character that the built-in language does not have.
    pub fn encode(self, text: &str) -> Result<Vec<i32>> {
        match self {
            Self::Bytes => Ok(text.bytes().map(i32::from).collect()),
            Self::Synthetic => text
                .chars()
                .map(|c| {
                    symbol_of(c).ok_or_else(|| {
                        Error::config("prompt", format!("'{c}' is not a symbol of the built-in language"))
                    })
                })
                .collect(),
        }
    }

    /// The bytes of the ids; an id beyond the vocabulary (a model may have spare rows) becomes U+FFFD.
    #[must_use]
    pub fn decode_bytes(self, ids: &[i32]) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(ids.len());
        for &id in ids {
            match self {
                Self::Bytes => match u8::try_from(id) {
                    Ok(byte) => bytes.push(byte),
                    Err(_) => bytes.extend_from_slice("\u{fffd}".as_bytes()),
                },
                Self::Synthetic => {
                    let symbol = render_symbol(id).unwrap_or('\u{fffd}');
                    bytes.extend_from_slice(symbol.encode_utf8(&mut [0; 4]).as_bytes());
                }
            }
        }
        bytes
    }

    /// The text of the ids; bytes that are not UTF-8 become U+FFFD.
    #[must_use]
    pub fn decode(self, ids: &[i32]) -> String {
        String::from_utf8_lossy(&self.decode_bytes(ids)).into_owned()
    }

    /// The same tokenizer as a `tokenizer.json` of Hugging Face's `tokenizers`.
    #[must_use]
    pub fn to_json(self) -> String {
        let vocab = |name: fn(usize) -> char, size: usize| -> Map<String, Value> {
            (0..size).map(|id| (name(id).to_string(), json!(id))).collect()
        };
        let (model, pre, decoder) = match self {
            Self::Bytes => (
                // BPE without merges over the byte alphabet: every byte stays its own token.
                json!({"type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
                    "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "ignore_merges": false,
                    "vocab": vocab(byte_alphabet, BYTE_VOCAB), "merges": []}),
                json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false}),
                json!({"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true}),
            ),
            Self::Synthetic => (
                json!({"type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
                    "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "ignore_merges": false,
                    "vocab": vocab(|id| render_symbol(id as i32).unwrap_or('\u{fffd}'), SYNTHETIC_VOCAB),
                    "merges": []}),
                Value::Null,
                json!({"type": "Fuse"}),
            ),
        };
        let whole = json!({"version": "1.0", "truncation": null, "padding": null, "added_tokens": [],
            "normalizer": null, "pre_tokenizer": pre, "post_processor": null, "decoder": decoder, "model": model});
        format!("{whole:#}\n")
    }
}

/// `tokenizer_config.json` beside it, by which `AutoTokenizer` of Hugging Face's `transformers` takes `tokenizer.json` as it stands. Without
/// the file it goes by the model's type, and Qwen's tokenizer normalizes a text before (NFC), and Llama's begins it with a token.
#[must_use]
pub fn transformers_tokenizer() -> String {
    let config = json!({"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": false,
        "model_input_names": ["input_ids", "attention_mask"]});
    format!("{config:#}\n")
}

/// The printable character that stands for a byte in byte-level BPE vocabularies (Radford et al., 2019): printable
/// Latin-1 bytes stand for themselves, the others follow from U+0100 on.
fn byte_alphabet(byte: usize) -> char {
    let printable = |b: usize| matches!(b, 0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff);
    let code = if printable(byte) { byte } else { 0x100 + (0..byte).filter(|&b| !printable(b)).count() };
    // At most U+0143: a character.
    char::from_u32(code as u32).unwrap_or('\u{fffd}')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_round_trip() {
        let text = "First Citizen:\n«é» \u{1F600}";
        let ids = Tokenizer::Bytes.encode(text).unwrap_or_default();
        assert_eq!(ids.len(), text.len());
        assert_eq!(Tokenizer::Bytes.decode(&ids), text);
        assert_eq!(Tokenizer::Bytes.decode_bytes(&[0, 255]), [0, 255]);
    }

    #[test]
    fn symbols_round_trip_and_strangers_are_named() {
        let ids = Tokenizer::Synthetic.encode("(Aab=A)").unwrap_or_default();
        assert_eq!(Tokenizer::Synthetic.decode(&ids), "(Aab=A)");
        let error = Tokenizer::Synthetic.encode("(Hab").map_err(|e| e.to_string());
        assert_eq!(error, Err("`prompt`: 'H' is not a symbol of the built-in language".into()));
    }

    #[test]
    fn ids_beyond_the_vocabulary_do_not_stop_decoding() {
        assert_eq!(Tokenizer::Bytes.decode(&[65, 300, -1, 66]), "A\u{fffd}\u{fffd}B");
        assert_eq!(Tokenizer::Synthetic.decode(&[0, 99]), "(\u{fffd}");
    }

    /// `AutoTokenizer` takes the class from here, and with it nothing but what `tokenizer.json` says: no text is changed before its ids.
    #[test]
    fn transformers_is_told_to_take_the_tokenizer_as_it_stands() {
        let of = |text: &str| serde_json::from_str::<Value>(text).unwrap_or_default();
        let config = of(&transformers_tokenizer());
        assert_eq!(config["tokenizer_class"], "PreTrainedTokenizerFast");
        assert_eq!(config["clean_up_tokenization_spaces"], false);
        for tokenizer in [Tokenizer::Bytes, Tokenizer::Synthetic] {
            let whole = of(&tokenizer.to_json());
            assert_eq!(whole["normalizer"], Value::Null, "{tokenizer:?}");
            assert_eq!(whole["added_tokens"], json!([]), "{tokenizer:?}");
            assert_eq!(whole["model"]["vocab"].as_object().map(Map::len), Some(tokenizer.vocab_size()));
        }
    }

    #[test]
    fn the_byte_alphabet_is_the_published_one() {
        let letters: std::collections::BTreeSet<char> = (0..256).map(byte_alphabet).collect();
        assert_eq!(letters.len(), 256);
        assert_eq!(byte_alphabet(b' '.into()), 'Ġ');
        assert_eq!(byte_alphabet(b'\n'.into()), 'Ċ');
        assert_eq!(byte_alphabet(b'A'.into()), 'A');
    }
}
