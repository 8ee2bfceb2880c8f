//! Finds the answers in the text of a conversation. The answers are a model's targets.

use std::ops::Range;

use super::builtins::{BEGIN, END};
use super::{ChatTemplate, Conversation, MARKED, PLAIN, Rendered};
use crate::error::{Error, Result};

/// Largest total size, in bytes, of the texts of a conversation whose template rewrites earlier answers.
const MOST_BYTES: usize = 64 << 20;

/// Number of characters of a text that an error message shows.
const SHOWN: usize = 60;

impl ChatTemplate {
    /// The texts of a conversation, each with the ranges of its answers. Each answer that is a target is in exactly one text.
    ///
    /// If the template has `{% generation %}` blocks, there is one text, and the contents of these blocks are the answers. Otherwise an
    /// answer is the text that its message adds to the prompt; the prompt is rendered from the preceding messages, as when the model
    /// generates the answer. Some templates rewrite an earlier answer in the course of the conversation, for example without its reasoning.
    /// Such an answer gets a separate text: the conversation up to and including the answer.
    ///
    /// # Errors
    /// Returns the errors of [`ChatTemplate::text`], and [`Error::Config`] with the key `messages`, naming a message whose rendering does
    /// not begin with its prompt.
    pub fn render(&self, of: &Conversation) -> Result<Vec<Rendered>> {
        let text = self.text(of, false)?;
        match self.has_generation {
            true => Ok(vec![self.marked(of, text)?]),
            false => self.added(of, text),
        }
    }

    /// The answers that `{% generation %}` blocks mark.
    fn marked(&self, of: &Conversation, text: String) -> Result<Rendered> {
        let marked = self.rendered(MARKED, of, of.messages.len(), false)?;
        let (mut answers, mut begin, mut at) = (Vec::new(), None, 0);
        let mut bare = String::with_capacity(text.len());
        for c in marked.chars() {
            match (c, begin) {
                (BEGIN, None) => begin = Some(at),
                (END, Some(start)) => {
                    answers.push(start..at);
                    begin = None;
                }
                _ => {
                    bare.push(c);
                    at += c.len_utf8();
                }
            }
        }
        if bare != text || begin.is_some() {
            return Err(self.fail(
                "what it does with `generation` blocks changes them, so that they say no answers".into(),
            ));
        }
        let mut answers = learnt(of, &text, answers)?;
        answers.retain(|answer| !answer.is_empty());
        Ok(Rendered { text, answers })
    }

    /// The text that each answer adds to its prompt, from the last answer backwards. An answer is in the text of the whole conversation if
    /// that text begins with the conversation up to the answer. Otherwise the answer gets a separate text.
    fn added(&self, of: &Conversation, text: String) -> Result<Vec<Rendered>> {
        let (mut texts, mut bytes) = (Vec::new(), text.len());
        let mut now = Rendered { text, answers: Vec::new() };
        for at in of.answers().rev().filter(|at| of.learnt[*at]) {
            let prompt = self.rendered(PLAIN, of, at, true)?;
            let whole = match at + 1 == of.messages.len() {
                true => now.text.clone(),
                false => self.rendered(PLAIN, of, at + 1, false)?,
            };
            if !whole.starts_with(&prompt) {
                return Err(Error::config("messages", self.not_following(at, &prompt, &whole)));
            }
            let end = now.answers.last().map_or(now.text.len(), |next| next.start);
            if whole.len() > end || !now.text.starts_with(&whole) {
                bytes += whole.len();
                if bytes > MOST_BYTES {
                    let most = MOST_BYTES >> 20;
                    let why = format!(
                        "would be more than {most} MiB of text: the chat template of {} writes earlier answers otherwise as a conversation goes on, so that each \
                         is one of a text of its own",
                        self.path.display()
                    );
                    return Err(Error::config("messages", why));
                }
                texts
                    .push(std::mem::replace(&mut now, Rendered { text: whole.clone(), answers: Vec::new() }));
            }
            now.answers.push(prompt.len()..whole.len());
        }
        texts.push(now);
        texts.iter_mut().for_each(|of| of.answers.reverse());
        // The text of the whole conversation has no answers if the messages after the last answer change this answer's text.
        let is_learnt = |of: &Rendered| of.answers.iter().any(|answer| !answer.is_empty());
        texts.reverse();
        if texts.len() > 1 {
            texts.retain(is_learnt);
        }
        Ok(texts)
    }

    /// The error of a message whose rendering does not begin with its prompt.
    fn not_following(&self, at: usize, prompt: &str, whole: &str) -> String {
        let same = prompt.bytes().zip(whole.bytes()).take_while(|(a, b)| a == b).count();
        let from = (0..=same).rev().find(|at| prompt.is_char_boundary(*at) && whole.is_char_boundary(*at));
        let shown = |text: &str| -> String { text[from.unwrap_or(0)..].chars().take(SHOWN).collect() };
        format!(
            "message {} does not follow what the chat template of {} writes before an answer to those before it: where that goes on with {:?}, the \
             conversation with the message has {:?}; a template with {{% generation %}} would say what the answers are",
            at + 1,
            self.path.display(),
            shown(prompt),
            shown(whole)
        )
    }
}

/// Selects the answers that are targets from the answers in the template's blocks.
fn learnt(of: &Conversation, text: &str, answers: Vec<Range<usize>>) -> Result<Vec<Range<usize>>> {
    let messages: Vec<usize> = of.answers().collect();
    if messages.iter().all(|at| of.learnt[*at]) {
        return Ok(answers);
    }
    let says = |at: usize, answer: &Range<usize>| {
        let content = of.messages[at].get_attr("content").unwrap_or_default();
        content.as_str().is_some_and(|content| text[answer.clone()].contains(content.trim()))
    };
    let is_told = messages.len() == answers.len()
        && messages.iter().zip(&answers).all(|(at, answer)| says(*at, answer));
    if !is_told {
        let why = "say that an answer is not learnt, and which of the template's {% generation %} blocks is that answer cannot be told";
        return Err(Error::config("messages", why));
    }
    let pairs = messages.into_iter().zip(answers);
    Ok(pairs.filter(|(at, _)| of.learnt[*at]).map(|(_, answer)| answer).collect())
}
