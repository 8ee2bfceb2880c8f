use crate::error::expect_eq;
use crate::{Agreement, Backend, Result, Tensor};

/// a = GELU(h) = h · Φ(h) for each element, where Φ is computed by the error function, as in `torch.nn.GELU()`. The op computes in F32 by
/// [`nibble_formats::math::gelu`] and rounds once.
#[derive(Debug)]
pub struct Gelu<'a, B: Backend> {
    /// Shape `[rows, f]`, F32 or BF16.
    pub h: &'a Tensor<B>,
}

impl<B: Backend> Gelu<'_, B> {
    /// How closely the results of two backends must agree.
    pub const AGREEMENT: Agreement = Agreement::Bitwise;

    /// Always succeeds, because any shape and either type are allowed.
    pub fn check(&self) -> Result<()> {
        Ok(())
    }

    /// Allocates the result. Call `check` first.
    pub fn result(&self, b: &B) -> Result<Tensor<B>> {
        self.h.unwritten_like(b)
    }
}

/// The backward pass of [`Gelu`]: dh = da · (Φ(h) + h · φ(h)) for each element. The op computes in F32 by
/// [`nibble_formats::math::gelu_derivative`] and rounds once.
#[derive(Debug)]
pub struct GeluBackward<'a, B: Backend> {
    /// The input of the forward pass.
    pub h: &'a Tensor<B>,
    /// The gradient of a, with the shape and type of h.
    pub da: &'a Tensor<B>,
}

impl<B: Backend> GeluBackward<'_, B> {
    /// How closely the results of two backends must agree.
    pub const AGREEMENT: Agreement = Agreement::Bitwise;

    /// Checks shapes.
    pub fn check(&self) -> Result<()> {
        const OP: &str = "gelu_backward";
        expect_eq(OP, "shape of da", self.da.shape(), self.h.shape())?;
        expect_eq(OP, "type of da", self.da.dtype(), self.h.dtype())
    }

    /// Allocates the result. Call `check` first.
    pub fn result(&self, b: &B) -> Result<Tensor<B>> {
        self.h.unwritten_like(b)
    }
}
