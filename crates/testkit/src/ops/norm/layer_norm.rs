use crate::case::{Case, Outputs, Pads, in_place};
use crate::host::plain;
use crate::input::{Input, stream};
use crate::ops::PLAIN;
use crate::pair::Pair;
use nibble_core::ops::{LayerNorm, LayerNormBackward, LayerNormOut};
use nibble_core::{Agreement, DType, Kernels, Result, Tensor};

/// Numbers of rows, columns and shards. Some rows are not whole 16-byte loads, and one case has more chunks of rows than a GPU sums at
/// once.
const SIZES: [(usize, usize, usize); 9] = [
    (1, 1, 1),
    (4, 15, 2),
    (12, 33, 4),
    (64, 128, 4),
    (64, 448, 2),
    (300, 64, 2),
    (130, 2048, 2),
    (5, 4104, 1),
    (16_500, 8, 1),
];

#[derive(Debug, Clone, Copy)]
struct Rows {
    rows: usize,
    d: usize,
    shards: usize,
    dtype: DType,
    input: Input,
    /// Whether a tensor is added, either before the norm or after its backward pass.
    plus: bool,
}

impl Rows {
    fn x<B: Kernels>(&self, b: &B, name: &str) -> Result<Tensor<B>> {
        plain(b, self.dtype, &self.input.values(&stream(name), self.rows * self.d), self.rows, self.d)
    }

    fn vector<B: Kernels>(&self, b: &B, name: &str) -> Result<Tensor<B>> {
        Tensor::from_f32(b, &Input::Normal.values(&stream(name), self.d), 1, self.d)
    }

    fn plus<B: Kernels>(&self, b: &B) -> Result<Option<Tensor<B>>> {
        self.plus.then(|| self.x(b, "layer_norm.plus")).transpose()
    }

    fn forward<B: Kernels>(&self, b: &B, x: &Tensor<B>, plus: Option<&Tensor<B>>) -> Result<LayerNormOut<B>> {
        let [weight, bias] = [self.vector(b, "layer_norm.weight")?, self.vector(b, "layer_norm.bias")?];
        LayerNorm { x, plus, weight: &weight, bias: &bias, eps: 1e-5 }.run(b)
    }

    fn all() -> impl Iterator<Item = Self> {
        let of = |dtype| {
            Input::ALL.into_iter().flat_map(move |input| {
                SIZES.into_iter().flat_map(move |(rows, d, shards)| {
                    [false, true].map(|plus| Self { rows, d, shards, dtype, input, plus })
                })
            })
        };
        PLAIN.into_iter().flat_map(of)
    }
}

#[derive(Debug)]
struct Forward(Rows);

impl<B: Kernels> Case<B> for Forward {
    fn agreement(&self) -> Agreement {
        LayerNorm::<B>::AGREEMENT
    }

    fn run(&self, b: &B, _: Pads) -> Result<Outputs> {
        let plus = self.0.plus(b)?;
        let made = self.0.forward(b, &self.0.x(b, "layer_norm.x")?, plus.as_ref())?;
        let mut out = Outputs::default();
        out.tensor(b, "y", &made.y)?;
        out.buf(b, "mean", &made.mean, None)?;
        out.buf(b, "inv_std", &made.inv_std, None)?;
        if let Some(sum) = &made.sum {
            out.tensor(b, "sum", sum)?;
        }
        Ok(out)
    }
}

#[derive(Debug)]
struct Backward(Rows);

impl<B: Kernels> Case<B> for Backward {
    fn agreement(&self) -> Agreement {
        LayerNormBackward::<B>::AGREEMENT
    }

    fn run(&self, b: &B, _: Pads) -> Result<Outputs> {
        let Rows { d, shards, .. } = self.0;
        let (x, dy) = (self.0.x(b, "layer_norm.x")?, self.0.x(b, "layer_norm.dy")?);
        let (weight, plus) = (self.0.vector(b, "layer_norm.weight")?, self.0.plus(b)?);
        let LayerNormOut { mean, inv_std, .. } = self.0.forward(b, &x, None)?;
        let dweight = Input::Normal.values(&stream("layer_norm.dweight"), shards * d);
        let dweight = Tensor::from_f32(b, &dweight, shards, d)?;
        let (dweight, dx) = in_place(b, &dweight, |dweight| {
            let (x, mean, inv_std, dy, plus) = (&x, &mean, &inv_std, &dy, plus.as_ref());
            LayerNormBackward { x, weight: &weight, mean, inv_std, dy, plus, dweight }.run(b)
        })?;
        let mut out = Outputs::default();
        out.tensor(b, "dx", &dx)?;
        out.tensor(b, "dweight", &dweight)?;
        Ok(out)
    }
}

/// The conformance test of [`LayerNorm`].
pub fn layer_norm<A: Kernels, B: Kernels>(pair: &Pair<A, B>) {
    Rows::all().for_each(|rows| pair.check(&Forward(rows)));
}

/// The conformance test of [`LayerNormBackward`].
pub fn layer_norm_backward<A: Kernels, B: Kernels>(pair: &Pair<A, B>) {
    Rows::all().for_each(|rows| pair.check(&Backward(rows)));
}
