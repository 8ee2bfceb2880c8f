//! Operations over the vocabulary: the embedding, the cross-entropy, and the head with its loss.

pub mod cross_entropy;
pub mod embed;
pub mod head_loss;

pub(crate) use {cross_entropy::*, embed::*, head_loss::*};
