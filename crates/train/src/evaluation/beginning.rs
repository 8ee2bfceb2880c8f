//! What stands before a text that is scored, and the request that a text and what continues it are.

use super::Request;
use crate::config::Config;
use crate::error::Result;
use crate::tokenizer::{AUTO, Bytes, Tokenizer};

/// What stands before a text that is scored.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Beginning {
    /// Before a text of which nothing comes before.
    alone: Vec<i32>,
    /// Whether that is a token that texts begin or end with, which a document of ids or a conversation may have already.
    is_control: bool,
    /// Before a question, where that has anything before it.
    question: Option<i32>,
}

impl Beginning {
    /// Of a run, as its own documents have it: the token that `data.bos_token` puts before them, before questions too. Where it puts none, they follow
    /// the token that ends the one before (`data.eos_token`).
    ///
    /// # Errors
    /// As [`Config::framing`].
    pub fn of_run(config: &Config) -> Result<Self> {
        let framing = config.framing()?;
        Self::new(config, framing.bos.or(framing.eos), framing.bos)
    }

    /// Of a folder, as lm-evaluation-harness has it: before a text the `bos_token` of the tokenizer's files, also where texts do not begin with it, else
    /// what ends texts; before a question what the tokenizer puts before every text, if it does. `data.bos_token` names another for both.
    ///
    /// # Errors
    /// As [`Config::framing`].
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

    /// These, for tests.
    #[cfg(test)]
    pub(super) fn of(alone: Vec<i32>, is_control: bool, question: Option<i32>) -> Self {
        Self { alone, is_control, question }
    }

    /// What stands before these ids of a document.
    pub(super) fn of_document(&self, ids: &[i32]) -> &[i32] {
        let has_it = self.is_control && ids.first() == self.alone.first();
        if has_it { &[] } else { &self.alone }
    }

    /// What the longest of it takes.
    pub(super) fn len(&self) -> usize {
        self.alone.len()
    }

    /// The ids of a text and of what continues it, as one request: those of the text alone, and behind them what the whole has behind as many ids. Where
    /// a token of the whole reaches across the end of the text, these are not the ids of the whole. Spaces at the end of the text belong to the
    /// continuation. A text of nothing else is what a text has before it.
    ///
    /// These are the rules of lm-evaluation-harness's `loglikelihood` and `_encode_pair`.
    ///
    /// # Errors
    /// For a text that has no ids.
    pub fn request(&self, tokenizer: &dyn Tokenizer, context: &str, continuation: &str) -> Result<Request> {
        let text = context.trim_end_matches(is_space);
        let whole = tokenizer.encode_with_control(&[context, continuation].concat())?;
        let alone = if text.is_empty() { Vec::new() } else { tokenizer.encode_with_control(text)? };
        let before = match &self.question {
            _ if alone.is_empty() => self.of_document(&whole),
            Some(bos) if alone.first() != Some(bos) => std::slice::from_ref(bos),
            _ => &[],
        };
        // Of a text of nothing that begins with what stands before one, that is what the rest stands behind.
        let first = (before.len() + alone.len()).max(1);
        let behind = whole.get(alone.len()..).unwrap_or_default();
        Ok(Request::behind(first, [before, &alone, behind].concat()))
    }
}

/// What Python's `str.rstrip` takes away: white space, and the separators of ASCII.
fn is_space(of: char) -> bool {
    of.is_whitespace() || ('\u{1c}'..='\u{1f}').contains(&of)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Bytes, but for an exclamation mark and what ends its line, which are one token.
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

    /// The context is what it is alone, also where the whole is cut elsewhere: so the harness has it.
    #[test]
    fn a_context_has_the_ids_that_it_has_alone() {
        for (question, before) in [(Some(1), vec![1]), (None, vec![])] {
            let made = Beginning::of(vec![1], true, question).request(&Merging, "ab!\n", " c").unwrap();
            // The whole is `a`, `b`, the token of both, ` `, `c`: behind as many as `ab!` has are the last two.
            let wanted = [before.clone(), Bytes.encode("ab! c").unwrap()].concat();
            assert_eq!(made, Request::behind(before.len() + 3, wanted));
        }
    }

    /// Byte 1 is the token that texts begin with, as a text may have it too.
    #[test]
    fn a_question_begins_as_the_harness_has_it() {
        let with = Beginning::of(vec![1], true, Some(1));
        let without = Beginning::of(vec![1], true, None);
        let of = |beginning: &Beginning, context: &str, continuation: &str| {
            let Request { ids, scored } = beginning.request(&Bytes, context, continuation).unwrap();
            (ids, scored[0].start)
        };
        let ids = |text: &str| Bytes.encode(text).unwrap();
        // (context, continuation, ids with the token and the first that is scored, the same without)
        for (context, continuation, wanted, plain) in [
            ("ab", " c", ("\u{1}ab c", 3), ("ab c", 2)),
            ("ab ", " c", ("\u{1}ab  c", 3), ("ab  c", 2)),
            // White space of Python: two of ASCII's separators, and one of Unicode's.
            ("ab\u{1c}\u{1f}", "c", ("\u{1}ab\u{1c}\u{1f}c", 3), ("ab\u{1c}\u{1f}c", 2)),
            ("ab\u{2003}", "c", ("\u{1}ab\u{2003}c", 3), ("ab\u{2003}c", 2)),
            // What begins with it has it once.
            ("\u{1}ab", " c", ("\u{1}ab c", 3), ("\u{1}ab c", 3)),
            // Of no question it is what stands before a text, wherever that is asked for.
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
        // A new line stands before a text of bytes; one that begins with it has two.
        let bytes = Beginning::of(vec![10], false, None);
        assert_eq!(of(&bytes, "", "\nc"), (ids("\n\nc"), 1));
        assert_eq!(of(&bytes, "\n", "c"), (ids("\n\nc"), 1));
    }
}
