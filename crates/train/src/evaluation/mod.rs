//! Evaluation on given texts: log-likelihoods of continuations, tasks scored by log-likelihoods, and perplexities.
//!
//! [`Beginning`] contains the tokens before a text, with different rules for a run and for a published folder. Short texts are packed as
//! documents into sequences, and each token's loss is added to the sum of its text ([`Request`]). A [`Perplexity`] cuts each document into
//! [`Windows`]. A token of a window is counted only if no earlier window predicted this token. Documents are read piece by piece and need
//! no cache.

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
