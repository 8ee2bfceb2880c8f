use crate::error::expect_eq;
use crate::{Agreement, Backend, DType, Result, Tensor};

/// y = x / sqrt(mean(x²) + eps) · weight, where the mean runs over each row. The op computes in F32 and rounds y once to the type of x.
///
/// The sum of squares is divided into 256 partial sums (lanes): element i is added to lane i mod 256. Each lane starts at 0 and adds its
/// elements in order by fma. A tree then reduces the lanes: it adds lane l + 128 to lane l, then lane l + 64 to lane l, and so on down to a
/// distance of 1. If a row has fewer than 256 elements, the remaining lanes are zeros. The number 256 is that of the 32 threads of a warp
/// times the 8 elements that a thread loads in 16 bytes.
#[derive(Debug)]
pub struct RmsNorm<'a, B: Backend> {
    /// Shape `[rows, d]`, F32 or BF16.
    pub x: &'a Tensor<B>,
    /// A tensor that the op adds to x before the norm. The sum is rounded to the type of x and has the same bits as the result of
    /// [`Add`](crate::ops::Add).
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

    /// The norm of x, without a tensor that is added to x first.
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

/// The backward pass of [`RmsNorm`]. The op returns dx, and adds the gradient of the weight to the row of `dweight` of each shard.
///
/// With x̂ = x · inv_rms, dx = inv_rms · (dy·w − x̂ · mean(dy·w·x̂)). The sum of this mean adds its terms by fma(dy·w, x̂, ·) in the same
/// lanes as [`RmsNorm`]. The gradient dw of a shard is Σ dy · x̂ over the rows of the shard. The rows form chunks of
/// [`RmsNormBackward::CHUNK`] rows. The sum of a chunk starts at 0 and adds the rows in order by fma. The sums of the chunks are added
/// pairwise, as ((0+1)+(2+3))…; a sum without a neighbour moves up to the next level of this tree unchanged. The total is added once to
/// dweight.
#[derive(Debug)]
pub struct RmsNormBackward<'a, B: Backend> {
    /// The input of the forward pass.
    pub x: &'a Tensor<B>,
    /// F32 of shape `[1, d]`.
    pub weight: &'a Tensor<B>,
    /// The value 1 / sqrt(mean(x²) + eps) of each row, which the forward pass returned.
    pub inv_rms: &'a B::Buf<f32>,
    /// Gradient of y, with the shape of x.
    pub dy: &'a Tensor<B>,
    /// A tensor with the shape of x that the op adds to the rounded dx. The sum is rounded again and has the same bits as the result of
    /// [`Add`](crate::ops::Add).
    pub plus: Option<&'a Tensor<B>>,
    /// F32 of shape `[shards, d]`; rows are divided evenly among the shards. The op adds the gradient to this tensor.
    pub dweight: &'a mut Tensor<B>,
}

impl<B: Backend> RmsNormBackward<'_, B> {
    /// The number of rows whose contributions to the gradient of the weight are summed one after the other.
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
