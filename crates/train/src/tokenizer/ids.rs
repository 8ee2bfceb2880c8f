//! Token ids of files whose tokenizer is unknown.

use serde_json::{Value, json};

use super::Tokenizer;
use crate::error::{Error, Result};

/// A tokenizer that writes each token as its id, because the text of the token is unknown.
#[derive(Debug, Clone, Copy)]
pub struct Ids {
    /// Exclusive upper bound of token ids.
    pub vocab_size: usize,
}

impl Tokenizer for Ids {
    fn vocab_size(&self) -> usize {
        self.vocab_size
    }

    fn encode(&self, text: &str) -> Result<Vec<i32>> {
        let id = |word: &str| {
            self.token_id(word).ok_or_else(|| {
                let why = format!(
                    "is not named, and the run's data are token ids: {word:?} is no id below {}; name the tokenizer that made the ids",
                    self.vocab_size
                );
                Error::config("data.tokenizer", why)
            })
        };
        text.split_whitespace().map(id).collect()
    }

    fn decode_bytes(&self, ids: &[i32]) -> Vec<u8> {
        ids.iter().map(|id| format!("{id} ")).collect::<String>().into_bytes()
    }

    fn to_json(&self) -> String {
        let ids = 0..self.vocab_size;
        let vocab: serde_json::Map<String, Value> = ids.map(|id| (id.to_string(), json!(id))).collect();
        let model = json!({"type": "WordLevel", "vocab": vocab, "unk_token": "0"});
        let whole = json!({"version": "1.0", "truncation": null, "padding": null, "added_tokens": [], "normalizer": null,
            "pre_tokenizer": {"type": "WhitespaceSplit"}, "post_processor": null, "decoder": null, "model": model});
        format!("{whole:#}\n")
    }

    fn tokens(&self) -> String {
        "token ids of a tokenizer that is not named (data.tokenizer)".into()
    }

    fn token(&self, id: i32) -> Option<String> {
        let id = usize::try_from(id).ok().filter(|id| *id < self.vocab_size)?;
        Some(id.to_string())
    }

    fn token_id(&self, token: &str) -> Option<i32> {
        token.parse().ok().filter(|id| usize::try_from(*id).is_ok_and(|id| id < self.vocab_size))
    }

    fn opening(&self) -> Result<Vec<i32>> {
        Ok(vec![0])
    }

    fn has_text(&self) -> bool {
        false
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_are_numbers() {
        let ids = Ids { vocab_size: 300 };
        assert_eq!(ids.encode(" 5 17\n299").ok(), Some(vec![5, 17, 299]));
        assert_eq!(ids.decode(&[5, 17]), "5 17 ");
        for text in ["300", "-1", "the", "1.5"] {
            let error = ids.encode(text).map_err(|e| e.to_string()).err().unwrap_or_default();
            assert!(error.contains("`data.tokenizer`") && error.contains(text), "{error}");
        }
        assert_eq!([ids.token(299), ids.token(300), ids.token(-1)], [Some("299".to_owned()), None, None]);
    }

    /// The crate `tokenizers` reads the same ids from the same numbers.
    #[test]
    fn the_crate_reads_it() {
        let ids = Ids { vocab_size: 300 };
        let read = tokenizers::Tokenizer::from_bytes(ids.to_json()).unwrap();
        assert_eq!(read.encode_fast("5 17 299", true).unwrap().get_ids(), [5, 17, 299]);
        assert_eq!(read.decode(&[5, 17], false).unwrap(), "5 17");
    }
}
