//! RMSNorm, of the residual stream or of heads, and LayerNorm of the residual stream. Legend: t tokens, d width.

use super::Layer;
use crate::cx::Cx;
use crate::ledger::{Ledger, Saved};
use crate::param::{Param, Wanted, Writes};
use crate::spec::Part;
use nibble_core::ops::{AddBiasBackward, LayerNorm, LayerNormBackward, RmsNorm, RmsNormBackward};
use nibble_core::{Error, Kernels, Result, Tensor};

/// RMSNorm, y = x / rms(x) · weight; or, with a bias, LayerNorm, y = (x − mean(x)) / std(x) · weight + bias.
#[derive(Debug, Clone)]
pub struct Norm<B: Kernels> {
    /// The weight `[1, d]`.
    pub weight: Param<B>,
    /// The bias `[1, d]` of LayerNorm; `None` for RMSNorm.
    pub bias: Option<Param<B>>,
    /// The small constant ε that is added to the mean square (RMSNorm) or to the variance (LayerNorm).
    pub eps: f32,
}

/// The saved input of a norm, and for each row one scalar (RMSNorm) or two scalars (LayerNorm).
#[derive(Debug)]
pub struct NormSaved<B: Kernels> {
    /// Name of the norm.
    pub layer: String,
    /// The input of the norm, `[t, d]`.
    pub x: Tensor<B>,
    /// The value 1 / rms of each row or of each head (RMSNorm), or 1 / std of each row (LayerNorm).
    pub inv_rms: B::Buf<f32>,
    /// The mean of each row, for LayerNorm.
    pub mean: Option<B::Buf<f32>>,
}

/// The residual stream between two norms: the tensor x, and the output of the preceding attention, MLP or experts, which is not yet added
/// to x. When the next norm reads the two tensors, it adds them and saves the sum as its input.
#[derive(Debug, Clone)]
pub struct Residual<B: Kernels> {
    /// The first term of the residual stream, `[t, d]`.
    pub x: Tensor<B>,
    /// The second term of the residual stream; the next norm adds this term to `x`.
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
        if let Some(mean) = &self.mean {
            ledger.words::<B, f32>(&self.layer, "mean", mean);
        }
    }
}

impl<B: Kernels> Norm<B> {
    /// Creates the norm with weights of 1, and with biases of 0 if the part has a bias.
    pub fn new(cx: &Cx<'_, B>, part: &Part, eps: f32) -> Result<Self> {
        let (weight, bias) = Param::with_bias(cx, part)?;
        Ok(Self { weight, bias, eps })
    }

    /// The norm's name, for example `model.layers.3.input_layernorm`.
    pub fn layer(&self) -> String {
        self.weight.layer().to_owned()
    }

    /// Applies the norm to the residual stream. The returned saved activations contain the sum of the stream's two terms.
    pub fn of(&self, cx: &Cx<'_, B>, residual: Residual<B>) -> Result<(Tensor<B>, NormSaved<B>)> {
        let Residual { x, plus } = residual;
        let (layer, weight, plus) = (self.layer(), self.weight.plain()?, plus.as_ref());
        let Some(bias) = &self.bias else {
            let out = RmsNorm { x: &x, plus, weight, eps: self.eps }.run(cx.b)?;
            let x = out.sum.unwrap_or(x);
            return Ok((out.y, NormSaved { layer, x, inv_rms: out.inv_rms, mean: None }));
        };
        let out = LayerNorm { x: &x, plus, weight, bias: bias.plain()?, eps: self.eps }.run(cx.b)?;
        let x = out.sum.unwrap_or(x);
        Ok((out.y, NormSaved { layer, x, inv_rms: out.inv_std, mean: Some(out.mean) }))
    }

    /// Recomputes the norm's output from the saved activations.
    pub fn output(&self, cx: &Cx<'_, B>, saved: &NormSaved<B>) -> Result<Tensor<B>> {
        Ok(self.of(cx, saved.x.clone().into())?.0)
    }

    /// Computes the input's gradient dx from the output's gradient dy, and returns dx + plus.
    pub fn gradient(
        &mut self,
        cx: &Cx<'_, B>,
        saved: NormSaved<B>,
        dy: &Tensor<B>,
        plus: Option<&Tensor<B>>,
    ) -> Result<Tensor<B>> {
        let weight = &self.weight.plain()?.clone();
        let NormSaved { x, inv_rms, mean, .. } = &saved;
        let Some(bias) = &mut self.bias else {
            return self.weight.add_gradient(cx, Writes::Adds, |dweight, _| {
                RmsNormBackward { x, weight, inv_rms, dy, plus, dweight }.run(cx.b)
            });
        };
        let mean = mean.as_ref().ok_or(Error::Defect { place: "norm", what: "the means were not saved" })?;
        bias.add_gradient(cx, Writes::Adds, |dbias, _| AddBiasBackward { dy, dbias }.run(cx.b))?;
        self.weight.add_gradient(cx, Writes::Adds, |dweight, _| {
            LayerNormBackward { x, weight, mean, inv_std: inv_rms, dy, plus, dweight }.run(cx.b)
        })
    }
}

impl<B: Kernels> Layer<B> for Norm<B> {
    type In = Tensor<B>;
    type Out = Tensor<B>;
    type Saved = NormSaved<B>;

    fn wanted(&self, _: &Cx<'_, B>) -> Vec<Wanted<'_, B>> {
        [self.weight.as_it_is()].into_iter().chain(self.bias.iter().map(Param::as_it_is)).collect()
    }

    fn params(&mut self) -> Vec<&mut Param<B>> {
        [&mut self.weight].into_iter().chain(&mut self.bias).collect()
    }

    fn forward(&self, cx: &Cx<'_, B>, x: Tensor<B>) -> Result<(Tensor<B>, NormSaved<B>)> {
        self.of(cx, x.into())
    }

    fn backward(&mut self, cx: &Cx<'_, B>, saved: NormSaved<B>, dy: Tensor<B>) -> Result<Tensor<B>> {
        self.gradient(cx, saved, &dy, None)
    }
}
