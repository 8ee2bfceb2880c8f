use crate::error::expect_eq;
use crate::{Agreement, Backend, DType, Model, Result, Tensor};

/// y = x / sqrt(mean(x²) + eps) · weight, along each row, in F32, rounded once to the type of x.
///
/// The sum of squares runs over 16 lanes (element i goes to lane i mod 16, in order, by fma), closed by the tree
/// 8, 4, 2, 1.
#[derive(Debug)]
pub struct RmsNorm<'a, B: Backend> {
    /// `[rows, d]`, F32 or BF16.
    pub x: &'a Tensor<B>,
    /// F32 `[1, d]`.
    pub weight: &'a Tensor<B>,
    /// Added to the mean square.
    pub eps: f32,
}

/// The result of [`RmsNorm`].
#[derive(Debug, Clone)]
pub struct RmsNormOut<B: Backend> {
    /// `[rows, d]`, type of x.
    pub y: Tensor<B>,
    /// 1 / sqrt(mean(x²) + eps) of each row.
    pub inv_rms: B::Buf<f32>,
}

impl<B: Backend> RmsNorm<'_, B> {
    /// What backends owe each other.
    pub const AGREEMENT: Agreement = Agreement::Bitwise;

    /// Checks shapes.
    pub fn check(&self) -> Result<()> {
        expect_eq("rms_norm", "shape of weight", self.weight.shape(), (1, self.x.cols))?;
        expect_eq("rms_norm", "type of weight", self.weight.dtype(), DType::F32)
    }

    /// Checks and runs.
    pub fn run(self, b: &B) -> Result<RmsNormOut<B>>
    where
        B: Model,
    {
        self.check()?;
        b.rms_norm(self)
    }
}

/// The backward pass of [`RmsNorm`]: returns dx and adds each shard's dweight.
///
/// With x̂ = x · inv_rms: dx = inv_rms · (dy·w − x̂ · mean(dy·w·x̂)); dw = Σ over the shard's rows, in order, of dy · x̂.
#[derive(Debug)]
pub struct RmsNormBackward<'a, B: Backend> {
    /// The input.
    pub x: &'a Tensor<B>,
    /// F32 `[1, d]`.
    pub weight: &'a Tensor<B>,
    /// From the forward pass.
    pub inv_rms: &'a B::Buf<f32>,
    /// Same shape as x.
    pub dy: &'a Tensor<B>,
    /// F32 `[shards, d]`; rows are divided evenly among the shards. Added to.
    pub dweight: &'a mut Tensor<B>,
}

impl<B: Backend> RmsNormBackward<'_, B> {
    /// What backends owe each other.
    pub const AGREEMENT: Agreement = Agreement::Bitwise;

    /// Checks shapes.
    pub fn check(&self) -> Result<()> {
        const OP: &str = "rms_norm_backward";
        expect_eq(OP, "shape of dy", self.dy.shape(), self.x.shape())?;
        expect_eq(OP, "type of dy", self.dy.dtype(), self.x.dtype())?;
        expect_eq(OP, "shape of weight", self.weight.shape(), (1, self.x.cols))?;
        expect_eq(OP, "columns of dweight", self.dweight.cols, self.x.cols)?;
        expect_eq(OP, "inv_rms.len()", B::len(self.inv_rms), self.x.rows)?;
        expect_eq(OP, "rows modulo the shards of dweight", self.x.rows % self.dweight.rows.max(1), 0)
    }

    /// Checks and runs.
    pub fn run(self, b: &B) -> Result<Tensor<B>>
    where
        B: Model,
    {
        self.check()?;
        b.rms_norm_backward(self)
    }
}
