//! Attention on a GPU: which head sizes run on the tensor cores, and what the backward pass stores per query.
//!
//! If no heads share keys and the heads are long, the backward pass is one kernel. The kernel computes the gradients of keys and values and
//! stores the gradients of scores (at most 512 MiB). Some heads later, the kernel computes the gradients of queries from the stored
//! gradients. Otherwise the backward pass computes the scores twice, once for keys and values and once for queries. Every sum has one
//! owner, which adds the terms in a fixed order.

use crate::Temporary;
use nibble_core::ops::AttentionBackward;
use nibble_core::{Backend, DType, Error, Result};
use std::fmt;

/// The head sizes for which there are tensor-core kernels, as (head size of queries and keys, head size of values).
pub const HEADS: [(usize, usize); 3] = [(64, 64), (128, 128), (192, 128)];

/// The number to a multiple of which the backward pass pads the queries of a head. This number is a multiple of the query tile size of
/// every kernel.
pub const PADDED_QUERIES: usize = 128;

/// The largest head size of queries and keys, and of values, that any kernel supports. Four tiles of heads of this size must fit into the
/// shared memory of a multiprocessor.
pub const HEAD_LIMIT: usize = 256;

/// Checks that there is a kernel for these head sizes.
///
/// # Errors
/// [`Error::Shape`] if a head size exceeds [`HEAD_LIMIT`].
pub fn check_heads(op: &'static str, (head_dim, value_dim): (usize, usize)) -> Result<()> {
    for (name, dim) in [("head_dim", head_dim), ("value_dim", value_dim)] {
        if dim > HEAD_LIMIT {
            return Err(Error::shape(op, name, dim, format!("at most {HEAD_LIMIT} on a GPU")));
        }
    }
    Ok(())
}

/// Which cores compute attention.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum AttentionPath {
    /// The tensor cores.
    TensorCores,
    /// The CUDA cores, which are many times slower.
    OrdinaryCores {
        /// Why the tensor cores do not compute attention, in words.
        why: String,
    },
}

impl AttentionPath {
    /// The path (kernels) with or without the causal mask. `heads` is the head size of queries and keys, and the head size of values.
    pub fn masked(dtype: DType, heads: (usize, usize), causal: bool) -> Self {
        match causal {
            true => Self::of(dtype, heads),
            false => Self::OrdinaryCores { why: "no causal mask".into() },
        }
    }

    /// The path (kernels) with the causal mask. `heads` is the head size of queries and keys, and the head size of values.
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

/// The number of queries of all heads, including padding, in the lists of the backward pass, for `heads` heads and sequences of `seq_len`
/// tokens. The queries of each head are padded to a multiple of [`PADDED_QUERIES`].
pub const fn padded_queries(sequences: usize, heads: usize, seq_len: usize) -> usize {
    sequences * seq_len.next_multiple_of(PADDED_QUERIES) * heads
}

/// The plan of the backward pass in one kernel, which stores dS, the gradients of the scores, in global memory. The kernel computes dk and
/// dv of a head first, and dq of this head some heads later.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StoredScoreGrads {
    /// The number of heads by which the computation of dk and dv is ahead of the computation of dq.
    pub ahead: usize,
    /// The number of heads whose dS is stored at a time, at least `ahead`.
    pub slots: usize,
    /// The number of bytes of dS of one head.
    pub slot_bytes: usize,
}

impl StoredScoreGrads {
    /// Limit on the bytes of dS that are stored at a time.
    const BYTES: usize = 512 << 20;
    /// Number of keys of a CTA that computes dk and dv.
    const KEYS: usize = 128;
    /// Number of queries of a block of dS. A block has all keys up to its last query.
    const BLOCK: usize = 256;
    /// Number of CTAs for dk and dv that run while the CTA with the most queries of a head runs. This number fills the 132 multiprocessors
    /// of an H100.
    const CTAS_AHEAD: usize = 211;

    /// Chooses the plan for BF16 heads. `heads` is the head size of queries and keys, and the head size of values. Returns `None` in three
    /// cases: there is no tensor-core kernel for the heads, two kernels are faster (short heads, or heads that share keys), or dS of long
    /// sequences needs too much memory. If there are two kernels instead, each of them computes dS itself.
    pub fn of(
        heads: (usize, usize),
        sequences: usize,
        [query_heads, kv_heads]: [usize; 2],
        seq_len: usize,
    ) -> Option<Self> {
        let all = sequences * query_heads;
        if !HEADS.contains(&heads) || heads.0 <= 64 || query_heads != kv_heads || all == 0 || seq_len == 0 {
            return None;
        }
        let blocks = seq_len.div_ceil(Self::BLOCK);
        let pairs = blocks.checked_mul(blocks + 1)?.checked_mul(Self::BLOCK * Self::BLOCK / 2)?;
        let slot_bytes = pairs.checked_mul(size_of::<u16>())?;
        let ahead = Self::CTAS_AHEAD.div_ceil(seq_len.div_ceil(Self::KEYS)) + 1;
        let (ahead, slots) = (ahead.min(all), (ahead * 3 / 2).min(all));
        let fits = slots.checked_mul(slot_bytes)? <= Self::BYTES;
        fits.then_some(Self { ahead, slots, slot_bytes })
    }

    /// The number of bytes of dS that are in memory at a time.
    pub const fn bytes(&self) -> usize {
        self.slots * self.slot_bytes
    }
}

/// The temporary memory of the backward pass, which contains two numbers per query, and dS if the kernel stores dS.
pub fn backward_temporaries<B: Backend>(op: &AttentionBackward<'_, B>) -> Vec<Temporary> {
    let (sequences, heads) = (op.q.rows / op.seq_len, op.q.cols / op.head_dim);
    let bytes = padded_queries(sequences, heads, op.seq_len) * size_of::<f32>();
    let stored = StoredScoreGrads::of(
        (op.head_dim, op.value_dim),
        sequences,
        [heads, op.k.cols / op.head_dim],
        op.seq_len,
    );
    let score_grads =
        stored.filter(|_| op.q.dtype() == DType::Bf16 && op.causal).map(|stored| stored.bytes());
    let queries = ["log-sum-exp", "out · dout"].map(|what| Temporary::new(what, bytes));
    queries.into_iter().chain(score_grads.map(|bytes| Temporary::new("gradients of scores", bytes))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn score_grads_are_stored_where_they_fit_and_keys_are_not_shared() {
        let of = |heads, sequences, all: [usize; 2], seq_len| {
            StoredScoreGrads::of(heads, sequences, all, seq_len).map(|stored| (stored.ahead, stored.slots))
        };
        assert_eq!(of((192, 128), 4, [128, 128], 4096), Some((8, 12)));
        assert_eq!(of((192, 128), 2, [32, 32], 8192), Some((5, 7)));
        assert_eq!(of((192, 128), 1, [16, 16], 16384), None);
        assert_eq!(of((128, 128), 1, [5, 5], 100), Some((5, 5)));
        assert_eq!(of((128, 128), 1, [8, 2], 4096), None);
        assert_eq!(of((64, 64), 1, [8, 8], 4096), None);
        assert_eq!(of((192, 192), 1, [8, 8], 4096), None);
        assert_eq!(of((128, 128), 1, [8, 8], usize::MAX), None);
        // A head has 16 blocks of 256 queries, of which the i-th has i blocks of 256 keys; a score has 2 bytes.
        let stored = StoredScoreGrads::of((192, 128), 4, [128, 128], 4096).unwrap();
        assert_eq!(stored.bytes(), 12 * 136 * 256 * 256 * 2);
        let one = StoredScoreGrads::of((192, 128), 1, [1, 1], 1).unwrap();
        assert_eq!((one.ahead, one.bytes()), (1, 256 * 256 * 2));
    }
}
