use super::NormRows;
use crate::case::{Case, Outputs, Pads, in_place};
use crate::input::{Input, stream};
use crate::pair::Pair;
use nibble_core::ops::{RmsNorm, RmsNormBackward};
use nibble_core::{Agreement, Kernels, Result, Tensor};

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

fn all() -> impl Iterator<Item = NormRows> {
    let wide = NormRows::all(&[Input::Normal, Input::SignedZeros], &WIDE);
    NormRows::all(&Input::ALL, &SIZES).chain(wide)
}

#[derive(Debug)]
struct Forward(NormRows);

impl<B: Kernels> Case<B> for Forward {
    fn agreement(&self) -> Agreement {
        RmsNorm::<B>::AGREEMENT
    }

    fn run(&self, b: &B, _: Pads) -> Result<Outputs> {
        let (x, weight) = (self.0.x(b, "rms_norm.x")?, self.0.vector(b, "rms_norm.weight")?);
        let plus = self.0.plus(b, "rms_norm.plus")?;
        let made = RmsNorm { x: &x, plus: plus.as_ref(), weight: &weight, eps: 1e-6 }.run(b)?;
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
    all().for_each(|rows| pair.check(&Forward(rows)));
}

#[derive(Debug)]
struct Backward(NormRows);

impl<B: Kernels> Case<B> for Backward {
    fn agreement(&self) -> Agreement {
        RmsNormBackward::<B>::AGREEMENT
    }

    fn run(&self, b: &B, _: Pads) -> Result<Outputs> {
        let NormRows { d, shards, .. } = self.0;
        let (x, dy, weight) =
            (self.0.x(b, "rms_norm.x")?, self.0.x(b, "rms_norm.dy")?, self.0.vector(b, "rms_norm.weight")?);
        let plus = self.0.plus(b, "rms_norm.plus")?;
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
    all().for_each(|rows| pair.check(&Backward(rows)));
}
