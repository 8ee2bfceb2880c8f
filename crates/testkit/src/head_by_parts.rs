//! The head loss computed by the separate operations on decoded values: operands are quantized and decoded again, and F32 GEMMs sum in
//! their own order. Any single quantization may be skipped.

use nibble_core::formats::Codec;
use nibble_core::ops::{
    Cast, Control, Counts, CrossEntropy, Dequantize, Gemm, GroupedWgrad, HeadLoss, HeadLossOut, Planes,
    Quantize,
};
use nibble_core::{DType, Groups, Kernels, Operand, Result, Tensor};

/// Computes [`HeadLoss`] without the quantization of this argument. If the argument has no quantization, the result does not change.
pub(crate) fn head_by_parts<B: Kernels>(
    b: &B,
    op: HeadLoss<'_, B>,
    left_out: &'static str,
) -> Result<HeadLossOut<B>> {
    let HeadLoss { x, w, codecs, targets, shards, grad, .. } = op;
    let parts = Parts { b, left_out };
    let ([x_rows, x_cols], x_counts) =
        parts.factors(x, [("codecs.fprop_x", codecs.fprop_x), ("codecs.wgrad_x", codecs.wgrad_x)])?;
    let logits = Gemm { a: &x_rows, b: &parts.values(w)?, out: DType::F32 }.run(b)?;
    let none = b.zeros(Control::LEN)?;
    let (control, dtype) =
        (grad.as_ref().map_or(&none, |grad| grad.control), grad.as_ref().map(|_| x.dtype()));
    let loss = CrossEntropy { logits: &logits, targets, control, shards, grad: dtype }.run(b)?;
    let mut out = HeadLossOut {
        shard_nats: loss.shard_nats,
        bad_ids: loss.bad_ids,
        dx: None,
        x_counts,
        dlogits_counts: None,
    };
    if let (Some(grad), Some(dlogits)) = (grad, loss.dlogits) {
        let arguments = [("codecs.dgrad_dy", codecs.dgrad_dy), ("codecs.wgrad_dy", codecs.wgrad_dy)];
        let ([rows, cols], counts) = parts.factors(&dlogits, arguments)?;
        out.dlogits_counts = counts;
        out.dx = Some(Gemm { a: &rows, b: &parts.values(grad.wt)?, out: x.dtype() }.run(b)?);
        let groups = Groups::uniform(b, shards, x.rows / shards.max(1), 1, 0)?;
        let (dy, x, accumulate) = (&cols, &x_cols, grad.accumulate);
        GroupedWgrad { dy, x, groups: &groups, grad: grad.dw, accumulate }.run(b)?;
    }
    Ok(out)
}

/// An argument's name and codec.
type Argument = (&'static str, Option<Codec>);

struct Parts<'a, B> {
    b: &'a B,
    left_out: &'static str,
}

impl<B: Kernels> Parts<'_, B> {
    /// The decoded values of an operand.
    fn values(&self, x: &Operand<B>) -> Result<Operand<B>> {
        let values = match x {
            Operand::Plain(x) => Cast { x, dtype: DType::F32 }.run(self.b)?,
            Operand::Block(x) => Dequantize { x, dtype: DType::F32 }.run(self.b)?,
        };
        Ok(Operand::Plain(values))
    }

    /// The decoded values of the first `rows` rows, because column blocks are padded to whole blocks.
    fn values_of(&self, x: &Operand<B>, rows: usize) -> Result<Operand<B>> {
        match self.values(x)? {
            Operand::Plain(x) if x.rows > rows => {
                let values = x.to_f32_vec(self.b)?;
                Tensor::from_f32(self.b, &values[..rows * x.cols], rows, x.cols).map(Operand::Plain)
            }
            values => Ok(values),
        }
    }

    /// The values of row blocks, the values of column blocks, and the block counts.
    #[allow(clippy::type_complexity)] // the type is two operands, and counts if something is quantized
    fn factors(
        &self,
        x: &Tensor<B>,
        [rows, cols]: [Argument; 2],
    ) -> Result<([Operand<B>; 2], Option<Counts<B>>)> {
        let plain = Operand::Plain(x.clone());
        let mut made = [plain.clone(), plain.clone()];
        let mut counts = [0; 3];
        if let ((_, Some(codec)), true) = (rows, rows.1 == cols.1) {
            let both = Quantize::new(x, codec, Planes::Both).run(self.b)?;
            made = [both.take_rows("rows")?, both.take_cols("columns")?];
            self.add(&mut counts, &both.counts)?;
        } else {
            if let (_, Some(codec)) = rows {
                let emitted = Quantize::new(x, codec, Planes::Rows).run(self.b)?;
                made[0] = emitted.take_rows("rows")?;
                self.add(&mut counts, &emitted.counts)?;
            }
            if let (_, Some(codec)) = cols {
                let emitted = Quantize::new(x, codec, Planes::Cols).run(self.b)?;
                made[1] = emitted.take_cols("columns")?;
                self.add(&mut counts, &emitted.counts)?;
            }
        }
        for ((argument, _), made) in [rows, cols].into_iter().zip(&mut made) {
            *made = self.values_of(if argument == self.left_out { &plain } else { &*made }, x.rows)?;
        }
        let counted = rows.1.is_some() || cols.1.is_some();
        let counts = counted.then(|| self.b.upload(&counts)).transpose()?.map(Counts);
        Ok((made, counts))
    }

    fn add(&self, sums: &mut [u64; 3], counts: &Option<Counts<B>>) -> Result<()> {
        if let Some(Counts(counts)) = counts {
            sums.iter_mut().zip(self.b.download(counts)?).for_each(|(sum, count)| *sum += count);
        }
        Ok(())
    }
}
