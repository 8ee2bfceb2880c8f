//! Finds the token at the end of an answer. A chat template writes this token after answers, and a model learns the token together with the
//! answers.

use super::{ChatTemplate, Conversation};
use crate::error::Result;
use crate::tokenizer::Tokenizer;

/// The answer in the trial conversation.
const ANSWER: &str = "Four bits";

/// Trial conversations with answers of a model: one answer has a text, and one has a tool call.
const TRIED: [&str; 2] = [
    r#"[{"role": "user", "content": "What is a nibble?"}, {"role": "assistant", "content": "Four bits"}]"#,
    r#"[{"role": "user", "content": "What is a nibble?"}, {"role": "assistant", "content": "Four bits",
        "tool_calls": [{"id": "aaaaaaaaa", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}]}]"#,
];

impl ChatTemplate {
    /// The target tokens that end answers: the first control token after the text of an answer, and the last control token after a tool
    /// call. The list is empty if the template writes no such tokens. The result is `None` if the template refuses a plain conversation,
    /// because the tokens are then unknown.
    ///
    /// # Errors
    /// Returns the errors of the tokenizer.
    pub fn ends_of_answers(&self, tokenizer: &dyn Tokenizer) -> Result<Option<Vec<i32>>> {
        let mut ends = Vec::new();
        for (number, tried) in TRIED.into_iter().enumerate() {
            let rendered = Conversation::from_json(tried).and_then(|tried| self.render(&tried));
            let answer = rendered.ok().and_then(|mut texts| {
                let last = texts.pop()?;
                let range = last.answers.last()?.clone();
                Some((last.text, range))
            });
            let Some((text, range)) = answer else {
                match number {
                    0 => return Ok(None),
                    _ => continue,
                }
            };
            let answer = &text[range.clone()];
            let said = answer.rfind(ANSWER).map_or(0, |at| at + ANSWER.len());
            let behind = range.start + said..range.end;
            let parts = [&text[..behind.start], &text[behind]];
            let ids = tokenizer.encode_parts(&parts, true, false)?.pop().unwrap_or_default();
            let mut control = ids.into_iter().filter(|id| tokenizer.is_control(*id));
            let end = if number == 0 { control.next() } else { control.next_back() };
            ends.extend(end.filter(|end| !ends.contains(end)));
        }
        Ok(Some(ends))
    }
}
