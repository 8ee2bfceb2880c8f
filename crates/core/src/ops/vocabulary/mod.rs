//! Operations over the vocabulary: embedding, cross-entropy, the head with its loss.

pub(super) mod cross_entropy;
pub(super) mod embed;
pub(super) mod head_loss;

pub use cross_entropy::{CrossEntropy, CrossEntropyOut, verify_ids};
pub use embed::{Embed, EmbedBackward, EmbedOut};
pub use head_loss::{HeadCodecs, HeadLoss, HeadLossChunk, HeadLossGrad, HeadLossOut, head_chunk};
