use crate::error::expect_eq;
use crate::{Agreement, Backend, DType, Model, Result, Tensor};

/// One AdamW step in place (decoupled weight decay, Loshchilov & Hutter 2019), all in F32:
///
/// g = grad · grad_scale; m = β₁m + (1−β₁)g; v = β₂v + (1−β₂)g²;
/// w ← w − lr · weight_decay · w − lr · (m · bias1) / (sqrt(v · bias2) + eps).
#[derive(Debug)]
pub struct AdamW<'a, B: Backend> {
    /// F32 master weights.
    pub param: &'a mut Tensor<B>,
    /// F32 gradient.
    pub grad: &'a Tensor<B>,
    /// First moment.
    pub exp_avg: &'a mut Tensor<B>,
    /// Second moment.
    pub exp_avg_sq: &'a mut Tensor<B>,
    /// Learning rate of this step.
    pub lr: f32,
    /// β₁.
    pub beta1: f32,
    /// β₂.
    pub beta2: f32,
    /// 1 / (1 − β₁^step).
    pub bias1: f32,
    /// 1 / (1 − β₂^step).
    pub bias2: f32,
    /// Added to the denominator.
    pub eps: f32,
    /// Decoupled weight decay.
    pub weight_decay: f32,
    /// Factor on the gradient (clipping).
    pub grad_scale: f32,
}

impl<B: Backend> AdamW<'_, B> {
    /// What backends owe each other.
    pub const AGREEMENT: Agreement = Agreement::Bitwise;

    /// Checks shapes and types.
    pub fn check(&self) -> Result<()> {
        const OP: &str = "adamw";
        expect_eq(OP, "shape of grad", self.grad.shape(), self.param.shape())?;
        expect_eq(OP, "shape of exp_avg", self.exp_avg.shape(), self.param.shape())?;
        expect_eq(OP, "shape of exp_avg_sq", self.exp_avg_sq.shape(), self.param.shape())?;
        for (argument, t) in [
            ("type of grad", self.grad),
            ("type of param", &*self.param),
            ("type of exp_avg", &*self.exp_avg),
            ("type of exp_avg_sq", &*self.exp_avg_sq),
        ] {
            expect_eq(OP, argument, t.dtype(), DType::F32)?;
        }
        Ok(())
    }

    /// Checks and runs.
    pub fn run(self, b: &B) -> Result<()>
    where
        B: Model,
    {
        self.check()?;
        b.adamw(self)
    }
}
