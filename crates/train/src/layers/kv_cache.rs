//! Cache of keys and values of a sequence, for text that is generated token by token.

use crate::cx::Cx;
use nibble_core::ops::{Attention, AttentionDecode};
use nibble_core::{DType, Data, Error, Kernels, Result, Tensor};
use std::ops::Range;

/// The rotated keys and the values of all tokens of a sequence so far, for each key-value head of one layer.
#[derive(Debug)]
pub struct KvCache<B: Kernels> {
    /// The keys `[positions, heads of keys · head_dim]`.
    k: Tensor<B>,
    /// The values `[positions, heads of keys · value_dim]`.
    v: Tensor<B>,
    heads: CachedHeads,
    /// Number of rows that are filled.
    len: usize,
}

/// The number and sizes of the heads whose keys and values are cached.
#[derive(Debug, Clone, Copy)]
pub(super) struct CachedHeads {
    /// Number of key/value heads.
    pub kv_heads: usize,
    /// Number of elements of one head's query or key.
    pub head_dim: usize,
    /// Number of elements of one head's value.
    pub value_dim: usize,
    /// The factor by which attention scores are multiplied.
    pub scale: f32,
    /// The largest number of keys to which a query attends; `None` if the layer has no sliding window. The cache stores the keys of all
    /// tokens, also of those outside the window.
    pub window: Option<usize>,
}

impl<B: Kernels> KvCache<B> {
    /// An empty cache with capacity for `positions` tokens.
    pub(super) fn new(b: &B, dtype: DType, positions: usize, heads: CachedHeads) -> Result<Self> {
        let zeros = |dim| Tensor::zeros(b, dtype, positions, heads.kv_heads * dim);
        Ok(Self { k: zeros(heads.head_dim)?, v: zeros(heads.value_dim)?, heads, len: 0 })
    }

    /// Empties the cache, so that it can be used for another sequence.
    pub fn clear(&mut self) {
        self.len = 0;
    }

    /// Number of tokens in the cache.
    pub(super) fn len(&self) -> usize {
        self.len
    }

    /// Attention's output for tokens that follow the tokens in the cache. The call adds the new tokens' keys and values to the cache.
    /// Several tokens at once are allowed only if the cache is empty. `sinks` is F32 `[1, heads of queries]`.
    pub(super) fn attended(
        &mut self,
        cx: &Cx<'_, B>,
        [q, k, v]: [&Tensor<B>; 3],
        sinks: Option<&Tensor<B>>,
    ) -> Result<Tensor<B>> {
        let CachedHeads { head_dim, value_dim, scale, window, .. } = self.heads;
        let (tokens, first) = (q.rows, self.len);
        for (from, to) in [(k, &mut self.k), (v, &mut self.v)] {
            copy_rows(cx.b, from, 0..tokens, to, first)?;
        }
        self.len += tokens;
        if first == 0 {
            let op = Attention::new([q, k, v], (head_dim, value_dim), tokens);
            let windows = cx.windows(window, tokens)?;
            return Ok(Attention { scale, windows, sinks, ..op }.run(cx.b)?.out);
        }
        let first = window.map_or(0, |window| self.len.saturating_sub(window));
        let op = AttentionDecode::new([q, &self.k, &self.v], (head_dim, value_dim), self.len);
        AttentionDecode { scale, first, sinks, ..op }.run(cx.b)
    }
}

/// Copies the rows `rows` of one tensor into another tensor, from row `at` on. Both tensors have the same type and number of columns.
pub fn copy_rows<B: Kernels>(
    b: &B,
    from: &Tensor<B>,
    rows: Range<usize>,
    to: &mut Tensor<B>,
    at: usize,
) -> Result<()> {
    let cols = to.cols;
    if from.cols != cols {
        return Err(Error::shape("copy_rows", "columns", from.cols, cols));
    }
    let (range, at) = (rows.start * cols..rows.end * cols, at * cols);
    match (&from.data, &mut to.data) {
        (Data::F32(from), Data::F32(to)) => b.copy(from, range, to, at),
        (Data::Bf16(from), Data::Bf16(to)) => b.copy(from, range, to, at),
        _ => Err(Error::shape("copy_rows", "type", from.dtype(), to.dtype())),
    }
}
