//! The output head and its loss, in chunks of tokens. Legend: t tokens, d model, v vocabulary.
//!
//! A separate backward pass would need the head's input and the logits of all tokens, whose width is the vocabulary. The head therefore
//! computes its gradients in the forward pass, while a chunk's logits exist, and saves only the gradient of its input. The head has no
//! `backward`. `nibble_choice::head_loss` chooses the length of a chunk: 512 tokens on a CPU, up to 8192 on a GPU.
//!
//! Under a recipe's `[head]`, the products may be quantized in any format in which a scale covers a block of tokens or less. Each chunk's
//! input, and the BF16 gradients of the chunk's logits, are then quantized along rows and columns. Random bits and the signs of transforms
//! depend on the token's place in the step, so the length of a chunk does not change them. The weight is quantized once per step, like any
//! other weight.

use crate::convert::{Again, LayerName};
use crate::cx::Cx;
use crate::ledger::{Ledger, Saved};
use crate::lifts::Lifting;
use crate::param::{Gathering, Param, Wanted, Writes};

use crate::spec::Part;
use nibble_choice::head_loss;
use nibble_core::formats::{Codec, fnv1a32};
use nibble_core::ops::{
    CrossEntropy, Gemm, HeadCodecs, HeadLoss, HeadLossChunk, HeadLossGrad, HeadLossOut, HeadOperand,
    HeadRandom,
};
use nibble_core::recipe::{Layer, LayerKind, LayerPlan, Product};
use nibble_core::{DType, Data, Error, Kernels, Operand, Result, Tensor};
use std::sync::Arc;

/// The gradient of the head's input. The forward pass of the head computes and saves the gradient of the head's input.
#[derive(Debug)]
pub struct HeadSaved<B: Kernels> {
    layer: String,
    /// The gradient `[t, d]`, in the data type of the activations.
    pub dx: Tensor<B>,
}

impl<B: Kernels> Saved for HeadSaved<B> {
    fn ledger(&self, ledger: &mut Ledger) {
        ledger.tensor(&self.layer, "dx", &self.dx);
    }
}

/// The input vectors of the output head and the target tokens.
#[derive(Debug)]
pub struct HeadInput<'a, B: Kernels> {
    /// The input vectors of the head, `[t, d]`.
    pub x_td: &'a Tensor<B>,
    /// The target token of each row. Rows with a negative target do not contribute to the loss.
    pub targets: &'a B::Buf<i32>,
    /// Number of parts into which the rows are divided. All parts have equally many rows. The losses are summed separately over each part.
    /// If gradients are computed, each of the `shards` parts is one shard of the pass.
    pub shards: usize,
}

/// The output head. The head has its own weight `[v, d]`, or shares the embedding's weight (a tied head). The head is not a
/// [`Layer`](super::Layer), because the forward pass already computes the head's gradients. Callers pass the embedding's weight as the
/// argument `table`, which only a tied head uses.
#[derive(Debug, Clone)]
pub struct Head<B: Kernels> {
    /// The name of the head's weight in recipes: `lm_head`, or for a tied head, the id of the embedding.
    pub id: String,
    /// The head's own weight; `None` if the head shares the embedding's weight.
    pub own: Option<Param<B>>,
}

impl<B: Kernels> Head<B> {
    /// Creates the head with random weights. This rank stores only its own rows of the F32 master weight, but every rank computes with all
    /// rows. A tied head has no weight of its own.
    pub fn new(cx: &Cx<'_, B>, part: &Part) -> Result<Self> {
        let own = (!part.params().is_empty()).then(|| Param::only(cx, part));
        Ok(Self { id: part.id.clone(), own: own.transpose()? })
    }

    fn weight<'a>(&'a self, table: &'a Param<B>) -> &'a Param<B> {
        self.own.as_ref().unwrap_or(table)
    }

    /// The weight that the head uses.
    pub(crate) fn weight_mut<'a>(&'a mut self, table: &'a mut Param<B>) -> &'a mut Param<B> {
        self.own.as_mut().unwrap_or(table)
    }

    fn plan(&self, cx: &Cx<'_, B>) -> Arc<LayerPlan> {
        cx.plan(&Layer::new(LayerKind::Head, &self.id))
    }

    /// See [`Layer::wanted`](super::Layer::wanted).
    pub fn wanted<'a>(&'a self, cx: &Cx<'_, B>, table: &'a Param<B>) -> Vec<Wanted<'a, B>> {
        vec![self.weight(table).for_products(&self.plan(cx).weights, &self.id)]
    }

    /// Makes the copies of the weight that this step's matrix products read.
    ///
    /// # Errors
    /// Returns errors of the backend and of other ranks.
    pub fn prepare(&mut self, cx: &Cx<'_, B>, table: &mut Param<B>) -> Result<()> {
        Gathering::begin(cx, vec![self.wanted(cx, table)])?.finish_next(cx, vec![self.weight_mut(table)])
    }

    /// Computes only the losses.
    pub fn losses(
        &self,
        cx: &Cx<'_, B>,
        table: &Param<B>,
        input: &HeadInput<'_, B>,
    ) -> Result<HeadLossOut<B>> {
        let HeadInput { x_td: x, targets, shards } = *input;
        let weight = self.weight(table);
        let w = weight.w()?;
        let chunk = head_loss::chunk(cx.b.kind(), w.rows());
        let plan = self.plan(cx);
        let codecs = plan.head()?.losses()?;
        let random = self.random(cx, &plan, &codecs, x);
        HeadLoss { x, w, codecs, random, targets, shards, chunk, grad: None }.run(cx.b)
    }

    /// The random bits and the transforms of the tensors that the kernel of the head quantizes by `codecs`. Their names are those of any
    /// layer's tensors: the random bits have the name of the tensor, the signs have the name of the layer.
    fn random<'c>(
        &self,
        cx: &'c Cx<'_, B>,
        plan: &LayerPlan,
        codecs: &HeadCodecs,
        x: &Tensor<B>,
    ) -> HeadRandom<'c, B> {
        let HeadCodecs { fprop_x, dgrad_dy, wgrad_dy, wgrad_x } = *codecs;
        let bits = |tensor, codecs: [Option<Codec>; 2]| {
            codecs.into_iter().flatten().any(|codec| codec.draws()).then(|| cx.bits(&self.id, tensor))
        };
        let transform = |product, codec: Option<Codec>| {
            let planned = plan.products.iter().find(|planned| planned.product == product)?;
            let transform = planned.transform.filter(|_| codec.is_some())?;
            Some(cx.hadamard(&transform, fnv1a32(&self.id)))
        };
        let random = HeadRandom {
            x: bits("x", [fprop_x, wgrad_x]),
            dlogits: bits("dlogits", [dgrad_dy, wgrad_dy]),
            fprop: transform(Product::Fprop, fprop_x),
            dgrad: transform(Product::Dgrad, dgrad_dy),
            wgrad: transform(Product::Wgrad, wgrad_dy),
            row_id: None,
        };
        let by_token = random.x.is_some() || random.dlogits.is_some() || random.wgrad.is_some();
        let groups = cx.groups_of(x).filter(|_| by_token);
        HeadRandom { row_id: groups.map(|groups| &groups.row_id), ..random }
    }

    /// Computes the losses, and the gradients of the sum of the losses. The gradients are scaled by the factor in `control`
    /// ([`nibble_core::ops::Control`]). The call adds the gradient of the weight to the weight's accumulated gradient.
    pub fn losses_and_gradients(
        &mut self,
        cx: &Cx<'_, B>,
        table: &mut Param<B>,
        input: &HeadInput<'_, B>,
        control: &B::Buf<f32>,
    ) -> Result<(HeadLossOut<B>, HeadSaved<B>)> {
        let HeadInput { x_td: x, targets, shards } = *input;
        let plan = self.plan(cx);
        let codecs = plan.head()?.losses_and_gradients()?;
        let random = self.random(cx, &plan, &codecs, x);
        let weight = self.weight_mut(table);
        let (w, wt) = (weight.w()?.clone(), weight.wt(cx)?.into_owned());
        let chunk = head_loss::chunk(cx.b.kind(), w.rows());
        let mut out = weight.add_gradient(cx, Writes::InParts, |dw, accumulate| {
            let grad = Some(HeadLossGrad { wt: &wt, control, dw, accumulate });
            HeadLoss { x, w: &w, codecs, random, targets, shards, chunk, grad }.run(cx.b)
        })?;
        let [of_x, of_dlogits] = random.operands(&codecs);
        cx.keep_counts(&self.id, "x", out.x_counts.as_ref());
        let groups = random.row_id.and_then(|_| cx.groups_of(x));
        let again = || Again { x: x.clone(), place: HeadLossChunk::all(shards, x.rows), groups };
        cx.measure_again(|| Ok(vec![again()]), &of_x)?;
        cx.keep_counts(&self.id, "dlogits", out.dlogits_counts.as_ref());
        let dlogits = || sample_dlogits(cx, input, (&w, of_x.along_rows()), control);
        cx.measure_again(dlogits, &of_dlogits)?;
        self.measure_lifts(cx, table, input, [&w, &wt], [of_x, of_dlogits], control)?;
        let dx = out.dx.take().ok_or(Error::Defect { place: "head_loss", what: "it gives no gradient" })?;
        Ok((out, HeadSaved { layer: self.id.clone(), dx }))
    }

    /// In a step that measures quantization: counts what lifts round inside the head's operation. Their operands, except the weight, exist
    /// only there, and are made again piece by piece. A piece consists of whole lifted blocks.
    fn measure_lifts(
        &self,
        cx: &Cx<'_, B>,
        table: &Param<B>,
        input: &HeadInput<'_, B>,
        [w, wt]: [&Operand<B>; 2],
        [of_x, of_dlogits]: [HeadOperand<'_, B>; 2],
        control: &B::Buf<f32>,
    ) -> Result<()> {
        let plan = self.plan(cx);
        if cx.measures.is_none() || plan.products.iter().all(|product| product.lifted() == [None; 2]) {
            return Ok(());
        }
        let of = |product| Lifting { layer: &self.id, weight: self.weight(table), number: 0, product };
        let each = input.x_td.rows / input.shards.max(1);
        for first in
            (0..input.shards).flat_map(|shard| (0..each).step_by(PIECE).map(move |at| shard * each + at))
        {
            let len = PIECE.min(each - first % each);
            let Piece { x, dlogits, place } =
                piece(cx, input, (w, of_x.along_rows()), control, (first, len))?;
            let [rows, x_columns] = quantized(cx, of_x, &x, &place)?;
            let [dy, dy_columns] = quantized(cx, of_dlogits, &dlogits, &place)?;
            let columns = [dy_columns, x_columns];
            let once = |weight| Some(weight).filter(|_| first == 0);
            for (product, operands) in [
                (Product::Fprop, [Some(&rows), once(w)]),
                (Product::Dgrad, [Some(&dy), once(wt)]),
                (Product::Wgrad, columns.each_ref().map(Some)),
            ] {
                cx.measure_parts(of(product), || Arc::clone(&plan), operands, None)?;
            }
        }
        Ok(())
    }

    /// Computes the logits, F32 `[t, v]`, from the plain (not quantized) input `x`, `[t, d]`.
    pub fn logits(&self, cx: &Cx<'_, B>, table: &Param<B>, x: &Tensor<B>) -> Result<Tensor<B>> {
        let to = self.plan(cx).head()?.x.first();
        let (x, _) = cx.convert(LayerName::new(&self.id), &Operand::Plain(x.clone()), &to, None)?;
        Gemm { a: &x, b: self.weight(table).w()?, out: DType::F32 }.run(cx.b)
    }
}

/// Tokens of a piece: whole blocks of any format, also after a lift, and no more than the head takes at a time.
const PIECE: usize = 256;

/// The input of some tokens, the gradients of their logits, and the tokens' place.
struct Piece<B: Kernels> {
    x: Tensor<B>,
    dlogits: Tensor<B>,
    place: HeadLossChunk,
}

/// Makes a piece of `len` tokens of one shard again, whose gradients exist only inside the head's operation, by the operations that define
/// it. Stochastic rounding takes random bits as on a rank with the first tokens of a step.
fn piece<B: Kernels>(
    cx: &Cx<'_, B>,
    input: &HeadInput<'_, B>,
    (w, operand): (&Operand<B>, HeadOperand<'_, B>),
    control: &B::Buf<f32>,
    (first, len): (usize, usize),
) -> Result<Piece<B>> {
    let HeadInput { x_td: x, targets, shards } = *input;
    let rows = first * x.cols..(first + len) * x.cols;
    let mut piece = Tensor::unwritten(cx.b, x.dtype(), len, x.cols)?;
    match (&x.data, &mut piece.data) {
        (Data::F32(x), Data::F32(piece)) => cx.b.copy(x, rows, piece, 0)?,
        (Data::Bf16(x), Data::Bf16(piece)) => cx.b.copy(x, rows, piece, 0)?,
        _ => return Err(Error::Defect { place: "head", what: "a piece has another type" }),
    }
    let mut of_piece = cx.b.alloc(len)?;
    cx.b.copy(targets, first..first + len, &mut of_piece, 0)?;
    let position = first % (x.rows / shards.max(1)).max(1);
    let place = HeadLossChunk { tokens: first..first + len, position, ..HeadLossChunk::all(1, len) };
    let [a, _] = quantized(cx, operand, &piece, &place)?;
    let logits = Gemm { a: &a, b: w, out: DType::F32 }.run(cx.b)?;
    let (targets, grad) = (&of_piece, Some(x.dtype()));
    let made = CrossEntropy { logits: &logits, targets, control, shards: 1, grad }.run(cx.b)?;
    let dlogits =
        made.dlogits.ok_or(Error::Defect { place: "cross_entropy", what: "it gives no gradient" })?;
    Ok(Piece { x: piece, dlogits, place })
}

/// A tensor of a piece as the head quantizes it: along rows, and down columns. Without a codec it stays as it is.
fn quantized<B: Kernels>(
    cx: &Cx<'_, B>,
    operand: HeadOperand<'_, B>,
    x: &Tensor<B>,
    place: &HeadLossChunk,
) -> Result<[Operand<B>; 2]> {
    let mut both = [None, None];
    for op in operand.quantizations(x, place, None) {
        let made = op.run(cx.b)?;
        both = [made.rows.or(both[0].take()), made.cols.or(both[1].take())];
    }
    Ok(both.map(|made| made.unwrap_or_else(|| Operand::Plain(x.clone()))))
}

/// The gradients of the logits of the first tokens of each shard.
fn sample_dlogits<'s, B: Kernels>(
    cx: &Cx<'_, B>,
    input: &HeadInput<'_, B>,
    operand: (&Operand<B>, HeadOperand<'_, B>),
    control: &B::Buf<f32>,
) -> Result<Vec<Again<'s, B>>> {
    let each = input.x_td.rows / input.shards.max(1);
    let of_shard = |shard: usize| -> Result<Again<'s, B>> {
        let Piece { dlogits, place, .. } =
            piece(cx, input, operand, control, (shard * each, each.min(PIECE)))?;
        Ok(Again { x: dlogits, place, groups: None })
    };
    (0..input.shards).map(of_shard).collect()
}
