//! What a model predicts of given texts: log-likelihoods of continuations, tasks that are scored by them, and perplexities.
//!
//! [`Beginning`] says what stands before a text, separately for a run and for a published folder. Texts of a few tokens are packed as
//! documents of sequences, and each token's loss is added to its text's ([`Request`]). A [`Perplexity`] cuts each document into
//! [`Windows`]; of a window, only those tokens count that no earlier window predicted. Documents are read piece by piece and need no
//! cache.

mod beginning;
mod held_out;
mod packing;
mod perplexity;
mod task;

pub use beginning::Beginning;
pub use held_out::HeldOut;
pub use packing::Request;
pub(crate) use packing::pack;
pub use perplexity::{Perplexity, Windows};
pub use task::{Question, Score, Scored, Task};
