use crate::error::expect_eq;
use crate::ops::Control;
use crate::ops::convert::quantize::{Counts, check_axis, check_planes};
use crate::ops::products::numbers::{Numbers, Stored};
use crate::ops::vocabulary::cross_entropy::check_shards;
use crate::{Agreement, Backend, DType, Error, Operand, Result, Tensor};
use nibble_formats::{BlockAxis, Codec, WHOLE_LINE};
use std::ops::Range;

const OP: &str = "head_loss";

/// The output head and its loss in one: cross-entropy of the logits x·wᵀ, and the gradients of scale · Σ loss, where scale is [`Control::LOSS_SCALE`], with
/// respect to x and w. The logits of all tokens never exist.
///
/// The tokens of a shard are taken in chunks; of each the logits (F32), the losses and their gradient (dlogits, rounded to
/// the type of x), dx and a part of dw are made before the next chunk begins. As numbers it is
///
/// ```text
/// logits  = Gemm { x, w }                      F32 [t, v]
/// dlogits = CrossEntropy { logits, targets }   [t, v], type of x
/// dx      = Gemm { dlogits, wt }               [t, d], type of x
/// dw      = GroupedWgrad { dlogits, x }        [shards · v, d]; the groups are the shards
/// ```
///
/// and where products are chains in ascending order (on the CPU) it is so to the bit, whatever the chunk: the chain of a
/// weight's gradient goes on from the F32 that the chunk before left, and reaches `dw` once, when its shard is done. Where
/// they are none (tensor cores), a `dw` in F32 may be added to chunk by chunk; one in BF16 is rounded once a shard there too.
///
/// Products may take quantized operands, any two of them: the weight as it comes, x and dlogits as `codecs` say, rows for the logits and
/// dx, columns for dw. It is then as if [`crate::ops::Quantize`] had made them of all tokens: of x, and of dlogits in the type of x,
/// to which they are rounded first. A chunk that parts a shard ends with a block of its columns; so a scale for more tokens than a block, of
/// a tensor or of a whole column, is refused: it is not known before the last chunk.
#[derive(Debug)]
pub struct HeadLoss<'a, B: Backend> {
    /// `[t, d]`, F32 or BF16.
    pub x: &'a Tensor<B>,
    /// The head's weight `[v, d]`: plain, type of x, or quantized as weights are: in tiles, or along its rows where the format has none.
    pub w: &'a Operand<B>,
    /// What is quantized of x and dlogits.
    pub codecs: HeadCodecs,
    /// The right token of each row; see [`crate::ops::CrossEntropy`] for one that is none.
    pub targets: &'a B::Buf<i32>,
    /// Number of shards; rows are divided evenly among them.
    pub shards: usize,
    /// Tokens whose logits exist at a time, at most (`nibble_choice::head_loss::chunk` says what suits a device); even, as the BF16 dot takes the contraction in pairs, and
    /// with quantized columns a multiple of their block. No chunk has a part of one shard and a part of another: long shards are
    /// cut, of short ones several may be taken at a time.
    pub chunk: usize,
    /// What the gradients need; none where the losses alone are wanted.
    pub grad: Option<HeadLossGrad<'a, B>>,
}

/// What [`HeadLoss`] quantizes itself, named as a recipe names it; none is multiplied as it is. Nothing is rounded
/// stochastically.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct HeadCodecs {
    /// x by rows, for the logits.
    pub fprop_x: Option<Codec>,
    /// dlogits by rows, for dx.
    pub dgrad_dy: Option<Codec>,
    /// dlogits by columns, for dw.
    pub wgrad_dy: Option<Codec>,
    /// x by columns, for dw.
    pub wgrad_x: Option<Codec>,
}

impl HeadCodecs {
    /// Whether everything is multiplied as it is.
    pub fn is_plain(&self) -> bool {
        *self == Self::default()
    }

    /// Length of the longest blocks down the columns, as they are stored or multiplied; 1 if there are none.
    pub fn column_block(&self) -> usize {
        let [dy, x] = [self.wgrad_dy, self.wgrad_x];
        // Of a plain one the type makes no difference: nothing is lifted beside it.
        let columns = |codec| Stored::made(codec, BlockAxis::Col, DType::Bf16);
        Numbers::column_step(columns(dy), columns(x))
    }

    /// Whether both operands of dw have columns that end at the same row, whatever the tokens.
    fn columns_end_alike(&self) -> bool {
        let step = |codec: Option<Codec>| codec.map_or(1, |codec| codec.format().column_step());
        step(self.wgrad_dy) == step(self.wgrad_x)
    }

    /// Each by the argument's name, and whether it is for columns.
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
                let why = "the head takes its tokens in chunks: a scale for all of them is not known before the last";
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

/// What [`HeadLoss`] needs for the gradients.
#[derive(Debug)]
pub struct HeadLossGrad<'a, B: Backend> {
    /// The head's weight transposed, `[d, v]`: plain, type of x, or quantized as `w`.
    pub wt: &'a Operand<B>,
    /// The factor of the gradient is its [`Control::LOSS_SCALE`].
    pub control: &'a B::Buf<f32>,
    /// The weight's gradient by shard, F32 or BF16 `[shards · v, d]`.
    pub dw: &'a mut Tensor<B>,
    /// Add to `dw` (one F32 addition an element, then rounded to its type) rather than overwrite it.
    pub accumulate: bool,
}

/// The result of [`HeadLoss`].
#[derive(Debug, Clone)]
pub struct HeadLossOut<B: Backend> {
    /// Nats of each shard, summed as [`crate::ops::CrossEntropyOut::shard_nats`] is. `shards` values.
    pub shard_nats: B::Buf<f64>,
    /// How many targets lie at or past the vocabulary: one value.
    pub bad_ids: B::Buf<u64>,
    /// `[t, d]`, type of x, if gradients were asked for.
    pub dx: Option<Tensor<B>>,
    /// Blocks of x, if any of it was quantized.
    pub x_counts: Option<Counts<B>>,
    /// Blocks of dlogits, if any of them were quantized.
    pub dlogits_counts: Option<Counts<B>>,
}

/// Tokens that [`HeadLoss`] takes together: whole shards, or a part of one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HeadLossChunk {
    /// Shards that they are of.
    pub shards: Range<usize>,
    /// The tokens.
    pub tokens: Range<usize>,
    /// Whether the shards' first tokens are among them.
    pub is_first: bool,
    /// Whether the shards' last tokens are among them.
    pub is_last: bool,
}

impl HeadLossChunk {
    /// Tokens of each of its shards.
    pub fn tokens_each(&self) -> usize {
        self.tokens.len() / self.shards.len().max(1)
    }
}

impl<B: Backend> HeadLoss<'_, B> {
    /// What backends owe each other, by the type of x. Of F32 the products' 1e-6, which the exponential makes larger. Of BF16,
    /// gradients of logits that tensor cores make differ by 3e-5 and more, and are rounded to 8 bits: one in a hundred
    /// falls on another side of a boundary.
    pub fn agreement(x: DType) -> Agreement {
        match x {
            DType::F32 => Agreement::RelL2(1e-5),
            DType::Bf16 => Agreement::RelL2(2e-3),
        }
    }

    /// The same where anything is quantized, whatever the values: logits of E4M3 differ by 7e-4 ([`crate::ops::FP8_AGREEMENT`]) of what they
    /// can be, their gradients by several times that, and of the codes of those, which are 6 to 12 % apart, a few in a hundred are
    /// others. That is as much as one rounding to E4M3, so that a quantization left out can pass: see [`HeadLoss::gradient_agreement`].
    pub const QUANTIZED_AGREEMENT: Agreement = Agreement::RelL2(3e-2);

    /// The vocabulary from which on the rows of a BF16 head's cross-entropy may be summed in an order of the backend's own.
    pub const OWN_ORDER_FROM: usize = 4096;

    /// What backends owe each other of dx and dw where the sums of the logits are exact and the vocabulary is below
    /// [`HeadLoss::OWN_ORDER_FROM`]. Logits, losses, dlogits, their codes and the counts are then the same bits on all of them, as those of
    /// [`crate::ops::Gemm`], [`crate::ops::CrossEntropy`] and [`crate::ops::Quantize`] are; the last two products alone may sum in another order. So each
    /// owes what such a product does, of these operands.
    pub fn gradient_agreement(dlogits: Stored, beside: Stored) -> Agreement {
        Numbers::of(dlogits, beside).agreement()
    }

    /// Tokens of the longest chunk: whole shards, or a part of one. For checked arguments.
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

    /// Blocks down the columns begin with a shard, and no chunk cuts one. Columns of two lengths end alike where a shard has whole blocks of both.
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

    /// Its result, yet to be written, and counts of zero. For checked arguments.
    pub fn result(&self, b: &B) -> Result<HeadLossOut<B>> {
        let HeadCodecs { fprop_x, dgrad_dy, wgrad_dy, wgrad_x } = self.codecs;
        let counts =
            |rows: Option<Codec>, cols: Option<Codec>| rows.or(cols).map(|_| Counts::zeros(b)).transpose();
        let (x_counts, dlogits_counts) = (counts(fprop_x, wgrad_x)?, counts(dgrad_dy, wgrad_dy)?);
        let (shard_nats, bad_ids) = (b.alloc(self.shards)?, b.counters(1)?);
        let dx = self.grad.as_ref().map(|_| self.x.unwritten_like(b)).transpose()?;
        Ok(HeadLossOut { shard_nats, bad_ids, dx, x_counts, dlogits_counts })
    }

    /// The chunks, in the order of the tokens. One of no tokens where there are none.
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

/// A weight of this shape: plain, of the type of x, or quantized.
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
            // Square blocks, where the format has them, or blocks along the lines that a product contracts.
            let is_square = w.axis == BlockAxis::Tile && w.format.spec().tiles;
            check_axis(OP, is[2], w, if is_square { BlockAxis::Tile } else { BlockAxis::Row })?;
            expect_eq(OP, is[3], w.stack, 1)
        }
    }
}
