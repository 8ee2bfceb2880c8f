//! RMSNorm, of the residual stream or of heads. Legend: t tokens, d width.

use super::Layer;
use crate::cx::Cx;
use crate::ledger::{Ledger, Saved};
use crate::param::{Param, Wanted, Writes};
use crate::spec::Part;
use nibble_core::ops::{RmsNorm, RmsNormBackward};
use nibble_core::{Kernels, Result, Tensor};

/// A layer that computes y = x / rms(x) · weight.
#[derive(Debug, Clone)]
pub struct Norm<B: Kernels> {
    /// The weight `[1, d]`.
    pub weight: Param<B>,
    /// Epsilon, which is added to the mean square.
    pub eps: f32,
}

/// The saved input, and one scalar per row.
#[derive(Debug)]
pub struct NormSaved<B: Kernels> {
    /// Name of the norm.
    pub layer: String,
    /// The input of the norm, `[t, d]`.
    pub x: Tensor<B>,
    /// 1 / rms of each row, or of each head.
    pub inv_rms: B::Buf<f32>,
}

/// The residual stream between two norms: x, and the output of one half of a layer, which is not yet added to x. The next norm adds the two
/// tensors when it reads them, and saves the sum as its x.
#[derive(Debug, Clone)]
pub struct Residual<B: Kernels> {
    /// The first term of the residual stream, `[t, d]`.
    pub x: Tensor<B>,
    /// The second term of the residual stream, which is not yet added.
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
    /// Creates the norm with weights of 1.
    pub fn new(cx: &Cx<'_, B>, part: &Part, eps: f32) -> Result<Self> {
        Ok(Self { weight: Param::only(cx, part)?, eps })
    }

    /// The norm's name, for example `model.layers.3.input_layernorm`.
    pub fn layer(&self) -> String {
        self.weight.layer().to_owned()
    }

    /// The norm of the residual stream. The saved activations hold the sum of the stream's two terms.
    pub fn of(&self, cx: &Cx<'_, B>, residual: Residual<B>) -> Result<(Tensor<B>, NormSaved<B>)> {
        let Residual { x, plus } = residual;
        let op = RmsNorm { x: &x, plus: plus.as_ref(), weight: self.weight.plain()?, eps: self.eps };
        let out = op.run(cx.b)?;
        Ok((out.y, NormSaved { layer: self.layer(), x: out.sum.unwrap_or(x), inv_rms: out.inv_rms }))
    }

    /// The output, recomputed from the saved activations.
    pub fn output(&self, cx: &Cx<'_, B>, saved: &NormSaved<B>) -> Result<Tensor<B>> {
        Ok(RmsNorm::new(&saved.x, self.weight.plain()?, self.eps).run(cx.b)?.y)
    }

    /// Returns dx + plus, from the gradient dy of the output.
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
