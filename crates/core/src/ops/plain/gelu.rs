use crate::error::expect_eq;
use crate::{Agreement, Backend, Result, Tensor};

/// a = GELU(h) = h · Φ(h) for each element, with the error function (`torch.nn.GELU()`), in F32 and rounded once:
/// [`nibble_formats::math::gelu`].
#[derive(Debug)]
pub struct Gelu<'a, B: Backend> {
    /// Shape `[rows, f]`, F32 or BF16.
    pub h: &'a Tensor<B>,
}

impl<B: Backend> Gelu<'_, B> {
    /// How closely the results of two backends must agree.
    pub const AGREEMENT: Agreement = Agreement::Bitwise;

    /// Any shape and either type are allowed.
    pub fn check(&self) -> Result<()> {
        Ok(())
    }

    /// Allocates the result. Call `check` first.
    pub fn result(&self, b: &B) -> Result<Tensor<B>> {
        self.h.unwritten_like(b)
    }
}

/// The backward pass of [`Gelu`]: dh = da · (Φ(h) + h · φ(h)) for each element, in F32 and rounded once:
/// [`nibble_formats::math::gelu_derivative`].
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
