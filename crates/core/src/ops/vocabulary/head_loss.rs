use crate::error::expect_eq;
use crate::ops::Control;
use crate::ops::convert::quantize::{Counts, check_axis, check_planes};
use crate::ops::products::numbers::{Numbers, Stored};
use crate::ops::vocabulary::cross_entropy::check_shards;
use crate::{Agreement, Backend, DType, Error, Operand, Result, Tensor};
use nibble_formats::{BlockAxis, Codec, WHOLE_LINE};
use std::ops::Range;

const OP: &str = "head_loss";

/// The output head fused with its loss: cross-entropy of the logits x·wᵀ, and the gradients of scale · Σ loss with respect to x and w,
/// where scale is [`Control::LOSS_SCALE`]. The logits of all tokens never exist at once.
///
/// The tokens of a shard are processed in chunks. Each chunk computes its logits (F32), losses, the gradient of the logits (dlogits,
/// rounded to the type of x), dx and its share of dw before the next chunk begins. The result is the same as that of these ops:
///
/// ```text
/// logits  = Gemm { x, w }                      F32 [t, v]
/// dlogits = CrossEntropy { logits, targets }   [t, v], type of x
/// dx      = Gemm { dlogits, wt }               [t, d], type of x
/// dw      = GroupedWgrad { dlogits, x }        [shards · v, d]; the groups are the shards
/// ```
///
/// On the CPU, where matrix products sum in ascending order, the result has the same bits for any chunk length. Each chunk continues the
/// F32 sum of the weight's gradient from the previous chunk, and the sum is added to `dw` once, at the end of a shard. On tensor cores, a
/// backend may add the gradient of each chunk to an F32 `dw` directly; a BF16 `dw` is still rounded once per shard.
///
/// Both operands of a product may be quantized, in any two formats. The caller quantizes the weight; this op quantizes x and dlogits by
/// `codecs`, along rows for the logits and dx, along columns for dw. The result is as if [`crate::ops::Quantize`] had quantized all tokens
/// at once: x as given, and dlogits after rounding to the type of x. A chunk that ends inside a shard ends with a whole block of columns.
/// The op refuses formats with one scale per tensor or per whole column, because such a scale is not known before the last chunk.
#[derive(Debug)]
pub struct HeadLoss<'a, B: Backend> {
    /// Shape `[t, d]`, F32 or BF16.
    pub x: &'a Tensor<B>,
    /// The head's weight `[v, d]`, plain with the type of x, or quantized in 2-D blocks (along rows if the format has no 2-D blocks).
    pub w: &'a Operand<B>,
    /// The quantization of x and dlogits.
    pub codecs: HeadCodecs,
    /// The target of each row; see [`crate::ops::CrossEntropy`] for rows without a target.
    pub targets: &'a B::Buf<i32>,
    /// Number of shards; rows are divided evenly among them.
    pub shards: usize,
    /// The largest number of tokens whose logits exist at a time (`nibble_choice::head_loss::chunk` chooses this number for a device). The
    /// number is even, because the BF16 dot product takes the contraction in pairs; if columns are quantized, the number is a multiple of
    /// their block length. Long shards are cut into chunks, and a chunk may hold several whole short shards, but never parts of two shards.
    pub chunk: usize,
    /// Arguments of the gradients; `None` to compute only the losses.
    pub grad: Option<HeadLossGrad<'a, B>>,
}

/// The operands that [`HeadLoss`] quantizes itself, by their names in a recipe. An operand with `None` is multiplied unquantized. No
/// operand is rounded stochastically.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct HeadCodecs {
    /// The codec of x along rows, for the logits.
    pub fprop_x: Option<Codec>,
    /// The codec of dlogits along rows, for dx.
    pub dgrad_dy: Option<Codec>,
    /// The codec of dlogits along columns, for dw.
    pub wgrad_dy: Option<Codec>,
    /// The codec of x along columns, for dw.
    pub wgrad_x: Option<Codec>,
}

impl HeadCodecs {
    /// Whether nothing is quantized.
    pub fn is_plain(&self) -> bool {
        *self == Self::default()
    }

    /// Length of the longest column blocks, as stored or as multiplied; 1 if there are no column blocks.
    pub fn column_block(&self) -> usize {
        let [dy, x] = [self.wgrad_dy, self.wgrad_x];
        // The type of a plain operand does not matter, because a product with a plain operand lifts no operand.
        let columns = |codec| Stored::made(codec, BlockAxis::Col, DType::Bf16);
        Numbers::column_step(columns(dy), columns(x))
    }

    /// Whether the columns of both operands of dw end at the same row, for any number of tokens.
    fn columns_end_alike(&self) -> bool {
        let step = |codec: Option<Codec>| codec.map_or(1, |codec| codec.format().column_step());
        step(self.wgrad_dy) == step(self.wgrad_x)
    }

    /// Each codec with the name of its argument, and whether the codec is for columns.
    pub fn arguments(&self) -> [(&'static str, Option<Codec>, bool); 4] {
        [
            ("codecs.fprop_x", self.fprop_x, false),
            ("codecs.dgrad_dy", self.dgrad_dy, false),
            ("codecs.wgrad_dy", self.wgrad_dy, true),
            ("codecs.wgrad_x", self.wgrad_x, true),
        ]
    }

    fn check(&self, gradients: bool) -> Result<()> {
        for (argument, codec, columns) in self.arguments() {
            let Some(codec) = codec else { continue };
            if codec.scale_kind().has_tensor_scale() || columns && codec.format().spec().block == WHOLE_LINE {
                let why = "the head processes tokens in chunks, so a scale for all tokens is not known before the last chunk";
                return Err(Error::unsupported(OP, codec.format(), why));
            }
            if codec.draws() {
                return Err(Error::shape(OP, argument, codec.rounding(), "a rounding without random bits"));
            }
            if !gradients && argument != "codecs.fprop_x" {
                return Err(Error::shape(
                    OP,
                    argument,
                    codec.format(),
                    "none, as no gradients are asked for",
                ));
            }
        }
        Ok(())
    }
}

/// Arguments of [`HeadLoss`] for the gradients.
#[derive(Debug)]
pub struct HeadLossGrad<'a, B: Backend> {
    /// The head's weight transposed, `[d, v]`: plain with the type of x, or quantized like `w`.
    pub wt: &'a Operand<B>,
    /// The step's scalars; [`Control::LOSS_SCALE`] is the factor of the gradient.
    pub control: &'a B::Buf<f32>,
    /// The weight's gradient by shard, F32 or BF16 `[shards · v, d]`.
    pub dw: &'a mut Tensor<B>,
    /// Whether to add to `dw` instead of overwriting it. Each element is added in F32 and rounded to the type of `dw`.
    pub accumulate: bool,
}

/// The result of [`HeadLoss`].
#[derive(Debug, Clone)]
pub struct HeadLossOut<B: Backend> {
    /// Loss of each shard in nats, summed as in [`crate::ops::CrossEntropyOut::shard_nats`]. `shards` values.
    pub shard_nats: B::Buf<f64>,
    /// Number of targets at or past the end of the vocabulary: one value.
    pub bad_ids: B::Buf<u64>,
    /// Gradient of x, with the shape and type of x, if gradients were requested.
    pub dx: Option<Tensor<B>>,
    /// Counts of the quantization of x, if x is quantized.
    pub x_counts: Option<Counts<B>>,
    /// Counts of the quantization of dlogits, if dlogits are quantized.
    pub dlogits_counts: Option<Counts<B>>,
}

/// A chunk of [`HeadLoss`]: whole shards, or a part of one shard.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HeadLossChunk {
    /// The shards of the chunk's tokens.
    pub shards: Range<usize>,
    /// The tokens of the chunk.
    pub tokens: Range<usize>,
    /// Whether the chunk holds the shards' first tokens.
    pub is_first: bool,
    /// Whether the chunk holds the shards' last tokens.
    pub is_last: bool,
}

impl HeadLossChunk {
    /// Number of tokens that each of the chunk's shards has in the chunk.
    pub fn tokens_each(&self) -> usize {
        self.tokens.len() / self.shards.len().max(1)
    }
}

impl<B: Backend> HeadLoss<'_, B> {
    /// How closely backends must agree, by the type of x. For F32, the bound is the 1e-6 of matrix products, enlarged by the exponential.
    /// For BF16, gradients of logits from tensor cores differ by 3e-5 and more before they are rounded to 8 bits, so one gradient in a
    /// hundred is rounded differently.
    pub fn agreement(x: DType) -> Agreement {
        match x {
            DType::F32 => Agreement::RelL2(1e-5),
            DType::Bf16 => Agreement::RelL2(2e-3),
        }
    }

    /// How closely backends must agree under any quantization, whatever the values. E4M3 logits differ by 7e-4 of their range
    /// ([`crate::ops::FP8_AGREEMENT`]), and their gradients differ by several times as much. Neighbouring codes of these gradients are 6 to
    /// 12 % apart, so a few codes in a hundred differ. These differences are as large as one rounding to E4M3, so a backend that leaves out
    /// a quantization can pass this bound. [`HeadLoss::gradient_agreement`] is a stricter bound.
    pub const QUANTIZED_AGREEMENT: Agreement = Agreement::RelL2(3e-2);

    /// From this vocabulary size on, a backend may sum each row of a BF16 head's cross-entropy in its own order.
    pub const OWN_ORDER_FROM: usize = 4096;

    /// How closely backends must agree in dx and dw if the sums of the logits are exact and the vocabulary is below
    /// [`HeadLoss::OWN_ORDER_FROM`]. In this case, logits, losses, dlogits, their codes and the counts have the same bits on all backends,
    /// like the results of [`crate::ops::Gemm`], [`crate::ops::CrossEntropy`] and [`crate::ops::Quantize`]. Only the products for dx and dw
    /// may sum in another order, so dx and dw must agree as closely as any product of these operands.
    pub fn gradient_agreement(dlogits: Stored, beside: Stored) -> Agreement {
        Numbers::of(dlogits, beside).agreement()
    }

    /// Number of tokens of the longest chunk, which holds whole shards or a part of one shard. Call `check` first.
    pub fn longest_chunk(&self) -> usize {
        let each = self.x.rows / self.shards.max(1);
        match self.chunk.checked_div(each) {
            Some(0) => self.chunk,
            Some(together) => each * together.min(self.shards),
            None => 0,
        }
    }

    /// Checks shapes and types.
    pub fn check(&self) -> Result<()> {
        let ((tokens, d), v) = (self.x.shape(), self.w.rows());
        self.codecs.check(self.grad.is_some())?;
        check_weight("w", self.w, (v, d), self.x.dtype())?;
        expect_eq(OP, "targets.len()", B::len(self.targets), tokens)?;
        check_shards(OP, tokens, self.shards)?;
        if self.chunk == 0 || !self.chunk.is_multiple_of(2) {
            return Err(Error::shape(OP, "chunk", self.chunk, "an even number of tokens, at least 2"));
        }
        let Some(grad) = &self.grad else { return Ok(()) };
        expect_eq(OP, "control.len()", B::len(grad.control), Control::LEN)?;
        check_weight("wt", grad.wt, (d, v), self.x.dtype())?;
        expect_eq(OP, "shape of dw", grad.dw.shape(), (self.shards * v, d))?;
        self.check_columns(tokens)
    }

    /// Checks that each shard begins with a new column block, and that no chunk cuts a column block. Column blocks of two lengths end at
    /// the same row if each shard has whole blocks of both lengths.
    fn check_columns(&self, tokens: usize) -> Result<()> {
        let (block, each) = (self.codecs.column_block(), tokens / self.shards);
        if !self.chunk.is_multiple_of(block) {
            let expected = format!("a multiple of the columns' block of {block}");
            return Err(Error::shape(OP, "chunk", self.chunk, expected));
        }
        let whole = self.shards > 1 || !self.codecs.columns_end_alike();
        if whole && !each.is_multiple_of(block) {
            let expected = format!("a multiple of the columns' block of {block}");
            return Err(Error::shape(OP, "tokens of a shard", each, expected));
        }
        Ok(())
    }

    /// Allocates the result, with zeroed counts. Call `check` first.
    pub fn result(&self, b: &B) -> Result<HeadLossOut<B>> {
        let HeadCodecs { fprop_x, dgrad_dy, wgrad_dy, wgrad_x } = self.codecs;
        let counts =
            |rows: Option<Codec>, cols: Option<Codec>| rows.or(cols).map(|_| Counts::zeros(b)).transpose();
        let (x_counts, dlogits_counts) = (counts(fprop_x, wgrad_x)?, counts(dgrad_dy, wgrad_dy)?);
        let (shard_nats, bad_ids) = (b.alloc(self.shards)?, b.counters(1)?);
        let dx = self.grad.as_ref().map(|_| self.x.unwritten_like(b)).transpose()?;
        Ok(HeadLossOut { shard_nats, bad_ids, dx, x_counts, dlogits_counts })
    }

    /// The chunks, in the order of the tokens; one empty chunk if there are no tokens.
    pub fn chunks(&self) -> Vec<HeadLossChunk> {
        let (shards, most) = (self.shards, self.chunk.max(1));
        let each = self.x.rows / shards.max(1);
        if each <= most {
            let together = most.checked_div(each).unwrap_or(shards).max(1);
            let whole = |first: usize| {
                let shards = first..(first + together).min(shards);
                let tokens = shards.start * each..shards.end * each;
                HeadLossChunk { shards, tokens, is_first: true, is_last: true }
            };
            return (0..shards).step_by(together).map(whole).collect();
        }
        let cut = |shard: usize| {
            (0..each).step_by(most).map(move |first| {
                let end = (first + most).min(each);
                let tokens = shard * each + first..shard * each + end;
                HeadLossChunk { shards: shard..shard + 1, tokens, is_first: first == 0, is_last: end == each }
            })
        };
        (0..shards).flat_map(cut).collect()
    }
}

/// Checks a weight of this shape: plain, of the type of x, or quantized.
fn check_weight<B: Backend>(
    argument: &'static str,
    w: &Operand<B>,
    shape: (usize, usize),
    dtype: DType,
) -> Result<()> {
    let is = if argument == "w" {
        ["shape of w", "type of w", "axis of w", "stack of w"]
    } else {
        ["shape of wt", "type of wt", "axis of wt", "stack of wt"]
    };
    expect_eq(OP, is[0], (w.rows(), w.cols()), shape)?;
    match w {
        Operand::Plain(w) => expect_eq(OP, is[1], w.dtype(), dtype),
        Operand::Block(w) => {
            check_planes(OP, w)?;
            // 2-D blocks if the format has them, otherwise blocks along the contraction.
            let is_square = w.axis == BlockAxis::Tile && w.format.spec().tiles;
            check_axis(OP, is[2], w, if is_square { BlockAxis::Tile } else { BlockAxis::Row })?;
            expect_eq(OP, is[3], w.stack, 1)
        }
    }
}
