//! Dense feed-forward layer: the MLP of a dense layer, or the shared expert, with SwiGLU or GELU. Legend: t tokens, d model, f ffn.
//!
//! The layer consists of two linear layers with SwiGLU or GELU between them. Each linear layer saves its input, and SwiGLU or GELU saves h.
//! GELU's h and a are plain, and the projections quantize a. SwiGLU and its
//! backward pass write plain a and dh, which the projections quantize. Under `mxfp4-hopper` this takes six separate quantizations, while
//! the fused kernels of an expert layer need two.

use super::{Layer, Linear, LinearSaved};
use crate::config::Activation;
use crate::cx::Cx;
use crate::ledger::{Ledger, Saved};
use crate::param::{Param, Wanted};
use crate::recompute::Scope;
use crate::spec::MlpSpec;
use nibble_core::ops::{Emit, Gelu, GeluBackward, Swiglu, SwigluBackward};
use nibble_core::{Error, Kernels, Operand, Result, Tensor};

/// A layer that computes y = (silu(x·Wgᵀ) · x·Wuᵀ)·Wdᵀ, or y = gelu(x·Wuᵀ)·Wdᵀ; each product may have a bias.
#[derive(Debug, Clone)]
pub struct Mlp<B: Kernels> {
    /// The layer's name, for example `model.layers.3.mlp` or `model.layers.3.mlp.shared_expert`.
    pub name: String,
    /// The activation function between the projections.
    pub activation: Activation,
    /// The gate and up projections, stacked in one weight `[2f, d]`; for GELU, only the up projection `[f, d]`.
    pub gate_up: Linear<B>,
    /// The down projection, `[d, f]`.
    pub down: Linear<B>,
    /// Whether to save h, the output of `gate_up`, instead of recomputing h from the layer's input.
    pub keep_h: bool,
}

/// The inputs of both projections and the input of SwiGLU, saved for the backward pass.
#[derive(Debug)]
pub struct MlpSaved<B: Kernels> {
    layer: String,
    /// The saved input of the gate and up projections.
    pub gate_up: LinearSaved<B>,
    /// The gate and up values `[t, 2f]` before SwiGLU, or the up values `[t, f]` before GELU; `None` if the backward pass recomputes these
    /// values.
    pub h: Option<Operand<B>>,
    /// The saved output of SwiGLU or GELU, `[t, f]`.
    pub down: LinearSaved<B>,
    /// The layer's input `[t, d]`, which only the backward pass sets, and only to recompute h.
    input: Option<Tensor<B>>,
}

impl<B: Kernels> MlpSaved<B> {
    /// Calls `again` to recompute the layer's input if h was not saved.
    pub fn give_input(&mut self, again: impl FnOnce() -> Result<Tensor<B>>) -> Result<()> {
        if self.h.is_none() {
            self.input = Some(again()?);
        }
        Ok(())
    }
}

impl<B: Kernels> Saved for MlpSaved<B> {
    fn ledger(&self, ledger: &mut Ledger) {
        self.gate_up.ledger(ledger);
        if let Some(h) = &self.h {
            ledger.operand(&self.layer, "h", h);
        }
        self.down.ledger(ledger);
    }
}

impl<B: Kernels> Mlp<B> {
    /// Creates the layer with random weights.
    pub fn new(cx: &Cx<'_, B>, spec: &MlpSpec) -> Result<Self> {
        let linear = |part| Linear::new(cx, part, cx.activations());
        let (gate_up, down) = (linear(&spec.gate_up)?, linear(&spec.down)?);
        Ok(Self { name: spec.id.clone(), activation: spec.activation, gate_up, down, keep_h: true })
    }

    /// The forward pass up to its last product. Returns the input of that product, and the saved activations.
    fn hidden(&self, cx: &Cx<'_, B>, x_td: Tensor<B>) -> Result<(Operand<B>, MlpSaved<B>)> {
        let (h_tf, gate_up) = self.gate_up.forward(cx, x_td)?;
        let (a_tf, h) = self.gated(cx, h_tf, self.keep_h)?;
        let (a, down) = self.down.input(cx, &a_tf)?;
        Ok((a, MlpSaved { layer: self.name.clone(), gate_up, h, down, input: None }))
    }

    /// SwiGLU or GELU: returns plain a, and h in the form in which it is saved, if `keep_h`.
    fn gated(
        &self,
        cx: &Cx<'_, B>,
        h_tf: Tensor<B>,
        keep_h: bool,
    ) -> Result<(Tensor<B>, Option<Operand<B>>)> {
        if self.activation == Activation::Gelu {
            let a = Gelu { h: &h_tf }.run(cx.b)?;
            return Ok((a, keep_h.then_some(Operand::Plain(h_tf))));
        }
        let plan = self.gate_up.plan(cx);
        let save_h = plan.linear()?.h.filter(|_| keep_h).map(|h| h.codec()).transpose()?;
        let a = Emit::Plain(cx.activations());
        let out = Swiglu { h: &h_tf, weight: None, groups: None, a, save_h }.run(cx.b)?;
        let h = keep_h.then(|| out.h.map_or(Operand::Plain(h_tf), Operand::Block));
        Ok((out.a.take_rows("mlp")?.plain("mlp")?.clone(), h))
    }

    /// Recomputes h from the layer's input, in the form in which it is saved.
    fn h_again(&self, cx: &Cx<'_, B>, x_td: &Tensor<B>) -> Result<Operand<B>> {
        let plan = self.gate_up.plan(cx);
        let h_tf = self.gate_up.product(cx, &self.gate_up.fprop_input(cx, x_td)?)?;
        match plan.linear()?.h {
            // Only SwiGLU's kernel writes this form.
            Some(_) => {
                let missing = Error::Defect { place: "mlp", what: "h is not made again" };
                self.gated(cx, h_tf, true)?.1.ok_or(missing)
            }
            None => Ok(Operand::Plain(h_tf)),
        }
    }
}

impl<B: Kernels> Layer<B> for Mlp<B> {
    type In = Tensor<B>;
    type Out = Tensor<B>;
    type Saved = MlpSaved<B>;

    fn wanted(&self, cx: &Cx<'_, B>) -> Vec<Wanted<'_, B>> {
        [&self.gate_up, &self.down].into_iter().flat_map(|linear| linear.wanted(cx)).collect()
    }

    fn params(&mut self) -> Vec<&mut Param<B>> {
        [&mut self.gate_up, &mut self.down].into_iter().flat_map(Linear::params).collect()
    }

    fn recompute(&mut self, scopes: &[Scope]) {
        self.keep_h = !scopes.contains(&Scope::MlpUp);
    }

    fn forward(&self, cx: &Cx<'_, B>, x_td: Tensor<B>) -> Result<(Tensor<B>, MlpSaved<B>)> {
        let (a, saved) = self.hidden(cx, x_td)?;
        Ok((self.down.product(cx, &a)?, saved))
    }

    fn again(&self, cx: &Cx<'_, B>, x_td: Tensor<B>) -> Result<MlpSaved<B>> {
        Ok(self.hidden(cx, x_td)?.1)
    }

    fn backward(&mut self, cx: &Cx<'_, B>, saved: MlpSaved<B>, dy_td: Tensor<B>) -> Result<Tensor<B>> {
        let da = self.down.backward(cx, saved.down, dy_td)?;
        let plain = Emit::Plain(cx.activations());
        let h = match (saved.h, saved.input) {
            (Some(h), _) => h,
            (None, Some(x_td)) => cx.again(|| self.h_again(cx, &x_td))?,
            (None, None) => {
                return Err(Error::Defect { place: "mlp", what: "h is neither kept nor made again" });
            }
        };
        if self.activation == Activation::Gelu {
            let dh = GeluBackward { h: h.plain("mlp")?, da: &da }.run(cx.b)?;
            return self.gate_up.backward(cx, saved.gate_up, dh);
        }
        let grads =
            SwigluBackward { h: &h, da: &da, weight: None, groups: None, dh: plain, a: None }.run(cx.b)?;
        drop((h, da));
        let dh = grads.dh.take_rows("mlp")?.plain("mlp")?.clone();
        self.gate_up.backward(cx, saved.gate_up, dh)
    }
}
