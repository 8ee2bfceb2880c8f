//! What a model makes of given texts: log-likelihoods of continuations, tasks that are scored by them, and perplexities.

mod packing;
mod perplexity;
mod task;

pub use packing::Request;
pub(crate) use packing::pack;
pub use perplexity::{Perplexity, Windows};
pub use task::{Question, Score, Scored, Task};

use crate::error::Result;
use crate::tokenizer::Tokenizer;

/// The ids of a text and of what continues it, as one request: the text is encoded alone, and what the whole has behind as many ids is the
/// continuation. Spaces at the end of the text belong to the continuation. In place of a text of nothing else stands the token that a text begins with.
///
/// These are the rules of lm-evaluation-harness's `_encode_pair` for a tokenizer that puts no token before a text. Where one does, the harness has that
/// token before the context, and here there is none.
///
/// # Errors
/// For a text that has no ids.
pub fn request(tokenizer: &dyn Tokenizer, context: &str, continuation: &str) -> Result<Request> {
    let text = context.trim_end();
    if text.is_empty() {
        let mut ids = beginning(tokenizer)?;
        let first = ids.len();
        ids.extend(tokenizer.encode_with_control(&[context, continuation].concat())?);
        return Ok(Request::behind(first, ids));
    }
    let whole = tokenizer.encode_with_control(&[context, continuation].concat())?;
    let first = tokenizer.encode_with_control(text)?.len();
    Ok(Request::behind(first, whole))
}

/// What stands before a text of which nothing comes before: the token that a text begins with, or the one that another ends with.
pub(crate) fn beginning(tokenizer: &dyn Tokenizer) -> Result<Vec<i32>> {
    match tokenizer.bos().or(tokenizer.eos()) {
        Some(id) => Ok(vec![id]),
        None => tokenizer.opening(),
    }
}
