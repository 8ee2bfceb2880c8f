use crate::error::expect_eq;
use crate::ops::norm::rope::check_turn;
use crate::ops::{Positions, RmsNormBackward, RmsNormOut};
use crate::{Agreement, Backend, DType, Result, Tensor};

/// Prepares queries or keys for attention: applies [`RmsNorm`](crate::ops::RmsNorm) to each head, rounds to the type of x, applies
/// [`Rope`](crate::ops::Rope), and rounds again. The result has the same bits as the result of running the two operations one after the
/// other.
///
/// The norm treats each head as a row: head h of row r is row r · heads + h. The op returns y of shape `[t, heads · head_dim]`, and one
/// value of `inv_rms` per head of each row. The field `sum` of the result is `None`.
#[derive(Debug)]
pub struct NormRope<'a, B: Backend> {
    /// Shape `[t, heads · head_dim]`, F32 or BF16.
    pub x: &'a Tensor<B>,
    /// F32 of shape `[1, head_dim]`.
    pub weight: &'a Tensor<B>,
    /// Epsilon, which is added to the mean square.
    pub eps: f32,
    /// The cosines and sines of each position, F32 of shape `[positions, head_dim]`, in the layout of
    /// [`Rope::table`](crate::ops::Rope::table).
    pub table: &'a Tensor<B>,
    /// Positions of the rows.
    pub positions: &'a Positions<B>,
}

impl<B: Backend> NormRope<'_, B> {
    /// How closely the results of two backends must agree.
    pub const AGREEMENT: Agreement = Agreement::Bitwise;

    /// Checks shapes.
    pub fn check(&self) -> Result<()> {
        const OP: &str = "norm_rope";
        check_turn(OP, self.x, (self.table, self.table.cols), self.positions)?;
        check_weight(OP, self.weight, self.table)
    }

    /// The number of heads, counted over all rows. Call `check` first.
    pub fn heads(&self) -> usize {
        self.x.rows * (self.x.cols / self.table.cols)
    }

    /// Allocates the result. Call `check` first.
    pub fn result(&self, b: &B) -> Result<RmsNormOut<B>> {
        let inv_rms = b.alloc(self.heads())?;
        Ok(RmsNormOut { y: self.x.unwritten_like(b)?, inv_rms, sum: None })
    }
}

/// The backward pass of [`NormRope`]: applies the inverse rotation of [`Rope`](crate::ops::Rope), rounds to the type of dy, and applies
/// [`RmsNormBackward`] to each head. The op returns dx, and adds the gradient of the weight to the row of `dweight` of each shard.
#[derive(Debug)]
pub struct NormRopeBackward<'a, B: Backend> {
    /// The input of the forward pass, `[t, heads · head_dim]`.
    pub x: &'a Tensor<B>,
    /// F32 of shape `[1, head_dim]`.
    pub weight: &'a Tensor<B>,
    /// The value 1 / sqrt(mean(x²) + eps) of each head, which the forward pass returned.
    pub inv_rms: &'a B::Buf<f32>,
    /// Gradient of y, with the shape of x.
    pub dy: &'a Tensor<B>,
    /// The cosines and sines that the forward pass used, F32 of shape `[positions, head_dim]`.
    pub table: &'a Tensor<B>,
    /// Positions of the rows.
    pub positions: &'a Positions<B>,
    /// F32 of shape `[shards, head_dim]`. The heads of all rows are divided evenly among the shards. The op adds the gradient to this
    /// tensor.
    pub dweight: &'a mut Tensor<B>,
}

impl<B: Backend> NormRopeBackward<'_, B> {
    /// How closely the results of two backends must agree.
    pub const AGREEMENT: Agreement = RmsNormBackward::<B>::AGREEMENT;

    /// The number of heads, counted over all rows. Call `check` first.
    pub fn heads(&self) -> usize {
        self.x.rows * (self.x.cols / self.table.cols)
    }

    /// Checks shapes.
    pub fn check(&self) -> Result<()> {
        const OP: &str = "norm_rope_backward";
        check_turn(OP, self.x, (self.table, self.table.cols), self.positions)?;
        check_weight(OP, self.weight, self.table)?;
        expect_eq(OP, "shape of dy", self.dy.shape(), self.x.shape())?;
        expect_eq(OP, "type of dy", self.dy.dtype(), self.x.dtype())?;
        expect_eq(OP, "columns of dweight", self.dweight.cols, self.table.cols)?;
        expect_eq(OP, "inv_rms.len()", B::len(self.inv_rms), self.heads())?;
        expect_eq(OP, "heads modulo the shards of dweight", self.heads() % self.dweight.rows.max(1), 0)
    }

    /// Allocates the result. Call `check` first.
    pub fn result(&self, b: &B) -> Result<Tensor<B>> {
        self.x.unwritten_like(b)
    }
}

fn check_weight<B: Backend>(op: &'static str, weight: &Tensor<B>, table: &Tensor<B>) -> Result<()> {
    expect_eq(op, "shape of weight", weight.shape(), (1, table.cols))?;
    expect_eq(op, "type of weight", weight.dtype(), DType::F32)?;
    expect_eq(op, "type of table", table.dtype(), DType::F32)
}
