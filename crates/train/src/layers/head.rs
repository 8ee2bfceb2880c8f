//! The output head and its loss, in chunks of tokens. t tokens, d model, v vocabulary.
//!
//! What a forward pass would keep for the head's backward pass is its input, and logits as large as the vocabulary. So the
//! head's gradients are made in the forward pass, while a chunk's logits exist, and what is kept is one gradient of the
//! size of the input.

use super::Linear;
use crate::cx::Cx;
use crate::ledger::{Ledger, Saved};
use crate::param::Writes;
use nibble_core::ops::{Gemm, HeadLoss, HeadLossGrad, HeadLossOut};
use nibble_core::{DType, Error, Kernels, Operand, Result, Tensor};

/// The gradient of the head's input, made in the forward pass.
#[derive(Debug)]
pub struct HeadSaved<B: Kernels> {
    layer: String,
    /// `[t, d]`, type of the activations.
    pub dx: Tensor<B>,
}

impl<B: Kernels> Saved for HeadSaved<B> {
    fn ledger(&self, ledger: &mut Ledger) {
        ledger.tensor(&self.layer, "dx", &self.dx);
    }
}

/// A head's tokens and their targets.
#[derive(Debug)]
pub struct HeadInput<'a, B: Kernels> {
    /// `[t, d]`.
    pub x_td: &'a Tensor<B>,
    /// The right token of each row; a negative one is not counted.
    pub targets: &'a B::Buf<i32>,
    /// Runs of rows whose losses are summed; where there is a gradient, the shards of the pass.
    pub shards: usize,
}

impl<B: Kernels> Linear<B> {
    /// The losses alone. The head is never quantized.
    pub fn losses(&self, cx: &Cx<'_, B>, input: &HeadInput<'_, B>) -> Result<HeadLossOut<B>> {
        let HeadInput { x_td: x, targets, shards } = *input;
        let w = self.weight.w()?.plain("head_loss")?;
        HeadLoss { x, w, targets, shards, chunk: cx.b.head_chunk(w.rows), grad: None }.run(cx.b)
    }

    /// The losses; and the gradients of `scale` · their sum, that of the weight added to what it has.
    pub fn losses_and_gradients(
        &mut self,
        cx: &Cx<'_, B>,
        input: &HeadInput<'_, B>,
        scale: f32,
    ) -> Result<(HeadLossOut<B>, HeadSaved<B>)> {
        let HeadInput { x_td: x, targets, shards } = *input;
        let layer = self.weight.name.trim_end_matches(".weight").to_owned();
        let (w, wt) = (self.weight.w()?.clone(), self.weight.wt()?.clone());
        let (w, wt) = (w.plain("head_loss")?, wt.plain("head_loss")?);
        let chunk = cx.b.head_chunk(w.rows);
        let mut out = self.weight.add_gradient(cx, Writes::InParts, |dw, accumulate| {
            let grad = Some(HeadLossGrad { wt, scale, dw, accumulate });
            HeadLoss { x, w, targets, shards, chunk, grad }.run(cx.b)
        })?;
        let dx = out.dx.take().ok_or_else(|| Error::shape("head_loss", "dx", "missing", "[t, d]"))?;
        Ok((out, HeadSaved { layer, dx }))
    }

    /// Logits F32 `[t, v]` of the plain `[t, d]`.
    pub fn logits(&self, cx: &Cx<'_, B>, x: Tensor<B>) -> Result<Tensor<B>> {
        Gemm { a: &Operand::Plain(x), b: self.weight.w()?, out: DType::F32 }.run(cx.b)
    }
}
