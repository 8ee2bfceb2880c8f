//! Text while its tokens come one by one.

use super::Tokenizer;

/// Bytes of text, token by token: all of them together are the text of all tokens.
///
/// A character may take several tokens, and a token may read differently after another (the first of a text loses its space). So new text is
/// what a token adds to the text of those before it, and what ends within a character waits for the rest.
#[derive(Debug)]
pub struct TextStream<'a> {
    tokenizer: &'a dyn Tokenizer,
    /// Of the tokens so far those that the next text may depend on.
    ids: Vec<i32>,
    /// How many of these have been given.
    given: usize,
}

/// More tokens than a character takes. What is no character by then is no part of one.
const MOST_WAITING: usize = 8;

impl<'a> TextStream<'a> {
    /// The beginning of a text.
    #[must_use]
    pub fn new(tokenizer: &'a dyn Tokenizer) -> Self {
        Self { tokenizer, ids: Vec::new(), given: 0 }
    }

    /// One that goes on after these tokens, whose text has been given.
    #[must_use]
    pub fn after(tokenizer: &'a dyn Tokenizer, ids: &[i32]) -> Self {
        Self { tokenizer, ids: ids.to_vec(), given: ids.len() }
    }

    /// The text that this token adds, or nothing yet.
    #[must_use]
    pub fn push(&mut self, id: i32) -> Vec<u8> {
        self.ids.push(id);
        let text = self.tokenizer.decode_bytes(&self.ids);
        let waits = ends_within_a_character(&text) && self.ids.len() - self.given < MOST_WAITING;
        if waits { Vec::new() } else { self.give(&text) }
    }

    /// What still waits at the end of the text.
    #[must_use]
    pub fn finish(mut self) -> Vec<u8> {
        let text = self.tokenizer.decode_bytes(&self.ids);
        self.give(&text)
    }

    /// What of the text of all tokens is new. Of those whose text has been given the newest stay.
    fn give(&mut self, text: &[u8]) -> Vec<u8> {
        let before = self.tokenizer.decode_bytes(&self.ids[..self.given]);
        let new = match text.starts_with(&before) {
            true => before.len(),
            // What was given reads differently now: bytes that more bytes have made no character. It is not given again.
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

/// Whether a text stops before its last character does: its last bytes begin one, or a decoder has put U+FFFD there for them.
fn ends_within_a_character(text: &[u8]) -> bool {
    let last = text.utf8_chunks().last();
    let incomplete = |invalid: &[u8]| match std::str::from_utf8(invalid) {
        Ok(_) => false,
        // None: more bytes may make it whole.
        Err(e) => e.error_len().is_none(),
    };
    last.is_some_and(|last| match last.invalid() {
        [] => last.valid().ends_with(char::REPLACEMENT_CHARACTER),
        invalid => incomplete(invalid),
    })
}
