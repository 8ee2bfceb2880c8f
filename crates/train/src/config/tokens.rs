//! The tokenizer of a configuration's data, which is opened once.

use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

use super::{Config, RANDOM, SYNTHETIC};
use crate::checkpoint::Checkpoint;
use crate::data::holds_ids;
use crate::error::{Error, Result};
use crate::pretrained::{Initial, companions_of, is_folder};
use crate::tokenizer::{
    self, BYTE_VOCAB, Bytes, Framing, Ids, SharedTokenizer, Symbols, TOKENIZER_FILE, Tokenizer,
};

/// Where a configuration's tokenizer comes from.
#[derive(Debug, Clone, PartialEq, Eq)]
enum TokenizerIn {
    /// The tokenizer belongs to the built-in language.
    BuiltIn,
    /// The tokenizer is the file or folder of `data.tokenizer`.
    File(PathBuf),
    /// The tokenizer belongs to the model in `train.init_from`.
    Model(PathBuf),
    /// No key names a tokenizer.
    Nowhere,
}

/// An opened tokenizer and its place. Clones of a configuration share the tokenizer. The configuration's keys determine the tokenizer
/// completely.
#[derive(Debug, Clone, Default)]
pub(crate) struct Opened {
    /// A started run's copies of the tokenizer.
    kept: Option<Kept>,
    tokenizer: OnceLock<(TokenizerIn, Option<SharedTokenizer>)>,
    /// The data sources, and whether they contain token ids.
    ids: OnceLock<(Vec<String>, bool)>,
}

/// Copies of the tokenizer that a run had at its start.
#[derive(Debug, Clone)]
struct Kept {
    /// The place of the original tokenizer.
    of: TokenizerIn,
    /// The model from which the run started, which has the same tokens; empty if there is none.
    init_from: String,
    /// Folders that may contain a copy, in order of preference.
    folders: Vec<PathBuf>,
}

impl Kept {
    fn folder(&self) -> Option<&Path> {
        self.folders.iter().map(PathBuf::as_path).find(|folder| folder.join(TOKENIZER_FILE).exists())
    }
}

impl PartialEq for Opened {
    fn eq(&self, _other: &Self) -> bool {
        true
    }
}

/// Folders with the tokenizer of a checkpoint's run. The checkpoint is first, but checkpoints of earlier versions have no copy.
pub(crate) fn kept_beside(checkpoint: &Checkpoint) -> Vec<PathBuf> {
    vec![checkpoint.path().to_owned(), companions_of(checkpoint.path())]
}

/// The message to the user if the chat template does not mark the end of answers.
pub const UNENDED: &str = "the chat template writes no control token after a learnt answer, so a model does not learn to end its answers; \
    `nibble generate --stop TEXT` stops before a given text";

impl Config {
    fn tokenizer_place(&self) -> TokenizerIn {
        let [file, model] = [&self.data.tokenizer, &self.train.init_from].map(Path::new);
        match () {
            () if self.is_synthetic() => TokenizerIn::BuiltIn,
            () if !self.data.tokenizer.is_empty() => TokenizerIn::File(file.to_owned()),
            () if !self.train.init_from.is_empty() => TokenizerIn::Model(model.to_owned()),
            () => TokenizerIn::Nowhere,
        }
    }

    /// The tokenizer of the data. The tokenizer comes from `data.tokenizer`, or from the model in `train.init_from`. Without
    /// `data.tokenizer` and `train.init_from`, tokens are bytes (for text), ids (for files of token ids), or symbols (for the built-in
    /// language). Random tokens have no tokenizer. The first call opens the tokenizer's file. The configuration and its later clones then
    /// share the opened tokenizer.
    ///
    /// # Errors
    /// Returns the errors of [`tokenizer::open`] and [`Initial::open`].
    pub fn tokenizer(&self) -> Result<Option<SharedTokenizer>> {
        let place = self.tokenizer_place();
        let named = match self.opened.tokenizer.get() {
            Some((opened, tokenizer)) if *opened == place => tokenizer.clone(),
            _ => {
                let tokenizer = self.open_tokenizer(&place)?;
                // If the tokenizer of earlier keys is already stored, this tokenizer is not stored.
                let _ = self.opened.tokenizer.set((place, tokenizer.clone()));
                tokenizer
            }
        };
        Ok(named.or_else(|| match (self.is_text(), self.holds_ids()) {
            (false, _) => None,
            (true, false) => Some(Arc::new(Bytes)),
            (true, true) => Some(Arc::new(Ids { vocab_size: self.model.vocab_size.max(1) })),
        }))
    }

    /// Whether the data are token ids. If the files no longer exist, their names decide.
    fn holds_ids(&self) -> bool {
        let sources: Vec<String> = self.data.sources().into_iter().map(|one| one.source).collect();
        match self.opened.ids.get() {
            Some((asked, holds)) if *asked == sources => *holds,
            _ => {
                let holds = self.is_text() && !self.data.bytes && sources.iter().any(|one| holds_ids(one));
                let _ = self.opened.ids.set((sources, holds));
                holds
            }
        }
    }

    fn open_tokenizer(&self, place: &TokenizerIn) -> Result<Option<SharedTokenizer>> {
        let kept = self.opened.kept.as_ref().filter(|kept| kept.of == *place).and_then(Kept::folder);
        match (kept, place) {
            (_, TokenizerIn::BuiltIn) => Ok(Some(Arc::new(Symbols))),
            (Some(folder), _) => self.open_kept(folder),
            (None, TokenizerIn::File(path)) => Ok(Some(tokenizer::open(path)?)),
            // A model whose vocabulary is larger than the number of bytes has its own tokens. A text's bytes would then be wrong token ids.
            (None, TokenizerIn::Model(path)) if self.is_text() && !self.holds_ids() && is_folder(path) => {
                let own = tokenizer::of_folder(path)?;
                if own.is_none() && self.model.vocab_size > BYTE_VOCAB {
                    tokenizer::open(path).map(Some)
                } else {
                    Ok(own)
                }
            }
            (None, TokenizerIn::Model(path)) => Initial::open(path)?.tokenizer(),
            (None, TokenizerIn::Nowhere) => Ok(None),
        }
    }

    fn open_kept(&self, folder: &Path) -> Result<Option<SharedTokenizer>> {
        Ok(tokenizer::of_folder(folder)?.filter(|own| self.is_known(&**own)))
    }

    /// The tokenizer of the model from which the run starts. A started run has a copy of this tokenizer, because the model may no longer
    /// exist.
    fn model_tokenizer(&self) -> Result<Option<SharedTokenizer>> {
        let kept = self.opened.kept.as_ref().filter(|kept| kept.init_from == self.train.init_from);
        match kept.and_then(Kept::folder) {
            Some(folder) => self.open_kept(folder),
            None => Initial::open(Path::new(&self.train.init_from))?.tokenizer(),
        }
    }

    /// Whether the tokenizer in a checkpoint of this configuration is the data's tokenizer. A run on random tokens stores the byte
    /// tokenizer if no key names another tokenizer.
    pub(crate) fn is_known(&self, own: &dyn Tokenizer) -> bool {
        self.data.source != RANDOM || own.to_json() != Bytes.to_json()
    }

    /// The tokens that are added before and after each document, according to `data.bos_token` and `data.eos_token`. If `data.source` is
    /// `random`, no tokens are added.
    ///
    /// # Errors
    /// Returns the errors of [`Config::tokenizer`], and [`Error::Config`] if the text of a configured token is no token.
    pub fn framing(&self) -> Result<Framing> {
        let Some(tokenizer) = self.tokenizer()? else { return Ok(Framing::default()) };
        Framing::of(&*tokenizer, &self.data.bos_token, &self.data.eos_token)
    }

    /// The tokens that end answers in conversations ([`ChatTemplate::ends_of_answers`]). Returns `None` if the data are no conversations,
    /// or if the tokens are unknown.
    ///
    /// [`ChatTemplate::ends_of_answers`]: crate::tokenizer::ChatTemplate::ends_of_answers
    ///
    /// # Errors
    /// Returns the errors of [`Config::tokenizer`].
    pub fn ends_of_answers(&self) -> Result<Option<Vec<i32>>> {
        if self.data.messages_key.is_empty() {
            return Ok(None);
        }
        let Some(tokenizer) = self.tokenizer()? else { return Ok(None) };
        match tokenizer.chat_template("")? {
            Some(template) => template.ends_of_answers(&*tokenizer),
            None => Ok(None),
        }
    }

    /// The message to the user if the data are conversations in which no token ends an answer.
    ///
    /// # Errors
    /// The errors of [`Config::ends_of_answers`].
    pub fn told_of_answers(&self) -> Result<Option<String>> {
        let is_endless = self.ends_of_answers()?.is_some_and(|ends| ends.is_empty());
        Ok(is_endless.then(|| UNENDED.to_owned()))
    }

    /// The configuration of a checkpoint, changed by `overrides`. The configuration uses the checkpoint's copy of the tokenizer.
    ///
    /// # Errors
    /// The errors of [`Config::stored`].
    pub fn of_checkpoint(checkpoint: &Checkpoint, overrides: &[String]) -> Result<Self> {
        let kept = kept_beside(checkpoint);
        Self::stored_beside(&checkpoint.position().config, checkpoint.path(), overrides, kept)
    }

    /// Uses the copies of `stored`'s tokenizer in these folders if the keys still name the same tokenizer. The tokenizer's original files
    /// may no longer exist.
    pub(crate) fn keep_tokenizer(&mut self, stored: &Self, folders: Vec<PathBuf>) {
        let (of, init_from) = (stored.tokenizer_place(), stored.train.init_from.clone());
        if matches!(of, TokenizerIn::File(_) | TokenizerIn::Model(_)) || !init_from.is_empty() {
            let kept = Some(Kept { of, init_from, folders });
            self.opened = Opened { kept, ..Opened::default() };
        }
    }

    /// What one token is called in messages, such as `byte` or `token`. If the tokenizer's file can no longer be opened, a token is called
    /// `token`. The byte tokenizer needs no file.
    #[must_use]
    pub fn unit(&self) -> &'static str {
        if self.model.sees_images() {
            return "image";
        }
        self.tokenizer().ok().flatten().map_or("token", |tokenizer| tokenizer.unit())
    }

    /// Checks that the embedding has a row for each token, and that `data.bos_token` and `data.eos_token` name tokens.
    ///
    /// # Errors
    /// [`Error::Config`] with the key at fault.
    pub(super) fn check_tokens(&self) -> Result<()> {
        let Some(tokenizer) = self.tokenizer()? else { return Ok(()) };
        let (rows, tokens) = (self.model.vocab_size, tokenizer.vocab_size());
        if rows < tokens {
            let why = format!("is {rows}, but the tokenizer has {tokens} tokens ({})", tokenizer.tokens());
            return Err(Error::config("model.vocab_size", why));
        }
        self.framing()?;
        self.check_model_tokens(&tokenizer)
    }

    /// Checks that the data has the same tokens as the model from which a run starts.
    fn check_model_tokens(&self, now: &SharedTokenizer) -> Result<()> {
        // Symbols cannot encode text, even if they are the model's tokenizer.
        let symbols_of_text = self.is_text() && now.to_json() == Symbols.to_json();
        let theirs = match self.tokenizer_place() {
            TokenizerIn::Model(_) => symbols_of_text.then(|| now.clone()),
            _ if self.train.init_from.is_empty() => None,
            _ => self.model_tokenizer()?.filter(|theirs| !tokenizer::agree(&**theirs, &**now)),
        };
        let Some(theirs) = theirs else { return Ok(()) };
        let now = if symbols_of_text { Bytes.tokens() } else { now.tokens() };
        let (key, is) = match self.data.tokenizer.as_str() {
            "" => ("data.source", self.data.source.as_str()),
            tokenizer => ("data.tokenizer", tokenizer),
        };
        let (path, theirs) = (&self.train.init_from, theirs.tokens());
        let why = format!("is \"{is}\", whose tokens are {now}, and those of {path} are {theirs}");
        Err(Error::config(key, why))
    }

    /// Whether the data are text whose tokens are bytes, because no key names a tokenizer.
    pub(super) fn has_bytes(&self) -> bool {
        self.is_text() && self.tokenizer_place() == TokenizerIn::Nowhere && !self.holds_ids()
    }

    /// Whether `data.source` defines its own tokens, as images do.
    pub(super) fn has_own_tokens(&self) -> bool {
        self.model.sees_images() || [SYNTHETIC, RANDOM].contains(&self.data.source.as_str())
    }
}
