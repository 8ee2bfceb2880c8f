//! Tokenizers of published models, read from a `tokenizer.json` by Hugging Face's crate `tokenizers`. The crate panics if the tables of a
//! file contradict each other. This module catches the panic and returns an error that names the file.

use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use tokenizers::{Decoder, Encoding, ModelWrapper, PostProcessorWrapper};

use super::parts::{self, Placed};
use super::settings::{DEFAULT, Settings};
use super::{
    CHAT_TEMPLATE_FILE, ChatTemplate, NO_TOKEN, SETTINGS_FILE, TOKENIZER_FILE, Tokenizer, growth, listed,
    transformers_tokenizer,
};
use crate::error::{Error, Result};
use crate::files;

/// Largest size of a file in bytes. Files with vocabularies of a quarter of a million tokens have 35 MB.
const MOST_BYTES: u64 = 512 << 20;

/// The tokenizer of a `tokenizer.json` and of the files in its folder.
pub struct HuggingFace {
    path: PathBuf,
    /// The text of `tokenizer.json`, including tokens that only other files list.
    text: String,
    vocab_size: usize,
    /// The tokenizer that encodes the text of a control token as plain text.
    plain: tokenizers::Tokenizer,
    /// A copy of the tokenizer that encodes the text of a control token as this token. The copy, which is created at first use, is needed
    /// because this behaviour is a setting of the whole tokenizer.
    control: OnceLock<tokenizers::Tokenizer>,
    settings: Settings,
    /// Whether each text needs a trial first, because the file's steps may enlarge it much.
    grows: bool,
    /// The ids that the file adds before and after a text.
    around: [Vec<i32>; 2],
    bos: Option<i32>,
    eos: Option<i32>,
}

impl fmt::Debug for HuggingFace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { path, vocab_size, bos, eos, .. } = self;
        f.debug_struct("HuggingFace")
            .field("path", path)
            .field("vocab_size", vocab_size)
            .field("bos", bos)
            .field("eos", eos)
            .finish_non_exhaustive()
    }
}

/// Reads the text of a `tokenizer.json`.
///
/// # Errors
/// Returns [`Error::Io`] if the file cannot be read.
pub(super) fn read(path: &Path) -> Result<String> {
    files::read_text(path, MOST_BYTES).map_err(Error::io(path))
}

impl HuggingFace {
    /// Creates a tokenizer from `text`, the contents of the file `path`, and from the settings in the file's folder.
    ///
    /// # Errors
    /// Returns [`Error::Tokenizer`] for a tokenizer that is invalid or has random ids, and [`Error::Io`] if a call of the operating system
    /// fails.
    pub fn of(path: &Path, text: String) -> Result<Self> {
        let settings = Settings::beside(path)?;
        let fail = |why: String| Error::Tokenizer { path: path.to_owned(), why };
        let grows = growth::check(&text).map_err(fail)?;
        let read = caught(|| tokenizers::Tokenizer::from_bytes(&text)).map_err(fail)?;
        let mut plain = read.map_err(|e| fail(format!("is no tokenizer that can be read: {e}")))?;
        let mut text = text;
        if caught(|| settings.listed.add_to(&mut plain)).map_err(fail)?? {
            if grows {
                let why = "has a `normalizer` that may make a text much longer, so that the tokens which files beside it list are not added: write them into \
                           its `added_tokens`";
                return Err(fail(why.into()));
            }
            text = listed::with_tokens(&text, &plain).map_err(fail)?;
        }
        if let ModelWrapper::BPE(model) = plain.get_model()
            && model.dropout.is_some_and(|dropout| dropout > 0.0)
        {
            return Err(fail("has a `dropout`: the same text would have other ids each time".into()));
        }
        // Truncation and padding are removed, because the file may contain them from an earlier use.
        plain.with_truncation(None).map_err(|e| fail(e.to_string()))?;
        plain.with_padding(None);
        plain.set_encode_special_tokens(true);
        let vocab_size = caught(|| plain.get_vocab(true).into_values().max()).map_err(fail)?;
        let vocab_size = match vocab_size {
            Some(most) if i32::try_from(most).is_ok() => most as usize + 1,
            Some(most) => return Err(fail(format!("has the id {most}, beyond 2^31 - 1"))),
            None => return Err(fail("has no tokens".into())),
        };
        let path = path.to_owned();
        let control = OnceLock::new();
        let around = <[Vec<i32>; 2]>::default();
        let mut tokenizer =
            Self { path, text, vocab_size, plain, control, settings, grows, around, bos: None, eos: None };
        tokenizer.around = tokenizer.put_around()?;
        (tokenizer.bos, tokenizer.eos) = tokenizer.ends()?;
        // The post-processor is removed because it is no longer needed, and because some post-processors shift offsets.
        tokenizer.plain.with_post_processor(None::<PostProcessorWrapper>);
        Ok(tokenizer)
    }

    /// The ids that the file adds before and after a text.
    pub(super) fn around(&self) -> &[Vec<i32>; 2] {
        &self.around
    }

    /// Computes the ids that the file adds before and after a text. The computation needs the post-processor.
    fn put_around(&self) -> Result<[Vec<i32>; 2]> {
        let ids = |add| self.ids(&self.plain, "a", add);
        let (bare, whole) = (ids(false)?, ids(true)?);
        let first = whole.windows(bare.len().max(1)).position(|part| part == bare).unwrap_or(0);
        Ok([whole[..first].to_vec(), whole[(first + bare.len()).min(whole.len())..].to_vec()])
    }

    /// BOS and EOS according to `tokenizer_config.json`. If this file names no BOS and EOS, the ids that `tokenizer.json` adds around a
    /// text are used.
    fn ends(&self) -> Result<(Option<i32>, Option<i32>)> {
        let [before, behind] = &self.around;
        let named = |key: &str| match self.settings.tokens.get(key) {
            None => Ok(None),
            Some(token) => match self.token_id(token) {
                Some(id) => Ok(Some(id)),
                None => Err(Error::Tokenizer {
                    path: self.path.with_file_name(SETTINGS_FILE),
                    why: format!("`{key}` is {token:?}, which is no token of {}", self.path.display()),
                }),
            },
        };
        let bos = named("bos_token")?;
        let eos = named("eos_token")?;
        let begins = match (self.settings.add_bos_token, bos) {
            (Some(begins), _) => begins,
            (None, Some(bos)) => before.first() == Some(&bos),
            (None, None) => true,
        };
        let bos = bos.or(before.first().copied()).filter(|_| begins);
        Ok((bos, eos.or(behind.last().copied())))
    }

    /// The tokenizer that encodes the text of a control token as this token (if `control` is true) or as plain text.
    fn of_control(&self, control: bool) -> &tokenizers::Tokenizer {
        if !control {
            return &self.plain;
        }
        self.control.get_or_init(|| {
            let mut control = self.plain.clone();
            control.set_encode_special_tokens(false);
            control
        })
    }

    /// The tokens of a text, each with its byte range.
    fn placed(&self, of: &tokenizers::Tokenizer, text: &str) -> Result<Vec<Placed>> {
        let encoding = self.encoding(text, of, |of| of.encode(text, false))?;
        let added = of.get_added_vocabulary().get_added_tokens_decoder();
        let place = |(id, (begin, end)): (&u32, &(usize, usize))| {
            let (mut begin, mut end) = (*begin, *end);
            // White space that a token absorbs is not part of the token's text.
            if let Some(token) = added.get(id)
                && let Some(at) = text.get(begin..end).and_then(|text| text.find(&token.content))
            {
                begin += at;
                end = begin + token.content.len();
            }
            Placed { id: *id as i32, begin, end }
        };
        Ok(encoding.get_ids().iter().zip(encoding.get_offsets()).map(place).collect())
    }

    /// The ids of a text. If `add` is true, the ids include those that the file adds around a text.
    fn ids(&self, of: &tokenizers::Tokenizer, text: &str, add: bool) -> Result<Vec<i32>> {
        let encoding = self.encoding(text, of, |of| of.encode_fast(text, add))?;
        // The conversion is lossless, because all ids are below `vocab_size`, an i32.
        Ok(encoding.get_ids().iter().map(|id| *id as i32).collect())
    }

    /// The result or the error of `encode`.
    fn encoding(
        &self,
        text: &str,
        of: &tokenizers::Tokenizer,
        encode: impl FnOnce(&tokenizers::Tokenizer) -> tokenizers::Result<Encoding>,
    ) -> Result<Encoding> {
        let fail = |why: String| {
            let start: String = text.chars().take(40).collect();
            Error::Tokenizer { path: self.path.clone(), why: format!("a text that begins {start:?}: {why}") }
        };
        if self.grows {
            caught(|| growth::try_text(of.get_normalizer(), text)).and_then(|tried| tried).map_err(fail)?;
        }
        caught(|| encode(of)).map_err(fail)?.map_err(|e| fail(e.to_string()))
    }
}

impl Tokenizer for HuggingFace {
    fn vocab_size(&self) -> usize {
        self.vocab_size
    }

    fn encode(&self, text: &str) -> Result<Vec<i32>> {
        self.ids(&self.plain, text, false)
    }

    fn encode_with_control(&self, text: &str) -> Result<Vec<i32>> {
        self.ids(self.of_control(true), text, false)
    }

    fn encode_parts(&self, parts: &[&str], control: bool, continues: bool) -> Result<Vec<Vec<i32>>> {
        let of = self.of_control(control);
        let (ids, placed) = (|text: &str| self.ids(of, text, false), |text: &str| self.placed(of, text));
        match parts {
            [whole] if !continues => Ok(vec![ids(whole)?]),
            [whole] => Ok(vec![parts::going_on(&placed, &ids, whole)?]),
            _ => parts::encode(&placed, parts, continues),
        }
    }

    fn decode_bytes(&self, ids: &[i32]) -> Vec<u8> {
        // Some decoders panic on an empty list.
        if ids.is_empty() {
            return Vec::new();
        }
        let tokens: Vec<String> =
            ids.iter().map(|id| self.token(*id).unwrap_or_else(|| NO_TOKEN.into())).collect();
        let Some(decoder) = self.plain.get_decoder() else { return tokens.join(" ").into_bytes() };
        let text = caught(|| decoder.decode(tokens.clone()));
        // The crate's decoders accept all tokens of their own vocabulary. If a decoder fails, the tokens' strings are returned.
        text.ok().and_then(Result::ok).unwrap_or_else(|| tokens.concat()).into_bytes()
    }

    fn to_json(&self) -> String {
        self.text.clone()
    }

    fn tokens(&self) -> String {
        format!("those of {}", self.path.display())
    }

    fn token(&self, id: i32) -> Option<String> {
        self.plain.id_to_token(u32::try_from(id).ok()?)
    }

    fn token_id(&self, token: &str) -> Option<i32> {
        self.plain.token_to_id(token).and_then(|id| i32::try_from(id).ok())
    }

    fn is_control(&self, id: i32) -> bool {
        let added = self.plain.get_added_vocabulary().get_added_tokens_decoder();
        u32::try_from(id).is_ok_and(|id| added.contains_key(&id))
    }

    fn bos(&self) -> Option<i32> {
        self.bos
    }

    fn named_bos(&self) -> Option<i32> {
        self.settings.tokens.get("bos_token").and_then(|token| self.token_id(token)).or(self.bos)
    }

    fn eos(&self) -> Option<i32> {
        self.eos
    }

    fn opening(&self) -> Result<Vec<i32>> {
        match self.bos.or(self.eos) {
            Some(id) => Ok(vec![id]),
            None => self.encode("\n"),
        }
    }

    fn chat_template(&self, name: &str) -> Result<Option<ChatTemplate>> {
        let Settings { chat_templates, chat_template_file, tokens, .. } = &self.settings;
        let name = if name.is_empty() { DEFAULT } else { name };
        let Some(text) = chat_templates.get(name) else { return Ok(None) };
        let is_file = name == DEFAULT && chat_template_file.is_some();
        let file = if is_file { CHAT_TEMPLATE_FILE } else { SETTINGS_FILE };
        ChatTemplate::new(&self.path.with_file_name(file), text, tokens).map(Some)
    }

    fn files(&self) -> Vec<(&'static str, String)> {
        let settings = self.settings.text.clone().unwrap_or_else(transformers_tokenizer);
        let template = self.settings.chat_template_file.clone();
        let mut files = vec![(TOKENIZER_FILE, self.text.clone()), (SETTINGS_FILE, settings)];
        files.extend(template.map(|template| (CHAT_TEMPLATE_FILE, template)));
        files
    }
}

/// Calls a function of the crate, and converts a panic to an error. Inconsistent tables may cause such a panic. Reuse of the tokenizer
/// after a panic is safe, because a tokenizer is only read.
fn caught<T>(of: impl FnOnce() -> T) -> Result<T, String> {
    catch_unwind(AssertUnwindSafe(of)).map_err(|_| "its tables contradict each other".to_owned())
}
