//! Operations over the vocabulary: embedding, LM head and loss.

pub(crate) mod cross_entropy;
pub(crate) mod embed;
pub(crate) mod head_loss;
pub(crate) mod head_rows;

pub(crate) use {cross_entropy::*, embed::*, head_loss::*};

/// Every kernel instance of this module.
pub(crate) fn instances() -> Vec<crate::ops::Instance> {
    [embed::instances(), cross_entropy::instances(), head_loss::instances(), head_rows::instances()].concat()
}
