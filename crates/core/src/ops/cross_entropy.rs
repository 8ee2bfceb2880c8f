use crate::error::expect_eq;
use crate::{Agreement, Backend, DType, Model, Result, Tensor};

/// Per-token cross-entropy in nats, and the gradient of `scale · Σ loss` with respect to the logits.
#[derive(Debug)]
pub struct CrossEntropy<'a, B: Backend> {
    /// `[t, vocab]`, F32.
    pub logits: &'a Tensor<B>,
    /// The right token of each row; a negative one is not counted (loss 0, gradient 0).
    pub targets: &'a B::Buf<i32>,
    /// Factor of the gradient, 1 / (tokens of the step) for a mean.
    pub scale: f32,
    /// Type of the gradient; none if it is not needed.
    pub grad: Option<DType>,
}

/// The result of [`CrossEntropy`].
#[derive(Debug, Clone)]
pub struct CrossEntropyOut<B: Backend> {
    /// Nats of each row, `t` values.
    pub loss: B::Buf<f32>,
    /// `[t, vocab]`, if asked for.
    pub dlogits: Option<Tensor<B>>,
}

impl<B: Backend> CrossEntropy<'_, B> {
    /// What backends owe each other.
    pub const AGREEMENT: Agreement = Agreement::Bitwise;

    /// Checks shapes.
    pub fn check(&self) -> Result<()> {
        expect_eq("cross_entropy", "targets.len()", B::len(self.targets), self.logits.rows)?;
        expect_eq("cross_entropy", "type of logits", self.logits.dtype(), DType::F32)
    }

    /// Checks and runs. A target at or past the vocabulary is an error.
    pub fn run(self, b: &B) -> Result<CrossEntropyOut<B>>
    where
        B: Model,
    {
        self.check()?;
        b.cross_entropy(self)
    }
}
