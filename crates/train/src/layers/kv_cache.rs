//! What attention remembers of a sequence while text is made token by token.

use nibble_core::ops::{Attention, AttentionDecode};
use nibble_core::{DType, Data, Error, Kernels, Result, Tensor};
use std::ops::Range;

/// Keys and values of a sequence's tokens so far, in one layer, rotated, of each head that has its own.
#[derive(Debug)]
pub struct KvCache<B: Kernels> {
    /// `[positions, heads of keys · head_dim]`.
    k: Tensor<B>,
    /// `[positions, heads of keys · value_dim]`.
    v: Tensor<B>,
    heads: CachedHeads,
    /// Rows that are filled.
    len: usize,
}

/// Heads whose keys and values are remembered.
#[derive(Debug, Clone, Copy)]
pub(super) struct CachedHeads {
    /// Heads that have keys and values.
    pub kv_heads: usize,
    /// Elements of a head of queries and keys.
    pub head_dim: usize,
    /// Elements of a head of values.
    pub value_dim: usize,
    /// What scores are multiplied by.
    pub scale: f32,
}

impl<B: Kernels> KvCache<B> {
    /// Room for so many tokens, none of them there.
    pub(super) fn new(b: &B, dtype: DType, positions: usize, heads: CachedHeads) -> Result<Self> {
        let zeros = |dim| Tensor::zeros(b, dtype, positions, heads.kv_heads * dim);
        Ok(Self { k: zeros(heads.head_dim)?, v: zeros(heads.value_dim)?, heads, len: 0 })
    }

    /// Another sequence begins.
    pub fn clear(&mut self) {
        self.len = 0;
    }

    /// Tokens that are there.
    pub(super) fn len(&self) -> usize {
        self.len
    }

    /// What attention gives for tokens that follow those that are there, whose keys and values are put here. Several at once only where there
    /// are none. `sinks`: F32 `[1, heads of queries]`.
    pub(super) fn attended(
        &mut self,
        b: &B,
        [q, k, v]: [&Tensor<B>; 3],
        sinks: Option<&Tensor<B>>,
    ) -> Result<Tensor<B>> {
        let CachedHeads { head_dim, value_dim, scale, .. } = self.heads;
        let (tokens, first) = (q.rows, self.len);
        for (from, to) in [(k, &mut self.k), (v, &mut self.v)] {
            copy_rows(b, from, 0..tokens, to, first)?;
        }
        self.len += tokens;
        if first == 0 {
            let op = Attention::new([q, k, v], (head_dim, value_dim), tokens);
            return Ok(Attention { scale, sinks, ..op }.run(b)?.out);
        }
        let op = AttentionDecode::new([q, &self.k, &self.v], (head_dim, value_dim), self.len);
        AttentionDecode { scale, sinks, ..op }.run(b)
    }
}

/// Copies rows to those from `at` on of a tensor of the same type and as many columns.
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
