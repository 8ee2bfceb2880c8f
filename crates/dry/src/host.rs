//! What a host takes beside results.

use crate::Dry;
use nibble_choice::{Product, Temporary};
use nibble_core::formats::{BlockAxis, Codec, Format};
use nibble_core::ops::*;
use nibble_core::{BlockScaled, DType, Operand, Result, Tensor};

/// A transform is made apart.
pub(crate) fn quantize_temporaries(op: &Quantize<'_, Dry>) -> Vec<Temporary> {
    let (rows, cols) = op.x.shape();
    let transformed = |transform: Hadamard<'_, Dry>| {
        let rows = match op.planes {
            Planes::Cols => rows.next_multiple_of(transform.len.max(op.codec.format().column_step())),
            _ => rows,
        };
        Temporary::new("the transform in F32", rows * cols * size_of::<f32>())
    };
    op.hadamard.map(transformed).into_iter().collect()
}

impl Dry {
    /// A BF16 operand in F32, where the other one is.
    fn widened(&self, x: &Operand<Self>, other: &Operand<Self>) -> Result<Option<Tensor<Self>>> {
        match (x.format(), other.format()) {
            (Format::Bf16, Format::F32) => Tensor::unwritten(self, DType::F32, x.rows(), x.cols()).map(Some),
            _ => Ok(None),
        }
    }

    /// What a first operand is lifted to, if it is so beside the second; and that one, of so many matrices.
    fn lifted<'x>(
        &self,
        [a, b]: [&'x Operand<Self>; 2],
        matrices: usize,
    ) -> Result<[Option<BlockScaled<Self>>; 2]> {
        let stored = [a, b].map(Stored::of);
        let numbers = Numbers::of(stored[0], stored[1]);
        let taken = |x: &'x Operand<Self>, stored| match x {
            Operand::Block(q) if numbers.takes(stored) == Taken::Lifted => Some(q),
            _ => None,
        };
        let unwritten = |axis, q: &BlockScaled<Self>, stack| {
            BlockScaled::unwritten(self, Format::LIFTED, axis, (q.rows, q.cols, stack)).map(Some)
        };
        // Beside the plane it counts, but of squares.
        let along_lines = |q: &BlockScaled<Self>| -> Result<_> {
            let out = unwritten(q.axis, q, q.stack)?;
            Counts::zeros(self)?;
            Ok(out)
        };
        let first = taken(a, stored[0]).map_or(Ok(None), along_lines)?;
        let second = match (taken(b, stored[1]), stored[1].lifted_second().axis) {
            (Some(q), BlockAxis::Tile) => unwritten(BlockAxis::Tile, q, matrices)?,
            (Some(q), _) => along_lines(q)?,
            (None, _) => None,
        };
        Ok([first, second])
    }

    pub(crate) fn multiply_on_host(&self, product: &Product<'_, Self>) -> Result<()> {
        let (a, b) = product.operands;
        let _widened = (self.widened(a, b)?, self.widened(b, a)?);
        let _lifted = self.lifted([a, b], product.groups.map_or(1, |groups| groups.num_groups))?;
        Ok(())
    }

    /// It has room for logits and their gradients from the first chunk to the last, and quantizes copies.
    pub(crate) fn head_loss_on_host(&self, mut op: HeadLoss<'_, Self>) -> Result<HeadLossOut<Self>> {
        let (out, longest) = (op.result(self)?, op.longest_chunk());
        let ((tokens, d), vocab, dtype) = (op.x.shape(), op.w.rows(), op.x.dtype());
        let mut chunks: Vec<usize> = op.chunks().iter().map(|chunk| chunk.tokens.len()).collect();
        let _loss = self.buf::<f32>(tokens)?;
        let _logits = Tensor::unwritten(self, DType::F32, longest, vocab)?;
        let mut beside = None;
        if let Some(grad) = &mut op.grad {
            self.make_tensor_mut(grad.dw)?;
            let dlogits = Tensor::unwritten(self, dtype, longest, vocab)?;
            // A shard in several chunks has a sum of its own, unless that is the gradient itself.
            let is_cut = longest < tokens / op.shards.max(1);
            let apart = is_cut && (grad.accumulate || grad.dw.dtype() == DType::Bf16);
            let chain = apart.then(|| Tensor::unwritten(self, DType::F32, vocab, d)).transpose()?;
            beside = Some((dlogits, chain));
        }
        let of_w = HeadProducts { w: op.w, wt: op.grad.as_ref().map(|grad| grad.wt), codecs: op.codecs };
        // What one chunk takes the next of the same length takes again; of a weight what the first one took stays.
        chunks.dedup();
        let mut of_weights = Vec::new();
        for rows in chunks {
            self.head_chunk_on_host(&of_w, (rows, d, vocab, dtype), beside.is_some(), &mut of_weights)?;
        }
        Ok(out)
    }

    /// The planes of a chunk, and what its products lift.
    fn head_chunk_on_host(
        &self,
        of: &HeadProducts<'_>,
        (rows, d, vocab, dtype): (usize, usize, usize, DType),
        gradients: bool,
        of_weights: &mut Vec<BlockScaled<Self>>,
    ) -> Result<()> {
        let HeadCodecs { fprop_x, dgrad_dy, wgrad_dy, wgrad_x } = of.codecs;
        let is_block = |w: Option<&Operand<Self>>| matches!(w, Some(Operand::Block(_)));
        let x = [fprop_x, wgrad_x];
        let x = self.head_planes((rows, d, dtype), x, [is_block(Some(of.w)), wgrad_dy.is_some()])?;
        let first = of_weights.is_empty();
        let mut dense = |planes: &HeadPlanes, w: &Operand<Self>| -> Result<()> {
            let Some(a) = &planes.rows else { return Ok(()) };
            let [_a, b] = self.lifted([a, w], 1)?;
            of_weights.extend(b.filter(|_| first));
            Ok(())
        };
        dense(&x, of.w)?;
        let Some(wt) = of.wt.filter(|_| gradients) else { return Ok(()) };
        let dlogits = [dgrad_dy, wgrad_dy];
        let dlogits =
            self.head_planes((rows, vocab, dtype), dlogits, [is_block(Some(wt)), wgrad_x.is_some()])?;
        dense(&dlogits, wt)?;
        if let (Some(dy), Some(x)) = (&dlogits.cols, &x.cols) {
            let _both = self.lifted([dy, x], 1)?;
        }
        Ok(())
    }

    /// Planes of a matrix by rows and by columns, as far as they are wanted; a copy of it where one is plain beside something quantized.
    fn head_planes(
        &self,
        (rows, cols, dtype): (usize, usize, DType),
        codecs: [Option<Codec>; 2],
        beside: [bool; 2],
    ) -> Result<HeadPlanes> {
        let mut made = HeadPlanes { rows: None, cols: None };
        if codecs == [None, None] && beside == [false, false] {
            return Ok(made);
        }
        let x = Tensor::unwritten(self, dtype, rows, cols)?;
        let quantize = |codec, planes| self.quantize(Quantize::new(&x, codec, planes));
        if let [Some(rows), Some(cols)] = codecs
            && rows == cols
        {
            let both = quantize(rows, Planes::Both)?;
            return Ok(HeadPlanes { rows: both.rows, cols: both.cols });
        }
        let plain = |side: usize| beside[side].then(|| Operand::Plain(x.clone()));
        made.rows = match codecs[0] {
            Some(codec) => quantize(codec, Planes::Rows)?.rows,
            None => plain(0),
        };
        made.cols = match codecs[1] {
            Some(codec) => quantize(codec, Planes::Cols)?.cols,
            None => plain(1),
        };
        Ok(made)
    }
}

/// What the products of a head take beside x and the logits' gradients.
struct HeadProducts<'a> {
    w: &'a Operand<Dry>,
    wt: Option<&'a Operand<Dry>>,
    codecs: HeadCodecs,
}

/// A matrix of a chunk as products take it.
struct HeadPlanes {
    rows: Option<Operand<Dry>>,
    cols: Option<Operand<Dry>>,
}
