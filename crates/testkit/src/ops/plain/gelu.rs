use crate::case::{Case, Outputs, Pads};
use crate::host::plain;
use crate::input::{Input, stream};
use crate::ops::PLAIN;
use crate::pair::Pair;
use nibble_core::ops::{Gelu, GeluBackward};
use nibble_core::{Agreement, DType, Kernels, Result, Tensor};

#[derive(Debug, Clone, Copy)]
struct Values {
    rows: usize,
    cols: usize,
    dtype: DType,
    input: Input,
}

impl Values {
    fn tensor<B: Kernels>(&self, b: &B, name: &str) -> Result<Tensor<B>> {
        plain(b, self.dtype, &self.input.values(&stream(name), self.rows * self.cols), self.rows, self.cols)
    }

    /// All cases. Some lengths are not whole 16-byte loads, and one is longer than a CTA's share.
    fn all() -> impl Iterator<Item = Self> {
        const SIZES: [(usize, usize); 6] = [(1, 1), (3, 5), (17, 33), (64, 128), (7, 1031), (130, 520)];
        let of = |dtype| {
            Input::ALL.into_iter().flat_map(move |input| {
                SIZES.into_iter().map(move |(rows, cols)| Self { rows, cols, dtype, input })
            })
        };
        PLAIN.into_iter().flat_map(of)
    }
}

#[derive(Debug)]
struct Forward(Values);

impl<B: Kernels> Case<B> for Forward {
    fn agreement(&self) -> Agreement {
        Gelu::<B>::AGREEMENT
    }

    fn run(&self, b: &B, _: Pads) -> Result<Outputs> {
        let a = Gelu { h: &self.0.tensor(b, "gelu.h")? }.run(b)?;
        let mut out = Outputs::default();
        out.tensor(b, "a", &a)?;
        Ok(out)
    }
}

#[derive(Debug)]
struct Backward(Values);

impl<B: Kernels> Case<B> for Backward {
    fn agreement(&self) -> Agreement {
        GeluBackward::<B>::AGREEMENT
    }

    fn run(&self, b: &B, _: Pads) -> Result<Outputs> {
        let (h, da) = (self.0.tensor(b, "gelu.h")?, self.0.tensor(b, "gelu.da")?);
        let dh = GeluBackward { h: &h, da: &da }.run(b)?;
        let mut out = Outputs::default();
        out.tensor(b, "dh", &dh)?;
        Ok(out)
    }
}

/// The conformance test of [`Gelu`].
pub fn gelu<A: Kernels, B: Kernels>(pair: &Pair<A, B>) {
    Values::all().for_each(|values| pair.check(&Forward(values)));
}

/// The conformance test of [`GeluBackward`].
pub fn gelu_backward<A: Kernels, B: Kernels>(pair: &Pair<A, B>) {
    Values::all().for_each(|values| pair.check(&Backward(values)));
}
