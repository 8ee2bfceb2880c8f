//! The embedding of tokens, or of the patches of images. Legend: t tokens, d model, v vocabulary, p pixels of a patch, s positions.

use crate::cx::Cx;
use crate::ledger::{Ledger, Saved};
use crate::param::{Param, Wanted, Writes};
use crate::spec::Part;
use nibble_core::ops::{AddBias, AddBiasBackward, Embed, EmbedBackward, EmbedOut, Gemm};
use nibble_core::{Error, Kernels, Operand, Result, Tensor};

/// The embedding. The embedding is not a [`Layer`](super::Layer), because token ids, its input, have no gradient. The embedding reads its
/// weight directly. Only a tied head quantizes or converts copies of the weight for matrix products.
#[derive(Debug, Clone)]
pub struct Embedding<B: Kernels> {
    /// The embedding weight `[v, d]`. For images, `weight` is the weight `[d, p]` of the linear layer that embeds patches.
    pub weight: Param<B>,
    /// The additional parts of an embedding of images; `None` for a language model.
    pub patches: Option<Patches<B>>,
}

/// The parameters and pixels that an embedding of image patches needs. The id of a token is the index of the token's row in the table of
/// pixels. The first token of each image is the class token, whose row of pixels is zero. The vector of a class token is therefore the bias
/// plus the vector of the first position.
#[derive(Debug, Clone)]
pub struct Patches<B: Kernels> {
    /// The bias `[1, d]` of the linear layer that embeds patches.
    pub bias: Param<B>,
    /// The learned vectors of all positions, `[1, s·d]`.
    pub positions: Param<B>,
    /// The pixels of all images as F32 `[rows, p]`; `None` until the images have been read.
    pub pixels: Option<Tensor<B>>,
}

/// The saved token ids.
#[derive(Debug)]
pub struct EmbeddingSaved<B: Kernels> {
    layer: String,
    ids: B::Buf<i32>,
}

impl<B: Kernels> Saved for EmbeddingSaved<B> {
    fn ledger(&self, ledger: &mut Ledger) {
        ledger.words::<B, i32>(&self.layer, "ids", &self.ids);
    }
}

impl<B: Kernels> Embedding<B> {
    /// Creates the embedding with random weights. This rank stores only its own rows of the F32 master weight, but every rank computes with
    /// all rows.
    pub fn new(cx: &Cx<'_, B>, part: &Part) -> Result<Self> {
        let [weight, bias, positions] = part.weights() else {
            return Ok(Self { weight: Param::only(cx, part)?, patches: None });
        };
        let patches =
            Patches { bias: Param::of(cx, bias)?, positions: Param::of(cx, positions)?, pixels: None };
        Ok(Self { weight: Param::of(cx, weight)?, patches: Some(patches) })
    }

    /// See [`Layer::wanted`](super::Layer::wanted).
    pub fn wanted(&self) -> Vec<Wanted<'_, B>> {
        let patches = self.patches.iter().flat_map(|patches| [&patches.bias, &patches.positions]);
        [&self.weight].into_iter().chain(patches).map(Param::as_it_is).collect()
    }

    /// The embedding's parameter.
    pub fn params(&mut self) -> Vec<&mut Param<B>> {
        let patches = self.patches.iter_mut().flat_map(|patches| [&mut patches.bias, &mut patches.positions]);
        [&mut self.weight].into_iter().chain(patches).collect()
    }

    /// The vectors `[t, d]` of the tokens. Also returns the number of tokens that are not in the vocabulary (for images, not in the table
    /// of pixels).
    pub fn forward(&self, cx: &Cx<'_, B>, ids: &B::Buf<i32>) -> Result<EmbedOut<B>> {
        let Some(patches) = &self.patches else {
            return Embed { table: self.weight.plain()?, ids, dtype: cx.activations() }.run(cx.b);
        };
        let EmbedOut { x, bad_ids } = patches.rows(cx, ids)?;
        let (x, weight) = (Operand::Plain(x), Operand::Plain(self.weight.plain()?.clone()));
        let mut y_td = Gemm { a: &x, b: &weight, out: cx.activations() }.run(cx.b)?;
        AddBias { x: &mut y_td, bias: patches.bias.plain()? }.run(cx.b)?;
        let shape = y_td.shape();
        let mut of_images = patches.by_images(y_td)?;
        AddBias { x: &mut of_images, bias: patches.positions.plain()? }.run(cx.b)?;
        Ok(EmbedOut { x: Tensor::new(of_images.data, shape.0, shape.1)?, bad_ids })
    }

    /// Saves the token ids, which the backward pass needs.
    pub fn saved(&self, ids: B::Buf<i32>) -> EmbeddingSaved<B> {
        EmbeddingSaved { layer: self.weight.layer().to_owned(), ids }
    }

    /// Computes the weight's gradient from the gradient of the output vectors, and adds it to the accumulated gradient.
    pub fn backward(&mut self, cx: &Cx<'_, B>, saved: EmbeddingSaved<B>, dy_td: &Tensor<B>) -> Result<()> {
        let shards = cx.shards.local;
        if let Some(patches) = &mut self.patches {
            let of_images = patches.by_images(dy_td.clone())?;
            for (bias, dy) in [(&mut patches.positions, &of_images), (&mut patches.bias, dy_td)] {
                bias.add_gradient(cx, Writes::Adds, |dbias, _| AddBiasBackward { dy, dbias }.run(cx.b))?;
            }
            let x = Operand::Plain(patches.rows(cx, &saved.ids)?.x);
            return self.weight.accumulate_wgrad(cx, &Operand::Plain(dy_td.clone()), &x, &cx.shards.groups);
        }
        self.weight.add_gradient(cx, Writes::Adds, |grad, _| {
            EmbedBackward { ids: &saved.ids, dy: dy_td, grad, shards }.run(cx.b)
        })
    }
}

impl<B: Kernels> Patches<B> {
    /// The pixels `[t, p]` of these tokens, and the number of tokens that are not in the table.
    fn rows(&self, cx: &Cx<'_, B>, ids: &B::Buf<i32>) -> Result<EmbedOut<B>> {
        let missing = || {
            Error::shape("embedding", "pixels", "none", "the images of the run, which are read with its data")
        };
        let table = self.pixels.as_ref().ok_or_else(missing)?;
        Embed { table, ids, dtype: cx.activations() }.run(cx.b)
    }

    /// The same values `[t, d]` with a row for each image, `[t/s, s·d]`.
    fn by_images(&self, x: Tensor<B>) -> Result<Tensor<B>> {
        let cols = self.positions.shape().1;
        let images = (x.rows * x.cols).checked_div(cols).unwrap_or(0);
        Tensor::new(x.data, images, cols)
    }
}
