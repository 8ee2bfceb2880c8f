use crate::error::expect_eq;
use crate::ops::norm::rope::check_turn;
use crate::ops::{Positions, RmsNormBackward, RmsNormOut};
use crate::{Agreement, Backend, DType, Result, Tensor};

/// Queries or keys before attention: [`RmsNorm`](crate::ops::RmsNorm) of each head, rounded to the type of x, then
/// [`Rope`](crate::ops::Rope), rounded again. The result has the same bits as the result of the two operations in
/// sequence.
///
/// Head h of row r is row r · heads + h of the norm. The op returns y `[t, heads · head_dim]` and `inv_rms`, one number per head of each
/// row; `sum` is `None`.
#[derive(Debug)]
pub struct NormRope<'a, B: Backend> {
    /// Shape `[t, heads · head_dim]`, F32 or BF16.
    pub x: &'a Tensor<B>,
    /// F32 of shape `[1, head_dim]`.
    pub weight: &'a Tensor<B>,
    /// Epsilon, which is added to the mean square.
    pub eps: f32,
    /// The table of [`Rope`](crate::ops::Rope), F32 `[positions, head_dim]`.
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

    /// Number of heads in all rows together. Call `check` first.
    pub fn heads(&self) -> usize {
        self.x.rows * (self.x.cols / self.table.cols)
    }

    /// Allocates the result. Call `check` first.
    pub fn result(&self, b: &B) -> Result<RmsNormOut<B>> {
        let inv_rms = b.alloc(self.heads())?;
        Ok(RmsNormOut { y: self.x.unwritten_like(b)?, inv_rms, sum: None })
    }
}

/// The backward pass of [`NormRope`]: the inverse [`Rope`](crate::ops::Rope), rounded to the type of dy, then [`RmsNormBackward`] of each
/// head. The op returns dx and adds to each shard's dweight.
#[derive(Debug)]
pub struct NormRopeBackward<'a, B: Backend> {
    /// The input of the forward pass, `[t, heads · head_dim]`.
    pub x: &'a Tensor<B>,
    /// F32 of shape `[1, head_dim]`.
    pub weight: &'a Tensor<B>,
    /// `inv_rms` of the forward pass.
    pub inv_rms: &'a B::Buf<f32>,
    /// Gradient of y, with the shape of x.
    pub dy: &'a Tensor<B>,
    /// The table of the forward pass, F32 `[positions, head_dim]`.
    pub table: &'a Tensor<B>,
    /// Positions of the rows.
    pub positions: &'a Positions<B>,
    /// F32 of shape `[shards, head_dim]`; heads of all rows are divided evenly among the shards. The op adds to this tensor.
    pub dweight: &'a mut Tensor<B>,
}

impl<B: Backend> NormRopeBackward<'_, B> {
    /// How closely the results of two backends must agree.
    pub const AGREEMENT: Agreement = RmsNormBackward::<B>::AGREEMENT;

    /// Number of heads in all rows together. Call `check` first.
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
