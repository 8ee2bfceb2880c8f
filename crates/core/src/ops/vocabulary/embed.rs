use crate::error::expect_eq;
use crate::{Agreement, Backend, DType, Result, Tensor};

/// Looks up rows of an embedding table: `x[i] = table[ids[i]]`, rounded to `dtype`.
///
/// If an id is bad (negative or too large), its row is zeros, and the op counts the id. A caller should read the number of bad ids by
/// [`crate::ops::verify_ids`], at a time when waiting for the device costs nothing.
#[derive(Debug)]
pub struct Embed<'a, B: Backend> {
    /// Shape `[vocab, d]`, F32.
    pub table: &'a Tensor<B>,
    /// Token id of each row.
    pub ids: &'a B::Buf<i32>,
    /// Type of the result.
    pub dtype: DType,
}

/// The result of [`Embed`].
#[derive(Debug, Clone)]
pub struct EmbedOut<B: Backend> {
    /// Shape `[t, d]`.
    pub x: Tensor<B>,
    /// The number of bad ids, as a buffer of one value.
    pub bad_ids: B::Buf<u64>,
}

impl<B: Backend> Embed<'_, B> {
    /// How closely the results of two backends must agree.
    pub const AGREEMENT: Agreement = Agreement::Bitwise;

    /// Checks types.
    pub fn check(&self) -> Result<()> {
        expect_eq("embed", "type of table", self.table.dtype(), DType::F32)
    }

    /// Allocates the result, with a zeroed count of bad ids. Call `check` first.
    pub fn result(&self, b: &B) -> Result<EmbedOut<B>> {
        let bad_ids = b.counters(1)?;
        Ok(EmbedOut { x: Tensor::unwritten(b, self.dtype, B::len(self.ids), self.table.cols)?, bad_ids })
    }
}

/// Adds each row of dy to the gradient of the embedding table: to the row of its token id, in the table of its shard.
///
/// For each shard and each id, the op divides the tokens of the shard with this id into chunks of [`EmbedBackward::CHUNK`] tokens, in the
/// order of the tokens. The sum of a chunk starts at 0 and adds the rows of dy in order. The sums of the chunks are added pairwise, as
/// ((0+1)+(2+3))…; a sum without a neighbour moves up to the next level of this tree unchanged. The total of all chunks is added once to
/// the row of the id. If no token has an id, the row of this id does not change. The op skips tokens with a bad id, which [`Embed`] has
/// already counted.
///
/// Because of the chunks, the sum for a frequent id is not one long chain of dependent additions. A GPU may stably sort the tokens of a
/// shard by id. After this sort, a chunk consists of consecutive tokens with the same id. A first pass sums every chunk. A second pass adds
/// the sums of the chunks for the few ids that have several chunks.
#[derive(Debug)]
pub struct EmbedBackward<'a, B: Backend> {
    /// Token id of each row.
    pub ids: &'a B::Buf<i32>,
    /// Shape `[t, d]`.
    pub dy: &'a Tensor<B>,
    /// The gradient of each shard, F32 of shape `[shards · vocab, d]`. The rows of dy are divided evenly among the shards. The op adds the
    /// gradient to this tensor.
    pub grad: &'a mut Tensor<B>,
    /// Number of shards.
    pub shards: usize,
}

impl<B: Backend> EmbedBackward<'_, B> {
    /// The number of tokens of a chunk, whose rows are added one after the other.
    pub const CHUNK: usize = 64;

    /// How closely the results of two backends must agree.
    pub const AGREEMENT: Agreement = Agreement::Bitwise;

    /// Checks shapes.
    pub fn check(&self) -> Result<()> {
        const OP: &str = "embed_backward";
        expect_eq(OP, "type of grad", self.grad.dtype(), DType::F32)?;
        expect_eq(OP, "columns of grad", self.grad.cols, self.dy.cols)?;
        expect_eq(OP, "ids.len()", B::len(self.ids), self.dy.rows)?;
        expect_eq(OP, "rows of grad modulo the shards", self.grad.rows % self.shards.max(1), 0)?;
        expect_eq(OP, "rows of dy modulo the shards", self.dy.rows % self.shards.max(1), 0)
    }
}
