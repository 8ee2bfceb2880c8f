//! Elements of a plan: conversions of tensors, and their readers.

use super::change::{Form, Pass};
use super::product::ProductPlan;
use super::route::{Pair, Route};
use crate::ops::Numbers;
use crate::recipe::Precision;

/// The reader of a representation of a tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reader {
    /// A product.
    Product(ProductPlan),
    /// The backward pass, for which it is saved.
    Backward,
    /// The all-to-all.
    Exchange,
    /// Several products with different numbers, or unknown readers: they need codes, not the form of one product.
    Several,
}

impl Reader {
    /// The numbers of a product.
    fn numbers(&self) -> Option<Numbers> {
        match self {
            Self::Product(product) => Some(product.numbers()),
            Self::Backward | Self::Exchange | Self::Several => None,
        }
    }
}

/// The conversion of a layer's tensor for its readers. `To` is a [`Pair`] for a tensor that exists, or the output of the kernel that
/// computes it ([`Computed`](super::Computed)).
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Conversion<To = Pair> {
    /// The tensor.
    pub tensor: LayerTensor,
    /// The representation that exists; for a computed tensor, that of the kernel's input.
    pub from: Form,
    /// The target representations.
    pub to: To,
    /// The readers of the first and of the second representation; equal if there is only one.
    pub readers: [Reader; 2],
}

impl<To> Conversion<To> {
    /// For each representation, the numbers that its product multiplies, if only a product reads it.
    pub fn numbers(&self) -> [Option<Numbers>; 2] {
        self.readers.map(|reader| reader.numbers())
    }
}

impl Conversion {
    /// A plain tensor to be sent to other ranks.
    pub(super) fn sent(tensor: LayerTensor, from: Form, wire: &Precision) -> Self {
        Self::one(tensor, from, Route::of_plain(wire), Reader::Exchange)
    }

    /// To one representation.
    pub(super) fn one(tensor: LayerTensor, from: Form, route: Route, reader: Reader) -> Self {
        Self { tensor, from, to: Pair::One(route), readers: [reader; 2] }
    }

    /// Only the first representation, for unknown readers.
    pub fn first(&self) -> Self {
        Self { to: Pair::One(self.to.first()), readers: [Reader::Several; 2], ..*self }
    }

    /// Only the second representation.
    pub fn second(&self) -> Self {
        Self { to: Pair::One(self.to.second()), readers: [self.readers[1]; 2], ..*self }
    }
}

/// The rows of a tensor of a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Rows {
    /// The tokens.
    Tokens,
    /// One row per slot, for each expert of a token.
    Routed,
}

/// The columns of a tensor of a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Cols {
    /// The inputs of the first weight.
    Inputs,
    /// The outputs of the first weight.
    Outputs,
    /// Half of these outputs: the output of SwiGLU.
    Hidden,
}

/// The size of a tensor of a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TensorSize {
    /// Rows.
    pub rows: Rows,
    /// Columns.
    pub cols: Cols,
}

impl TensorSize {
    pub(super) const fn new(rows: Rows, cols: Cols) -> Self {
        Self { rows, cols }
    }
}

/// A tensor of a layer in one of its passes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LayerTensor {
    /// `x`, `dy`, …
    pub name: &'static str,
    /// The pass.
    pub pass: Pass,
    /// Its size.
    pub size: TensorSize,
}

impl LayerTensor {
    pub(super) const fn forward(name: &'static str, size: TensorSize) -> Self {
        Self { name, pass: Pass::Forward, size }
    }

    pub(super) const fn backward(name: &'static str, size: TensorSize) -> Self {
        Self { name, pass: Pass::Backward, size }
    }
}

/// A tensor that a forward pass saves.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Kept {
    /// The tensor: `x`, `h`, `a`.
    pub tensor: &'static str,
    /// The form in which it is saved.
    pub precision: Precision,
    /// Its size.
    pub size: TensorSize,
}
