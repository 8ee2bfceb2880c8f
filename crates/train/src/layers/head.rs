//! The output head and its loss, in chunks of tokens. t tokens, d model, v vocabulary.
//!
//! What a forward pass would keep for the head's backward pass is its input, and logits as large as the vocabulary. So the
//! head's gradients are made in the forward pass, while a chunk's logits exist, and what is kept is one gradient of the
//! size of the input.

use super::Linear;
use crate::cx::{Cx, Place};
use crate::ledger::{Ledger, Saved};
use crate::param::Writes;
use crate::record::Conversion;
use nibble_core::formats::Codec;
use nibble_core::ops::{Gemm, HeadCodecs, HeadLoss, HeadLossGrad, HeadLossOut, head_chunk};
use nibble_core::recipe::{Section, Site};
use nibble_core::{DType, Error, Kernels, Result, Tensor};

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
    /// The losses alone.
    pub fn losses(&self, cx: &Cx<'_, B>, input: &HeadInput<'_, B>) -> Result<HeadLossOut<B>> {
        let HeadInput { x_td: x, targets, shards } = *input;
        let (w, chunk) = (self.weight.w()?, head_chunk(cx.b.kind(), self.weight.master.rows));
        let codecs = HeadCodecs { fprop_x: codec(&self.section(cx), Site::FpropX)?, ..HeadCodecs::default() };
        HeadLoss { x, w, codecs, targets, shards, chunk, grad: None }.run(cx.b)
    }

    /// The losses; and the gradients of `scale` · their sum, that of the weight added to what it has.
    pub fn losses_and_gradients(
        &mut self,
        cx: &Cx<'_, B>,
        input: &HeadInput<'_, B>,
        scale: f32,
    ) -> Result<(HeadLossOut<B>, HeadSaved<B>)> {
        let HeadInput { x_td: x, targets, shards } = *input;
        let layer = self.site().to_owned();
        let codecs = self.codecs(cx)?;
        let (w, wt) = (self.weight.w()?.clone(), self.weight.wt()?.clone());
        let chunk = head_chunk(cx.b.kind(), w.rows());
        let mut out = self.weight.add_gradient(cx, Writes::InParts, |dw, accumulate| {
            let grad = Some(HeadLossGrad { wt: &wt, scale, dw, accumulate });
            HeadLoss { x, w: &w, codecs, targets, shards, chunk, grad }.run(cx.b)
        })?;
        cx.keep_counts(&layer, "x", Conversion::Quantize, out.x_counts.as_ref());
        cx.keep_counts(&layer, "dlogits", Conversion::Quantize, out.dlogits_counts.as_ref());
        let dx = out.dx.take().ok_or_else(|| Error::shape("head_loss", "dx", "missing", "[t, d]"))?;
        Ok((out, HeadSaved { layer, dx }))
    }

    /// What a pass with gradients quantizes. All of it in the forward pass.
    fn codecs(&self, cx: &Cx<'_, B>) -> Result<HeadCodecs> {
        let section = self.section(cx);
        Ok(HeadCodecs {
            fprop_x: codec(&section, Site::FpropX)?,
            dgrad_dy: codec(&section, Site::DgradDy)?,
            wgrad_dy: codec(&section, Site::WgradDy)?,
            wgrad_x: codec(&section, Site::WgradX)?,
        })
    }

    /// Logits F32 `[t, v]` of the plain `[t, d]`.
    pub fn logits(&self, cx: &Cx<'_, B>, x: Tensor<B>) -> Result<Tensor<B>> {
        let section = self.section(cx);
        let to = section.at(Site::FpropX);
        let at = Place { layer: self.site(), tensor: "x", linear: self.site() };
        let x = cx.form(at, &x, to, None)?;
        Gemm { a: &x, b: self.weight.w()?, out: DType::F32 }.run(cx.b)
    }
}

/// That of a site's blocks.
fn codec(section: &Section, site: Site) -> Result<Option<Codec>> {
    let to = section.at(site);
    to.format.is_block().then(|| to.codec()).transpose()
}
