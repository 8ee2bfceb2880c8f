//! The kinds of attention of layers in a model with sliding windows, as a configuration writes them.

use serde::{Deserialize, Serialize};

/// The keys to which the queries of a layer attend within their document, as named in a configuration.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum LayerAttention {
    /// The last `model.sliding_window` keys, the query's own included.
    Sliding,
    /// All keys up to the query's own.
    Full,
}
