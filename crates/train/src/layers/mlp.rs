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
use crate::spec::MlpSpec;
use nibble_core::ops::{Emit, Gelu, GeluBackward, Swiglu, SwigluBackward};
use nibble_core::{Kernels, Operand, Result, Tensor};

/// A layer that computes y = (silu(x·Wgᵀ) · x·Wuᵀ)·Wdᵀ, or y = gelu(x·Wuᵀ)·Wdᵀ; each product may have a bias.
#[derive(Debug, Clone)]
pub struct Mlp<B: Kernels> {
    /// The layer's name, for example `model.layers.3.mlp` or `model.layers.3.mlp.shared_expert`.
    pub name: String,
    /// What is between the projections.
    pub activation: Activation,
    /// The gate and up projections, stacked: `[2f, d]`; for GELU, the up projection `[f, d]`.
    pub gate_up: Linear<B>,
    /// The down projection, `[d, f]`.
    pub down: Linear<B>,
}

/// The saved inputs of both projections, and the saved input of SwiGLU.
#[derive(Debug)]
pub struct MlpSaved<B: Kernels> {
    layer: String,
    /// The saved input of the layer.
    pub gate_up: LinearSaved<B>,
    /// The gate and up values `[t, 2f]`, before SwiGLU; the up values `[t, f]`, before GELU.
    pub h: Operand<B>,
    /// The output of SwiGLU or GELU, `[t, f]`.
    pub down: LinearSaved<B>,
}

impl<B: Kernels> Saved for MlpSaved<B> {
    fn ledger(&self, ledger: &mut Ledger) {
        self.gate_up.ledger(ledger);
        ledger.operand(&self.layer, "h", &self.h);
        self.down.ledger(ledger);
    }
}

impl<B: Kernels> Mlp<B> {
    /// Creates the layer with random weights.
    pub fn new(cx: &Cx<'_, B>, spec: &MlpSpec) -> Result<Self> {
        let linear = |part| Linear::new(cx, part, cx.activations());
        let (gate_up, down) = (linear(&spec.gate_up)?, linear(&spec.down)?);
        Ok(Self { name: spec.id.clone(), activation: spec.activation, gate_up, down })
    }

    /// The forward pass up to its last product. Returns the input of that product, and the saved activations.
    fn hidden(&self, cx: &Cx<'_, B>, x_td: Tensor<B>) -> Result<(Operand<B>, MlpSaved<B>)> {
        let (h_tf, gate_up) = self.gate_up.forward(cx, x_td)?;
        if self.activation == Activation::Gelu {
            let (a, down) = self.down.input(cx, &Gelu { h: &h_tf }.run(cx.b)?)?;
            let h = Operand::Plain(h_tf);
            return Ok((a, MlpSaved { layer: self.name.clone(), gate_up, h, down }));
        }
        let a = Emit::Plain(cx.activations());
        let plan = self.gate_up.plan(cx);
        let save_h = plan.linear()?.h.map(|h| h.codec()).transpose()?;
        let out = Swiglu { h: &h_tf, weight: None, groups: None, a, save_h }.run(cx.b)?;
        let h = out.h.map_or(Operand::Plain(h_tf), Operand::Block);
        let a_tf = out.a.take_rows("mlp")?.plain("mlp")?.clone();
        let (a, down) = self.down.input(cx, &a_tf)?;
        Ok((a, MlpSaved { layer: self.name.clone(), gate_up, h, down }))
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

    fn forward(&self, cx: &Cx<'_, B>, x_td: Tensor<B>) -> Result<(Tensor<B>, MlpSaved<B>)> {
        let (a, saved) = self.hidden(cx, x_td)?;
        Ok((self.down.product(cx, &a)?, saved))
    }

    fn again(&self, cx: &Cx<'_, B>, x_td: Tensor<B>) -> Result<MlpSaved<B>> {
        Ok(self.hidden(cx, x_td)?.1)
    }

    fn backward(&mut self, cx: &Cx<'_, B>, saved: MlpSaved<B>, dy_td: Tensor<B>) -> Result<Tensor<B>> {
        let da = self.down.backward(cx, saved.down, dy_td)?;
        if self.activation == Activation::Gelu {
            let dh = GeluBackward { h: saved.h.plain("mlp")?, da: &da }.run(cx.b)?;
            return self.gate_up.backward(cx, saved.gate_up, dh);
        }
        let plain = Emit::Plain(cx.activations());
        let grads = SwigluBackward { h: &saved.h, da: &da, weight: None, groups: None, dh: plain, a: None }
            .run(cx.b)?;
        let dh = grads.dh.take_rows("mlp")?.plain("mlp")?.clone();
        self.gate_up.backward(cx, saved.gate_up, dh)
    }
}
