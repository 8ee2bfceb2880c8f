//! What a plan is made of: conversions of tensors, and what reads them.

use super::change::{Form, Pass};
use super::product::ProductPlan;
use super::route::{Pair, Route};
use crate::ops::Numbers;
use crate::recipe::Precision;

/// What reads a representation of a tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reader {
    /// A product.
    Product(ProductPlan),
    /// The backward pass, for which it is kept.
    Backward,
    /// Experts or tokens, to which its rows travel.
    Exchange,
    /// Several products, whose numbers differ, or readers that are not known: codes are made, and nothing for one product alone.
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

/// A tensor of a layer on its way to what reads it. `To` is a [`Pair`] of what is there, or what a kernel makes of it that computes it
/// ([`Computed`](super::Computed)).
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Conversion<To = Pair> {
    /// The tensor.
    pub tensor: LayerTensor,
    /// In what representation it is there; of what is computed, what it is computed from.
    pub from: Form,
    /// What it becomes.
    pub to: To,
    /// What reads the first representation, and what the second. The same where there is one.
    pub readers: [Reader; 2],
}

impl<To> Conversion<To> {
    /// The numbers of the products that alone read each representation.
    pub fn numbers(&self) -> [Option<Numbers>; 2] {
        self.readers.map(|reader| reader.numbers())
    }
}

impl Conversion {
    /// A plain tensor on its way to other ranks.
    pub(super) fn sent(tensor: LayerTensor, from: Form, wire: &Precision) -> Self {
        Self::one(tensor, from, Route::of_plain(wire), Reader::Exchange)
    }

    /// Into one representation.
    pub(super) fn one(tensor: LayerTensor, from: Form, route: Route, reader: Reader) -> Self {
        Self { tensor, from, to: Pair::One(route), readers: [reader; 2] }
    }

    /// The first representation by itself, for readers that are not known.
    pub fn first(&self) -> Self {
        Self { to: Pair::One(self.to.first()), readers: [Reader::Several; 2], ..*self }
    }

    /// The second representation by itself.
    pub fn second(&self) -> Self {
        Self { to: Pair::One(self.to.second()), readers: [self.readers[1]; 2], ..*self }
    }
}

/// The rows of a tensor of a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Rows {
    /// Those of the tokens.
    Tokens,
    /// One for each expert of a token.
    Routed,
}

/// The columns of a tensor of a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Cols {
    /// As many as the first weight takes.
    Inputs,
    /// As many as the first weight gives.
    Outputs,
    /// Half of these: what SwiGLU leaves.
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
    /// When.
    pub pass: Pass,
    /// How large it is.
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

/// A tensor that a forward pass keeps.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Kept {
    /// The tensor: `x`, `h`, `a`.
    pub tensor: &'static str,
    /// As it is kept.
    pub precision: Precision,
    /// How large it is.
    pub size: TensorSize,
}
