//! The head's products and loss, chunk by chunk.

use crate::Dry;
use crate::memory::Buf;
use nibble_choice::Grouping;
use nibble_choice::products::{Factor, ProductDesc, Ragged};
use nibble_core::formats::Codec;
use nibble_core::ops::*;
use nibble_core::{DType, Operand, Result, Tensor};

const OP: &str = "head_loss";

/// What decides about the products of a GPU's chunks.
struct Head {
    d: usize,
    vocab: usize,
    dtype: DType,
    codecs: HeadCodecs,
    w: Factor,
    grad: Option<HeadGrad>,
}

struct HeadGrad {
    wt: Factor,
    dw: DType,
    accumulate: bool,
    /// Whether the weight's gradient is summed apart from it.
    apart: bool,
}

/// A matrix as it is multiplied along its rows and down its columns, and what is there for that.
struct Factors {
    rows: Factor,
    cols: Factor,
    _planes: Vec<Emitted<Dry>>,
    _plain: Option<Tensor<Dry>>,
}

impl Head {
    fn of(op: &HeadLoss<'_, Dry>) -> Self {
        let ((_, d), vocab) = (op.x.shape(), op.w.rows());
        let is_cut = op.chunks().iter().any(|chunk| !chunk.is_last);
        let grad = op.grad.as_ref().map(|grad| HeadGrad {
            wt: Factor::of(grad.wt),
            dw: grad.dw.dtype(),
            accumulate: grad.accumulate,
            apart: is_cut && grad.dw.dtype() == DType::Bf16,
        });
        Self { d, vocab, dtype: op.x.dtype(), codecs: op.codecs, w: Factor::of(op.w), grad }
    }

    /// Shards of a chunk, the tokens of each, and how far apart its columns begin: those end with a whole block.
    fn groups(&self, chunk: &HeadLossChunk) -> (usize, usize, usize) {
        let each = chunk.tokens_each();
        (chunk.shards.len(), each, each.next_multiple_of(self.codecs.column_block()))
    }
}

impl Dry {
    /// What a chunk of the head's rows takes on a GPU while it lasts.
    fn head_chunk_on_gpu(&self, head: &Head, chunk: &HeadLossChunk) -> Result<()> {
        let &Head { d, vocab, dtype, codecs, .. } = head;
        let rows = chunk.tokens.len();
        let dense = |a, b, dims, out| ProductDesc {
            ragged: Ragged::Rows,
            groups: None,
            dims,
            a,
            b,
            out,
            accumulate: false,
        };
        // x lies where it is.
        let x = Tensor { rows, ..self.plain(dtype, 0, d)? };
        let x = self.head_factors(x, codecs.fprop_x, codecs.wgrad_x)?;
        let logits = self.plain(DType::F32, rows, vocab)?;
        let dims = ProductDims { m: rows, n: vocab, k: d };
        self.beside_product(OP, dense(x.rows, head.w, dims, DType::F32))?;
        let Some(grad) = &head.grad else { return Ok(()) };
        let dlogits = self.plain(dtype, rows, vocab)?;
        drop(logits);
        let dlogits = self.head_factors(dlogits, codecs.dgrad_dy, codecs.wgrad_dy)?;
        let dims = ProductDims { m: rows, n: d, k: vocab };
        self.beside_product(OP, dense(dlogits.rows, grad.wt, dims, dtype))?;
        let (count, each, apart) = head.groups(chunk);
        let rows_each = (apart == each).then_some(each);
        let (out, before) = if grad.apart { (DType::F32, false) } else { (grad.dw, grad.accumulate) };
        self.beside_product(
            OP,
            ProductDesc {
                ragged: Ragged::Contraction,
                groups: Some(Grouping { count, align: 1, rows_each }),
                dims: ProductDims { m: vocab, n: d, k: dlogits.cols.rows },
                a: dlogits.cols,
                b: x.cols,
                out,
                accumulate: before || !chunk.is_first,
            },
        )
    }

    /// What a GPU's products take of a matrix, which is kept as it is only where a product takes it so.
    fn head_factors(&self, x: Tensor<Self>, rows: Option<Codec>, cols: Option<Codec>) -> Result<Factors> {
        let as_it_is = Factor::plain(x.dtype(), x.rows, x.cols);
        let made = self.head_planes(&x, rows, cols)?;
        let find =
            |plane: fn(&Emitted<Self>) -> Option<&Operand<Self>>| made.iter().find_map(plane).map(Factor::of);
        let (of_rows, of_cols) = (find(|made| made.rows.as_ref()), find(|made| made.cols.as_ref()));
        let plain = (rows.is_none() || cols.is_none()).then_some(x);
        let (rows, cols) = (of_rows.unwrap_or(as_it_is), of_cols.unwrap_or(as_it_is));
        Ok(Factors { rows, cols, _planes: made, _plain: plain })
    }

    /// Planes of a matrix by rows and by columns, as far as they are wanted.
    fn head_planes(
        &self,
        x: &Tensor<Self>,
        rows: Option<Codec>,
        cols: Option<Codec>,
    ) -> Result<Vec<Emitted<Self>>> {
        let wanted = match (rows, cols) {
            (Some(rows), cols) if cols == Some(rows) => vec![(rows, Planes::Both)],
            (rows, cols) => {
                let rows = rows.map(|codec| (codec, Planes::Rows));
                rows.into_iter().chain(cols.map(|codec| (codec, Planes::Cols))).collect()
            }
        };
        wanted.into_iter().map(|(codec, planes)| self.quantize(Quantize::new(x, codec, planes))).collect()
    }

    /// What a chunk takes on a host, which quantizes copies, and has room for logits and their gradients from the first chunk to the last.
    fn head_chunk_on_host(&self, head: &Head, rows: usize) -> Result<()> {
        let HeadCodecs { fprop_x, dgrad_dy, wgrad_dy, wgrad_x } = head.codecs;
        let planes = |cols, of_rows: Option<Codec>, of_cols: Option<Codec>| match (of_rows, of_cols) {
            (None, None) => Ok(Vec::new()),
            _ => self.head_planes(&self.plain(head.dtype, rows, cols)?, of_rows, of_cols),
        };
        let _x = planes(head.d, fprop_x, wgrad_x)?;
        let _dlogits = head.grad.as_ref().map(|_| planes(head.vocab, dgrad_dy, wgrad_dy)).transpose()?;
        Ok(())
    }

    pub(crate) fn head_loss(&self, op: HeadLoss<'_, Self>) -> Result<HeadLossOut<Self>> {
        let (head, chunks, longest) = (Head::of(&op), op.chunks(), op.longest_chunk());
        let ((tokens, d), vocab, dtype) = (op.x.shape(), head.vocab, head.dtype);
        let HeadCodecs { fprop_x, dgrad_dy, wgrad_dy, wgrad_x } = op.codecs;
        let [x_counts, dlogits_counts] = [(fprop_x, wgrad_x), (dgrad_dy, wgrad_dy)].map(|(rows, cols)| {
            let any = rows.is_some() || cols.is_some();
            any.then(|| self.counters(3).map(Counts)).transpose()
        });
        let _loss: Buf<f32> = self.buf(tokens)?;
        let bad_ids = self.counters(1)?;
        // A CPU has room for the longest chunk from the first to the last, a GPU for each chunk as it comes.
        let room = |dtype| (!self.is_gpu()).then(|| self.plain(dtype, longest, vocab)).transpose();
        let _logits = room(DType::F32)?;
        let (mut dx, mut beside) = (None, None);
        if let Some(grad) = op.grad {
            let dlogits = room(dtype)?;
            dx = Some(self.plain(dtype, tokens, d)?);
            // A shard in several chunks has a sum of its own, unless that is the gradient itself: a GPU adds to one in F32.
            let adds = grad.accumulate && !self.is_gpu();
            let is_cut = longest < tokens / op.shards.max(1);
            let apart = is_cut && (adds || grad.dw.dtype() == DType::Bf16);
            let chain = apart.then(|| self.plain(DType::F32, vocab, d)).transpose()?;
            beside = Some((dlogits, chain, self.head_groups(&head, &chunks)?));
            self.make_tensor_mut(grad.dw)?;
        }
        let mut known = None;
        for chunk in &chunks {
            let rows = chunk.tokens.len();
            match known.replace(rows) {
                _ if self.is_gpu() => self.head_chunk_on_gpu(&head, chunk)?,
                // What one chunk takes the next of the same length takes again.
                Some(before) if before == rows => {}
                _ => self.head_chunk_on_host(&head, rows)?,
            }
        }
        let shard_nats = self.shard_nats(tokens, op.shards)?;
        drop(beside);
        Ok(HeadLossOut { shard_nats, bad_ids, dx, x_counts: x_counts?, dlogits_counts: dlogits_counts? })
    }

    /// The groups of each kind of chunk, which a GPU makes.
    fn head_groups(&self, head: &Head, chunks: &[HeadLossChunk]) -> Result<Vec<[Buf<i32>; 2]>> {
        let mut known = Vec::new();
        for (count, each, _) in chunks.iter().map(|chunk| head.groups(chunk)).filter(|_| self.is_gpu()) {
            if !known.contains(&(count, each)) {
                known.push((count, each));
            }
        }
        known.into_iter().map(|(count, _)| Ok([self.buf(count + 1)?, self.buf(count)?])).collect()
    }
}
