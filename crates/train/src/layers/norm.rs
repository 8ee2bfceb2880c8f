//! RMSNorm. t tokens (or token·head rows), d width.

use super::Layer;
use crate::cx::Cx;
use crate::ledger::{Ledger, Saved};
use crate::param::{Param, Writes};
use nibble_core::ops::{RmsNorm, RmsNormBackward};
use nibble_core::{Kernels, Result, Tensor};

/// y = x / rms(x) · weight.
#[derive(Debug, Clone)]
pub struct Norm<B: Kernels> {
    /// `[1, d]`.
    pub weight: Param<B>,
    /// Added to the mean square.
    pub eps: f32,
}

/// The input and one scalar a row.
#[derive(Debug)]
pub struct NormSaved<B: Kernels> {
    /// Of the norm.
    pub layer: String,
    /// `[t, d]`.
    pub x: Tensor<B>,
    /// 1 / rms of each row.
    pub inv_rms: B::Buf<f32>,
}

impl<B: Kernels> Saved for NormSaved<B> {
    fn ledger(&self, ledger: &mut Ledger) {
        ledger.tensor(&self.layer, "x", &self.x);
        ledger.words::<B, f32>(&self.layer, "inv_rms", &self.inv_rms);
    }
}

impl<B: Kernels> Norm<B> {
    /// Weights of ones.
    pub fn new(b: &B, name: &str, d: usize, eps: f32) -> Result<Self> {
        Ok(Self { weight: Param::ones(b, format!("{name}.weight"), d)?, eps })
    }

    /// Its name, `model.layers.3.input_layernorm`.
    pub fn layer(&self) -> String {
        self.weight.name.trim_end_matches(".weight").to_owned()
    }

    /// The output again, from what was saved.
    pub fn again(&self, cx: &Cx<'_, B>, saved: &NormSaved<B>) -> Result<Tensor<B>> {
        Ok(RmsNorm { x: &saved.x, weight: &self.weight.master, eps: self.eps }.run(cx.b)?.y)
    }
}

impl<B: Kernels> Layer<B> for Norm<B> {
    type In = Tensor<B>;
    type Out = Tensor<B>;
    type Saved = NormSaved<B>;

    fn forward(&self, cx: &Cx<'_, B>, x: Tensor<B>) -> Result<(Tensor<B>, NormSaved<B>)> {
        let out = RmsNorm { x: &x, weight: &self.weight.master, eps: self.eps }.run(cx.b)?;
        Ok((out.y, NormSaved { layer: self.layer(), x, inv_rms: out.inv_rms }))
    }

    fn backward(&mut self, cx: &Cx<'_, B>, saved: NormSaved<B>, dy: Tensor<B>) -> Result<Tensor<B>> {
        let weight = self.weight.master.clone();
        self.weight.add_gradient(cx, Writes::Adds, |dweight, _| {
            let NormSaved { x, inv_rms, .. } = &saved;
            RmsNormBackward { x, weight: &weight, inv_rms, dy: &dy, dweight }.run(cx.b)
        })
    }
}
