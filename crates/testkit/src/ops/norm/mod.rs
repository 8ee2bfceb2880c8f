//! Norms and rotary embeddings.

pub(super) mod layer_norm;
pub(super) mod norm_rope;
pub(super) mod rms_norm;
pub(super) mod rope;

use crate::host::plain;
use crate::input::{Input, stream};
use nibble_core::{DType, Kernels, Result, Tensor};

/// The sizes and values of a case of a norm along rows.
#[derive(Debug, Clone, Copy)]
struct NormRows {
    rows: usize,
    d: usize,
    shards: usize,
    dtype: DType,
    input: Input,
    /// Whether a tensor is added, either before the norm or after its backward pass.
    plus: bool,
}

impl NormRows {
    /// A tensor `[rows, d]`.
    fn x<B: Kernels>(&self, b: &B, name: &str) -> Result<Tensor<B>> {
        plain(b, self.dtype, &self.input.values(&stream(name), self.rows * self.d), self.rows, self.d)
    }

    /// An F32 vector `[1, d]`.
    fn vector<B: Kernels>(&self, b: &B, name: &str) -> Result<Tensor<B>> {
        Tensor::from_f32(b, &Input::Normal.values(&stream(name), self.d), 1, self.d)
    }

    /// The tensor that is added, if there is one.
    fn plus<B: Kernels>(&self, b: &B, name: &str) -> Result<Option<Tensor<B>>> {
        self.plus.then(|| self.x(b, name)).transpose()
    }

    /// Every combination of a plain type, an input and sizes (rows, columns, shards), without and with a tensor that is added.
    fn all(inputs: &'static [Input], sizes: &'static [(usize, usize, usize)]) -> impl Iterator<Item = Self> {
        super::PLAIN.into_iter().flat_map(move |dtype| {
            inputs.iter().flat_map(move |&input| {
                sizes.iter().flat_map(move |&(rows, d, shards)| {
                    [false, true].map(|plus| Self { rows, d, shards, dtype, input, plus })
                })
            })
        })
    }
}

pub use {layer_norm::*, norm_rope::*, rms_norm::*, rope::*};
