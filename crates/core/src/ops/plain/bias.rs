use crate::error::expect_eq;
use crate::ops::RmsNormBackward;
use crate::{Agreement, Backend, DType, Result, Tensor};

/// Adds a bias to each row of x, in F32, and rounds once to the type of x. The op works in place, because x is the result of a product.
#[derive(Debug)]
pub struct AddBias<'a, B: Backend> {
    /// Shape `[rows, n]`, F32 or BF16. The op overwrites this tensor.
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

/// The backward pass of [`AddBias`]: sums each shard's rows of dy, and adds the sum to the shard's row of dbias. The gradient of x is dy.
///
/// The order of the sum is that of [`RmsNormBackward`]. Each chunk of [`AddBiasBackward::CHUNK`] rows is summed in order from 0. A tree
/// over neighbouring chunks adds their sums, and the total is added once to dbias.
#[derive(Debug)]
pub struct AddBiasBackward<'a, B: Backend> {
    /// Shape `[rows, n]`, F32 or BF16.
    pub dy: &'a Tensor<B>,
    /// F32 of shape `[shards, n]`; rows are divided evenly among the shards. The op adds to this tensor.
    pub dbias: &'a mut Tensor<B>,
}

impl<B: Backend> AddBiasBackward<'_, B> {
    /// Number of rows of a chunk in the sum.
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
