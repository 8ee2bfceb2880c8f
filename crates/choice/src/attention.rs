//! Attention: which heads the tensor cores take, and what the backward pass keeps of each query meanwhile.

use crate::Temporary;
use nibble_core::DType;

/// Elements of heads that the tensor cores' kernels are built for: of queries and keys, and of values.
pub const HEADS: [(usize, usize); 3] = [(64, 64), (128, 128), (192, 128)];

/// The backward pass pads a head's queries to a multiple of this: the tiles of every kernel divide it.
pub const PADDED_QUERIES: usize = 128;

/// Why attention of such heads goes to the ordinary cores, in words; nothing where it does not.
pub fn obstacle(dtype: DType, heads: (usize, usize)) -> Option<String> {
    let of = |(head, value)| match head == value {
        true => format!("{head}"),
        false => format!("{head} with values of {value}"),
    };
    if dtype != DType::Bf16 {
        return Some(format!("heads in {dtype}, not bf16"));
    }
    (!HEADS.contains(&heads)).then(|| format!("heads of {}, not {}", of(heads), HEADS.map(of).join(" or ")))
}

/// Queries of all heads as the backward pass lists them, each head's padded: of `heads` heads and sequences of `seq_len` tokens.
pub const fn padded_queries(sequences: usize, heads: usize, seq_len: usize) -> usize {
    sequences * seq_len.next_multiple_of(PADDED_QUERIES) * heads
}

/// What the backward pass takes beside its gradients: two numbers a query.
pub fn backward_temporaries(sequences: usize, heads: usize, seq_len: usize) -> [Temporary; 2] {
    let bytes = padded_queries(sequences, heads, seq_len) * size_of::<f32>();
    [Temporary::new("log-sum-exp", bytes), Temporary::new("out · dout", bytes)]
}
