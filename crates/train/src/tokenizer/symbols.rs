//! The symbols of the built-in language.

use serde_json::{Value, json};

use super::{NO_TOKEN, Tokenizer, without_merges};
use crate::data::synthetic::{SYNTHETIC_VOCAB, render_symbol, symbol_of};
use crate::error::{Error, Result};

/// A tokenizer for the symbols of the built-in language. Each symbol is written as one character.
#[derive(Debug, Clone, Copy)]
pub struct Symbols;

impl Tokenizer for Symbols {
    fn vocab_size(&self) -> usize {
        SYNTHETIC_VOCAB
    }

    fn encode(&self, text: &str) -> Result<Vec<i32>> {
        let id = |c| {
            symbol_of(c).ok_or_else(|| {
                Error::config("prompt", format!("'{c}' is not a symbol of the built-in language"))
            })
        };
        text.chars().map(id).collect()
    }

    fn decode_bytes(&self, ids: &[i32]) -> Vec<u8> {
        let symbols = ids.iter().map(|id| render_symbol(*id).map_or(NO_TOKEN.into(), String::from));
        symbols.collect::<String>().into_bytes()
    }

    fn to_json(&self) -> String {
        let symbols = (0..SYNTHETIC_VOCAB as i32).filter_map(render_symbol);
        without_merges(symbols, &Value::Null, &json!({"type": "Fuse"}))
    }

    fn tokens(&self) -> String {
        "symbols of the built-in language".into()
    }

    fn token(&self, id: i32) -> Option<String> {
        render_symbol(id).map(String::from)
    }

    fn opening(&self) -> Result<Vec<i32>> {
        self.encode("(")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn symbols_round_trip_and_strangers_are_named() {
        let ids = Symbols.encode("(Aab=A)").unwrap_or_default();
        assert_eq!(Symbols.decode(&ids), "(Aab=A)");
        let error = Symbols.encode("(Hab").map_err(|e| e.to_string());
        assert_eq!(error, Err("`prompt`: 'H' is not a symbol of the built-in language".into()));
    }
}
