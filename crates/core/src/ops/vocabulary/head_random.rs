//! The random bits and transforms of the tensors that the head quantizes itself, chunk by chunk.

use super::head_loss::{HeadCodecs, HeadLoss, HeadLossChunk};
use crate::error::expect_eq;
use crate::ops::convert::hadamard::Hadamard;
use crate::ops::convert::quantize::{Planes, Quantize, Random, check_random, check_step};
use crate::{Backend, Error, Groups, Operand, Result, Tensor};
use nibble_formats::Codec;

/// The random bits and the Hadamard transforms of the tensors that [`HeadLoss`] quantizes itself, as [`Quantize::random`] and
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
    /// The tensors that [`HeadLoss`] quantizes by these codecs: x and dlogits.
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

/// One of the two tensors that [`HeadLoss`] quantizes itself: x or dlogits.
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
    pub(super) fn check_transforms(&self, op: &'static str) -> Result<()> {
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
            transform.check(op, [of_len, argument, of_step])?;
            if !are_blocks {
                return Err(Error::shape(op, argument, "given", "none, as an operand is not quantized"));
            }
            if !contracted.is_multiple_of(transform.len) {
                let expected = format!("a divisor of the {contracted} values that the product contracts");
                return Err(Error::shape(op, of_len, transform.len, expected));
            }
        }
        if wgrad.is_some() && self.shards > 1 && self.random.row_id.is_none() {
            let expected = "ids, as the transform down the tokens begins anew in each shard";
            return Err(Error::shape(op, "random.row_id", "none", expected));
        }
        Ok(())
    }
}
