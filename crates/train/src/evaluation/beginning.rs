//! The tokens before a scored text, and requests that consist of a text and its continuation.

use super::Request;
use crate::config::Config;
use crate::error::Result;
use crate::tokenizer::{AUTO, Bytes, Tokenizer};

/// The tokens that precede a scored text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Beginning {
    /// Tokens before a text without context.
    alone: Vec<i32>,
    /// Whether the tokens before a text are BOS or EOS. A document of ids or a conversation may already begin with such a token.
    is_control: bool,
    /// The token before a question, if there is one.
    question: Option<i32>,
}

impl Beginning {
    /// The tokens that a run puts before its own documents. The BOS token (`data.bos_token`) precedes a text and a question. If there is no
    /// BOS token, the token that ends documents (`data.eos_token`) precedes a text.
    ///
    /// # Errors
    /// The errors of [`Config::framing`].
    pub fn of_run(config: &Config) -> Result<Self> {
        let framing = config.framing()?;
        Self::new(config, framing.bos.or(framing.eos), framing.bos)
    }

    /// The tokens that lm-evaluation-harness puts before texts and questions for a published model folder. Before a text, the harness puts
    /// the `bos_token` of the tokenizer's files, even if the tokenizer itself does not put this token before texts. If there is no
    /// `bos_token`, the harness puts EOS before a text. Before a question, the harness puts the token that the tokenizer puts before every
    /// text, if there is such a token. The setting `data.bos_token` replaces the tokens before texts and before questions.
    ///
    /// # Errors
    /// The errors of [`Config::framing`].
    pub fn of_folder(config: &Config) -> Result<Self> {
        let framing = config.framing()?;
        let named = match config.tokenizer()? {
            Some(tokenizer) if config.data.bos_token == AUTO => tokenizer.named_bos().or(framing.bos),
            _ => framing.bos,
        };
        Self::new(config, named.or(framing.eos), framing.bos)
    }

    fn new(config: &Config, alone: Option<i32>, question: Option<i32>) -> Result<Self> {
        let question = question.filter(|_| config.eval.add_bos_token);
        let (alone, is_control) = match (alone, config.tokenizer()?) {
            (Some(id), _) => (vec![id], true),
            (None, Some(tokenizer)) => (tokenizer.opening()?, false),
            (None, None) => (Bytes.opening()?, false),
        };
        Ok(Self { alone, is_control, question })
    }

    /// Creates a value from its fields, for tests.
    #[cfg(test)]
    pub(super) fn of(alone: Vec<i32>, is_control: bool, question: Option<i32>) -> Self {
        Self { alone, is_control, question }
    }

    /// The tokens to put before a document with these ids.
    pub(super) fn of_document(&self, ids: &[i32]) -> &[i32] {
        let has_it = self.is_control && ids.first() == self.alone.first();
        if has_it { &[] } else { &self.alone }
    }

    /// Largest number of tokens before a text.
    pub(super) fn len(&self) -> usize {
        self.alone.len()
    }

    /// Tokenizes a text (the context) and its continuation for one scoring request. Two strings are tokenized: the context alone, and the
    /// concatenation of context and continuation. If the context alone has n ids, the request contains these n ids, followed by the ids of
    /// the concatenation from index n on. If one token of the concatenation spans the boundary between context and continuation, the ids of
    /// the request differ from the ids of the concatenation. Trailing spaces of the context are moved to the continuation. An empty context
    /// is replaced by the tokens that precede a text.
    ///
    /// The rules of this tokenization are the same as in `loglikelihood` and `_encode_pair` of lm-evaluation-harness.
    ///
    /// # Errors
    /// Returns an error for a text that cannot be tokenized.
    pub fn request(&self, tokenizer: &dyn Tokenizer, context: &str, continuation: &str) -> Result<Request> {
        let text = context.trim_end_matches(is_space);
        let whole = tokenizer.encode_with_control(&[context, continuation].concat())?;
        let alone = if text.is_empty() { Vec::new() } else { tokenizer.encode_with_control(text)? };
        let before = match &self.question {
            _ if alone.is_empty() => self.of_document(&whole),
            Some(bos) if alone.first() != Some(bos) => std::slice::from_ref(bos),
            _ => &[],
        };
        // The continuation of an empty text may begin with the token before a text. Then this token is the context.
        let first = (before.len() + alone.len()).max(1);
        let behind = whole.get(alone.len()..).unwrap_or_default();
        Ok(Request::behind(first, [before, &alone, behind].concat()))
    }
}

/// Whether Python's `str.rstrip` strips this character: white space, and ASCII's separators.
fn is_space(of: char) -> bool {
    of.is_whitespace() || ('\u{1c}'..='\u{1f}').contains(&of)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A tokenizer with bytes as tokens, except that an exclamation mark and a following line end are one token.
    #[derive(Debug)]
    struct Merging;

    impl Tokenizer for Merging {
        fn vocab_size(&self) -> usize {
            Bytes.vocab_size()
        }
        fn encode(&self, text: &str) -> Result<Vec<i32>> {
            Bytes.encode(&text.replace("!\n", "\u{2}"))
        }
        fn decode_bytes(&self, ids: &[i32]) -> Vec<u8> {
            Bytes.decode_bytes(ids)
        }
        fn to_json(&self) -> String {
            Bytes.to_json()
        }
        fn tokens(&self) -> String {
            Bytes.tokens()
        }
        fn token(&self, id: i32) -> Option<String> {
            Bytes.token(id)
        }
        fn opening(&self) -> Result<Vec<i32>> {
            Bytes.opening()
        }
    }

    /// As in the harness, the ids of a context are the ids of the context alone, even if text and continuation together are tokenized
    /// differently.
    #[test]
    fn a_context_has_the_ids_that_it_has_alone() {
        for (question, before) in [(Some(1), vec![1]), (None, vec![])] {
            let made = Beginning::of(vec![1], true, question).request(&Merging, "ab!\n", " c").unwrap();
            // Together, the tokens are `a`, `b`, the joint token, ` `, `c`. `ab!` alone has three ids, so the last two tokens follow.
            let wanted = [before.clone(), Bytes.encode("ab! c").unwrap()].concat();
            assert_eq!(made, Request::behind(before.len() + 3, wanted));
        }
    }

    /// Byte 1 is BOS. A text may also contain this byte.
    #[test]
    fn a_question_begins_as_the_harness_has_it() {
        let with = Beginning::of(vec![1], true, Some(1));
        let without = Beginning::of(vec![1], true, None);
        let of = |beginning: &Beginning, context: &str, continuation: &str| {
            let Request { ids, scored } = beginning.request(&Bytes, context, continuation).unwrap();
            (ids, scored[0].start)
        };
        let ids = |text: &str| Bytes.encode(text).unwrap();
        // The columns are: context, continuation, ids with BOS and index of the first scored id, and the same without BOS.
        for (context, continuation, wanted, plain) in [
            ("ab", " c", ("\u{1}ab c", 3), ("ab c", 2)),
            ("ab ", " c", ("\u{1}ab  c", 3), ("ab  c", 2)),
            // These characters are white space in Python: two of ASCII's separators, and one of Unicode's.
            ("ab\u{1c}\u{1f}", "c", ("\u{1}ab\u{1c}\u{1f}c", 3), ("ab\u{1c}\u{1f}c", 2)),
            ("ab\u{2003}", "c", ("\u{1}ab\u{2003}c", 3), ("ab\u{2003}c", 2)),
            // A text that begins with BOS gets no second BOS.
            ("\u{1}ab", " c", ("\u{1}ab c", 3), ("\u{1}ab c", 3)),
            // An empty question is replaced by the token before a text, with or without BOS before questions.
            ("", "c", ("\u{1}c", 1), ("\u{1}c", 1)),
            (" ", "c", ("\u{1} c", 1), ("\u{1} c", 1)),
            ("", "\u{1}c", ("\u{1}c", 1), ("\u{1}c", 1)),
        ] {
            assert_eq!(
                of(&with, context, continuation),
                (ids(wanted.0), wanted.1),
                "{context:?}, {continuation:?}"
            );
            assert_eq!(
                of(&without, context, continuation),
                (ids(plain.0), plain.1),
                "{context:?}, {continuation:?}"
            );
        }
        // A new line precedes a text of bytes, even if the text begins with a new line.
        let bytes = Beginning::of(vec![10], false, None);
        assert_eq!(of(&bytes, "", "\nc"), (ids("\n\nc"), 1));
        assert_eq!(of(&bytes, "\n", "c"), (ids("\n\nc"), 1));
    }
}
