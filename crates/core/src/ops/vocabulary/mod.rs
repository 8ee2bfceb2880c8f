//! Operations over the vocabulary: embedding, cross-entropy, the head with its loss.

pub(super) mod cross_entropy;
pub(super) mod embed;
pub(super) mod head_loss;
pub(super) mod head_operands;

pub use {cross_entropy::*, embed::*, head_loss::*, head_operands::*};
