//! What a model makes of given texts: log-likelihoods of continuations, tasks that are scored by them, and perplexities.

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
