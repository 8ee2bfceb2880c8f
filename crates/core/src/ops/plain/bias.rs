use crate::error::expect_eq;
use crate::ops::RmsNormBackward;
use crate::{Agreement, Backend, DType, Result, Tensor};

/// Adds a bias to each row of x, in F32, and rounds once to the type of x. The op overwrites x, which is the output of a matrix product.
#[derive(Debug)]
pub struct AddBias<'a, B: Backend> {
    /// Shape `[rows, n]`, F32 or BF16.
    pub x: &'a mut Tensor<B>,
    /// F32 of shape `[1, n]`.
    pub bias: &'a Tensor<B>,
}

impl<B: Backend> AddBias<'_, B> {
    /// How closely the results of two backends must agree.
    pub const AGREEMENT: Agreement = Agreement::Bitwise;

    /// Checks shapes.
    pub fn check(&self) -> Result<()> {
        const OP: &str = "add_bias";
        expect_eq(OP, "shape of bias", self.bias.shape(), (1, self.x.cols))?;
        expect_eq(OP, "type of bias", self.bias.dtype(), DType::F32)
    }
}

/// The backward pass of [`AddBias`]. For each shard, it sums the rows of dy that belong to the shard, and adds this sum to one row of
/// dbias. The gradient of x is dy itself, so this op does not write it.
///
/// The op adds rows in the same order as [`RmsNormBackward`]. The sum of each chunk of [`AddBiasBackward::CHUNK`] rows starts at 0 and adds
/// the rows in order. The sums of neighbouring chunks are added pairwise in a tree, and the total is added once to dbias.
#[derive(Debug)]
pub struct AddBiasBackward<'a, B: Backend> {
    /// Shape `[rows, n]`, F32 or BF16.
    pub dy: &'a Tensor<B>,
    /// F32 of shape `[shards, n]`; rows are divided evenly among the shards. The op adds the gradient to this tensor.
    pub dbias: &'a mut Tensor<B>,
}

impl<B: Backend> AddBiasBackward<'_, B> {
    /// The number of rows that are summed one after the other, as one chunk.
    pub const CHUNK: usize = RmsNormBackward::<B>::CHUNK;

    /// How closely the results of two backends must agree.
    pub const AGREEMENT: Agreement = Agreement::Bitwise;

    /// Checks shapes.
    pub fn check(&self) -> Result<()> {
        const OP: &str = "add_bias_backward";
        expect_eq(OP, "columns of dbias", self.dbias.cols, self.dy.cols)?;
        expect_eq(OP, "type of dbias", self.dbias.dtype(), DType::F32)?;
        expect_eq(OP, "rows modulo the shards of dbias", self.dy.rows % self.dbias.rows.max(1), 0)
    }
}
