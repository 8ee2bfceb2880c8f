//! Decodes text token by token.

use super::Tokenizer;

/// Decodes text token by token, as bytes. The concatenation of the results of all calls is the text of all tokens.
///
/// A character may consist of several tokens, and a token's text may depend on the preceding token (the first token of a text loses its
/// space). So each call returns the difference to the text of the earlier tokens, and holds back an incomplete character.
#[derive(Debug)]
pub struct TextStream<'a> {
    tokenizer: &'a dyn Tokenizer,
    /// The recent tokens, because the text of the next token may depend on them.
    ids: Vec<i32>,
    /// Number of tokens in `ids` whose text has been returned.
    given: usize,
}

/// A number of tokens that is larger than any character needs. Bytes that are still incomplete after so many tokens are invalid.
const MOST_WAITING: usize = 8;

impl<'a> TextStream<'a> {
    /// A stream at the beginning of a text.
    #[must_use]
    pub fn new(tokenizer: &'a dyn Tokenizer) -> Self {
        Self { tokenizer, ids: Vec::new(), given: 0 }
    }

    /// A stream that continues after the tokens `ids`, whose text has already been returned.
    #[must_use]
    pub fn after(tokenizer: &'a dyn Tokenizer, ids: &[i32]) -> Self {
        Self { tokenizer, ids: ids.to_vec(), given: ids.len() }
    }

    /// The text that this token adds; the text is empty while the last character is incomplete.
    #[must_use]
    pub fn push(&mut self, id: i32) -> Vec<u8> {
        self.ids.push(id);
        let text = self.tokenizer.decode_bytes(&self.ids);
        let waits = ends_within_a_character(&text) && self.ids.len() - self.given < MOST_WAITING;
        if waits { Vec::new() } else { self.give(&text) }
    }

    /// The text that is still held back at the end of the stream.
    #[must_use]
    pub fn finish(mut self) -> Vec<u8> {
        let text = self.tokenizer.decode_bytes(&self.ids);
        self.give(&text)
    }

    /// Returns the new part of the text of all tokens, and drops the tokens whose text had been returned before.
    fn give(&mut self, text: &[u8]) -> Vec<u8> {
        let before = self.tokenizer.decode_bytes(&self.ids[..self.given]);
        let new = match text.starts_with(&before) {
            true => before.len(),
            // Some returned bytes were an incomplete character that turned out to be invalid; they are not returned again.
            false => (before.len()..text.len()).find(|at| is_start(text[*at])).unwrap_or(text.len()),
        };
        let given = text[new..].to_vec();
        self.ids.drain(..self.given);
        self.given = self.ids.len();
        given
    }
}

/// Whether a byte begins a character.
fn is_start(byte: u8) -> bool {
    byte & 0xc0 != 0x80
}

/// Whether a text ends within a character: with incomplete bytes, or with U+FFFD, which decoders write for incomplete bytes.
fn ends_within_a_character(text: &[u8]) -> bool {
    let last = text.utf8_chunks().last();
    let incomplete = |invalid: &[u8]| match std::str::from_utf8(invalid) {
        Ok(_) => false,
        // `error_len` is `None` if more bytes may complete the character.
        Err(e) => e.error_len().is_none(),
    };
    last.is_some_and(|last| match last.invalid() {
        [] => last.valid().ends_with(char::REPLACEMENT_CHARACTER),
        invalid => incomplete(invalid),
    })
}
