//! Converts pieces of documents to token ids.

use std::ops::Range;

use super::source::{Content, Piece};
use crate::config::Config;
use crate::error::Error;
use crate::tokenizer::{Framing, SharedTokenizer, Tokenizer};

/// Converts texts to token ids, and checks that ids are below a bound.
#[derive(Debug, Clone)]
pub(super) struct Encoder {
    /// The tokenizer of text; `None` if each byte is a token, or if the files contain token ids.
    pub tokenizer: Option<SharedTokenizer>,
    /// Whether the files contain token ids of a tokenizer that the configuration does not name.
    pub has_ids: bool,
    pub framing: Framing,
    /// Upper bound of token ids: every id is less than this number.
    pub vocab_size: usize,
}

/// The token ids of a piece.
#[derive(Debug, Default)]
pub(crate) struct Encoded {
    pub ids: Vec<u32>,
    /// Number of bytes of the part of the text that consists of training targets; `None` if the piece contains token ids.
    pub bytes: Option<usize>,
    /// Ranges of ids that are not training targets. The ranges are sorted and not empty.
    pub unlearnt: Vec<Range<usize>>,
    /// Whether a document begins at the start of this piece.
    pub begins: bool,
}

impl Encoded {
    /// An empty piece of text.
    fn of_text(begins: bool) -> Self {
        Self { begins, bytes: Some(0), ..Self::default() }
    }

    /// Ends a part of the piece: `bytes` bytes of text whose ids begin at index `first`.
    fn part(&mut self, first: usize, bytes: usize, is_target: bool) {
        if is_target {
            self.bytes = self.bytes.map(|before| before + bytes);
        } else if self.ids.len() > first {
            self.unlearnt.push(first..self.ids.len());
        }
    }
}

impl Encoder {
    /// The encoder for the data of a configuration. Every token id is less than `vocab_size`.
    ///
    /// # Errors
    /// Returns the errors of [`Config::tokenizer`] and [`Config::framing`].
    pub fn of(config: &Config, vocab_size: usize) -> Result<Self, Error> {
        let (tokenizer, framing) = (config.tokenizer()?, config.framing()?);
        let has_ids = tokenizer.as_ref().is_some_and(|tokenizer| !tokenizer.has_text());
        let tokenizer = tokenizer.filter(|tokenizer| tokenizer.has_text() && tokenizer.unit() != "byte");
        Ok(Self { tokenizer, has_ids, framing, vocab_size })
    }

    /// An encoder whose tokens are bytes, and which adds no BOS or EOS tokens.
    pub fn of_bytes() -> Self {
        let framing = Framing::default();
        Self { tokenizer: None, has_ids: false, framing, vocab_size: super::BYTE_VOCAB }
    }

    /// Whether the tokens of a text are exactly the bytes of the text.
    pub fn is_bytes(&self) -> bool {
        self.tokenizer.is_none() && self.framing == Framing::default()
    }

    /// What the encoder's tokens are called in messages, in the plural.
    pub fn unit(&self) -> &'static str {
        if self.tokenizer.is_none() && !self.has_ids { "bytes" } else { "tokens" }
    }

    /// Upper bound of token ids: the size of the tokenizer's vocabulary, which may be smaller than the number of rows of the model's
    /// embedding.
    pub fn vocabulary(&self) -> usize {
        match &self.tokenizer {
            None if self.has_ids => self.vocab_size,
            None => super::BYTE_VOCAB,
            Some(tokenizer) => tokenizer.vocab_size(),
        }
    }

    /// The token ids of a piece of text. The error is the reason why the piece cannot be encoded.
    pub fn encode(&self, piece: Piece) -> Result<Encoded, String> {
        let begins = piece.begins;
        match piece.content {
            Content::Ids(ids) => {
                let within = |id: &u32| (*id as usize) < self.vocab_size;
                match ids.iter().position(|id| !within(id)) {
                    None => Ok(Encoded { ids, begins, ..Encoded::default() }),
                    Some(at) => Err(self.outside(ids[at].into(), Some(at))),
                }
            }
            Content::Text(parts) => {
                let mut encoded = Encoded::of_text(begins);
                match &self.tokenizer {
                    None => parts.iter().for_each(|(text, is_target)| {
                        let first = encoded.ids.len();
                        encoded.ids.extend(text.iter().map(|byte| u32::from(*byte)));
                        encoded.part(first, text.len(), *is_target);
                    }),
                    Some(tokenizer) => {
                        let texts: Vec<(&str, bool)> = parts
                            .iter()
                            .map(|(text, is_target)| Ok((utf8(text)?, *is_target)))
                            .collect::<Result<_, String>>()?;
                        self.add(&**tokenizer, &texts, false, &mut encoded)?;
                    }
                }
                self.frame(&mut encoded, piece.begins, piece.ends)?;
                Ok(encoded)
            }
            Content::Chat(parts) => {
                let mut encoded = Encoded::of_text(begins);
                let Some(tokenizer) = &self.tokenizer else {
                    return Err("is a conversation of no tokens".into());
                };
                let texts: Vec<(&str, bool)> =
                    parts.iter().map(|(text, is_target)| (text.as_str(), *is_target)).collect();
                self.add(&**tokenizer, &texts, true, &mut encoded)?;
                Ok(encoded)
            }
        }
    }

    /// Adds the ids of consecutive texts. Each text has a flag that says whether its tokens are targets.
    fn add(
        &self,
        tokenizer: &dyn Tokenizer,
        texts: &[(&str, bool)],
        control: bool,
        encoded: &mut Encoded,
    ) -> Result<(), String> {
        let parts: Vec<&str> = texts.iter().map(|(text, _)| *text).collect();
        let ids = tokenizer.encode_parts(&parts, control, !encoded.begins).map_err(|e| e.to_string())?;
        for ((text, is_target), ids) in texts.iter().zip(ids) {
            let first = encoded.ids.len();
            for id in ids {
                encoded.ids.push(self.checked(id)?);
            }
            encoded.part(first, text.len(), *is_target);
        }
        Ok(())
    }

    /// Adds BOS and EOS at the beginning and end of a document of text, unless the piece is empty. BOS is a target only if the piece has no
    /// non-target tokens.
    fn frame(&self, encoded: &mut Encoded, begins: bool, ends: bool) -> Result<(), String> {
        if encoded.ids.is_empty() {
            return Ok(());
        }
        if let Some(begin) = self.framing.bos.filter(|_| begins) {
            encoded.ids.insert(0, self.checked(begin)?);
            encoded.unlearnt.iter_mut().for_each(|run| *run = run.start + 1..run.end + 1);
            if !encoded.unlearnt.is_empty() {
                encoded.unlearnt.insert(0, 0..1);
            }
        }
        if let Some(end) = self.framing.eos.filter(|_| ends) {
            encoded.ids.push(self.checked(end)?);
        }
        Ok(())
    }

    fn checked(&self, id: i32) -> Result<u32, String> {
        let within = u32::try_from(id).ok().filter(|id| (*id as usize) < self.vocab_size);
        within.ok_or_else(|| self.outside(id.into(), None))
    }

    fn outside(&self, id: i64, at: Option<usize>) -> String {
        let place = at.map(|at| format!(" as token {} of it", at + 1)).unwrap_or_default();
        format!("has the id {id}{place}, and the vocabulary has {} (model.vocab_size)", self.vocab_size)
    }
}

/// Interprets bytes as UTF-8 text.
fn utf8(text: &[u8]) -> Result<&str, String> {
    std::str::from_utf8(text)
        .map_err(|e| format!("is no UTF-8 (byte {} of it is none), expected a text", e.valid_up_to() + 1))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tokenizer::Bytes;
    use std::sync::Arc;

    fn text(parts: &[(&str, bool)]) -> Piece {
        let parts = parts.iter().map(|(text, is_target)| (text.as_bytes().to_vec(), *is_target)).collect();
        Piece { begins: true, ends: true, content: Content::Text(parts) }
    }

    #[test]
    fn documents_are_framed_and_prompts_are_not_learnt() {
        let framing = Framing { bos: Some(300), eos: Some(301) };
        let encoder = Encoder { tokenizer: Some(Arc::new(Bytes)), has_ids: false, framing, vocab_size: 302 };
        let encoded = encoder.encode(text(&[("ab", true)])).unwrap();
        assert_eq!((encoded.ids, encoded.unlearnt), (vec![300, 97, 98, 301], vec![]));
        let encoded = encoder.encode(text(&[("ab", false), ("c", true)])).unwrap();
        assert_eq!((encoded.ids, encoded.unlearnt), (vec![300, 97, 98, 99, 301], vec![0..1, 1..3]));
        let inner = Piece { begins: false, ends: false, ..text(&[("c", true)]) };
        assert_eq!(encoder.encode(inner).unwrap().ids, [99]);
        assert_eq!(encoder.encode(text(&[("", true)])).unwrap().ids, [0; 0]);
    }

    /// A tokenizer may put a space before a text. Later parts of a document and later pieces of a long text get no such space.
    #[test]
    fn what_goes_on_with_a_text_begins_none() {
        let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/tokenizers/llama2");
        let tokenizer = crate::tokenizer::open(&folder).unwrap();
        let vocab_size = tokenizer.vocab_size();
        let encoder = Encoder {
            tokenizer: Some(tokenizer.clone()),
            framing: Framing::default(),
            vocab_size,
            has_ids: false,
        };
        let ids = |text: &str| -> Vec<u32> {
            tokenizer.encode(text).unwrap().into_iter().map(|id| id as u32).collect()
        };
        for (prompt, answer) in [("is five odd?\n", "yes it is"), ("[INST] is it? [/INST]", " it is ")] {
            let (whole, of_prompt) = (ids(&format!("{prompt}{answer}")), ids(prompt).len());
            assert_ne!([ids(prompt), ids(answer)].concat(), whole);
            let pair = text(&[(prompt, false), (answer, true)]);
            let parts = [(prompt, false), (answer, true)].map(|(text, learnt)| (text.to_owned(), learnt));
            let chat = Piece { content: Content::Chat(parts.into()), ..text(&[]) };
            for piece in [pair, chat] {
                let encoded = encoder.encode(piece).unwrap();
                assert_eq!(encoded.ids, whole);
                let unlearnt = 0..of_prompt;
                assert_eq!(encoded.unlearnt, [unlearnt]);
                assert_eq!(encoded.bytes, Some(answer.len()));
            }
            let inner = Piece { begins: false, ..text(&[(answer, true)]) };
            assert_eq!(encoder.encode(inner).unwrap().ids, whole[of_prompt..]);
        }
    }

    #[test]
    fn what_has_no_ids_is_told() {
        let encoder = |vocab_size| Encoder {
            tokenizer: Some(Arc::new(Bytes)),
            has_ids: false,
            framing: Framing::default(),
            vocab_size,
        };
        let ids = |ids: &[u32]| Piece { begins: true, ends: true, content: Content::Ids(ids.to_vec()) };
        let error = encoder(100).encode(ids(&[1, 99, 100])).unwrap_err();
        assert_eq!(error, "has the id 100 as token 3 of it, and the vocabulary has 100 (model.vocab_size)");
        let error = encoder(100).encode(text(&[("a~", true)])).unwrap_err();
        assert!(error.starts_with("has the id 126, and the vocabulary has 100"), "{error}");
        let content = Content::Text(vec![(vec![b'a', 0xff], true)]);
        let error = encoder(256).encode(Piece { begins: true, ends: true, content }).unwrap_err();
        assert!(error.contains("byte 2 of it"), "{error}");
    }
}
