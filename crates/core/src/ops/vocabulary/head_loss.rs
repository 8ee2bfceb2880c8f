use super::head_operands::{HeadCodecs, HeadLossChunk, HeadOperand, HeadRandom};
use crate::error::expect_eq;
use crate::ops::Control;
use crate::ops::convert::quantize::{Counts, check_axis, check_planes};
use crate::ops::products::numbers::{Numbers, Stored};
use crate::ops::vocabulary::cross_entropy::check_shards;
use crate::{Agreement, Backend, DType, Error, Operand, Result, Tensor};
use nibble_formats::{BlockAxis, Codec};

const OP: &str = "head_loss";

/// The output head fused with the loss. The op computes the cross-entropy of the logits x·wᵀ, and the gradients of scale · Σ loss with
/// respect to x and w. The factor scale is [`Control::LOSS_SCALE`]. The op never stores the logits of all tokens at the same time.
///
/// The op processes the tokens of a shard in chunks. For each chunk, the op computes the F32 logits, the losses, the gradient of the logits
/// (dlogits, rounded to the type of x), dx, and the contribution to dw. Only then does it begin the next chunk. The result is the same as
/// that of running the following ops:
///
/// ```text
/// logits  = Gemm { x, w }                      F32 [t, v]
/// dlogits = CrossEntropy { logits, targets }   [t, v], type of x
/// dx      = Gemm { dlogits, wt }               [t, d], type of x
/// dw      = GroupedWgrad { dlogits, x }        [shards · v, d]; the groups are the shards
/// ```
///
/// On the CPU, the result has the same bits for any chunk length, because matrix products sum in ascending order. The F32 sum of the weight
/// gradient continues from chunk to chunk, and is added to `dw` once, at the end of a shard. A backend that uses tensor cores may add the
/// weight gradient of each chunk to an F32 `dw` directly. A BF16 `dw` is still rounded only once per shard.
///
/// The two operands of each product may be quantized in any two formats. The caller quantizes the weight, and this op quantizes x and
/// dlogits by `codecs`. Blocks run along rows for the products that compute logits and dx, and down columns for the product that computes
/// dw. The result is the same as if [`crate::ops::Quantize`] had quantized x and dlogits for all tokens at once, after dlogits were rounded
/// to the type of x. This includes random bits and transforms ([`HeadRandom`]): the random bits of an element depend on its position in the
/// whole tensor, the signs of a transform down columns depend on the position of the token in its shard, and both are the same for any
/// chunk length. If a chunk ends inside a shard, its end is also the end of a column block and of a transform block. The op returns an error
/// for formats with one scale per tensor or per whole column, because such a scale is not known before the last chunk.
#[derive(Debug)]
pub struct HeadLoss<'a, B: Backend> {
    /// Shape `[t, d]`, F32 or BF16.
    pub x: &'a Tensor<B>,
    /// The weight of the head, of shape `[v, d]`. The weight is either plain with the type of x, or quantized in 2-D blocks. If the format
    /// has no 2-D blocks, blocks run along rows.
    pub w: &'a Operand<B>,
    /// The quantization of x and dlogits.
    pub codecs: HeadCodecs,
    /// The random bits and the transforms of these quantizations.
    pub random: HeadRandom<'a, B>,
    /// The token id that is the target of each row. [`crate::ops::CrossEntropy`] explains targets that are negative or too large.
    pub targets: &'a B::Buf<i32>,
    /// The number of shards, among which the rows are divided evenly.
    pub shards: usize,
    /// The largest number of tokens whose logits are in memory at the same time. `nibble_choice::head_loss::chunk` chooses this number for
    /// a device. The number must be even, because the BF16 dot product processes the contraction in pairs. If columns are quantized, the
    /// number must be a multiple of [`HeadLoss::column_block`]. A long shard is divided into several chunks. A chunk may contain several
    /// whole short shards, but not parts of two shards.
    pub chunk: usize,
    /// The arguments that are needed to compute gradients; `None` to compute only the losses.
    pub grad: Option<HeadLossGrad<'a, B>>,
}

/// The arguments that [`HeadLoss`] needs to compute gradients.
#[derive(Debug)]
pub struct HeadLossGrad<'a, B: Backend> {
    /// The transposed weight of the head, of shape `[d, v]`, either plain with the type of x, or quantized like `w`.
    pub wt: &'a Operand<B>,
    /// The buffer of [`Control`]. The op multiplies gradients by its element [`Control::LOSS_SCALE`].
    pub control: &'a B::Buf<f32>,
    /// The weight gradient of each shard, F32 or BF16 of shape `[shards · v, d]`.
    pub dw: &'a mut Tensor<B>,
    /// Whether to add to `dw` instead of overwriting it. If it adds, the op adds each element in F32 and rounds the sum to the type of
    /// `dw`.
    pub accumulate: bool,
}

/// The result of [`HeadLoss`].
#[derive(Debug, Clone)]
pub struct HeadLossOut<B: Backend> {
    /// The sum of the losses of each shard in nats. The order of the sum is that of [`crate::ops::CrossEntropyOut::shard_nats`]. `shards`
    /// values.
    pub shard_nats: B::Buf<f64>,
    /// The number of targets at or past the end of the vocabulary, as a buffer of one value.
    pub bad_ids: B::Buf<u64>,
    /// Gradient of x, with the shape and type of x, if gradients were requested.
    pub dx: Option<Tensor<B>>,
    /// The counts of blocks in the quantization of x, if x is quantized.
    pub x_counts: Option<Counts<B>>,
    /// The counts of blocks in the quantization of dlogits, if dlogits are quantized.
    pub dlogits_counts: Option<Counts<B>>,
}

impl<B: Backend> HeadLoss<'_, B> {
    /// How closely the results of two backends must agree without quantization, by the type of x. For F32, the bound is larger than the
    /// bound 1e-6 of matrix products, because the exponential enlarges errors of the logits. For BF16, the logit gradients that follow from
    /// tensor-core products differ by 3e-5 or more before they are rounded to BF16 (8 significant bits), so about one gradient in a hundred
    /// is rounded to a different number.
    pub fn agreement(x: DType) -> Agreement {
        match x {
            DType::F32 => Agreement::RelL2(1e-5),
            DType::Bf16 => Agreement::RelL2(2e-3),
        }
    }

    /// How closely the results of two backends must agree with any quantization and any values. Between two backends, logits from E4M3
    /// operands differ by 7e-4 of their range ([`crate::ops::FP8_AGREEMENT`]), and the gradients of these logits differ by several times as
    /// much. After quantization, a few codes in a hundred of these gradients differ, because neighbouring E4M3 numbers are 6 to 12 % apart.
    /// These differences are as large as the error of one rounding to E4M3, so this bound does not detect a backend that leaves out a
    /// quantization. The bound [`HeadLoss::gradient_agreement`] is stricter.
    pub const QUANTIZED_AGREEMENT: Agreement = Agreement::RelL2(3e-2);

    /// If the vocabulary has at least this size, a backend may sum the exponentials of each row of a BF16 head in its own order.
    pub const OWN_ORDER_FROM: usize = 4096;

    /// How closely two backends must agree in dx and dw if the sums that compute the logits are exact and the vocabulary is smaller than
    /// [`HeadLoss::OWN_ORDER_FROM`]. In this case, the logits, the losses, dlogits, their codes and the counts have the same bits on all
    /// backends, and the same bits as if [`crate::ops::Gemm`], [`crate::ops::CrossEntropy`] and [`crate::ops::Quantize`] had computed them.
    /// Only the products that compute dx and dw may sum in a different order on each backend. So dx and dw must agree as closely as any
    /// product of operands in these formats.
    pub fn gradient_agreement(dlogits: Stored, beside: Stored) -> Agreement {
        Numbers::of(dlogits, beside).agreement()
    }

    /// The number of tokens of the longest chunk, which contains whole shards or a part of one shard. Call `check` first.
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
        self.codecs.check(OP, self.grad.is_some())?;
        self.random.check(OP, &self.codecs, tokens)?;
        check_weight("w", self.w, (v, d), self.x.dtype())?;
        expect_eq(OP, "targets.len()", B::len(self.targets), tokens)?;
        check_shards(OP, tokens, self.shards)?;
        self.check_transforms()?;
        if self.chunk == 0 || !self.chunk.is_multiple_of(2) {
            return Err(Error::shape(OP, "chunk", self.chunk, "an even number of tokens, at least 2"));
        }
        let Some(grad) = &self.grad else { return Ok(()) };
        expect_eq(OP, "control.len()", B::len(grad.control), Control::LEN)?;
        check_weight("wt", grad.wt, (d, v), self.x.dtype())?;
        expect_eq(OP, "shape of dw", grad.dw.shape(), (self.shards * v, d))?;
        self.check_columns(tokens)
    }

    /// Checks that each shard begins with a new column block, and that no chunk cuts a column block or a transform block. Column blocks of
    /// two lengths end at the same row if each shard has whole blocks of both lengths.
    fn check_columns(&self, tokens: usize) -> Result<()> {
        let (block, each) = (self.column_block(), tokens / self.shards);
        if !self.chunk.is_multiple_of(block) {
            let expected = format!("a multiple of the columns' block of {block}");
            return Err(Error::shape(OP, "chunk", self.chunk, expected));
        }
        let is_grouped = self.shards > 1 || self.random.row_id.is_some() || self.random.wgrad.is_some();
        let whole = is_grouped || !self.codecs.columns_end_alike();
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

    /// The chunks, in the order of their tokens. If there are no tokens, there is one empty chunk.
    pub fn chunks(&self) -> Vec<HeadLossChunk> {
        let (shards, most) = (self.shards, self.chunk.max(1));
        let each = self.x.rows / shards.max(1);
        if each <= most {
            let together = most.checked_div(each).unwrap_or(shards).max(1);
            let whole = |first: usize| {
                let shards = first..(first + together).min(shards);
                let tokens = shards.start * each..shards.end * each;
                HeadLossChunk { shards, tokens, position: 0, is_first: true, is_last: true }
            };
            return (0..shards).step_by(together).map(whole).collect();
        }
        let cut = |shard: usize| {
            (0..each).step_by(most).map(move |first| {
                let end = (first + most).min(each);
                let tokens = shard * each + first..shard * each + end;
                let (is_first, is_last) = (first == 0, end == each);
                HeadLossChunk { shards: shard..shard + 1, tokens, position: first, is_first, is_last }
            })
        };
        (0..shards).flat_map(cut).collect()
    }
}

impl<'a, B: Backend> HeadLoss<'a, B> {
    /// The tensors that the op quantizes itself: x and dlogits.
    pub fn operands(&self) -> [HeadOperand<'a, B>; 2] {
        self.random.operands(&self.codecs)
    }

    /// The length of the longest column blocks ([`HeadCodecs::column_block`]) or of the transform down columns, if it is longer. Every
    /// chunk that ends inside a shard has a multiple of this number of tokens.
    pub fn column_block(&self) -> usize {
        self.codecs.column_block().max(self.random.wgrad.map_or(1, |transform| transform.len))
    }

    /// Checks that both operands of a transformed product are quantized, and that transforms divide the contractions.
    fn check_transforms(&self) -> Result<()> {
        let HeadCodecs { fprop_x, dgrad_dy, wgrad_dy, wgrad_x } = self.codecs;
        let HeadRandom { fprop, dgrad, wgrad, .. } = self.random;
        let (d, v, each) = (self.x.cols, self.w.rows(), self.x.rows / self.shards.max(1));
        let is_block = |w: Option<&Operand<B>>| matches!(w, Some(Operand::Block(_)));
        let (w, wt) = (is_block(Some(self.w)), is_block(self.grad.as_ref().map(|grad| grad.wt)));
        let products = [
            (["random.fprop", "random.fprop.len", "random.fprop.step"], fprop, d, fprop_x.is_some() && w),
            (["random.dgrad", "random.dgrad.len", "random.dgrad.step"], dgrad, v, dgrad_dy.is_some() && wt),
            (
                ["random.wgrad", "random.wgrad.len", "random.wgrad.step"],
                wgrad,
                each,
                wgrad_dy.is_some() && wgrad_x.is_some(),
            ),
        ];
        for ([argument, of_len, of_step], transform, contracted, are_blocks) in products {
            let Some(transform) = transform else { continue };
            transform.check(OP, [of_len, argument, of_step])?;
            if !are_blocks {
                return Err(Error::shape(OP, argument, "given", "none, as an operand is not quantized"));
            }
            if !contracted.is_multiple_of(transform.len) {
                let expected = format!("a divisor of the {contracted} values that the product contracts");
                return Err(Error::shape(OP, of_len, transform.len, expected));
            }
        }
        if wgrad.is_some() && self.shards > 1 && self.random.row_id.is_none() {
            let expected = "ids, as the transform down the tokens begins anew in each shard";
            return Err(Error::shape(OP, "random.row_id", "none", expected));
        }
        Ok(())
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
