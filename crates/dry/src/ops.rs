//! Results and temporaries of operations. Results come from the operations' own functions ([`nibble_core::ops`]). `nibble-choice` lists a
//! GPU's temporaries; `host.rs` lists those of a CPU.

use crate::memory::InPlace;
use crate::{Dry, Slow};
use nibble_choice::attention::{self, AttentionPath};
use nibble_choice::norm::{self, NormRopePath};
use nibble_choice::quantize::QuantizePath;
use nibble_choice::routing::{PlanChunks, RouteSums};
use nibble_choice::vocabulary::{EmbedTasks, losses_temporary, sorted_tokens};
use nibble_choice::{GpuKernels, Temporary, head_loss, squares, swiglu, transcode};
use nibble_core::ops::*;
use nibble_core::{Backend, Groups, Operand, PermuteMap, Result, Tensor, for_each_op};

/// Operations without temporaries: they allocate their result, or a copy if another handle shares a buffer that they write. Any other
/// operation, and any operation whose fields are not a plain list, has a function of its name below, which hides this default.
mod defaults {
    use super::*;

    type B = Dry;

    macro_rules! functions {
        (() $($rows:tt)*) => { functions! { @ $($rows)* } };
        (@) => {};
        (@ $name:ident($args:ty) -> $out:ty {} $($rest:tt)*) => { functions! { @ $($rest)* } };
        (@ $name:ident($args:ty) -> () {
            $(reads $($r:ident),+;)? $(may_read $($m:ident),+;)? writes $($w:ident),+; $(plain $($p:ident),+;)?
        } $($rest:tt)*) => {
            #[allow(dead_code)] // unused if hidden by a function below
            pub fn $name(dry: &Dry, op: $args) -> Result<()> {
                $(op.$w.make_own(dry)?;)+
                Ok(())
            }
            functions! { @ $($rest)* }
        };
        (@ $name:ident($args:ty) -> $out:ty {
            $(reads $($r:ident),+;)? $(may_read $($m:ident),+;)? $(plain $($p:ident),+;)?
        } $($rest:tt)*) => {
            #[allow(dead_code)] // unused if hidden by a function below
            pub fn $name<B: Backend>(b: &B, op: $args) -> Result<$out> {
                op.result(b)
            }
            functions! { @ $($rest)* }
        };
        (@ $name:ident($args:ty) -> $out:ty { $($fields:tt)+ } $($rest:tt)*) => { functions! { @ $($rest)* } };
    }

    for_each_op! { [functions] () B }
}
pub use defaults::*;

pub fn quantize(dry: &Dry, op: Quantize<'_, Dry>) -> Result<Emitted<Dry>> {
    let taken = if dry.is_gpu() { QuantizePath::of_op(&op).taken } else { Taken::AsIs };
    let out = op.result_as(dry, taken)?;
    while_quantizing(dry, &op)?;
    Ok(out)
}

pub fn quantize_pack(dry: &Dry, op: QuantizePack<'_, Dry>) -> Result<PackedRows<Dry>> {
    if dry.is_gpu() && QuantizePath::of_op(&op.quantize).packs() {
        return op.result(dry);
    }
    let made = quantize(dry, op.quantize)?;
    let bytes = pack_rows(dry, PackRows { rows: &made.take_rows("quantize_pack")?, index: op.index })?;
    let counts = made.counts.map_or_else(|| Counts::zeros(dry), Ok)?;
    Ok(PackedRows { bytes, counts, found: made.found })
}

/// Allocates the temporaries of a quantization.
pub fn while_quantizing(dry: &Dry, op: &Quantize<'_, Dry>) -> Result<()> {
    let temporaries = match dry.is_gpu() {
        true => QuantizePath::of_op(op).temporaries(),
        false => quantize_temporaries(op),
    };
    dry.hold(temporaries).map(drop)
}

/// Temporaries of a quantization; a Hadamard transform is a separate pass.
fn quantize_temporaries(op: &Quantize<'_, Dry>) -> Vec<Temporary> {
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

pub fn transcode(dry: &Dry, op: Transcode<'_, Dry>) -> Result<Transcoded<Dry>> {
    if dry.is_gpu() { transcode::transcode(dry, op) } else { op.result(dry) }
}

pub fn swiglu(dry: &Dry, op: Swiglu<'_, Dry>) -> Result<SwigluOut<Dry>> {
    if dry.is_gpu() { swiglu::swiglu(dry, &op) } else { op.result(dry) }
}

pub fn swiglu_backward(dry: &Dry, op: SwigluBackward<'_, Dry>) -> Result<SwigluGrads<Dry>> {
    if dry.is_gpu() { swiglu::swiglu_backward(dry, &op) } else { op.result(dry) }
}

pub fn route(dry: &Dry, op: Route<'_, Dry>) -> Result<Routing<Dry>> {
    let out = op.result(dry)?;
    let (tokens, experts) = op.logits.shape();
    let sums = RouteSums::new::<Dry>(tokens, op.shards, experts);
    let of_documents = sums.of_documents().into_iter().chain([sums.of_document_losses()]);
    let of_documents = of_documents.filter(|_| op.documents.is_some());
    dry.while_on_gpu(sums.temporaries().into_iter().chain(of_documents))?;
    Ok(out)
}

pub fn route_backward(dry: &Dry, op: RouteBackward<'_, Dry>) -> Result<Tensor<Dry>> {
    let out = op.result(dry)?;
    let (tokens, experts) = op.routing.kept.shape();
    let sums = RouteSums::new::<Dry>(tokens, op.shards, experts);
    dry.while_on_gpu(sums.of_documents().into_iter().filter(|_| op.documents.is_some()))?;
    Ok(out)
}

pub fn plan_permute(dry: &Dry, op: PlanPermute<'_, Dry>) -> Result<PermuteMap<Dry>> {
    let mut out = op.result(dry)?;
    // The lengths are assumed to be equal, because only their sum is known.
    let lengths = |g| op.num_slots / op.num_groups + usize::from(g < op.num_slots % op.num_groups);
    let lengths: Vec<i32> = (0..op.num_groups).map(|g| lengths(g) as i32).collect();
    out.groups.len.tell(&lengths);
    dry.while_on_gpu([PlanChunks::new(Dry::len(op.expert), op.num_groups).temporary()])?;
    Ok(out)
}

pub fn gemm(dry: &Dry, op: Gemm<'_, Dry>) -> Result<Tensor<Dry>> {
    let mut d = op.result(dry)?;
    dry.multiply(op.product()?, &mut d)?;
    Ok(d)
}

pub fn grouped_gemm(dry: &Dry, op: GroupedGemm<'_, Dry>) -> Result<Tensor<Dry>> {
    let mut d = op.result(dry)?;
    dry.multiply(op.product()?, &mut d)?;
    Ok(d)
}

pub fn grouped_wgrad(dry: &Dry, op: GroupedWgrad<'_, Dry>) -> Result<()> {
    let (product, grad) = op.product()?;
    grad.make_own(dry)?;
    dry.multiply(product, grad)
}

pub fn embed_backward(dry: &Dry, op: EmbedBackward<'_, Dry>) -> Result<()> {
    op.grad.make_own(dry)?;
    let Some(tasks) = EmbedTasks::of(&op).filter(|_| dry.is_gpu()) else { return Ok(()) };
    let (tokens, d) = op.dy.shape();
    let _order = sorted_tokens(dry, tokens, op.grad.rows as u32, |_, _, _, _| Ok(()))?;
    let _counts = dry.counters(2)?;
    dry.while_on_gpu(tasks.temporaries(tokens, d))
}

pub fn rms_norm_backward(dry: &Dry, op: RmsNormBackward<'_, Dry>) -> Result<Tensor<Dry>> {
    let dx = op.result(dry)?;
    op.dweight.make_own(dry)?;
    dry.while_on_gpu([norm::column_sums_temporary::<Dry>(op.x.shape(), op.dweight.rows)])?;
    Ok(dx)
}

pub fn layer_norm_backward(dry: &Dry, op: LayerNormBackward<'_, Dry>) -> Result<Tensor<Dry>> {
    let dx = op.result(dry)?;
    op.dweight.make_own(dry)?;
    dry.while_on_gpu([norm::column_sums_temporary::<Dry>(op.x.shape(), op.dweight.rows)])?;
    Ok(dx)
}

pub fn add_bias_backward(dry: &Dry, op: AddBiasBackward<'_, Dry>) -> Result<()> {
    op.dbias.make_own(dry)?;
    dry.while_on_gpu([norm::column_sums_temporary::<Dry>(op.dy.shape(), op.dbias.rows)])
}

/// The code path of norm and rope; a CPU has no fused pass.
fn norm_rope_path(dry: &Dry, head_dim: usize) -> NormRopePath {
    if dry.is_gpu() { NormRopePath::of(head_dim) } else { NormRopePath::Apart }
}

pub fn norm_rope(dry: &Dry, op: NormRope<'_, Dry>) -> Result<RmsNormOut<Dry>> {
    let out = op.result(dry)?;
    dry.hold(norm_rope_path(dry, op.table.cols).between(op.x))?;
    Ok(out)
}

pub fn norm_rope_backward(dry: &Dry, op: NormRopeBackward<'_, Dry>) -> Result<Tensor<Dry>> {
    let dx = op.result(dry)?;
    let heads = (op.heads(), op.table.cols);
    let _turned = dry.hold(norm_rope_path(dry, heads.1).between(op.x))?;
    op.dweight.make_own(dry)?;
    dry.while_on_gpu([norm::column_sums_temporary::<Dry>(heads, op.dweight.rows)])?;
    Ok(dx)
}

/// Records attention that does not run on tensor cores. `products` is the number of products of each query with the keys up to its
/// position.
fn note_attention(
    dry: &Dry,
    op: &'static str,
    q: &Tensor<Dry>,
    (heads, causal): ((usize, usize), bool),
    (seq_len, products): (usize, f64),
) -> Result<()> {
    if !dry.is_gpu() {
        return Ok(());
    }
    attention::check_heads(op, heads)?;
    if let AttentionPath::OrdinaryCores { why } = AttentionPath::masked(q.dtype(), heads, causal) {
        let flops = products * (q.rows * q.cols) as f64 * seq_len as f64;
        dry.inner.slow.note(Slow { op, why, flops });
    }
    Ok(())
}

pub fn attention(dry: &Dry, op: Attention<'_, Dry>) -> Result<AttentionOut<Dry>> {
    note_attention(dry, "attention", op.q, ((op.head_dim, op.value_dim), op.causal), (op.seq_len, 2.0))?;
    op.result(dry)
}

pub fn attention_backward(dry: &Dry, op: AttentionBackward<'_, Dry>) -> Result<AttentionGrads<Dry>> {
    let heads = (op.head_dim, op.value_dim);
    note_attention(dry, "attention_backward", op.q, (heads, op.causal), (op.seq_len, 5.0))?;
    let grads = op.result(dry)?;
    dry.while_on_gpu(attention::backward_temporaries(&op))?;
    Ok(grads)
}

pub fn cross_entropy(dry: &Dry, op: CrossEntropy<'_, Dry>) -> Result<CrossEntropyOut<Dry>> {
    let out = op.result(dry)?;
    dry.while_on_gpu([losses_temporary::<Dry>(op.logits.rows, op.shards)])?;
    Ok(out)
}

pub fn head_loss(dry: &Dry, op: HeadLoss<'_, Dry>) -> Result<HeadLossOut<Dry>> {
    if dry.is_gpu() { head_loss::head_loss(dry, op) } else { dry.head_loss_on_host(op) }
}

pub fn collect(dry: &Dry, op: Collect<'_, Dry>) -> Result<()> {
    op.table.make_own(dry)
}

pub fn sum_squares(dry: &Dry, op: SumSquares<'_, Dry>) -> Result<()> {
    op.into.make_own(dry)
}

pub fn close_squares(dry: &Dry, op: CloseSquares<'_, Dry>) -> Result<()> {
    op.into.make_own(dry)?;
    let mut level = Vec::new();
    for next in squares::levels(&op.tensors).into_iter().filter(|_| dry.is_gpu()) {
        level = dry.hold([next])?;
    }
    drop(level);
    Ok(())
}

pub fn adamw(dry: &Dry, op: AdamW<'_, Dry>) -> Result<()> {
    for AdamWTensor { param, exp_avg, exp_avg_sq, .. } in op.tensors {
        [param, exp_avg, exp_avg_sq].into_iter().try_for_each(|x| x.make_own(dry))?;
    }
    Ok(())
}
