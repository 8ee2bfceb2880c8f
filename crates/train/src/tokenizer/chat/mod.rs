//! Conversations as text. Chat templates of published models are rendered in the environment that Hugging Face's `transformers` provides.

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

/// A rendered conversation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rendered {
    /// The text of the conversation.
    pub text: String,
    /// The byte ranges of the answers, which are the targets. The ranges are sorted and disjoint.
    pub answers: Vec<Range<usize>>,
}

/// A chat template.
#[derive(Debug)]
pub struct ChatTemplate {
    /// The template's file.
    path: PathBuf,
    source: String,
    engine: Engine,
    /// Names and texts of the tokens that templates insert.
    tokens: BTreeMap<String, String>,
    /// Whether the template itself marks answers, with `{% generation %}`.
    has_generation: bool,
}

/// Indices of the engine's two programs: the template, and the template with marks around answers.
const PLAIN: usize = 0;
const MARKED: usize = 1;

impl ChatTemplate {
    /// Compiles a template from the file `path`. `tokens` contains the tokens that the template may name, such as `bos_token`.
    ///
    /// # Errors
    /// Returns [`Error::Tokenizer`] naming the file, if the template is invalid.
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

    /// Starts the engine of a template, and returns whether the template itself marks answers.
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

    /// The template's original text.
    #[must_use]
    pub fn source(&self) -> &str {
        &self.source
    }

    /// The same template at another time: `strftime_now` returns this time, in UTC, instead of the current time.
    ///
    /// # Errors
    /// Returns [`Error::Tokenizer`] if no thread can be started for the template.
    pub fn at(mut self, time: SystemTime) -> Result<Self> {
        self.engine = Self::start(&self.path, &self.source, Some(time))?.0;
        Ok(self)
    }

    /// Announces that a new file of conversations begins. The file gets a new reserve of work, in addition to the conversations' own
    /// budgets.
    pub fn begin_file(&self) {
        self.engine.bounds.begin_file();
    }

    /// Whether the conversations of the file have used up the reserve. Callers should then render no more conversations, because each may
    /// take long.
    #[must_use]
    pub fn is_spent(&self) -> bool {
        self.engine.bounds.is_spent()
    }

    /// Renders a conversation as text, optionally followed by the beginning of an answer.
    ///
    /// # Errors
    /// Returns [`Error::Tokenizer`] naming the template's file, with the template's error.
    pub fn text(&self, of: &Conversation, add_generation_prompt: bool) -> Result<String> {
        of.require_named_by(&self.source).map_err(|why| Error::config("messages", why))?;
        self.rendered(PLAIN, of, of.messages.len(), add_generation_prompt)
    }

    /// Renders the first `count` messages as text.
    fn rendered(
        &self,
        program: usize,
        of: &Conversation,
        count: usize,
        add_generation_prompt: bool,
    ) -> Result<String> {
        // As in `transformers`, a row's variables override the tokenizer's tokens. Messages, tools and the prompt flag override both.
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

/// The error of a template, in one line.
fn said(failure: &Failure) -> String {
    let error = match failure {
        Failure::Said(error) => error,
        Failure::Broken => return "the engine of templates fails on it".into(),
    };
    let line = error.line().map_or(String::new(), |line| format!("line {line}: "));
    let detail = error.detail().unwrap_or_default();
    match error.kind() {
        // The template itself raises this error.
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

/// Replaces the `{% generation %}` blocks of a template by blocks of this filter, because the engine does not support custom blocks.
/// Returns the new text, and whether there were such blocks.
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
