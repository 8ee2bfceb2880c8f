//! The tensors that the head quantizes itself, chunk by chunk: codecs, random bits and transforms.

use crate::error::expect_eq;
use crate::ops::convert::quantize::{Planes, Quantize, check_random};
use crate::ops::convert::random::{Hadamard, Random, check_step};
use crate::ops::products::numbers::{Numbers, Stored};
use crate::{Backend, DType, Error, Groups, Result, Tensor};
use nibble_formats::{BlockAxis, Codec, WHOLE_LINE};
use std::ops::Range;

/// The codecs of the operands that [`crate::ops::HeadLoss`] quantizes itself. The fields have the names of these operands in a recipe. If a
/// codec is `None`, the operand is not quantized.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct HeadCodecs {
    /// The codec of x with blocks along rows, for the product that computes the logits.
    pub fprop_x: Option<Codec>,
    /// The codec of dlogits with blocks along rows, for the product that computes dx.
    pub dgrad_dy: Option<Codec>,
    /// The codec of dlogits with blocks down columns, for the product that computes dw.
    pub wgrad_dy: Option<Codec>,
    /// The codec of x with blocks down columns, for the product that computes dw.
    pub wgrad_x: Option<Codec>,
}

impl HeadCodecs {
    /// Whether nothing is quantized.
    pub fn is_plain(&self) -> bool {
        *self == Self::default()
    }

    /// The length of the longest column blocks, either as they are stored or as products multiply them; 1 if there are no column blocks.
    pub fn column_block(&self) -> usize {
        let [dy, x] = [self.wgrad_dy, self.wgrad_x];
        // The type of a plain operand does not matter, because a product with a plain operand lifts no operand.
        let columns = |codec| Stored::made(codec, BlockAxis::Col, DType::Bf16);
        Numbers::column_step(columns(dy), columns(x))
    }

    /// Whether the columns of both operands of dw end at the same row, for any number of tokens.
    pub(super) fn columns_end_alike(&self) -> bool {
        let step = |codec: Option<Codec>| codec.map_or(1, |codec| codec.format().column_step());
        step(self.wgrad_dy) == step(self.wgrad_x)
    }

    /// For each operand, the name of its field, its codec, and whether its blocks run down columns.
    pub fn arguments(&self) -> [(&'static str, Option<Codec>, bool); 4] {
        [
            ("codecs.fprop_x", self.fprop_x, false),
            ("codecs.dgrad_dy", self.dgrad_dy, false),
            ("codecs.wgrad_dy", self.wgrad_dy, true),
            ("codecs.wgrad_x", self.wgrad_x, true),
        ]
    }

    pub(super) fn check(&self, op: &'static str, gradients: bool) -> Result<()> {
        for (argument, codec, columns) in self.arguments() {
            let Some(codec) = codec else { continue };
            if codec.scale_kind().has_tensor_scale() || columns && codec.format().spec().block == WHOLE_LINE {
                let why = "the head processes tokens in chunks, so a scale for all tokens is not known before the last chunk";
                return Err(Error::unsupported(op, codec.format(), why));
            }
            if !gradients && argument != "codecs.fprop_x" {
                return Err(Error::shape(
                    op,
                    argument,
                    codec.format(),
                    "none, as no gradients are asked for",
                ));
            }
        }
        Ok(())
    }
}

/// The tokens that [`crate::ops::HeadLoss`] processes together (a chunk), which are several whole shards or a part of one shard.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HeadLossChunk {
    /// The shards to which the tokens of the chunk belong.
    pub shards: Range<usize>,
    /// The tokens of the chunk.
    pub tokens: Range<usize>,
    /// The position that the first token of the chunk has in its shard.
    pub position: usize,
    /// Whether the chunk contains the first tokens of its shards.
    pub is_first: bool,
    /// Whether the chunk contains the last tokens of its shards.
    pub is_last: bool,
}

impl HeadLossChunk {
    /// All tokens of all shards.
    pub fn all(shards: usize, tokens: usize) -> Self {
        Self { shards: 0..shards, tokens: 0..tokens, position: 0, is_first: true, is_last: true }
    }

    /// The number of tokens of each shard in the chunk.
    pub fn tokens_each(&self) -> usize {
        self.tokens.len() / self.shards.len().max(1)
    }
}

/// The random bits and the Hadamard transforms of the tensors that [`crate::ops::HeadLoss`] quantizes itself, as [`Quantize::random`] and
/// [`Quantize::hadamard`]. By default there are none.
#[derive(Debug)]
pub struct HeadRandom<'a, B: Backend> {
    /// The random bits of x. Blocks along rows and blocks down columns use the same bits. The bits are required if a codec of x draws.
    pub x: Option<Random<'a, B>>,
    /// The random bits of dlogits, whose rows have the length of the vocabulary.
    pub dlogits: Option<Random<'a, B>>,
    /// The transform of x along its rows, in the product that computes the logits. The caller has transformed `w` in the same way.
    pub fprop: Option<Hadamard<'a, B>>,
    /// The transform of dlogits along the vocabulary, in the product that computes dx. The caller has transformed `wt` in the same way.
    pub dgrad: Option<Hadamard<'a, B>>,
    /// The transform of x and of dlogits down the tokens of each shard, in the product that computes dw. Its length divides the number of
    /// tokens of a shard.
    pub wgrad: Option<Hadamard<'a, B>>,
    /// The id of each row, as in [`Groups::row_id`], which selects the random bits of the row; `None` if the id is the index of the row.
    /// With ids, the shards are the groups of [`Quantize::groups`], so each shard has whole column blocks. A transform down the tokens of
    /// several shards requires ids.
    pub row_id: Option<&'a B::Buf<i32>>,
}

impl<B: Backend> Clone for HeadRandom<'_, B> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<B: Backend> Copy for HeadRandom<'_, B> {}

impl<B: Backend> Default for HeadRandom<'_, B> {
    fn default() -> Self {
        Self { x: None, dlogits: None, fprop: None, dgrad: None, wgrad: None, row_id: None }
    }
}

impl<'a, B: Backend> HeadRandom<'a, B> {
    /// The tensors that [`crate::ops::HeadLoss`] quantizes by these codecs: x and dlogits.
    pub fn operands(&self, codecs: &HeadCodecs) -> [HeadOperand<'a, B>; 2] {
        let HeadCodecs { fprop_x, dgrad_dy, wgrad_dy, wgrad_x } = *codecs;
        let HeadRandom { x, dlogits, fprop, dgrad, wgrad, .. } = *self;
        [
            HeadOperand { codecs: [fprop_x, wgrad_x], random: x, transforms: [fprop, wgrad] },
            HeadOperand { codecs: [dgrad_dy, wgrad_dy], random: dlogits, transforms: [dgrad, wgrad] },
        ]
    }

    /// Checks that what draws has random bits, and that the ids are as many as the tokens.
    pub(super) fn check(&self, op: &'static str, codecs: &HeadCodecs, tokens: usize) -> Result<()> {
        let HeadCodecs { fprop_x, dgrad_dy, wgrad_dy, wgrad_x } = *codecs;
        for (argument, random, codecs) in [
            ("random.x.step", self.x, [fprop_x, wgrad_x]),
            ("random.dlogits.step", self.dlogits, [dgrad_dy, wgrad_dy]),
        ] {
            let mut codecs = codecs.into_iter().flatten();
            codecs.try_for_each(|codec| check_random(op, codec, random.is_some()))?;
            check_step::<B>(op, argument, random.and_then(|random| random.step))?;
        }
        self.row_id.map_or(Ok(()), |ids| expect_eq(op, "random.row_id.len()", B::len(ids), tokens))
    }

    /// The shards of a chunk as groups, with copies of their row ids; `None` if rows have no ids. Every group starts at a multiple of
    /// `align`.
    ///
    /// # Errors
    /// The errors of the backend.
    pub fn groups_of(&self, b: &B, chunk: &HeadLossChunk, align: usize) -> Result<Option<Groups<B>>> {
        let Some(ids) = self.row_id else { return Ok(None) };
        let groups = Groups::uniform(b, chunk.shards.len(), chunk.tokens_each(), align, 0)?;
        let mut row_id = b.alloc(chunk.tokens.len())?;
        b.copy(ids, chunk.tokens.clone(), &mut row_id, 0)?;
        Ok(Some(Groups { row_id, ..groups }))
    }
}

/// One of the two tensors that [`crate::ops::HeadLoss`] quantizes itself: x or dlogits.
#[derive(Debug)]
pub struct HeadOperand<'a, B: Backend> {
    /// The codecs of blocks along rows and of blocks down columns.
    codecs: [Option<Codec>; 2],
    random: Option<Random<'a, B>>,
    /// The transforms along rows and down columns.
    transforms: [Option<Hadamard<'a, B>>; 2],
}

impl<B: Backend> Clone for HeadOperand<'_, B> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<B: Backend> Copy for HeadOperand<'_, B> {}

impl<'a, B: Backend> HeadOperand<'a, B> {
    /// The same tensor with blocks along rows only.
    #[must_use]
    pub fn along_rows(self) -> Self {
        Self { codecs: [self.codecs[0], None], ..self }
    }

    /// The codecs of blocks along rows and of blocks down columns, if these blocks are written.
    pub fn codecs(&self) -> [Option<Codec>; 2] {
        self.codecs
    }

    /// Whether one quantization writes both kinds of blocks from one read of the tensor.
    pub fn is_one_read(&self) -> bool {
        let [rows, cols] = self.codecs;
        rows.is_some() && rows == cols && self.transforms.iter().all(Option::is_none)
    }

    /// The quantizations of the rows `x` of a chunk: one of rows and columns, or one of rows, one of columns, or both. `groups` are the
    /// shards of the chunk, if rows have ids. The quantizations give the codes that the same quantizations of all tokens give for these
    /// rows.
    pub fn quantizations<'x>(
        &self,
        x: &'x Tensor<B>,
        chunk: &HeadLossChunk,
        groups: Option<&'x Groups<B>>,
    ) -> Vec<Quantize<'x, B>>
    where
        'a: 'x,
    {
        let [rows, cols] = self.codecs;
        let planes = match self.is_one_read() {
            true => [(rows, Planes::Both), (None, Planes::Cols)],
            false => [(rows, Planes::Rows), (cols, Planes::Cols)],
        };
        let of = |(codec, planes): (Option<Codec>, Planes)| {
            Some(self.quantization(x, (codec?, planes), chunk, groups))
        };
        planes.into_iter().filter_map(of).collect()
    }

    fn quantization<'x>(
        &self,
        x: &'x Tensor<B>,
        (codec, planes): (Codec, Planes),
        chunk: &HeadLossChunk,
        groups: Option<&'x Groups<B>>,
    ) -> Quantize<'x, B>
    where
        'a: 'x,
    {
        let random = self.random.filter(|_| codec.draws());
        let hadamard = match planes {
            Planes::Rows => self.transforms[0],
            Planes::Cols => self.transforms[1]
                .map(|transform| Hadamard { first: transform.first + chunk.position as u64, ..transform }),
            Planes::Both | Planes::Tiles => None,
        };
        // Ids select random bits, and the starts of groups select the signs of columns. Other quantizations need no groups.
        let is_grouped = random.is_some() || planes == Planes::Cols && hadamard.is_some();
        let groups = groups.filter(|_| is_grouped);
        let before = if groups.is_some() { 0 } else { chunk.tokens.start * x.cols };
        let random = random.map(|random| Random { first: random.first + before as u64, ..random });
        Quantize { groups, random, hadamard, ..Quantize::new(x, codec, planes) }
    }
}
