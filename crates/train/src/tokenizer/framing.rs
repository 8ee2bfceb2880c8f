//! The tokens around each document.

use super::Tokenizer;
use crate::error::{Error, Result};

/// The value of `data.bos_token` and `data.eos_token` that selects the token named in the tokenizer's files.
pub const AUTO: &str = "auto";

/// The value of `data.bos_token` and `data.eos_token` that selects no token.
pub const NONE: &str = "none";

/// The tokens before and after each document.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Framing {
    /// The token before a document.
    pub bos: Option<i32>,
    /// The token after a document.
    pub eos: Option<i32>,
}

impl Framing {
    /// Determines the tokens around a document from `data.bos_token` and `data.eos_token`. Each value is [`AUTO`], [`NONE`], or the text of
    /// a token.
    ///
    /// # Errors
    /// Returns [`Error::Config`] with the key, if the text is no token.
    pub fn of(tokenizer: &dyn Tokenizer, bos_token: &str, eos_token: &str) -> Result<Self> {
        let id = |key: &str, says: &str, own: Option<i32>| match says {
            AUTO => Ok(own),
            NONE => Ok(None),
            token => match tokenizer.token_id(token) {
                Some(id) => Ok(Some(id)),
                None => {
                    let why = format!(
                        "is {token:?}, expected \"{AUTO}\", \"{NONE}\" or a token of the tokenizer, whose tokens are {}",
                        tokenizer.tokens()
                    );
                    Err(Error::config(key, why))
                }
            },
        };
        Ok(Self {
            bos: id("data.bos_token", bos_token, tokenizer.bos())?,
            eos: id("data.eos_token", eos_token, tokenizer.eos())?,
        })
    }

    /// Adds the tokens before and after a document to the document's ids.
    #[must_use]
    pub fn frame(&self, ids: Vec<i32>) -> Vec<i32> {
        let mut framed = ids;
        if let Some(bos) = self.bos {
            framed.insert(0, bos);
        }
        framed.extend(self.eos);
        framed
    }
}
