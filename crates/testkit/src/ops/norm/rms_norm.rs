use crate::case::{Case, Outputs, Pads, in_place};
use crate::host::plain;
use crate::input::{Input, stream};
use crate::ops::PLAIN;
use crate::pair::Pair;
use nibble_core::ops::{RmsNorm, RmsNormBackward, RmsNormOut};
use nibble_core::{Agreement, DType, Kernels, Result, Tensor};

/// Numbers of rows, columns and shards.
const SIZES: [(usize, usize, usize); 7] =
    [(1, 1, 1), (4, 15, 2), (12, 33, 4), (64, 128, 4), (64, 448, 2), (8, 320, 1), (450, 48, 2)];
/// Widths of models and of heads; some cases have more chunks of rows than a GPU sums at once.
const WIDE: [(usize, usize, usize); 8] = [
    (130, 2048, 2),
    (3, 7168, 1),
    (2, 8200, 1),
    (5, 4104, 1),
    (640, 128, 4),
    (300, 64, 2),
    (70, 1000, 1),
    (16_500, 8, 1),
];

#[derive(Debug, Clone, Copy)]
struct RmsNormRows {
    rows: usize,
    d: usize,
    shards: usize,
    dtype: DType,
    input: Input,
    /// Whether a tensor is added, either before the norm or after its backward pass.
    plus: bool,
}

impl RmsNormRows {
    fn x<B: Kernels>(&self, b: &B, name: &str) -> Result<Tensor<B>> {
        plain(b, self.dtype, &self.input.values(&stream(name), self.rows * self.d), self.rows, self.d)
    }

    fn weight<B: Kernels>(&self, b: &B) -> Result<Tensor<B>> {
        Tensor::from_f32(b, &Input::Normal.values(&stream("rms_norm.weight"), self.d), 1, self.d)
    }

    fn plus<B: Kernels>(&self, b: &B) -> Result<Option<Tensor<B>>> {
        self.plus.then(|| self.x(b, "rms_norm.plus")).transpose()
    }

    fn forward<B: Kernels>(&self, b: &B, x: &Tensor<B>) -> Result<RmsNormOut<B>> {
        RmsNorm { x, plus: self.plus(b)?.as_ref(), weight: &self.weight(b)?, eps: 1e-6 }.run(b)
    }

    fn all() -> impl Iterator<Item = RmsNormRows> {
        let of = |sizes: &'static [_], inputs: &'static [Input]| {
            PLAIN.into_iter().flat_map(move |dtype| {
                inputs.iter().flat_map(move |&input| {
                    sizes.iter().flat_map(move |&(rows, d, shards)| {
                        [false, true].map(|plus| RmsNormRows { rows, d, shards, dtype, input, plus })
                    })
                })
            })
        };
        of(&SIZES, &Input::ALL).chain(of(&WIDE, &[Input::Normal, Input::SignedZeros]))
    }
}

#[derive(Debug)]
struct Forward(RmsNormRows);

impl<B: Kernels> Case<B> for Forward {
    fn agreement(&self) -> Agreement {
        RmsNorm::<B>::AGREEMENT
    }

    fn run(&self, b: &B, _: Pads) -> Result<Outputs> {
        let made = self.0.forward(b, &self.0.x(b, "rms_norm.x")?)?;
        let mut out = Outputs::default();
        out.tensor(b, "y", &made.y)?;
        out.buf(b, "inv_rms", &made.inv_rms, None)?;
        if let Some(sum) = &made.sum {
            out.tensor(b, "sum", sum)?;
        }
        Ok(out)
    }
}

/// The conformance test of [`RmsNorm`].
pub fn rms_norm<A: Kernels, B: Kernels>(pair: &Pair<A, B>) {
    RmsNormRows::all().for_each(|rows| pair.check(&Forward(rows)));
}

#[derive(Debug)]
struct Backward(RmsNormRows);

impl<B: Kernels> Case<B> for Backward {
    fn agreement(&self) -> Agreement {
        RmsNormBackward::<B>::AGREEMENT
    }

    fn run(&self, b: &B, _: Pads) -> Result<Outputs> {
        let RmsNormRows { d, shards, .. } = self.0;
        let (x, dy, weight) = (self.0.x(b, "rms_norm.x")?, self.0.x(b, "rms_norm.dy")?, self.0.weight(b)?);
        let plus = self.0.plus(b)?;
        let inv_rms = RmsNorm::new(&x, &weight, 1e-6).run(b)?.inv_rms;
        let dweight = Input::Normal.values(&stream("rms_norm.dweight"), shards * d);
        let dweight = Tensor::from_f32(b, &dweight, shards, d)?;
        let (dweight, dx) = in_place(b, &dweight, |dweight| {
            let (x, dy, plus) = (&x, &dy, plus.as_ref());
            RmsNormBackward { x, weight: &weight, inv_rms: &inv_rms, dy, plus, dweight }.run(b)
        })?;
        let mut out = Outputs::default();
        out.tensor(b, "dx", &dx)?;
        out.tensor(b, "dweight", &dweight)?;
        Ok(out)
    }
}

/// The conformance test of [`RmsNormBackward`].
pub fn rms_norm_backward<A: Kernels, B: Kernels>(pair: &Pair<A, B>) {
    RmsNormRows::all().for_each(|rows| pair.check(&Backward(rows)));
}
