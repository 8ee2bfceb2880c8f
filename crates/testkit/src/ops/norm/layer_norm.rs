use super::NormRows;
use crate::case::{Case, Outputs, Pads, in_place};
use crate::input::{Input, stream};
use crate::pair::Pair;
use nibble_core::ops::{LayerNorm, LayerNormBackward, LayerNormOut};
use nibble_core::{Agreement, Kernels, Result, Tensor};

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

fn all() -> impl Iterator<Item = NormRows> {
    NormRows::all(&Input::ALL, &SIZES)
}

fn forward<B: Kernels>(
    rows: &NormRows,
    b: &B,
    x: &Tensor<B>,
    plus: Option<&Tensor<B>>,
) -> Result<LayerNormOut<B>> {
    let [weight, bias] = [rows.vector(b, "layer_norm.weight")?, rows.vector(b, "layer_norm.bias")?];
    LayerNorm { x, plus, weight: &weight, bias: &bias, eps: 1e-5 }.run(b)
}

#[derive(Debug)]
struct Forward(NormRows);

impl<B: Kernels> Case<B> for Forward {
    fn agreement(&self) -> Agreement {
        LayerNorm::<B>::AGREEMENT
    }

    fn run(&self, b: &B, _: Pads) -> Result<Outputs> {
        let plus = self.0.plus(b, "layer_norm.plus")?;
        let made = forward(&self.0, b, &self.0.x(b, "layer_norm.x")?, plus.as_ref())?;
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
struct Backward(NormRows);

impl<B: Kernels> Case<B> for Backward {
    fn agreement(&self) -> Agreement {
        LayerNormBackward::<B>::AGREEMENT
    }

    fn run(&self, b: &B, _: Pads) -> Result<Outputs> {
        let NormRows { d, shards, .. } = self.0;
        let (x, dy) = (self.0.x(b, "layer_norm.x")?, self.0.x(b, "layer_norm.dy")?);
        let (weight, plus) = (self.0.vector(b, "layer_norm.weight")?, self.0.plus(b, "layer_norm.plus")?);
        let LayerNormOut { mean, inv_std, .. } = forward(&self.0, b, &x, None)?;
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
    all().for_each(|rows| pair.check(&Forward(rows)));
}

/// The conformance test of [`LayerNormBackward`].
pub fn layer_norm_backward<A: Kernels, B: Kernels>(pair: &Pair<A, B>) {
    all().for_each(|rows| pair.check(&Backward(rows)));
}
