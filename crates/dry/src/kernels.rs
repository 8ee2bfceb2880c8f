//! Every operation: what it must do is noted, if somebody asks, and then the buffers are made that it makes. An operation is
//! a line: what it reads, by whole operands or by rows; what it writes in place; what it multiplies. Its results count as
//! written, of ragged rows those that belong to a group.

use crate::Dry;
use crate::memory::Buf;
use crate::work::{Bytes, Flops, Work, rows_of};
use nibble_core::formats::{Codec, Format};
use nibble_core::ops::*;
use nibble_core::{DType, Kernels, Operand, PermuteMap, Result, Tensor};

/// The method of a kernel trait for an operation. `of` are the rows of its results that count, all where it is not said.
macro_rules! op {
    ($name:ident($op:ident) -> $out:ty, |$x:ident| $work:expr) => {
        op!($name($op) -> $out, |$x| $work, of None);
    };
    ($name:ident($op:ident) -> $out:ty, |$x:ident| $work:expr, of $rows:expr) => {
        fn $name(&self, $x: $op<'_, Self>) -> Result<$out> {
            let counted = self.is_counted().then(|| ($work, $rows));
            // What makes the buffers: `Dry`'s own method of this name, and not this one of the trait.
            let out = Dry::$name(self, $x)?;
            if let Some((work, rows)) = counted {
                self.note(stringify!($name), work.writes(rows, &[&out]));
            }
            Ok(out)
        }
    };
}

impl Kernels for Dry {
    op!(quantize(Quantize) -> Emitted<Self>, |op| {
        let ids = op.random.and(op.groups).map(|groups| &groups.row_id);
        Work::reads_rows(op.groups.and_then(rows_of), &[op.x, &ids])
    }, of op.groups.and_then(rows_of));
    op!(dequantize(Dequantize) -> Tensor<Self>, |op| Work::reads(&[op.x]));
    op!(
        transcode(Transcode) -> Transcoded<Self>,
        |op| Work::reads_rows(op.groups.and_then(rows_of), &[op.x]), of op.groups.and_then(rows_of)
    );
    op!(cast(Cast) -> Tensor<Self>, |op| Work::reads(&[op.x]));
    op!(transpose(Transpose) -> Tensor<Self>, |op| Work::reads(&[op.x]));
    op!(add(Add) -> Tensor<Self>, |op| Work::reads(&[op.a, op.b, &op.plus]));
    op!(sum_shards(SumShards) -> (), |op| Work::reads(&[op.x]).writes(None, &[&*op.into]));
    op!(route(Route) -> Routing<Self>, |op| Work::reads(&[op.logits]));
    op!(route_backward(RouteBackward) -> Tensor<Self>, |op| Work::reads(&[op.routing, op.dweight, &op.batch_load]));
    op!(plan_permute(PlanPermute) -> PermuteMap<Self>, |op| Work::reads(&[op.expert, op.token_id]));
    op!(permute(Permute) -> Operand<Self>, |op| {
        Work::reads_rows(Some(op.map.num_slots), &[op.rows, &op.map.source_row])
    }, of Some(op.map.num_slots));
    op!(unpermute(Unpermute) -> Operand<Self>, |op| {
        Work::reads_rows(Some(op.map.num_slots), &[op.rows, &op.map.slot_row])
    });
    // To ragged rows or from them: the shorter list says how many there are.
    op!(gather_scalars(GatherScalars) -> Buf<f32>, |op| {
        Work::reads_rows(Some(op.values.len().min(op.index.len())), &[op.values, op.index])
    }, of Some(op.values.len()));
    op!(combine_slots(CombineSlots) -> Tensor<Self>, |op| {
        Work::reads(&[&op.index, &op.plus]).and_reads(op.index.map(Buf::len), &[op.rows])
    });
    op!(pack_rows(PackRows) -> Buf<u8>, |op| {
        Work::reads_rows(Some(op.index.len()), &[op.rows, op.index])
    });
    op!(unpack_rows(UnpackRows) -> Operand<Self>, |op| Work::reads(&[op.bytes]));
    op!(assign_ranks(AssignRanks) -> SlotRanks<Self>, |op| Work::reads(&[op.expert]));
    op!(pack_slots(PackSlots) -> Buf<i32>, |op| {
        Work::reads_rows(Some(op.slot.len()), &[op.slot, op.expert, op.weight, op.token_id])
    });
    op!(unpack_slots(UnpackSlots) -> ReceivedSlots<Self>, |op| Work::reads(&[op.records]));
    op!(tile_scales(TileScales) -> Buf<u8>, |op| Work::reads(&[op.scales, op.starts]));
    op!(untile_scales(UntileScales) -> Buf<u8>, |op| Work::reads(&[op.tiles, op.starts]));
    op!(swiglu(Swiglu) -> SwigluOut<Self>, |op| {
        Work::reads_rows(op.groups.and_then(rows_of), &[op.h, &op.weight])
    }, of op.groups.and_then(rows_of));
    op!(swiglu_backward(SwigluBackward) -> SwigluGrads<Self>, |op| {
        Work::reads_rows(op.groups.and_then(rows_of), &[op.h, op.da, &op.weight])
    }, of op.groups.and_then(rows_of));

    fn init_normal(&self, op: InitNormal) -> Result<Tensor<Self>> {
        let out = Dry::init_normal(self, op)?;
        self.note("init_normal", Work::default().writes(None, &[&out]));
        Ok(out)
    }
    op!(gemm(Gemm) -> Tensor<Self>, |op| {
        let sizes = [op.a.rows(), op.b.rows(), op.a.cols()];
        Work::reads(&[op.a, op.b]).multiplies((op.a.format(), op.b.format()), sizes)
    });
    op!(grouped_gemm(GroupedGemm) -> Tensor<Self>, |op| {
        let rows = rows_of(op.groups);
        let sizes = [
            rows.unwrap_or(op.x.rows()),
            op.w.rows() / op.groups.num_groups.max(1),
            op.x.cols(),
        ];
        Work::reads_rows(rows, &[op.x])
            .and_reads(None, &[op.w])
            .multiplies((op.x.format(), op.w.format()), sizes)
    }, of rows_of(op.groups));
    op!(grouped_wgrad(GroupedWgrad) -> (), |op| {
        let rows = rows_of(op.groups);
        let sizes = [op.dy.cols(), op.x.cols(), rows.unwrap_or(op.x.rows())];
        let grad: &Tensor<Self> = op.grad;
        Work::reads_rows(rows, &[op.dy, op.x])
            .and_reads(None, &[&op.accumulate.then_some(grad)])
            .writes(None, &[grad])
            .multiplies((op.dy.format(), op.x.format()), sizes)
    });
    // A row of the table for each token, and no row twice.
    op!(embed(Embed) -> EmbedOut<Self>, |op| {
        Work::reads(&[op.ids]).and_reads(Some(op.ids.len()), &[op.table])
    });
    op!(embed_backward(EmbedBackward) -> (), |op| {
        let (grad, rows): (&Tensor<Self>, _) = (op.grad, Some(op.ids.len()));
        Work::reads(&[op.ids, op.dy]).and_reads(rows, &[grad]).writes(rows, &[grad])
    });
    op!(rms_norm(RmsNorm) -> RmsNormOut<Self>, |op| Work::reads(&[op.x, &op.plus, op.weight]));
    op!(rms_norm_backward(RmsNormBackward) -> Tensor<Self>, |op| {
        let dweight: &Tensor<Self> = op.dweight;
        Work::reads(&[op.x, op.weight, op.inv_rms, op.dy, &op.plus, dweight]).writes(None, &[dweight])
    });
    op!(norm_rope(NormRope) -> RmsNormOut<Self>, |op| {
        Work::reads(&[op.x, op.weight]).and_reads(Some(op.seq_len), &[op.table])
    });
    op!(norm_rope_backward(NormRopeBackward) -> Tensor<Self>, |op| {
        let dweight: &Tensor<Self> = op.dweight;
        Work::reads(&[op.x, op.weight, op.inv_rms, op.dy, dweight])
            .and_reads(Some(op.seq_len), &[op.table])
            .writes(None, &[dweight])
    });
    op!(rope(Rope) -> Tensor<Self>, |op| {
        Work::reads(&[op.x]).and_reads(Some(op.seq_len), &[op.table])
    });
    op!(attention(Attention) -> AttentionOut<Self>, |op| {
        let pairs = causal_pairs(op.q.rows, op.seq_len);
        let flops = attends(op.q, (op.head_dim, op.value_dim), [pairs; 2]);
        Work { flops, ..Work::reads(&[op.q, op.k, op.v]) }
    });
    op!(attention_decode(AttentionDecode) -> Tensor<Self>, |op| {
        let flops = attends(op.q, (op.head_dim, op.value_dim), [op.len as f64; 2]);
        Work { flops, ..Work::reads(&[op.q]).and_reads(Some(op.len), &[op.k, op.v]) }
    });
    // Five products where the forward pass has two: the scores are made again; dq and dk are along their heads, dP and dv along values'.
    op!(attention_backward(AttentionBackward) -> AttentionGrads<Self>, |op| {
        let pairs = causal_pairs(op.q.rows, op.seq_len);
        let flops = attends(op.q, (op.head_dim, op.value_dim), [3.0 * pairs, 2.0 * pairs]);
        Work { flops, ..Work::reads(&[op.q, op.k, op.v, op.out, op.lse, op.dout]) }
    });
    op!(cross_entropy(CrossEntropy) -> CrossEntropyOut<Self>, |op| Work::reads(&[op.logits, op.targets]));
    op!(head_loss(HeadLoss) -> HeadLossOut<Self>, |op| head(&op));
    op!(begin_step(BeginStep) -> (), |op| {
        let scalars = Some(Control::FROM_HOST);
        let control: &Buf<f32> = op.control;
        Work::reads_rows(scalars, &[control]).writes(scalars, &[control]).writes(None, &[&*op.table])
    });
    // Ids and targets are copied; the rows' numbers are made.
    op!(begin_micro_batch(BeginMicroBatch) -> (), |op| {
        let [ids, targets, row_id]: [&Buf<i32>; 3] = [op.ids, op.targets, op.row_id];
        Work::reads(&[ids, targets]).writes(None, &[ids, targets, row_id])
    });
    op!(collect(Collect) -> (), |op| {
        let sources: Vec<&dyn Bytes> = op.entries.iter().map(|entry| &entry.source as &dyn Bytes).collect();
        let cells = Some(op.entries.iter().map(|entry| entry.cells).sum());
        let table: &Buf<f64> = op.table;
        Work::reads(&sources).and_reads(cells, &[table]).writes(cells, &[table])
    });
    op!(sum_squares(SumSquares) -> (), |op| {
        let parts = op.tensors.iter().map(|tensor| tensor.parts).sum();
        let tensors: Vec<&dyn Bytes> = op.tensors.iter().map(|tensor| tensor.x as &dyn Bytes).collect();
        Work::reads(&tensors).writes(Some(parts), &[&*op.into])
    });
    // One of the two places of the ring of reports.
    op!(end_step(EndStep) -> (), |op| {
        let report = Some(op.reports.len() / 2);
        Work::reads(&[op.squares, op.order, op.tables]).writes(report, &[&*op.reports])
    });
    op!(push_amax(PushAmax) -> (), |op| {
        let (cells, records) = (Some(op.num_spans()), &*op.records);
        Work::reads(&[op.spans, records]).and_reads(cells, &[op.table]).writes(cells, &[records])
    });
    op!(adamw(AdamW) -> (), |op| {
        let state = op.tensors.iter().flat_map(|tensor| -> [&dyn Bytes; 3] {
            [&*tensor.param, &*tensor.exp_avg, &*tensor.exp_avg_sq]
        });
        let state: Vec<&dyn Bytes> = state.collect();
        let grads: Vec<&dyn Bytes> = op.tensors.iter().map(|tensor| tensor.grad as &dyn Bytes).collect();
        Work::reads(&grads).and_reads(None, &state).writes(None, &state)
    });
}

/// Two a multiply-add, of BF16 or F32: pairs of a query and a key times elements, of products along heads of q and k and of those along
/// heads of v.
fn attends(q: &Tensor<Dry>, (head_dim, value_dim): (usize, usize), [keys, values]: [f64; 2]) -> Flops {
    let heads = (q.cols / head_dim.max(1)) as f64;
    let type_of = plain(q.dtype());
    Flops::of((type_of, type_of), 2.0 * heads * (keys * head_dim as f64 + values * value_dim as f64))
}

/// The half of each sequence's square that a causal mask leaves.
fn causal_pairs(tokens: usize, seq_len: usize) -> f64 {
    tokens as f64 * seq_len as f64 / 2.0
}

fn plain(dtype: DType) -> Format {
    match dtype {
        DType::F32 => Format::F32,
        DType::Bf16 => Format::Bf16,
    }
}

/// The head's operands and its products; the logits never exist.
fn head(op: &HeadLoss<'_, Dry>) -> Work {
    let ((tokens, d), vocab) = (op.x.shape(), op.w.rows());
    let sizes = [tokens, vocab, d];
    let HeadCodecs { fprop_x, dgrad_dy, wgrad_dy, wgrad_x } = op.codecs;
    let form = |codec: Option<Codec>| codec.map_or(plain(op.x.dtype()), |codec| codec.format());
    let logits = Work::reads(&[op.x, op.w, op.targets]).multiplies((form(fprop_x), op.w.format()), sizes);
    let Some(grad) = &op.grad else { return logits };
    let dw: &Tensor<Dry> = grad.dw;
    logits
        .and_reads(None, &[grad.wt, &grad.accumulate.then_some(dw)])
        .writes(None, &[dw])
        .multiplies((form(dgrad_dy), grad.wt.format()), sizes)
        .multiplies((form(wgrad_dy), form(wgrad_x)), sizes)
}
