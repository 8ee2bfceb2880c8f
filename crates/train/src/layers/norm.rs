//! RMSNorm, of the residual stream or of heads. t tokens, d width.

use super::Layer;
use crate::cx::Cx;
use crate::ledger::{Ledger, Saved};
use crate::param::{Param, Wanted, Writes};
use crate::spec::Part;
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

/// The input, and one scalar per row.
#[derive(Debug)]
pub struct NormSaved<B: Kernels> {
    /// Name of the norm.
    pub layer: String,
    /// `[t, d]`.
    pub x: Tensor<B>,
    /// 1 / rms of each row, or head.
    pub inv_rms: B::Buf<f32>,
}

/// The residual stream between two norms: x, and the output of one half of a layer, which is yet to be added. The next norm adds them in
/// the pass in which it reads them, and returns the sum as the x that it saves.
#[derive(Debug, Clone)]
pub struct Residual<B: Kernels> {
    /// `[t, d]`.
    pub x: Tensor<B>,
    /// Yet to be added.
    pub plus: Option<Tensor<B>>,
}

impl<B: Kernels> From<Tensor<B>> for Residual<B> {
    fn from(x: Tensor<B>) -> Self {
        Self { x, plus: None }
    }
}

impl<B: Kernels> Saved for NormSaved<B> {
    fn ledger(&self, ledger: &mut Ledger) {
        ledger.tensor(&self.layer, "x", &self.x);
        ledger.words::<B, f32>(&self.layer, "inv_rms", &self.inv_rms);
    }
}

impl<B: Kernels> Norm<B> {
    /// Weights of ones.
    pub fn new(cx: &Cx<'_, B>, part: &Part, eps: f32) -> Result<Self> {
        Ok(Self { weight: Param::only(cx, part)?, eps })
    }

    /// Its name, `model.layers.3.input_layernorm`.
    pub fn layer(&self) -> String {
        self.weight.layer().to_owned()
    }

    /// The norm of the residual stream. What is saved holds the stream itself.
    pub fn of(&self, cx: &Cx<'_, B>, residual: Residual<B>) -> Result<(Tensor<B>, NormSaved<B>)> {
        let Residual { x, plus } = residual;
        let op = RmsNorm { x: &x, plus: plus.as_ref(), weight: self.weight.plain()?, eps: self.eps };
        let out = op.run(cx.b)?;
        Ok((out.y, NormSaved { layer: self.layer(), x: out.sum.unwrap_or(x), inv_rms: out.inv_rms }))
    }

    /// The output, recomputed from what was saved.
    pub fn output(&self, cx: &Cx<'_, B>, saved: &NormSaved<B>) -> Result<Tensor<B>> {
        Ok(RmsNorm::new(&saved.x, self.weight.plain()?, self.eps).run(cx.b)?.y)
    }

    /// dx + plus, from the gradient dy of the output.
    pub fn gradient(
        &mut self,
        cx: &Cx<'_, B>,
        saved: NormSaved<B>,
        dy: &Tensor<B>,
        plus: Option<&Tensor<B>>,
    ) -> Result<Tensor<B>> {
        let weight = self.weight.plain()?.clone();
        self.weight.add_gradient(cx, Writes::Adds, |dweight, _| {
            let NormSaved { x, inv_rms, .. } = &saved;
            RmsNormBackward { x, weight: &weight, inv_rms, dy, plus, dweight }.run(cx.b)
        })
    }
}

impl<B: Kernels> Layer<B> for Norm<B> {
    type In = Tensor<B>;
    type Out = Tensor<B>;
    type Saved = NormSaved<B>;

    fn wanted(&self, _: &Cx<'_, B>) -> Vec<Wanted<'_, B>> {
        vec![self.weight.as_it_is()]
    }

    fn params(&mut self) -> Vec<&mut Param<B>> {
        vec![&mut self.weight]
    }

    fn forward(&self, cx: &Cx<'_, B>, x: Tensor<B>) -> Result<(Tensor<B>, NormSaved<B>)> {
        self.of(cx, x.into())
    }

    fn backward(&mut self, cx: &Cx<'_, B>, saved: NormSaved<B>, dy: Tensor<B>) -> Result<Tensor<B>> {
        self.gradient(cx, saved, &dy, None)
    }
}
