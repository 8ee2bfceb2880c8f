//! The head loss computed by the separate operations on decoded values: operands are quantized and decoded again, and F32 GEMMs sum in
//! their own order. Any single quantization may be skipped.

use nibble_core::ops::{
    Cast, Control, Counts, CrossEntropy, Dequantize, Gemm, GroupedWgrad, HeadLoss, HeadLossChunk,
    HeadLossOut, HeadOperand,
};
use nibble_core::{DType, Groups, Kernels, Operand, Result, Tensor};

/// Computes [`HeadLoss`] without the quantization of this argument. If the argument has no quantization, the result does not change.
pub(crate) fn head_by_parts<B: Kernels>(
    b: &B,
    op: HeadLoss<'_, B>,
    left_out: &'static str,
) -> Result<HeadLossOut<B>> {
    let all = HeadLossChunk::all(op.shards, op.x.rows);
    let groups = op.random.groups_of(b, &all, op.column_block())?;
    let [of_x, of_dlogits] = op.operands();
    let HeadLoss { x, w, targets, shards, grad, .. } = op;
    let parts = Parts { b, left_out, at: (&all, groups.as_ref()) };
    let ([x_rows, x_cols], x_counts) = parts.factors(x, &of_x, ["codecs.fprop_x", "codecs.wgrad_x"])?;
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
        let arguments = ["codecs.dgrad_dy", "codecs.wgrad_dy"];
        let ([rows, cols], counts) = parts.factors(&dlogits, &of_dlogits, arguments)?;
        out.dlogits_counts = counts;
        out.dx = Some(Gemm { a: &rows, b: &parts.values(grad.wt)?, out: x.dtype() }.run(b)?);
        let groups = Groups::uniform(b, shards, x.rows / shards.max(1), 1, 0)?;
        let (dy, x, accumulate) = (&cols, &x_cols, grad.accumulate);
        GroupedWgrad { dy, x, groups: &groups, grad: grad.dw, accumulate }.run(b)?;
    }
    Ok(out)
}

struct Parts<'a, B: Kernels> {
    b: &'a B,
    left_out: &'static str,
    /// All tokens, and their shards if rows have ids.
    at: (&'a HeadLossChunk, Option<&'a Groups<B>>),
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

    /// The values of row blocks, the values of column blocks, and the block counts. `arguments` are the names of both codecs.
    #[allow(clippy::type_complexity)] // the type is two operands, and counts if something is quantized
    fn factors(
        &self,
        x: &Tensor<B>,
        operand: &HeadOperand<'_, B>,
        arguments: [&'static str; 2],
    ) -> Result<([Operand<B>; 2], Option<Counts<B>>)> {
        let plain = Operand::Plain(x.clone());
        let mut made = [None, None];
        let mut counts = [0; 3];
        let quantizations = operand.quantizations(x, self.at.0, self.at.1);
        let counted = !quantizations.is_empty();
        for op in quantizations {
            let emitted = op.run(self.b)?;
            self.add(&mut counts, &emitted.counts)?;
            made = [made[0].take().or(emitted.rows), made[1].take().or(emitted.cols)];
        }
        let of = |argument: &str, made: Option<Operand<B>>| {
            let quantized = made.filter(|_| argument != self.left_out);
            self.values_of(quantized.as_ref().unwrap_or(&plain), x.rows)
        };
        let [rows, cols] = made;
        let made = [of(arguments[0], rows)?, of(arguments[1], cols)?];
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
