//! Where an answer ends: the token that a chat template writes behind answers, and that a model learns with them.

use super::{ChatTemplate, Conversation};
use crate::error::Result;
use crate::tokenizer::Tokenizer;

/// The answer of a conversation that a template is tried with.
const ANSWER: &str = "Four bits";

/// Conversations whose answers end as those of a model do: one with a text, and one with a call of a tool.
const TRIED: [&str; 2] = [
    r#"[{"role": "user", "content": "What is a nibble?"}, {"role": "assistant", "content": "Four bits"}]"#,
    r#"[{"role": "user", "content": "What is a nibble?"}, {"role": "assistant", "content": "Four bits",
        "tool_calls": [{"id": "aaaaaaaaa", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}]}]"#,
];

impl ChatTemplate {
    /// The tokens that end answers, among what is learnt of them: the first control token behind the text of an answer, and the last one behind a call of a
    /// tool. Empty where the template writes none there; none where it refuses a plain conversation, of which nothing is known then.
    ///
    /// # Errors
    /// What the tokenizer says of the texts.
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
