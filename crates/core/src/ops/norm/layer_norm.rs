use super::rms_norm::check_plus;
use crate::error::expect_eq;
use crate::{Agreement, Backend, DType, Result, Tensor};

/// y = (x − mean) · inv_std · weight + bias along each row, where mean = Σ x / d and inv_std = 1 / sqrt(Σ (x − mean)² / d + eps). The op
/// computes in F32, evaluates the formula from left to right, and rounds y once to the type of x.
///
/// Like the sum of [`RmsNorm`](crate::ops::RmsNorm), the two sums over a row are divided into 256 lanes. Lanes of Σ x use additions that
/// start at 0, and lanes of Σ (x − mean)² use fma.
#[derive(Debug)]
pub struct LayerNorm<'a, B: Backend> {
    /// Shape `[rows, d]`, F32 or BF16.
    pub x: &'a Tensor<B>,
    /// A tensor that the op adds to x before the norm. The sum is rounded to the type of x and has the same bits as the result of
    /// [`Add`](crate::ops::Add).
    pub plus: Option<&'a Tensor<B>>,
    /// F32 of shape `[1, d]`.
    pub weight: &'a Tensor<B>,
    /// F32 of shape `[1, d]`.
    pub bias: &'a Tensor<B>,
    /// Epsilon, which is added to the variance.
    pub eps: f32,
}

/// The result of [`LayerNorm`].
#[derive(Debug, Clone)]
pub struct LayerNormOut<B: Backend> {
    /// Shape `[rows, d]`, type of x.
    pub y: Tensor<B>,
    /// The mean of each row.
    pub mean: B::Buf<f32>,
    /// 1 / sqrt(variance + eps) of each row.
    pub inv_std: B::Buf<f32>,
    /// x + plus, if `plus` is given.
    pub sum: Option<Tensor<B>>,
}

impl<B: Backend> LayerNorm<'_, B> {
    /// How closely the results of two backends must agree.
    pub const AGREEMENT: Agreement = Agreement::Bitwise;

    /// Checks shapes.
    pub fn check(&self) -> Result<()> {
        const OP: &str = "layer_norm";
        let vector = (1, self.x.cols);
        expect_eq(OP, "shape of weight", self.weight.shape(), vector)?;
        expect_eq(OP, "type of weight", self.weight.dtype(), DType::F32)?;
        expect_eq(OP, "shape of bias", self.bias.shape(), vector)?;
        expect_eq(OP, "type of bias", self.bias.dtype(), DType::F32)?;
        check_plus(OP, self.plus, self.x)
    }

    /// Allocates the result. Call `check` first.
    pub fn result(&self, b: &B) -> Result<LayerNormOut<B>> {
        let [mean, inv_std] = [b.alloc(self.x.rows)?, b.alloc(self.x.rows)?];
        let y = self.x.unwritten_like(b)?;
        let sum = self.plus.map(|_| self.x.unwritten_like(b)).transpose()?;
        Ok(LayerNormOut { y, mean, inv_std, sum })
    }
}

/// The backward pass of [`LayerNorm`]. The op returns dx, and adds the gradient of the weight to the row of `dweight` of each shard. The
/// gradient of the bias is computed from dy by another op, [`AddBiasBackward`](crate::ops::AddBiasBackward).
///
/// With x̂ = (x − mean) · inv_std and g = dy·weight: dx = inv_std · ((g − mean(g)) − x̂ · mean(g·x̂)). The two means divide sums by d. The
/// sums are divided into the same lanes as in [`LayerNorm`]: Σ g uses additions, and Σ g·x̂ uses fma(g, x̂, ·). The gradient of the weight
/// is Σ dy · x̂ over the rows of the shard. The op adds the terms of this sum by fma, in the order of
/// [`RmsNormBackward`](crate::ops::RmsNormBackward).
#[derive(Debug)]
pub struct LayerNormBackward<'a, B: Backend> {
    /// The input of the forward pass.
    pub x: &'a Tensor<B>,
    /// F32 of shape `[1, d]`.
    pub weight: &'a Tensor<B>,
    /// The mean of each row, which the forward pass returned.
    pub mean: &'a B::Buf<f32>,
    /// The value 1 / sqrt(variance + eps) of each row, which the forward pass returned.
    pub inv_std: &'a B::Buf<f32>,
    /// Gradient of y, with the shape of x.
    pub dy: &'a Tensor<B>,
    /// A tensor with the shape of x that the op adds to the rounded dx. The sum is rounded again and has the same bits as the result of
    /// [`Add`](crate::ops::Add).
    pub plus: Option<&'a Tensor<B>>,
    /// F32 of shape `[shards, d]`; rows are divided evenly among the shards. The op adds the gradient to this tensor.
    pub dweight: &'a mut Tensor<B>,
}

impl<B: Backend> LayerNormBackward<'_, B> {
    /// How closely the results of two backends must agree.
    pub const AGREEMENT: Agreement = Agreement::Bitwise;

    /// Checks shapes.
    pub fn check(&self) -> Result<()> {
        const OP: &str = "layer_norm_backward";
        expect_eq(OP, "shape of dy", self.dy.shape(), self.x.shape())?;
        expect_eq(OP, "type of dy", self.dy.dtype(), self.x.dtype())?;
        expect_eq(OP, "shape of weight", self.weight.shape(), (1, self.x.cols))?;
        expect_eq(OP, "type of weight", self.weight.dtype(), DType::F32)?;
        expect_eq(OP, "columns of dweight", self.dweight.cols, self.x.cols)?;
        expect_eq(OP, "mean.len()", B::len(self.mean), self.x.rows)?;
        expect_eq(OP, "inv_std.len()", B::len(self.inv_std), self.x.rows)?;
        check_plus(OP, self.plus, self.x)?;
        expect_eq(OP, "rows modulo the shards of dweight", self.x.rows % self.dweight.rows.max(1), 0)
    }

    /// Allocates the result. Call `check` first.
    pub fn result(&self, b: &B) -> Result<Tensor<B>> {
        self.x.unwritten_like(b)
    }
}
