//! Every operation, delegated. One is added by a line: which of its fields it reads, may read (`Option`), writes in place, and
//! which are plain values.

use super::call::{Run, Taken, open};
use super::mapping::{Mapping, Over, Plane};
use super::{Buf, Recorder};
use crate::head_by_parts::head_by_parts;
use nibble_core::formats::{BlockAxis, Codec};
use nibble_core::ops::*;
use nibble_core::recipe::Form;
use nibble_core::{
    Backend, Convert, Kernels, Model, Occupancy, Operand, PermuteMap, Products, Result, Tensor,
};
use std::convert::identity;

/// Issues an operation: seals its arguments, and has the same operation of the inner backend run on what their cells hold.
/// All fields of the operation are named, so that a new one does not compile before it is listed.
macro_rules! issue {
    (
        $recorder:expr, $given:ident, $name:ident, $op:ident, {
            $(reads $($r:ident),+;)?
            $(may_read $($m:ident),+;)?
            $(writes $($w:ident),+;)?
            $(plain $($p:ident),+;)?
        }, $made:expr
    ) => {{
        #[allow(unused_mut)] // one operation has no buffers
        let mut call = $recorder.call(stringify!($name), &$given);
        let $op { $($($r,)+)? $($($m,)+)? $($($w,)+)? $($($p,)+)? } = $given;
        $($(let $r = call.reads($r)?;)+)?
        $($(let $m = $m.map(|m| call.reads(m)).transpose()?;)+)?
        $($(let $w = call.writes($w)?;)+)?
        call.issue(move |b: &B, _run: Run| {
            $($(let $r = open(b, &$r)?;)+)?
            $($(let $m = $m.as_ref().map(|m| open(b, m)).transpose()?;)+)?
            $($(let mut $w = Taken::new(b, &$w, _run)?;)+)?
            let op = $op {
                $($($r: &$r,)+)?
                $($($m: $m.as_ref(),)+)?
                $($($w: &mut *$w,)+)?
                $($($p: Clone::clone(&$p),)+)?
            };
            b.$name(op).map($made)
        })
    }};
}

/// The method of a kernel trait for an operation.
macro_rules! op {
    ($name:ident($op:ident $fields:tt) -> plane $t:ty) => {
        fn $name(&self, op: $op<'_, Self>) -> Result<Buf<$t, B>> {
            Ok(issue!(self, op, $name, $op, $fields, Plane::<B, $t>)?.0)
        }
    };
    ($name:ident($op:ident $fields:tt) -> $out:ty) => {
        fn $name(&self, op: $op<'_, Self>) -> Result<$out> {
            issue!(self, op, $name, $op, $fields, identity)
        }
    };
}

impl<B: Convert> Convert for Recorder<B> {
    op!(dequantize(Dequantize { reads x; plain dtype; }) -> Tensor<Self>);
    op!(transcode(Transcode { reads x; may_read groups; plain to, axis, rule; }) -> Transcoded<Self>);
    op!(cast(Cast { reads x; plain dtype; }) -> Tensor<Self>);
    op!(transpose(Transpose { reads x; plain stack; }) -> Tensor<Self>);
    op!(add(Add { reads a, b; may_read plus; }) -> Tensor<Self>);
    op!(sum_shards(SumShards { reads x; writes into; plain shards; }) -> ());
    op!(route(Route { reads logits; plain top_k, normalize, shards; }) -> Routing<Self>);
    op!(route_backward(RouteBackward {
        reads routing, dweight; may_read batch_load;
        plain top_k, normalize, shards, aux_scale, batch_rows, z_scale;
    }) -> Tensor<Self>);
    op!(plan_permute(PlanPermute {
        reads expert, token_id; plain top_k, num_slots, num_groups, align, capacity;
    }) -> PermuteMap<Self>);
    op!(permute(Permute { reads rows, map; }) -> Operand<Self>);
    op!(unpermute(Unpermute { reads rows, map; }) -> Operand<Self>);
    op!(gather_scalars(GatherScalars { reads values, index; }) -> plane f32);
    op!(combine_slots(CombineSlots { reads rows; may_read index, plus; plain top_k; }) -> Tensor<Self>);
    op!(pack_rows(PackRows { reads rows, index; }) -> plane u8);
    op!(unpack_rows(UnpackRows { reads bytes; plain kind; }) -> Operand<Self>);
    op!(assign_ranks(AssignRanks { reads expert; plain top_k, experts_each, world; }) -> SlotRanks<Self>);
    op!(pack_slots(PackSlots { reads slot, expert, weight, token_id; plain top_k, experts_each; }) -> plane i32);
    op!(unpack_slots(UnpackSlots { reads records; plain top_k; }) -> ReceivedSlots<Self>);
    op!(tile_scales(TileScales { reads scales, starts; plain matrix; }) -> plane u8);
    op!(untile_scales(UntileScales { reads tiles, starts; plain matrix; }) -> plane u8);
    op!(swiglu(Swiglu { reads h; may_read weight, groups; plain a, save_h; }) -> SwigluOut<Self>);
    op!(swiglu_backward(SwigluBackward {
        reads h, da; may_read weight, groups; plain dh, a;
    }) -> SwigluGrads<Self>);

    fn quantize(&self, op: Quantize<'_, Self>) -> Result<Emitted<Self>> {
        let mut call = self.call("quantize", &op);
        let Quantize { x, codec, planes, groups, stack, random, hadamard, delayed } = op;
        let x = call.reads(x)?;
        let groups = groups.map(|groups| call.reads(groups)).transpose()?;
        let stream = random.map(|random| random.stream);
        let step = random.and_then(|random| random.step).map(|step| call.reads(step)).transpose()?;
        let records = delayed.map(|delayed| call.reads(delayed.records)).transpose()?;
        let (first, stride) = delayed.map_or((0, 0), |delayed| (delayed.first, delayed.stride));
        call.issue(move |b: &B, _| {
            let x = open(b, &x)?;
            let records = records.as_ref().map(|records| open(b, records)).transpose()?;
            let delayed = records.as_ref().map(|records| Delayed { records, first, stride });
            let groups = groups.as_ref().map(|groups| open(b, groups)).transpose()?;
            let step = step.as_ref().map(|step| open(b, step)).transpose()?;
            let random = stream.map(|stream| Random { stream, step: step.as_ref() });
            let groups = groups.as_ref();
            b.quantize(Quantize { x: &x, codec, planes, groups, stack, random, hadamard, delayed })
        })
    }

    fn init_normal(&self, op: InitNormal) -> Result<Tensor<Self>> {
        issue!(self, op, init_normal, InitNormal, { plain stream, first, rows, cols, std; }, identity)
    }
}

impl<B: Products> Products for Recorder<B> {
    op!(gemm(Gemm { reads a, b; plain out; }) -> Tensor<Self>);
    op!(grouped_gemm(GroupedGemm { reads x, w, groups; plain out; }) -> Tensor<Self>);
    op!(grouped_wgrad(GroupedWgrad { reads dy, x, groups; writes grad; plain accumulate; }) -> ());
}

impl<B: Kernels> Model for Recorder<B> {
    op!(embed(Embed { reads table, ids; plain dtype; }) -> EmbedOut<Self>);
    op!(embed_backward(EmbedBackward { reads ids, dy; writes grad; plain shards; }) -> ());
    op!(rms_norm(RmsNorm { reads x, weight; may_read plus; plain eps; }) -> RmsNormOut<Self>);
    op!(rms_norm_backward(RmsNormBackward {
        reads x, weight, inv_rms, dy; may_read plus; writes dweight;
    }) -> Tensor<Self>);
    op!(norm_rope(NormRope { reads x, weight, table; plain eps, seq_len, first_position; }) -> RmsNormOut<Self>);
    op!(norm_rope_backward(NormRopeBackward {
        reads x, weight, inv_rms, dy, table; writes dweight; plain seq_len, first_position;
    }) -> Tensor<Self>);
    op!(rope(Rope { reads x, table; plain seq_len, first_position, inverse; }) -> Tensor<Self>);
    op!(attention(Attention { reads q, k, v; plain head_dim, value_dim, seq_len; }) -> AttentionOut<Self>);
    op!(attention_decode(AttentionDecode { reads q, k, v; plain head_dim, value_dim, len; }) -> Tensor<Self>);
    op!(attention_backward(AttentionBackward {
        reads q, k, v, out, lse, dout; plain head_dim, value_dim, seq_len;
    }) -> AttentionGrads<Self>);
    op!(cross_entropy(CrossEntropy { reads logits, targets; plain scale, shards, grad; }) -> CrossEntropyOut<Self>);
    op!(begin_step(BeginStep { reads inputs; writes clock, control, table; plain layout; }) -> ());
    op!(begin_micro_batch(BeginMicroBatch {
        reads inputs; writes clock, ids, targets, row_id; plain layout, rank, ranks;
    }) -> ());
    op!(end_step(EndStep {
        reads squares, order, tables;
        writes clock, control, reports;
        plain ranks, alarms, finite, clip_norm;
    }) -> ());
    op!(push_amax(PushAmax { reads table, spans, control; writes records; plain at; }) -> ());
    fn sum_squares(&self, op: SumSquares<'_, Self>) -> Result<()> {
        let mut call = self.call("sum_squares", &op);
        let tensors = op.tensors.iter().map(|tensor| Ok((call.reads(tensor.x)?, tensor.parts, tensor.at)));
        let tensors: Vec<_> = tensors.collect::<Result<_>>()?;
        let into = call.writes(op.into)?;
        call.issue(move |b: &B, run| {
            let opened = tensors.iter().map(|(x, parts, at)| Ok((open(b, x)?, *parts, *at)));
            let opened: Vec<_> = opened.collect::<Result<_>>()?;
            let tensors = opened.iter().map(|&(ref x, parts, at)| Squared { x, parts, at });
            let tensors = tensors.collect();
            b.sum_squares(SumSquares { tensors, into: &mut *Taken::new(b, &into, run)? })
        })
    }

    fn adamw(&self, op: AdamW<'_, Self>) -> Result<()> {
        let mut call = self.call("adamw", &op);
        let AdamW { tensors, control, beta1, beta2, eps } = op;
        let control = call.reads(control)?;
        let tensors = tensors.into_iter().map(|tensor| {
            let AdamWTensor { param, grad, exp_avg, exp_avg_sq, weight_decay } = tensor;
            let grad = call.reads(grad)?;
            Ok(([call.writes(param)?, call.writes(exp_avg)?, call.writes(exp_avg_sq)?], grad, weight_decay))
        });
        let tensors: Vec<_> = tensors.collect::<Result<_>>()?;
        call.issue(move |b: &B, run| {
            let control = open(b, &control)?;
            let opened = tensors.iter().map(|([param, exp_avg, exp_avg_sq], grad, weight_decay)| {
                let [param, exp_avg, exp_avg_sq] = [
                    Taken::new(b, param, run)?,
                    Taken::new(b, exp_avg, run)?,
                    Taken::new(b, exp_avg_sq, run)?,
                ];
                Ok((param, exp_avg, exp_avg_sq, open(b, grad)?, *weight_decay))
            });
            let mut opened: Vec<_> = opened.collect::<Result<_>>()?;
            let tensors = opened.iter_mut().map(|(param, exp_avg, exp_avg_sq, grad, weight_decay)| {
                AdamWTensor { param, grad, exp_avg, exp_avg_sq, weight_decay: *weight_decay }
            });
            let tensors = tensors.collect();
            b.adamw(AdamW { tensors, control: &control, beta1, beta2, eps })
        })
    }

    fn head_loss(&self, op: HeadLoss<'_, Self>) -> Result<HeadLossOut<Self>> {
        let mut call = self.call("head_loss", &op);
        let HeadLoss { x, w, codecs, targets, shards, chunk, grad } = op;
        call.makes_inside(head_forms(&codecs));
        let skipped = call.not_quantized(&head_arguments(&codecs));
        let (x, w, targets) = (call.reads(x)?, call.reads(w)?, call.reads(targets)?);
        let grad = match grad {
            Some(HeadLossGrad { wt, scale, dw, accumulate }) => {
                Some((call.reads(wt)?, scale, call.writes(dw)?, accumulate))
            }
            None => None,
        };
        call.issue(move |b: &B, run| {
            let (x, w, targets) = (open(b, &x)?, open(b, &w)?, open(b, &targets)?);
            let mut grad = match &grad {
                Some((wt, scale, dw, accumulate)) => {
                    Some((open(b, wt)?, *scale, Taken::new(b, dw, run)?, *accumulate))
                }
                None => None,
            };
            let grad = grad.as_mut().map(|(wt, scale, dw, accumulate)| {
                let (wt, scale, dw, accumulate) = (&*wt, *scale, &mut **dw, *accumulate);
                HeadLossGrad { wt, scale, dw, accumulate }
            });
            let op = HeadLoss { x: &x, w: &w, codecs, targets: &targets, shards, chunk, grad };
            match skipped {
                Some(argument) => head_by_parts(b, op, argument),
                None => b.head_loss(op),
            }
        })
    }

    fn collect(&self, op: Collect<'_, Self>) -> Result<()> {
        let mut call = self.call("collect", &op);
        let entries = op.entries.iter().map(|Entry { source, at, cells, stride }| {
            let source = call.reads(&OwnedSource::new(source))?;
            Ok(OwnedEntry { source, at: *at, cells: *cells, stride: *stride })
        });
        let entries: Vec<OwnedEntry<Self>> = entries.collect::<Result<_>>()?;
        let table = call.writes(op.table)?;
        call.issue(move |b: &B, run| {
            let opened = entries.iter().map(|OwnedEntry { source, at, cells, stride }| {
                Ok(OwnedEntry { source: open(b, source)?, at: *at, cells: *cells, stride: *stride })
            });
            let opened: Vec<OwnedEntry<B>> = opened.collect::<Result<_>>()?;
            let entries: Vec<Entry<'_, B>> = opened.iter().map(OwnedEntry::lent).collect();
            b.collect(Collect { entries: &entries, table: &mut *Taken::new(b, &table, run)? })
        })
    }
}

/// The arguments by which the head's loss quantizes on its way, and the forms.
fn head_arguments(codecs: &HeadCodecs) -> Vec<(&'static str, Form)> {
    let form = |(argument, codec, columns): (_, Option<Codec>, bool)| {
        let axis = if columns { BlockAxis::Col } else { BlockAxis::Row };
        Some((argument, Form::new(codec?.format(), axis)))
    };
    codecs.arguments().into_iter().filter_map(form).collect()
}

/// What the head's loss quantizes on its way.
fn head_forms(codecs: &HeadCodecs) -> Vec<(&'static str, Form)> {
    let HeadCodecs { fprop_x, dgrad_dy, wgrad_dy, wgrad_x } = *codecs;
    let mut forms = Vec::new();
    for (tensor, rows, cols) in [("x", fprop_x, wgrad_x), ("dlogits", dgrad_dy, wgrad_dy)] {
        match (rows, cols) {
            (Some(rows), Some(cols)) if rows == cols => forms.push((tensor, Form::both(rows.format()))),
            _ => {
                let axes = [(rows, BlockAxis::Row), (cols, BlockAxis::Col)];
                let made =
                    axes.into_iter().filter_map(|(codec, axis)| Some(Form::new(codec?.format(), axis)));
                forms.extend(made.map(|form| (tensor, form)));
            }
        }
    }
    forms
}

/// An [`Entry`] that owns its handles.
struct OwnedEntry<A: Backend> {
    source: OwnedSource<A>,
    at: usize,
    cells: usize,
    stride: usize,
}

impl<A: Backend> OwnedEntry<A> {
    fn lent(&self) -> Entry<'_, A> {
        let source = match &self.source {
            OwnedSource::U64(x) => Source::U64(x),
            OwnedSource::I32(x) => Source::I32(x),
            OwnedSource::F32(x) => Source::F32(x),
            OwnedSource::F64(x) => Source::F64(x),
            OwnedSource::Largest(x) => Source::Largest(x),
            OwnedSource::Occupancy(x) => Source::Occupancy(x),
        };
        Entry { source, at: self.at, cells: self.cells, stride: self.stride }
    }
}

/// A [`Source`] that owns its handles.
enum OwnedSource<A: Backend> {
    U64(A::Buf<u64>),
    I32(A::Buf<i32>),
    F32(A::Buf<f32>),
    F64(A::Buf<f64>),
    Largest(A::Buf<f32>),
    Occupancy(Occupancy<A>),
}

impl<A: Backend> OwnedSource<A> {
    fn new(source: &Source<'_, A>) -> Self {
        match *source {
            Source::U64(x) => Self::U64(x.clone()),
            Source::I32(x) => Self::I32(x.clone()),
            Source::F32(x) => Self::F32(x.clone()),
            Source::F64(x) => Self::F64(x.clone()),
            Source::Largest(x) => Self::Largest(x.clone()),
            Source::Occupancy(x) => Self::Occupancy(x.clone()),
        }
    }
}

impl<A: Backend> Over for OwnedSource<A> {
    type A = A;
    type On<C: Backend> = OwnedSource<C>;
    fn mapped<C: Backend>(&self, m: &mut impl Mapping<A, C>) -> Result<OwnedSource<C>> {
        Ok(match self {
            Self::U64(x) => OwnedSource::U64(m.buf(x)?),
            Self::I32(x) => OwnedSource::I32(m.buf(x)?),
            Self::F32(x) => OwnedSource::F32(m.buf(x)?),
            Self::F64(x) => OwnedSource::F64(m.buf(x)?),
            Self::Largest(x) => OwnedSource::Largest(m.buf(x)?),
            Self::Occupancy(x) => OwnedSource::Occupancy(x.mapped(m)?),
        })
    }
}
