//! Attention: which heads the tensor cores take, and what the backward pass keeps of each query meanwhile.

use crate::Temporary;
use nibble_core::ops::AttentionBackward;
use nibble_core::{Backend, DType, Error, Result};
use std::fmt;

/// Elements of heads that the tensor cores' kernels are built for: of queries and keys, and of values.
pub const HEADS: [(usize, usize); 3] = [(64, 64), (128, 128), (192, 128)];

/// The backward pass pads a head's queries to a multiple of this: the tiles of every kernel divide it.
pub const PADDED_QUERIES: usize = 128;

/// Elements of a head at most, of queries and keys or of values: four tiles of such heads must fit a multiprocessor.
pub const HEAD_LIMIT: usize = 256;

/// Refuses heads that no kernel takes.
///
/// # Errors
/// [`Error::Shape`] beyond [`HEAD_LIMIT`].
pub fn check_heads(op: &'static str, (head_dim, value_dim): (usize, usize)) -> Result<()> {
    for (name, dim) in [("head_dim", head_dim), ("value_dim", value_dim)] {
        if dim > HEAD_LIMIT {
            return Err(Error::shape(op, name, dim, format!("at most {HEAD_LIMIT} on a GPU")));
        }
    }
    Ok(())
}

/// Which cores attend.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum AttentionPath {
    /// The tensor cores.
    TensorCores,
    /// The ordinary cores, many times slower.
    OrdinaryCores {
        /// Why, in words.
        why: String,
    },
}

impl AttentionPath {
    /// For heads of queries and keys, and of values.
    pub fn of(dtype: DType, heads: (usize, usize)) -> Self {
        let of = |(head, value)| match head == value {
            true => format!("{head}"),
            false => format!("{head} with values of {value}"),
        };
        if dtype != DType::Bf16 {
            return Self::OrdinaryCores { why: format!("heads in {dtype}, not bf16") };
        }
        if HEADS.contains(&heads) {
            return Self::TensorCores;
        }
        Self::OrdinaryCores { why: format!("heads of {}, not {}", of(heads), HEADS.map(of).join(" or ")) }
    }
}

impl fmt::Display for AttentionPath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::TensorCores => f.write_str("tensor cores"),
            Self::OrdinaryCores { why } => write!(f, "ordinary cores: {why}"),
        }
    }
}

/// Queries of all heads as the backward pass lists them, each head's padded: of `heads` heads and sequences of `seq_len` tokens.
pub const fn padded_queries(sequences: usize, heads: usize, seq_len: usize) -> usize {
    sequences * seq_len.next_multiple_of(PADDED_QUERIES) * heads
}

/// What the backward pass takes beside its gradients: two numbers a query.
pub fn backward_temporaries<B: Backend>(op: &AttentionBackward<'_, B>) -> [Temporary; 2] {
    let (sequences, heads) = (op.q.rows / op.seq_len, op.q.cols / op.head_dim);
    let bytes = padded_queries(sequences, heads, op.seq_len) * size_of::<f32>();
    [Temporary::new("log-sum-exp", bytes), Temporary::new("out · dout", bytes)]
}
