//! Decodes text token by token.

use super::Tokenizer;

/// Decodes bytes of text token by token; their concatenation is the text of all tokens.
///
/// A character may take several tokens, and a token's text may depend on the preceding one (the first token of a text loses its space). So
/// the new text is the difference to the text of the earlier tokens, and an incomplete character is held back.
#[derive(Debug)]
pub struct TextStream<'a> {
    tokenizer: &'a dyn Tokenizer,
    /// The recent tokens, on which the next text may depend.
    ids: Vec<i32>,
    /// Number of these tokens whose text has been returned.
    given: usize,
}

/// More tokens than a character takes. Bytes still incomplete after that are invalid.
const MOST_WAITING: usize = 8;

impl<'a> TextStream<'a> {
    /// A stream at the beginning of a text.
    #[must_use]
    pub fn new(tokenizer: &'a dyn Tokenizer) -> Self {
        Self { tokenizer, ids: Vec::new(), given: 0 }
    }

    /// A stream that continues after these tokens, whose text has been returned.
    #[must_use]
    pub fn after(tokenizer: &'a dyn Tokenizer, ids: &[i32]) -> Self {
        Self { tokenizer, ids: ids.to_vec(), given: ids.len() }
    }

    /// The text that this token adds; empty while a character is incomplete.
    #[must_use]
    pub fn push(&mut self, id: i32) -> Vec<u8> {
        self.ids.push(id);
        let text = self.tokenizer.decode_bytes(&self.ids);
        let waits = ends_within_a_character(&text) && self.ids.len() - self.given < MOST_WAITING;
        if waits { Vec::new() } else { self.give(&text) }
    }

    /// The text still held back at the end.
    #[must_use]
    pub fn finish(mut self) -> Vec<u8> {
        let text = self.tokenizer.decode_bytes(&self.ids);
        self.give(&text)
    }

    /// Returns the new part of the text of all tokens, and drops the tokens that were returned before.
    fn give(&mut self, text: &[u8]) -> Vec<u8> {
        let before = self.tokenizer.decode_bytes(&self.ids[..self.given]);
        let new = match text.starts_with(&before) {
            true => before.len(),
            // Returned bytes were an incomplete character that turned out invalid. They are not returned again.
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

/// Whether a text ends within a character: with an incomplete character, or with U+FFFD, which decoders write for one.
fn ends_within_a_character(text: &[u8]) -> bool {
    let last = text.utf8_chunks().last();
    let incomplete = |invalid: &[u8]| match std::str::from_utf8(invalid) {
        Ok(_) => false,
        // `None`: more bytes may complete it.
        Err(e) => e.error_len().is_none(),
    };
    last.is_some_and(|last| match last.invalid() {
        [] => last.valid().ends_with(char::REPLACEMENT_CHARACTER),
        invalid => incomplete(invalid),
    })
}
