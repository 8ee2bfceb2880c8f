//! Elements of a plan: conversions of tensors, and their readers.

use super::change::{Form, Pass};
use super::product::ProductPlan;
use super::route::{Pair, Route};
use crate::ops::Numbers;
use crate::recipe::Precision;
use nibble_formats::BlockAxis;

/// The operation that reads a representation of a tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reader {
    /// A product reads the representation.
    Product(ProductPlan),
    /// The backward pass reads the representation, which is saved for it.
    Backward,
    /// The all-to-all sends the representation.
    Exchange,
    /// Several products that multiply different numbers read the representation, or the readers are unknown. Such readers need codes
    /// instead of the form for one product.
    Several,
}

impl Reader {
    /// The numbers that the product multiplies, if the reader is a product.
    fn numbers(&self) -> Option<Numbers> {
        match self {
            Self::Product(product) => Some(product.numbers()),
            Self::Backward | Self::Exchange | Self::Several => None,
        }
    }
}

/// The conversion of a tensor of a layer to the one or two representations that later operations (readers) need. For an existing tensor,
/// `To` is a [`Pair`]. For a tensor that a kernel computes and converts at the same time, `To` is [`Computed`](super::Computed).
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Conversion<To = Pair> {
    /// The tensor.
    pub tensor: LayerTensor,
    /// The representation before the conversion. For a tensor that a kernel computes, it is the representation of the input of this kernel.
    pub from: Form,
    /// The target representations.
    pub to: To,
    /// The operation that reads the first representation, and the operation that reads the second. The two are equal if there is only one
    /// representation.
    pub readers: [Reader; 2],
}

impl<To> Conversion<To> {
    /// For each representation, the type of the numbers that its reader multiplies; `None` if the reader is not a matrix product.
    pub fn numbers(&self) -> [Option<Numbers>; 2] {
        self.readers.map(|reader| reader.numbers())
    }
}

impl Conversion {
    /// The conversion of a plain tensor that is sent to other ranks.
    pub(super) fn sent(tensor: LayerTensor, from: Form, wire: &Precision) -> Self {
        Self::one(tensor, from, Route::of_plain(wire), Reader::Exchange)
    }

    /// A conversion to one representation.
    pub(super) fn one(tensor: LayerTensor, from: Form, route: Route, reader: Reader) -> Self {
        Self { tensor, from, to: Pair::One(route), readers: [reader; 2] }
    }

    /// The conversion to the first representation only, without known readers.
    pub fn first(&self) -> Self {
        Self { to: Pair::One(self.to.first()), readers: [Reader::Several; 2], ..*self }
    }

    /// The conversion from the second representation to the first, without known readers. Returns `None` if the bits of the first
    /// representation do not follow from the second, because both were quantized from the original tensor.
    pub fn first_of_second(&self) -> Option<Self> {
        let route = match self.to {
            Pair::One(_) => Route::Same,
            Pair::Two(first, Route::Same) => first,
            // A cast to the tensor's own type changes nothing.
            Pair::Two(first, Route::Plain(dtype))
                if Form::new(Precision::plain(dtype).format, BlockAxis::Row) == self.from =>
            {
                first
            }
            Pair::Two(..) | Pair::OneRead(_) | Pair::Again { .. } => return None,
        };
        Some(Self { to: Pair::One(route), readers: [Reader::Several; 2], ..*self })
    }

    /// The conversion to the second representation only.
    pub fn second(&self) -> Self {
        Self { to: Pair::One(self.to.second()), readers: [self.readers[1]; 2], ..*self }
    }
}

/// What the rows of a tensor in a layer are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Rows {
    /// One row per token.
    Tokens,
    /// One row per slot, for each expert of a token.
    Routed,
}

/// What the columns of a tensor in a layer are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Cols {
    /// The input columns of the first weight.
    Inputs,
    /// The output columns of the first weight.
    Outputs,
    /// Half of the output columns of the first weight: the output of SwiGLU.
    Hidden,
}

/// The size of a tensor of a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TensorSize {
    /// The rows of the tensor.
    pub rows: Rows,
    /// The columns of the tensor.
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
    /// The name of the tensor, such as `x` or `dy`.
    pub name: &'static str,
    /// The pass in which the tensor occurs.
    pub pass: Pass,
    /// The tensor's size.
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

/// A tensor that a forward pass saves for the backward pass.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Kept {
    /// The tensor's name: `x`, `h` or `a`.
    pub tensor: &'static str,
    /// The precision in which the tensor is saved.
    pub precision: Precision,
    /// The tensor's size.
    pub size: TensorSize,
}
