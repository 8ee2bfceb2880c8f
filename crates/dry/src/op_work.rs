//! The minimum work of each operation: the operands or rows that it reads, the buffers that it writes in place, and the products that it
//! computes. Results count as written. Only those rows of a ragged tensor that belong to a group count.
//!
//! An operation that reads whole operands and computes no products needs no function here. Any other operation has a function of the same
//! name.

use crate::Dry;
use crate::memory::Buf;
use crate::work::{Bytes, Flops, Work, rows_of};
use nibble_core::formats::{Codec, Format};
use nibble_core::ops::*;
use nibble_core::{DType, Tensor, for_each_op};

/// The work of an operation, without the writes of its results.
pub struct Counted {
    pub work: Work,
    /// Number of rows of the results that count; `None` means all rows.
    pub rows: Option<usize>,
}

impl Counted {
    fn with_flops(self, flops: Flops) -> Self {
        Self { work: Work { flops, ..self.work }, ..self }
    }
}

impl From<Work> for Counted {
    fn from(work: Work) -> Self {
        Self { work, rows: None }
    }
}

/// The default: every operand is read once as a whole, and every buffer written in place is written once as a whole. A function of the same
/// name outside this module hides the default.
mod whole_operands {
    use super::*;

    macro_rules! functions {
        (() $($name:ident($args:ty) -> $out:ty { $($fields:tt)* })*) => {
            $(functions! { @one $name($args) { $($fields)* } })*
        };
        (@one $name:ident($args:ty) {}) => {};
        (@one $name:ident($args:ty) {
            $(reads $($r:ident),+;)? $(may_read $($m:ident),+;)? $(writes $($w:ident),+;)? $(plain $($p:ident),+;)?
        }) => {
            #[allow(dead_code, unused_variables)] // unused if hidden by a function outside, or if an operation reads nothing
            pub fn $name(op: &$args) -> Counted {
                Work::reads(&[$($(op.$r,)+)? $($(&op.$m,)+)?]).writes(None, &[$($(&*op.$w),+)?]).into()
            }
        };
    }

    for_each_op! { [functions] () Dry }
}
pub use whole_operands::*;

pub fn quantize(op: &Quantize<'_, Dry>) -> Counted {
    let rows = op.groups.and_then(rows_of);
    let ids = op.random.and(op.groups).map(|groups| &groups.row_id);
    Counted { work: Work::reads_rows(rows, &[op.x, &ids]).and_reads(None, &[&op.amax]), rows }
}

pub fn transcode(op: &Transcode<'_, Dry>) -> Counted {
    let rows = op.groups.and_then(rows_of);
    Counted { work: Work::reads_rows(rows, &[op.x]), rows }
}

pub fn permute(op: &Permute<'_, Dry>) -> Counted {
    let rows = Some(op.map.num_slots);
    Counted { work: Work::reads_rows(rows, &[op.rows, &op.map.source_row]), rows }
}

/// Each record is read once, or once per row if there are fewer rows than records.
pub fn unpack_permute(op: &UnpackPermute<'_, Dry>) -> Counted {
    let (rows, record) = (op.map.num_slots, op.kind.row_bytes());
    let work = Work::reads_rows(Some(rows * record), &[op.bytes]);
    Counted { work: work.and_reads(Some(rows), &[&op.map.source_row]), rows: Some(rows) }
}

pub fn unpermute(op: &Unpermute<'_, Dry>) -> Counted {
    Work::reads_rows(Some(op.map.num_slots), &[op.rows, &op.map.slot_row]).into()
}

/// The values are copied to or from ragged rows; the shorter list determines their number.
pub fn gather_scalars(op: &GatherScalars<'_, Dry>) -> Counted {
    let read = Some(op.values.len().min(op.index.len()));
    Counted { work: Work::reads_rows(read, &[op.values, op.index]), rows: Some(op.values.len()) }
}

pub fn combine_slots(op: &CombineSlots<'_, Dry>) -> Counted {
    Work::reads(&[&op.index, &op.plus]).and_reads(op.index.map(Buf::len), &[op.rows]).into()
}

/// If there are fewer rows than slots, each row counts for one slot.
pub fn combine_tree(op: &CombineTree<'_, Dry>) -> Counted {
    let rows = op.index.len().min(op.rows.rows);
    Work::reads(&[op.index, op.leaf, &op.plus]).and_reads(Some(rows), &[op.rows]).into()
}

pub fn pack_rows(op: &PackRows<'_, Dry>) -> Counted {
    Work::reads_rows(Some(op.index.len()), &[op.rows, op.index]).into()
}

/// Each row is read once, even if it is sent in several records.
pub fn quantize_pack(op: &QuantizePack<'_, Dry>) -> Counted {
    quantize(&op.quantize).work.and_reads(None, &[op.place]).into()
}

pub fn pack_slots(op: &PackSlots<'_, Dry>) -> Counted {
    Work::reads_rows(Some(op.slot.len()), &[op.slot, op.expert, op.weight, op.token_id]).into()
}

pub fn swiglu(op: &Swiglu<'_, Dry>) -> Counted {
    let rows = op.groups.and_then(rows_of);
    Counted { work: Work::reads_rows(rows, &[op.h, &op.weight]), rows }
}

pub fn swiglu_backward(op: &SwigluBackward<'_, Dry>) -> Counted {
    let rows = op.groups.and_then(rows_of);
    Counted { work: Work::reads_rows(rows, &[op.h, op.da, &op.weight]), rows }
}

pub fn gemm(op: &Gemm<'_, Dry>) -> Counted {
    let sizes = [op.a.rows(), op.b.rows(), op.a.cols()];
    Work::reads(&[op.a, op.b]).multiplies((op.a.format(), op.b.format()), sizes).into()
}

pub fn grouped_gemm(op: &GroupedGemm<'_, Dry>) -> Counted {
    let rows = rows_of(op.groups);
    let sizes = [rows.unwrap_or(op.x.rows()), op.w.rows() / op.groups.num_groups.max(1), op.x.cols()];
    let work = Work::reads_rows(rows, &[op.x]).and_reads(None, &[op.w]);
    Counted { work: work.multiplies((op.x.format(), op.w.format()), sizes), rows }
}

pub fn grouped_wgrad(op: &GroupedWgrad<'_, Dry>) -> Counted {
    let rows = rows_of(op.groups);
    let sizes = [op.dy.cols(), op.x.cols(), rows.unwrap_or(op.x.rows())];
    let grad: &Tensor<Dry> = op.grad;
    Work::reads_rows(rows, &[op.dy, op.x])
        .and_reads(None, &[&op.accumulate.then_some(grad)])
        .writes(None, &[grad])
        .multiplies((op.dy.format(), op.x.format()), sizes)
        .into()
}

/// Each token reads one row of the embedding; no row counts twice.
pub fn embed(op: &Embed<'_, Dry>) -> Counted {
    Work::reads(&[op.ids]).and_reads(Some(op.ids.len()), &[op.table]).into()
}

pub fn embed_backward(op: &EmbedBackward<'_, Dry>) -> Counted {
    let (grad, rows): (&Tensor<Dry>, _) = (op.grad, Some(op.ids.len()));
    Work::reads(&[op.ids, op.dy]).and_reads(rows, &[grad]).writes(rows, &[grad]).into()
}

pub fn rms_norm_backward(op: &RmsNormBackward<'_, Dry>) -> Counted {
    let dweight: &Tensor<Dry> = op.dweight;
    Work::reads(&[op.x, op.weight, op.inv_rms, op.dy, &op.plus, dweight]).writes(None, &[dweight]).into()
}

pub fn layer_norm_backward(op: &LayerNormBackward<'_, Dry>) -> Counted {
    let dweight: &Tensor<Dry> = op.dweight;
    Work::reads(&[op.x, op.weight, op.mean, op.inv_std, op.dy, &op.plus, dweight])
        .writes(None, &[dweight])
        .into()
}

pub fn add_bias(op: &AddBias<'_, Dry>) -> Counted {
    let x: &Tensor<Dry> = op.x;
    Work::reads(&[x, op.bias]).writes(None, &[x]).into()
}

pub fn add_bias_backward(op: &AddBiasBackward<'_, Dry>) -> Counted {
    let dbias: &Tensor<Dry> = op.dbias;
    Work::reads(&[op.dy, dbias]).writes(None, &[dbias]).into()
}

pub fn norm_rope(op: &NormRope<'_, Dry>) -> Counted {
    Work::reads(&[op.x, op.weight, op.positions]).and_reads(Some(op.positions.seq_len), &[op.table]).into()
}

pub fn norm_rope_backward(op: &NormRopeBackward<'_, Dry>) -> Counted {
    let dweight: &Tensor<Dry> = op.dweight;
    Work::reads(&[op.x, op.weight, op.inv_rms, op.dy, dweight, op.positions])
        .and_reads(Some(op.positions.seq_len), &[op.table])
        .writes(None, &[dweight])
        .into()
}

pub fn rope(op: &Rope<'_, Dry>) -> Counted {
    Work::reads(&[op.x, op.positions]).and_reads(Some(op.positions.seq_len), &[op.table]).into()
}

pub fn assemble_kv(op: &AssembleKv<'_, Dry>) -> Counted {
    Work::reads(&[op.up, op.shared, op.positions]).and_reads(Some(op.positions.seq_len), &[op.table]).into()
}

pub fn assemble_kv_backward(op: &AssembleKvBackward<'_, Dry>) -> Counted {
    Work::reads(&[op.dk, op.dv, op.positions]).and_reads(Some(op.positions.seq_len), &[op.table]).into()
}

/// As if sequences were single documents: which keys documents hide is not known here.
pub fn attention(op: &Attention<'_, Dry>) -> Counted {
    let pairs = pairs(op.q.rows, op.seq_len, op.causal, op.windows);
    let flops = attends(op.q, (op.head_dim, op.value_dim), [pairs; 2]);
    whole_operands::attention(op).with_flops(flops)
}

pub fn attention_decode(op: &AttentionDecode<'_, Dry>) -> Counted {
    // All fields by name: of a cache it reads some rows, so that the table does not say what it reads.
    let AttentionDecode { q, k, v, head_dim, value_dim, scale: _, first, len, sinks } = op;
    let seen = len - first;
    let flops = attends(q, (*head_dim, *value_dim), [seen as f64; 2]);
    Work { flops, ..Work::reads(&[q, sinks]).and_reads(Some(seen), &[k, v]) }.into()
}

/// The backward pass has five products and the forward pass two, because the scores are recomputed: scores, dq and dk have size head_dim;
/// dP and dv have size value_dim.
pub fn attention_backward(op: &AttentionBackward<'_, Dry>) -> Counted {
    let pairs = pairs(op.q.rows, op.seq_len, op.causal, op.windows);
    let flops = attends(op.q, (op.head_dim, op.value_dim), [3.0 * pairs, 2.0 * pairs]);
    whole_operands::attention_backward(op).with_flops(flops)
}

/// Two flops per multiply-add, in BF16 or F32. `keys` is the number of (query, key) pairs in products with heads of q and k; `values` is
/// that number for heads of v.
fn attends(q: &Tensor<Dry>, (head_dim, value_dim): (usize, usize), [keys, values]: [f64; 2]) -> Flops {
    let heads = (q.cols / head_dim.max(1)) as f64;
    let type_of = plain(q.dtype());
    Flops::of((type_of, type_of), 2.0 * heads * (keys * head_dim as f64 + values * value_dim as f64))
}

/// What a causal mask and a sliding window leave of each sequence's square.
fn pairs(tokens: usize, seq_len: usize, causal: bool, windows: Option<&Windows<Dry>>) -> f64 {
    if !causal {
        return tokens as f64 * seq_len as f64;
    }
    tokens as f64 * mean_keys(seq_len, windows.map_or(seq_len, |windows| windows.most_keys))
}

fn plain(dtype: DType) -> Format {
    match dtype {
        DType::F32 => Format::F32,
        DType::Bf16 => Format::Bf16,
    }
}

/// The work reads the head's operands and computes its GEMMs; logits are never stored.
pub fn head_loss(op: &HeadLoss<'_, Dry>) -> Counted {
    let ((tokens, d), vocab) = (op.x.shape(), op.w.rows());
    let sizes = [tokens, vocab, d];
    let HeadCodecs { fprop_x, dgrad_dy, wgrad_dy, wgrad_x } = op.codecs;
    let form = |codec: Option<Codec>| codec.map_or(plain(op.x.dtype()), |codec| codec.format());
    let ids: Option<&Buf<i32>> = op.random.row_id;
    let logits =
        Work::reads(&[op.x, op.w, op.targets, &ids]).multiplies((form(fprop_x), op.w.format()), sizes);
    let Some(grad) = &op.grad else { return logits.into() };
    let dw: &Tensor<Dry> = grad.dw;
    logits
        .and_reads(None, &[grad.wt, &grad.accumulate.then_some(dw)])
        .writes(None, &[dw])
        .multiplies((form(dgrad_dy), grad.wt.format()), sizes)
        .multiplies((form(wgrad_dy), form(wgrad_x)), sizes)
        .into()
}

pub fn begin_step(op: &BeginStep<'_, Dry>) -> Counted {
    let [read, written] = [InputLayout::SCALARS, Control::FROM_HOST].map(Some);
    let control: &Buf<f32> = op.control;
    Work::reads_rows(read, &[op.inputs]).writes(written, &[control]).writes(None, &[&*op.table]).into()
}

/// The operation copies ids, targets and document starts, and computes row numbers.
pub fn begin_micro_batch(op: &BeginMicroBatch<'_, Dry>) -> Counted {
    let [ids, targets, starts, row_id]: [&Buf<i32>; 4] = [op.ids, op.targets, op.starts, op.row_id];
    Work::reads(&[ids, targets, starts]).writes(None, &[ids, targets, starts, row_id]).into()
}

pub fn collect(op: &Collect<'_, Dry>) -> Counted {
    let sources: Vec<&dyn Bytes> = op.entries.iter().map(|entry| &entry.source as &dyn Bytes).collect();
    let cells = Some(op.entries.iter().map(|entry| entry.cells).sum());
    let table: &Buf<f64> = op.table;
    Work::reads(&sources).and_reads(cells, &[table]).writes(cells, &[table]).into()
}

pub fn sum_squares(op: &SumSquares<'_, Dry>) -> Counted {
    let chunks = op.tensors.iter().map(Squared::chunks).sum();
    let tensors: Vec<&dyn Bytes> = op.tensors.iter().map(|tensor| tensor.x as &dyn Bytes).collect();
    Work::reads(&tensors).writes(Some(chunks), &[&*op.into]).into()
}

pub fn close_squares(op: &CloseSquares<'_, Dry>) -> Counted {
    let of = |count: fn(&ChunkSums) -> usize| Some(op.tensors.iter().map(count).sum());
    let chunks = of(|tensor| tensor.parts * tensor.chunks);
    Work::reads(&[]).and_reads(chunks, &[op.sums]).writes(of(|tensor| tensor.parts), &[&*op.into]).into()
}

/// The operation writes one of the two entries of the ring buffer of reports.
pub fn end_step(op: &EndStep<'_, Dry>) -> Counted {
    let report = Some(op.reports.len() / 2);
    Work::reads(&[op.squares, op.order, op.tables]).writes(report, &[&*op.reports]).into()
}

pub fn push_amax(op: &PushAmax<'_, Dry>) -> Counted {
    let (cells, records) = (Some(op.num_spans()), &*op.records);
    Work::reads(&[op.spans, records]).and_reads(cells, &[op.table]).writes(cells, &[records]).into()
}

pub fn balance_bias(op: &BalanceBias<'_, Dry>) -> Counted {
    let (loads, bias) = (Some(op.ranks * op.bias.len()), &*op.bias);
    Work::reads(&[bias]).and_reads(loads, &[op.tables]).writes(None, &[bias]).into()
}

pub fn adamw(op: &AdamW<'_, Dry>) -> Counted {
    let state = op
        .tensors
        .iter()
        .flat_map(|tensor| -> [&dyn Bytes; 3] { [&*tensor.param, &*tensor.exp_avg, &*tensor.exp_avg_sq] });
    let state: Vec<&dyn Bytes> = state.collect();
    let grads: Vec<&dyn Bytes> = op.tensors.iter().map(|tensor| tensor.grad as &dyn Bytes).collect();
    Work::reads(&grads).and_reads(None, &state).writes(None, &state).into()
}
