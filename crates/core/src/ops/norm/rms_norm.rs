use crate::error::expect_eq;
use crate::{Agreement, Backend, DType, Result, Tensor};

/// y = x / sqrt(mean(x²) + eps) · weight, along each row, in F32, rounded once to the type of x.
///
/// The sum of squares runs over 256 lanes: element i goes to lane i mod 256. Each lane sums in order by fma from 0, and the lanes are
/// reduced by the halving tree 128, 64, …, 1 (lane l with lane l + 128, and so on). Lanes past the row's end are zeros. 256 lanes are the
/// 32 threads of a warp, each with the 8 elements of a 16-byte load.
#[derive(Debug)]
pub struct RmsNorm<'a, B: Backend> {
    /// Shape `[rows, d]`, F32 or BF16.
    pub x: &'a Tensor<B>,
    /// A tensor that is added to x before the norm. The sum is rounded and has the same bits as [`Add`](crate::ops::Add).
    pub plus: Option<&'a Tensor<B>>,
    /// F32 of shape `[1, d]`.
    pub weight: &'a Tensor<B>,
    /// Epsilon, which is added to the mean square.
    pub eps: f32,
}

/// The result of [`RmsNorm`].
#[derive(Debug, Clone)]
pub struct RmsNormOut<B: Backend> {
    /// Shape `[rows, d]`, type of x.
    pub y: Tensor<B>,
    /// 1 / sqrt(mean(x²) + eps) of each row.
    pub inv_rms: B::Buf<f32>,
    /// x + plus, if `plus` is given.
    pub sum: Option<Tensor<B>>,
}

impl<'a, B: Backend> RmsNorm<'a, B> {
    /// How closely the results of two backends must agree.
    pub const AGREEMENT: Agreement = Agreement::Bitwise;

    /// The norm of x, without `plus`.
    pub fn new(x: &'a Tensor<B>, weight: &'a Tensor<B>, eps: f32) -> Self {
        Self { x, plus: None, weight, eps }
    }

    /// Checks shapes.
    pub fn check(&self) -> Result<()> {
        const OP: &str = "rms_norm";
        expect_eq(OP, "shape of weight", self.weight.shape(), (1, self.x.cols))?;
        expect_eq(OP, "type of weight", self.weight.dtype(), DType::F32)?;
        check_plus(OP, self.plus, self.x)
    }

    /// Allocates the result. Call `check` first.
    pub fn result(&self, b: &B) -> Result<RmsNormOut<B>> {
        let inv_rms = b.alloc(self.x.rows)?;
        let y = self.x.unwritten_like(b)?;
        Ok(RmsNormOut { y, inv_rms, sum: self.plus.map(|_| self.x.unwritten_like(b)).transpose()? })
    }
}

/// Checks that the added tensor has the shape and type of x.
pub(super) fn check_plus<B: Backend>(
    op: &'static str,
    plus: Option<&Tensor<B>>,
    x: &Tensor<B>,
) -> Result<()> {
    let Some(plus) = plus else { return Ok(()) };
    expect_eq(op, "shape of plus", plus.shape(), x.shape())?;
    expect_eq(op, "type of plus", plus.dtype(), x.dtype())
}

/// The backward pass of [`RmsNorm`]: returns dx and adds to each shard's dweight.
///
/// With x̂ = x · inv_rms: dx = inv_rms · (dy·w − x̂ · mean(dy·w·x̂)); the sum of the mean is fma(dy·w, x̂, ·) over the lanes of
/// [`RmsNorm`]. dw = Σ over the shard's rows of dy · x̂. Each chunk of [`RmsNormBackward::CHUNK`] rows is summed in order by fma from 0.
/// The sums of chunks are added by the tree over neighbours ((0+1)+(2+3))…, in which an odd sum moves up unchanged. The total is added once
/// to dweight.
#[derive(Debug)]
pub struct RmsNormBackward<'a, B: Backend> {
    /// The input of the forward pass.
    pub x: &'a Tensor<B>,
    /// F32 of shape `[1, d]`.
    pub weight: &'a Tensor<B>,
    /// `inv_rms` of the forward pass.
    pub inv_rms: &'a B::Buf<f32>,
    /// Gradient of y, with the shape of x.
    pub dy: &'a Tensor<B>,
    /// A tensor that is added to the rounded dx, with the shape of x. The result is rounded again and has the same bits as
    /// [`Add`](crate::ops::Add).
    pub plus: Option<&'a Tensor<B>>,
    /// F32 of shape `[shards, d]`; rows are divided evenly among the shards. The op adds to this tensor.
    pub dweight: &'a mut Tensor<B>,
}

impl<B: Backend> RmsNormBackward<'_, B> {
    /// Number of rows of a chunk in the sum of dweight.
    pub const CHUNK: usize = 64;

    /// How closely the results of two backends must agree.
    pub const AGREEMENT: Agreement = Agreement::Bitwise;

    /// Checks shapes.
    pub fn check(&self) -> Result<()> {
        const OP: &str = "rms_norm_backward";
        expect_eq(OP, "shape of dy", self.dy.shape(), self.x.shape())?;
        expect_eq(OP, "type of dy", self.dy.dtype(), self.x.dtype())?;
        expect_eq(OP, "shape of weight", self.weight.shape(), (1, self.x.cols))?;
        expect_eq(OP, "columns of dweight", self.dweight.cols, self.x.cols)?;
        expect_eq(OP, "inv_rms.len()", B::len(self.inv_rms), self.x.rows)?;
        check_plus(OP, self.plus, self.x)?;
        expect_eq(OP, "rows modulo the shards of dweight", self.x.rows % self.dweight.rows.max(1), 0)
    }

    /// Allocates the result. Call `check` first.
    pub fn result(&self, b: &B) -> Result<Tensor<B>> {
        self.x.unwritten_like(b)
    }
}
