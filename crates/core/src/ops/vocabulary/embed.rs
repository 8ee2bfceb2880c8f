use crate::error::expect_eq;
use crate::{Agreement, Backend, DType, Result, Tensor};

/// Rows of a table: `x[i] = table[ids[i]]`, rounded to `dtype`.
///
/// An id that is negative, or at or past the table's rows, reads as a row of zeros and is counted: whoever needs to know
/// reads the count when waiting costs nothing ([`crate::ops::verify_ids`]).
#[derive(Debug)]
pub struct Embed<'a, B: Backend> {
    /// `[vocab, d]`, F32.
    pub table: &'a Tensor<B>,
    /// Token of each row.
    pub ids: &'a B::Buf<i32>,
    /// Type of the result.
    pub dtype: DType,
}

/// The result of [`Embed`].
#[derive(Debug, Clone)]
pub struct EmbedOut<B: Backend> {
    /// `[t, d]`.
    pub x: Tensor<B>,
    /// How many ids are no row of the table: one value.
    pub bad_ids: B::Buf<u64>,
}

impl<B: Backend> Embed<'_, B> {
    /// What backends owe each other.
    pub const AGREEMENT: Agreement = Agreement::Bitwise;

    /// Checks types.
    pub fn check(&self) -> Result<()> {
        expect_eq("embed", "type of table", self.table.dtype(), DType::F32)
    }

    /// Its result: rows yet to be written, and no bad id so far. For checked arguments.
    pub fn result(&self, b: &B) -> Result<EmbedOut<B>> {
        let bad_ids = b.counters(1)?;
        Ok(EmbedOut { x: Tensor::unwritten(b, self.dtype, B::len(self.ids), self.table.cols)?, bad_ids })
    }
}

/// Adds dy to the rows of each shard's gradient table.
///
/// For each shard and each id: the shard's tokens that have this id, in their order, form chunks of
/// [`EmbedBackward::CHUNK`]; a chunk's rows of dy are summed in order from 0, the chunks' sums by the tree over neighbours
/// ((0+1)+(2+3))…, in which an odd one out passes up unchanged; and the sum is added once to the id's row. An id without a
/// token leaves its row as it is. Tokens of an id outside the table are passed over: [`Embed`] has counted the same ids.
///
/// A frequent id is so no long chain. A GPU may sort the tokens of a shard by id, stably; the chunks are then runs of the
/// sorted tokens that begin with each id, each summed by itself, and a second pass closes the few ids of several chunks.
#[derive(Debug)]
pub struct EmbedBackward<'a, B: Backend> {
    /// Token of each row.
    pub ids: &'a B::Buf<i32>,
    /// `[t, d]`.
    pub dy: &'a Tensor<B>,
    /// F32 `[shards · vocab, d]`; rows of dy are divided evenly among the shards. Added to.
    pub grad: &'a mut Tensor<B>,
    /// Number of shards.
    pub shards: usize,
}

impl<B: Backend> EmbedBackward<'_, B> {
    /// Tokens of an id that are summed one after the other.
    pub const CHUNK: usize = 64;

    /// What backends owe each other.
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
