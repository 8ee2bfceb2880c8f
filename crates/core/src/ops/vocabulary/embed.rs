use crate::error::expect_eq;
use crate::{Agreement, Backend, DType, Result, Tensor};

/// Looks up rows of an embedding: `x[i] = table[ids[i]]`, rounded to `dtype`.
///
/// A bad id (negative or too large) gives a row of zeros, and the op counts bad ids. A caller reads this count with
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
    /// Number of bad ids: one value.
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

/// Adds each row of dy to the embedding gradient of the row's shard, at the row's token id.
///
/// For each shard and each id, the shard's tokens with this id form chunks of [`EmbedBackward::CHUNK`] tokens, in token order. The rows of
/// dy of a chunk are summed in order from 0. The sums of chunks are added by the tree over neighbours ((0+1)+(2+3))…, in which an odd sum
/// moves up unchanged. The total is added once to the id's row. The row of an id without a token does not change. Tokens with a bad id are
/// skipped; [`Embed`] has already counted them.
///
/// Chunks keep the sum of a frequent id from being one long chain of additions. A GPU may sort the tokens of a shard by id, stably. A chunk
/// is then a run of sorted tokens with the same id. One pass sums every chunk, and a second pass adds the sums of chunks of the few ids
/// that have several chunks.
#[derive(Debug)]
pub struct EmbedBackward<'a, B: Backend> {
    /// Token id of each row.
    pub ids: &'a B::Buf<i32>,
    /// Shape `[t, d]`.
    pub dy: &'a Tensor<B>,
    /// F32 of shape `[shards · vocab, d]`; rows of dy are divided evenly among the shards. The op adds to this tensor.
    pub grad: &'a mut Tensor<B>,
    /// Number of shards.
    pub shards: usize,
}

impl<B: Backend> EmbedBackward<'_, B> {
    /// Number of tokens of a chunk, which are summed one after the other.
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
