//! Conversations as text: chat templates of published models, in the environment that Hugging Face's `transformers` provides.

mod answers;
mod bounds;
mod builtins;
mod conversation;
mod date;
mod ending;
mod engine;
mod guard;
mod python;

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use minijinja::{ErrorKind, Value};

use self::bounds::{EXCEEDED, Warrant};
use self::builtins::{BARE_FILTER, MARK_FILTER, RAISED};
use self::engine::{Engine, Failure};
use crate::error::{Error, Result};

pub use self::conversation::{ANSWERS, Conversation};

/// The text of a conversation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rendered {
    /// The text.
    pub text: String,
    /// The byte ranges of the answers, which are the targets, sorted and disjoint.
    pub answers: Vec<Range<usize>>,
}

/// A chat template.
#[derive(Debug)]
pub struct ChatTemplate {
    /// Its file.
    path: PathBuf,
    source: String,
    engine: Engine,
    /// Texts of tokens that templates insert, by name.
    tokens: BTreeMap<String, String>,
    /// Whether it marks answers itself, by `{% generation %}`.
    has_generation: bool,
}

/// Indices of the engine's programs: the template, and the template with marks around answers.
const PLAIN: usize = 0;
const MARKED: usize = 1;

impl ChatTemplate {
    /// A template from the file `path`. `tokens`: the tokens that it may name, such as `bos_token`.
    ///
    /// # Errors
    /// [`Error::Tokenizer`] naming the file, for an invalid template.
    pub fn new(path: &Path, text: &str, tokens: &BTreeMap<String, String>) -> Result<Self> {
        let (engine, has_generation) = Self::start(path, text, None)?;
        Ok(Self {
            path: path.to_owned(),
            source: text.to_owned(),
            engine,
            tokens: tokens.clone(),
            has_generation,
        })
    }

    /// The engine of a template, and whether the template marks answers itself.
    fn start(path: &Path, text: &str, time: Option<SystemTime>) -> Result<(Engine, bool)> {
        let (plain, has_generation) = without_generation(text, BARE_FILTER);
        let mut texts = vec![("chat", plain)];
        if has_generation {
            texts.push(("marked", without_generation(text, MARK_FILTER).0));
        }
        let engine = Engine::start(texts, time).map_err(|failure| Error::Tokenizer {
            path: path.to_owned(),
            why: format!("its chat template cannot be read: {}", said(&failure)),
        })?;
        Ok((engine, has_generation))
    }

    /// Its original text.
    #[must_use]
    pub fn source(&self) -> &str {
        &self.source
    }

    /// The same template on another day: `strftime_now` gives this time, in UTC, rather than the current time.
    ///
    /// # Errors
    /// [`Error::Tokenizer`] if no thread can be started for it.
    pub fn at(mut self, time: SystemTime) -> Result<Self> {
        self.engine = Self::start(&self.path, &self.source, Some(time))?.0;
        Ok(self)
    }

    /// Starts a file of conversations, with a new reserve of work beyond the conversations' own budgets.
    pub fn begin_file(&self) {
        self.engine.bounds.begin_file();
    }

    /// Whether the conversations of the file have used up that reserve. Render no more of them then: each may take as long.
    #[must_use]
    pub fn is_spent(&self) -> bool {
        self.engine.bounds.is_spent()
    }

    /// The text of a conversation, optionally followed by the beginning of an answer.
    ///
    /// # Errors
    /// [`Error::Tokenizer`] naming the template's file, with the template's error.
    pub fn text(&self, of: &Conversation, add_generation_prompt: bool) -> Result<String> {
        of.require_named_by(&self.source).map_err(|why| Error::config("messages", why))?;
        self.rendered(PLAIN, of, of.messages.len(), add_generation_prompt)
    }

    /// The text of the first `count` messages.
    fn rendered(
        &self,
        program: usize,
        of: &Conversation,
        count: usize,
        add_generation_prompt: bool,
    ) -> Result<String> {
        // As in `transformers`, a row's variables override the tokenizer's tokens, and messages, tools and the prompt flag override both.
        let mut context = BTreeMap::from([("documents".to_owned(), Value::from(()))]);
        context.extend(self.tokens.iter().map(|(name, token)| (name.clone(), token.into())));
        context.extend(of.variables.iter().cloned());
        context.extend([
            ("messages".to_owned(), Value::from_iter(of.messages[..count].iter().cloned())),
            ("tools".to_owned(), of.tools.clone().unwrap_or(Value::from(()))),
            ("add_generation_prompt".to_owned(), add_generation_prompt.into()),
        ]);
        let context = Value::from(context);
        let warrant = Warrant { messages: count, bytes: of.bytes };
        self.engine.run(program, context, warrant).map_err(|failure| self.fail(said(&failure)))
    }

    fn fail(&self, why: String) -> Error {
        Error::Tokenizer { path: self.path.clone(), why: format!("its chat template: {why}") }
    }
}

/// The error of a template in one line.
fn said(failure: &Failure) -> String {
    let error = match failure {
        Failure::Said(error) => error,
        Failure::Broken => return "the engine of templates fails on it".into(),
    };
    let line = error.line().map_or(String::new(), |line| format!("line {line}: "));
    let detail = error.detail().unwrap_or_default();
    match error.kind() {
        // An error that the template itself raises.
        ErrorKind::InvalidOperation if detail.starts_with(RAISED) => {
            detail.trim_start_matches(RAISED).to_owned()
        }
        ErrorKind::InvalidOperation if detail.starts_with(EXCEEDED) => {
            format!("{line}{}", detail.trim_start_matches(EXCEEDED))
        }
        kind if detail.is_empty() => format!("{line}{kind}"),
        kind => format!("{line}{kind}: {detail}"),
    }
}

/// The template with `{% generation %}` blocks replaced by blocks of this filter, and whether there were any. The engine knows no custom
/// blocks.
fn without_generation(text: &str, filter: &str) -> (String, bool) {
    let (mut out, mut rest, mut found) = (String::new(), text, false);
    while let Some(start) = rest.find("{%") {
        let (before, tag) = rest.split_at(start);
        out += before;
        let Some(end) = tag.find("%}") else {
            rest = tag;
            break;
        };
        let inside = &tag[2..end];
        let name = inside.trim_start_matches(['-', '+']).trim_end_matches(['-', '+']).trim();
        let instead = match name {
            "generation" => inside.replacen("generation", &format!("filter {filter}"), 1),
            "endgeneration" => inside.replacen("endgeneration", "endfilter", 1),
            _ => inside.to_owned(),
        };
        found |= name == "generation";
        out += &format!("{{%{instead}%}}");
        rest = &tag[end + 2..];
    }
    (out + rest, found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn generation_blocks_become_filters_and_nothing_else_changes() {
        let text = "{%- if a %}{%- generation -%} x {%+ endgeneration %}{% endif %}{{ generation }} {% ";
        let (out, found) = without_generation(text, "f");
        assert!(found);
        assert_eq!(out, "{%- if a %}{%- filter f -%} x {%+ endfilter %}{% endif %}{{ generation }} {% ");
        assert_eq!(
            without_generation("{% if a %}b{% endif %}", "f"),
            ("{% if a %}b{% endif %}".into(), false)
        );
    }
}
