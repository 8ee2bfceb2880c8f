//! Norm and rotation of queries or keys before attention. The norm is over each head (Qwen3) or over all heads together (OLMoE); Llama has
//! no such norm. Legend: t tokens, n heads, c head_dim.

use super::{Norm, NormSaved};
use crate::cx::Cx;
use crate::ledger::{Ledger, Saved};
use nibble_core::ops::{NormRope, NormRopeBackward, Positions, RmsNorm, Rope};
use nibble_core::{Error, Kernels, Result, Tensor};

/// The norm that is applied to queries or keys before RoPE.
#[derive(Debug, Clone)]
pub struct Heads<B: Kernels> {
    /// The norm, which covers each head, `[1, c]`, or all heads together, `[1, n·c]`; `None` in a model without a norm of queries and keys.
    pub norm: Option<Norm<B>>,
}

/// A norm, and the rotation that follows the norm.
struct Turn<'a, B: Kernels> {
    norm: &'a Norm<B>,
    rotation: &'a Rotation<'a, B>,
}

impl<B: Kernels> Turn<'_, B> {
    /// Whether each head is normalized separately. If so, one op computes norm and rotation.
    fn by_heads(&self) -> bool {
        self.norm.weight.shape().1 == self.rotation.table.cols
    }

    /// The normalized and rotated heads of x, and 1 / rms of each head or of each row.
    fn of(&self, cx: &Cx<'_, B>, x: &Tensor<B>) -> Result<(Tensor<B>, B::Buf<f32>)> {
        let Self { norm, rotation } = self;
        let (weight, eps) = (norm.weight.plain()?, norm.eps);
        if self.by_heads() {
            let Rotation { table, positions } = rotation;
            let out = NormRope { x, weight, eps, table, positions }.run(cx.b)?;
            return Ok((out.y, out.inv_rms));
        }
        let out = RmsNorm::new(x, weight, eps).run(cx.b)?;
        Ok((rotated(cx, &out.y, rotation, false)?, out.inv_rms))
    }
}

/// The rotation of heads.
#[derive(Debug)]
pub struct Rotation<'a, B: Kernels> {
    /// The table of cosines and sines that [`nibble_core::ops::Rope`] reads.
    pub table: &'a Tensor<B>,
    /// Positions of the tokens.
    pub positions: Positions<B>,
}

/// The activations that the norm and the RoPE rotation of heads save for the backward pass.
#[derive(Debug)]
pub struct HeadsSaved<B: Kernels> {
    /// The norm's input, if there is a norm.
    norm: Option<NormSaved<B>>,
    /// The result, which attention's backward pass reads, unless the result is recomputed. Without a norm the result is always saved,
    /// because it is no larger than its input, and the backward pass of a rotation needs neither of the two.
    turned: Option<Tensor<B>>,
}

impl<B: Kernels> HeadsSaved<B> {
    /// Lists the saved activations, with the result as `kind` of this layer.
    pub(super) fn list(&self, ledger: &mut Ledger, layer: &str, kind: &'static str) {
        if let Some(norm) = &self.norm {
            norm.ledger(ledger);
        }
        if let Some(turned) = &self.turned {
            ledger.tensor(layer, kind, turned);
        }
    }
}

impl<B: Kernels> Heads<B> {
    /// The heads of `x` after the norm (if there is a norm) and the RoPE rotation: `[t, n·c]`. If `keep` is set, the result is saved for
    /// the backward pass.
    pub fn forward(
        &self,
        cx: &Cx<'_, B>,
        x: Tensor<B>,
        rotation: &Rotation<'_, B>,
        keep: bool,
    ) -> Result<(Tensor<B>, HeadsSaved<B>)> {
        let Some(norm) = &self.norm else {
            let y = rotated(cx, &x, rotation, false)?;
            return Ok((y.clone(), HeadsSaved { norm: None, turned: Some(y) }));
        };
        let (y, inv_rms) = Turn { norm, rotation }.of(cx, &x)?;
        let saved = NormSaved { layer: norm.layer(), x, inv_rms, mean: None };
        let turned = keep.then(|| y.clone());
        Ok((y, HeadsSaved { norm: Some(saved), turned }))
    }

    /// The heads after norm and rotation, either saved by the forward pass or recomputed.
    pub fn turned(
        &self,
        cx: &Cx<'_, B>,
        saved: &mut HeadsSaved<B>,
        rotation: &Rotation<'_, B>,
    ) -> Result<Tensor<B>> {
        match (saved.turned.take(), &self.norm, &saved.norm) {
            (Some(turned), ..) => Ok(turned),
            (None, Some(norm), Some(saved)) => Ok(Turn { norm, rotation }.of(cx, &saved.x)?.0),
            (None, ..) => Err(Error::Defect { place: "heads", what: "they are neither kept nor made again" }),
        }
    }

    /// Computes the gradient of the input `x` of [`Heads::forward`] from `dy`, the gradient of the output.
    pub fn backward(
        &mut self,
        cx: &Cx<'_, B>,
        saved: HeadsSaved<B>,
        dy: Tensor<B>,
        rotation: &Rotation<'_, B>,
    ) -> Result<Tensor<B>> {
        let (Some(norm), Some(saved)) = (&mut self.norm, saved.norm) else {
            return rotated(cx, &dy, rotation, true);
        };
        if !(Turn { norm, rotation }).by_heads() {
            let dy = rotated(cx, &dy, rotation, true)?;
            return norm.gradient(cx, saved, &dy, None);
        }
        let Rotation { table, positions } = rotation;
        let weight = &norm.weight.plain()?.clone();
        norm.weight.add_gradient(cx, crate::param::Writes::Adds, |dweight, _| {
            let NormSaved { x, inv_rms, .. } = &saved;
            let dy = &dy;
            NormRopeBackward { x, weight, inv_rms, dy, table, positions, dweight }.run(cx.b)
        })
    }
}

fn rotated<B: Kernels>(
    cx: &Cx<'_, B>,
    x: &Tensor<B>,
    Rotation { table, positions }: &Rotation<'_, B>,
    inverse: bool,
) -> Result<Tensor<B>> {
    Rope { x, table, head_dim: table.cols, positions, inverse }.run(cx.b)
}
