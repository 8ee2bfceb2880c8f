//! The arguments of every op, their checks, their results and their documentation. Related ops share a file. In every backend, an op is a
//! function with the op's name, in a file with the name of the op or of a related op.
//!
//! `for_each_op!` lists every op once: its method, its arguments, its result, and which fields it reads and writes. This list generates the
//! trait `Kernels`, each op's `run`, the delegates of every backend, the recorder of `testkit`, the counts of dry runs and the list of
//! conformance tests. `for_each_result!` lists the structs that ops return.
//!
//! Legend: t tokens, r routed rows (padding included), d model, f ffn, e experts, l local experts, k top-k, s shards.

mod attention;
mod convert;
mod norm;
mod plain;
mod products;
mod routing;
mod step;
mod swiglu;
mod vocabulary;

pub use {
    attention::*, convert::*, norm::*, plain::*, products::*, routing::*, step::*, swiglu::*, vocabulary::*,
};

use crate::{Groups, Kernels, Operand, PermuteMap, Result, Tensor};

/// Every operation, listed once. A row holds a method of [`Kernels`], the struct of its arguments, its result, and the use of each field of
/// the struct:
///
/// * `reads`: tensors and buffers;
/// * `may_read`: optional tensors and buffers;
/// * `writes`: tensors and buffers that are overwritten, or added to, in place;
/// * `plain`: values on the host.
///
/// The use of fields is left empty if the struct has fields of other kinds, such as lists of tensors, or structs of tensors and values.
///
/// `for_each_op! { [callback] (given) B }` expands to `callback! { (given) ROWS }`, with `B` for the backend. The trait, the `run` of each
/// struct, the delegates of each backend and the conformance tests are generated from this table, so an operation that lacks one of these
/// does not compile.
#[macro_export]
macro_rules! for_each_op {
    ([$($callback:tt)+] $given:tt $B:ident) => {
        $($callback)+! { $given
            quantize(Quantize<'_, $B>) -> Emitted<$B> {}
            measure_amax(MeasureAmax<'_, $B>) -> $B::Buf<f32> { reads x; plain codec, stack; }
            measure_lift(MeasureLift<'_, $B>) -> $B::Buf<u64> { reads x; may_read groups; plain is_second, stack; }
            measure_quantization(MeasureQuantization<'_, $B>) -> $B::Buf<u64> { reads x, quantized; may_read groups; }
            dequantize(Dequantize<'_, $B>) -> Tensor<$B> { reads x; plain dtype; }
            transcode(Transcode<'_, $B>) -> Transcoded<$B> { reads x; may_read groups; plain to, axis, rule; }
            cast(Cast<'_, $B>) -> Tensor<$B> { reads x; plain dtype; }
            transpose(Transpose<'_, $B>) -> Tensor<$B> { reads x; plain stack; }
            add(Add<'_, $B>) -> Tensor<$B> { reads a, b; may_read plus; }
            sum_shards(SumShards<'_, $B>) -> () { reads x; writes into; plain stack, shards; }
            route(Route<'_, $B>) -> Routing<$B> { reads logits; may_read bias, documents; plain rule, shards; }
            route_backward(RouteBackward<'_, $B>) -> Tensor<$B> {
                reads routing, dweight; may_read batch_load, documents; plain rule, shards, aux_scale, batch_rows, z_scale;
            }
            plan_permute(PlanPermute<'_, $B>) -> PermuteMap<$B> {
                reads expert, token_id; plain top_k, num_slots, num_groups, align, capacity;
            }
            assign_parts(AssignParts<'_, $B>) -> $B::Buf<i32> { reads expert, token_id; plain top_k, parts, part_tokens; }
            join_groups(JoinGroups<'_, $B>) -> Groups<$B> { reads groups; plain parts; }
            permute(Permute<'_, $B>) -> Operand<$B> { reads rows, map; }
            unpermute(Unpermute<'_, $B>) -> Operand<$B> { reads rows, map; }
            gather_scalars(GatherScalars<'_, $B>) -> $B::Buf<f32> { reads values, index; }
            combine_slots(CombineSlots<'_, $B>) -> Tensor<$B> { reads rows; may_read index, plus; plain top_k; }
            combine_tree(CombineTree<'_, $B>) -> Tensor<$B> { reads rows, index, leaf; may_read plus; plain leaves, top_k; }
            find_slots(FindSlots<'_, $B>) -> $B::Buf<i32> { reads row_slot; plain slots; }
            pack_rows(PackRows<'_, $B>) -> $B::Buf<u8> { reads rows, index; }
            quantize_pack(QuantizePack<'_, $B>) -> PackedRows<$B> {}
            unpack_rows(UnpackRows<'_, $B>) -> Operand<$B> { reads bytes; plain kind; }
            unpack_permute(UnpackPermute<'_, $B>) -> Operand<$B> { reads bytes, map; plain kind; }
            assign_ranks(AssignRanks<'_, $B>) -> SlotRanks<$B> { reads expert; plain top_k, experts_each, world; }
            pack_slots(PackSlots<'_, $B>) -> $B::Buf<i32> {
                reads slot, expert, weight, token_id; plain top_k, experts_each;
            }
            unpack_slots(UnpackSlots<'_, $B>) -> ReceivedSlots<$B> { reads records; plain top_k; }
            tile_scales(TileScales<'_, $B>) -> $B::Buf<u8> { reads scales, starts; plain matrix; }
            untile_scales(UntileScales<'_, $B>) -> $B::Buf<u8> { reads tiles, starts; plain matrix; }
            swiglu(Swiglu<'_, $B>) -> SwigluOut<$B> { reads h; may_read weight, groups; plain a, save_h; }
            swiglu_backward(SwigluBackward<'_, $B>) -> SwigluGrads<$B> {
                reads h, da; may_read weight, groups; plain dh, a;
            }
            gelu(Gelu<'_, $B>) -> Tensor<$B> { reads h; }
            gelu_backward(GeluBackward<'_, $B>) -> Tensor<$B> { reads h, da; }
            init_normal(InitNormal) -> Tensor<$B> { plain stream, first, rows, cols, std; }
            gemm(Gemm<'_, $B>) -> Tensor<$B> { reads a, b; plain out; }
            grouped_gemm(GroupedGemm<'_, $B>) -> Tensor<$B> { reads x, w, groups; plain out; }
            grouped_wgrad(GroupedWgrad<'_, $B>) -> () { reads dy, x, groups; writes grad; plain accumulate; }
            embed(Embed<'_, $B>) -> EmbedOut<$B> { reads table, ids; plain dtype; }
            embed_backward(EmbedBackward<'_, $B>) -> () { reads ids, dy; writes grad; plain shards; }
            rms_norm(RmsNorm<'_, $B>) -> RmsNormOut<$B> { reads x, weight; may_read plus; plain eps; }
            rms_norm_backward(RmsNormBackward<'_, $B>) -> Tensor<$B> {
                reads x, weight, inv_rms, dy; may_read plus; writes dweight;
            }
            layer_norm(LayerNorm<'_, $B>) -> LayerNormOut<$B> { reads x, weight, bias; may_read plus; plain eps; }
            layer_norm_backward(LayerNormBackward<'_, $B>) -> Tensor<$B> {
                reads x, weight, mean, inv_std, dy; may_read plus; writes dweight;
            }
            norm_rope(NormRope<'_, $B>) -> RmsNormOut<$B> {
                reads x, weight, table, positions; plain eps;
            }
            norm_rope_backward(NormRopeBackward<'_, $B>) -> Tensor<$B> {
                reads x, weight, inv_rms, dy, table, positions; writes dweight;
            }
            add_bias(AddBias<'_, $B>) -> () { reads bias; writes x; }
            add_bias_backward(AddBiasBackward<'_, $B>) -> () { reads dy; writes dbias; }
            rope(Rope<'_, $B>) -> Tensor<$B> { reads x, table, positions; plain head_dim, inverse; }
            assemble_kv(AssembleKv<'_, $B>) -> AssembledKv<$B> {
                reads up, shared, table, positions; plain key_dim, value_dim;
            }
            assemble_kv_backward(AssembleKvBackward<'_, $B>) -> AssembledKvGrads<$B> {
                reads dk, dv, table, positions; plain key_dim, value_dim;
            }
            attention(Attention<'_, $B>) -> AttentionOut<$B> {
                reads q, k, v; may_read windows, sinks; plain head_dim, value_dim, scale, seq_len, causal;
            }
            attention_decode(AttentionDecode<'_, $B>) -> Tensor<$B> {
                reads q, k, v; may_read sinks; plain head_dim, value_dim, scale, first, len;
            }
            attention_backward(AttentionBackward<'_, $B>) -> AttentionGrads<$B> {
                reads q, k, v, out, lse, dout; may_read windows, sinks; plain head_dim, value_dim, scale, seq_len, causal;
            }
            find_windows(FindWindows<'_, $B>) -> Windows<$B> { reads document; plain seq_len, window; }
            cross_entropy(CrossEntropy<'_, $B>) -> CrossEntropyOut<$B> {
                reads logits, targets, control; plain shards, grad;
            }
            head_loss(HeadLoss<'_, $B>) -> HeadLossOut<$B> {}
            begin_step(BeginStep<'_, $B>) -> () { reads inputs; writes clock, control, table; plain layout, told; }
            begin_micro_batch(BeginMicroBatch<'_, $B>) -> () {
                reads inputs; writes clock, ids, targets, starts, row_id; plain layout, rank, ranks;
            }
            collect(Collect<'_, $B>) -> () {}
            sum_squares(SumSquares<'_, $B>) -> () {}
            close_squares(CloseSquares<'_, $B>) -> () { reads sums; writes into; plain tensors; }
            end_step(EndStep<'_, $B>) -> () {
                reads squares, order, tables; writes clock, control, reports; plain ranks, alarms, finite, clip_norm;
            }
            push_amax(PushAmax<'_, $B>) -> () { reads table, spans, control; writes records; plain at; }
            balance_bias(BalanceBias<'_, $B>) -> () { reads tables, control; writes bias; plain ranks, at, rate; }
            adamw(AdamW<'_, $B>) -> () {}
        }
    };
}

/// Every struct that an operation returns, listed once with the kind of each of its fields, in order.
///
/// * `part`: a tensor, an operand or another struct, possibly optional;
/// * `buffer`: a buffer; `per_row(NAME)`: a buffer with an F32 number per row of the part `NAME`;
/// * `counts`: a struct of counters; `counter`: a buffer of a few counters;
/// * `plain`: a number that the host knows.
///
/// `for_each_result! { [callback] }` expands to `callback! { ROWS }`.
#[macro_export]
macro_rules! for_each_result {
    ([$($callback:tt)+]) => {
        $($callback)+! {
            Emitted { rows: part, cols: part, counts: counts, found: counts }
            Found { amax: counter, counts: counter }
            PackedRows { bytes: buffer, counts: counts, found: counts }
            Transcoded { out: part, transposed: part, counts: counts }
            Routing {
                expert: buffer, weight: buffer, kept: part, log_sum_exp: buffer, load: buffer, losses: buffer
            }
            SlotRanks { rank: buffer, first: buffer, counts: buffer }
            ReceivedSlots { token_id: buffer, expert: buffer, weight: buffer }
            SwigluOut { a: part, h: part }
            SwigluGrads { dh: part, a: part, dweight: buffer }
            EmbedOut { x: part, bad_ids: counter }
            RmsNormOut { y: part, inv_rms: buffer, sum: part }
            LayerNormOut { y: part, mean: buffer, inv_std: buffer, sum: part }
            AttentionOut { out: part, lse: per_row(out) }
            AttentionGrads { dq: part, dk: part, dv: part, dsinks: part }
            AssembledKv { k: part, v: part }
            AssembledKvGrads { dup: part, dshared: part }
            Windows { first_key: buffer, end_query: buffer, most_keys: plain }
            CrossEntropyOut { loss: buffer, shard_nats: buffer, bad_ids: counter, dlogits: part }
            HeadLossOut { shard_nats: buffer, bad_ids: counter, dx: part, x_counts: counts, dlogits_counts: counts }
        }
    };
}

/// Defines `run` for each argument struct.
macro_rules! runs {
    (() $($name:ident($Op:ident $(<$l:lifetime, $B:ident>)?) -> $out:ty { $($fields:tt)* })*) => {
        $(runs! { @one $name($Op $(<$l, $B>)?) -> $out })*
    };
    (@one $name:ident($Op:ident<$l:lifetime, $B:ident>) -> $out:ty) => {
        impl<$B: Kernels> $Op<$l, $B> {
            /// Checks the arguments, and runs the operation on the backend.
            ///
            /// # Errors
            /// [`crate::Error::Shape`] with the name of the argument if a check fails, and any error of the backend.
            pub fn run(self, b: &$B) -> Result<$out> {
                self.check()?;
                b.$name(self)
            }
        }
    };
    // This arm is for operations without a buffer that determines the backend.
    (@one $name:ident($Op:ident) -> $out:ty) => {
        impl $Op {
            /// Checks the arguments, and runs the operation on the backend.
            ///
            /// # Errors
            /// [`crate::Error::Shape`] with the name of the argument if a check fails, and any error of the backend.
            pub fn run<B: Kernels>(self, b: &B) -> Result<$out> {
                self.check()?;
                b.$name(self)
            }
        }
    };
}

for_each_op! { [runs] () B }
