//! Operations over the vocabulary: the embedding, the cross-entropy, and the head with its loss.

pub(super) mod cross_entropy;
pub(super) mod embed;
pub(super) mod head_loss;

pub use {cross_entropy::*, embed::*, head_loss::*};
