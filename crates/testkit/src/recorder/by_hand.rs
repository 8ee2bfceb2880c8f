//! The operations whose fields are not a plain list: they have lists of tensors, or structs of tensors and values.

use super::Recorder;
use super::buf::Buf;
use super::call::{Call, Taken, open};
use super::mapping::{Mapping, Over};
use crate::head_by_parts::head_by_parts;
use nibble_core::formats::{BlockAxis, Codec, Stream};
use nibble_core::ops::*;
use nibble_core::recipe::Form;
use nibble_core::{Backend, Groups, Kernels, Occupancy, Result, Tensor};

pub(super) fn quantize<B: Kernels>(
    recorder: &Recorder<B>,
    op: Quantize<'_, Recorder<B>>,
) -> Result<Emitted<Recorder<B>>> {
    let mut call = recorder.call("quantize", &op);
    let sealed = SealedQuantize::new(&mut call, op)?;
    call.issue(move |b: &B, _| sealed.run(b, |op| b.quantize(op)))
}

pub(super) fn quantize_pack<B: Kernels>(
    recorder: &Recorder<B>,
    op: QuantizePack<'_, Recorder<B>>,
) -> Result<PackedRows<Recorder<B>>> {
    let mut call = recorder.call("quantize_pack", &op);
    let QuantizePack { quantize, index, place, top_k } = op;
    let sealed = SealedQuantize::new(&mut call, quantize)?;
    let (index, place) = (call.reads(index)?, call.reads(place)?);
    call.issue(move |b: &B, _| {
        let (index, place) = (open(b, &index)?, open(b, &place)?);
        sealed.run(b, |quantize| {
            b.quantize_pack(QuantizePack { quantize, index: &index, place: &place, top_k })
        })
    })
}

/// The arguments of a [`Quantize`] with buffers replaced by non-owning handles (sealed).
struct SealedQuantize<B: Kernels> {
    x: Tensor<Recorder<B>>,
    codec: Codec,
    planes: Planes,
    groups: Option<Groups<Recorder<B>>>,
    stack: usize,
    /// The stream of random bits, and the index of the tensor's first element in it.
    stream: Option<(Stream, u64)>,
    step: Option<Buf<u32, B>>,
    /// The length of the transform, and the stream of its signs.
    hadamard: Option<(usize, Stream)>,
    /// The training step from which the signs are computed.
    signs_step: Option<Buf<u32, B>>,
    records: Option<Buf<f32, B>>,
    /// Index of the first record.
    first: usize,
    /// Distance between records.
    stride: usize,
    amax: Option<Buf<f32, B>>,
    only_for: Option<Numbers>,
}

impl<B: Kernels> SealedQuantize<B> {
    fn new(call: &mut Call<'_, B>, op: Quantize<'_, Recorder<B>>) -> Result<Self> {
        let Quantize { x, codec, planes, groups, stack, random, hadamard, delayed, amax, only_for } = op;
        let (first, stride) = delayed.map_or((0, 0), |delayed| (delayed.first, delayed.stride));
        Ok(Self {
            x: call.reads(x)?,
            codec,
            planes,
            groups: groups.map(|groups| call.reads(groups)).transpose()?,
            stack,
            stream: random.map(|random| (random.stream, random.first)),
            step: random.and_then(|random| random.step).map(|step| call.reads(step)).transpose()?,
            hadamard: hadamard.map(|hadamard| (hadamard.len, hadamard.signs)),
            signs_step: hadamard.and_then(|of| of.step).map(|step| call.reads(step)).transpose()?,
            records: delayed.map(|delayed| call.reads(delayed.records)).transpose()?,
            first,
            stride,
            amax: amax.map(|amax| call.reads(amax)).transpose()?,
            only_for,
        })
    }

    /// Runs an operation of the inner backend on the arguments' inner buffers.
    fn run<R>(&self, b: &B, operation: impl FnOnce(Quantize<'_, B>) -> Result<R>) -> Result<R> {
        let &Self { codec, planes, stack, hadamard, first, stride, stream, only_for, .. } = self;
        let x = open(b, &self.x)?;
        let records = self.records.as_ref().map(|records| open(b, records)).transpose()?;
        let delayed = records.as_ref().map(|records| Delayed { records, first, stride });
        let groups = self.groups.as_ref().map(|groups| open(b, groups)).transpose()?;
        let step = self.step.as_ref().map(|step| open(b, step)).transpose()?;
        let random = stream.map(|(stream, first)| Random { stream, step: step.as_ref(), first });
        let signs_step = self.signs_step.as_ref().map(|step| open(b, step)).transpose()?;
        let hadamard = hadamard.map(|(len, signs)| Hadamard { len, signs, step: signs_step.as_ref() });
        let amax = self.amax.as_ref().map(|amax| open(b, amax)).transpose()?;
        let (groups, amax) = (groups.as_ref(), amax.as_ref());
        operation(Quantize { x: &x, codec, planes, groups, stack, random, hadamard, delayed, amax, only_for })
    }
}

pub(super) fn sum_squares<B: Kernels>(recorder: &Recorder<B>, op: SumSquares<'_, Recorder<B>>) -> Result<()> {
    let mut call = recorder.call("sum_squares", &op);
    let tensors =
        op.tensors.iter().map(|tensor| Ok((call.reads(tensor.x)?, [tensor.part, tensor.skip, tensor.at])));
    let tensors: Vec<_> = tensors.collect::<Result<_>>()?;
    let into = call.writes(op.into)?;
    call.issue(move |b: &B, run| {
        let opened = tensors.iter().map(|(x, place)| Ok((open(b, x)?, *place)));
        let opened: Vec<_> = opened.collect::<Result<_>>()?;
        let tensors = opened.iter().map(|&(ref x, [part, skip, at])| Squared { x, part, skip, at });
        let tensors = tensors.collect();
        b.sum_squares(SumSquares { tensors, into: &mut *Taken::new(b, &into, run)? })
    })
}

pub(super) fn adamw<B: Kernels>(recorder: &Recorder<B>, op: AdamW<'_, Recorder<B>>) -> Result<()> {
    let mut call = recorder.call("adamw", &op);
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
            let [param, exp_avg, exp_avg_sq] =
                [Taken::new(b, param, run)?, Taken::new(b, exp_avg, run)?, Taken::new(b, exp_avg_sq, run)?];
            Ok((param, exp_avg, exp_avg_sq, open(b, grad)?, *weight_decay))
        });
        let mut opened: Vec<_> = opened.collect::<Result<_>>()?;
        let tensors = opened.iter_mut().map(|(param, exp_avg, exp_avg_sq, grad, weight_decay)| AdamWTensor {
            param,
            grad,
            exp_avg,
            exp_avg_sq,
            weight_decay: *weight_decay,
        });
        let tensors = tensors.collect();
        b.adamw(AdamW { tensors, control: &control, beta1, beta2, eps })
    })
}

pub(super) fn head_loss<B: Kernels>(
    recorder: &Recorder<B>,
    op: HeadLoss<'_, Recorder<B>>,
) -> Result<HeadLossOut<Recorder<B>>> {
    let mut call = recorder.call("head_loss", &op);
    let HeadLoss { x, w, codecs, targets, shards, chunk, grad } = op;
    call.makes_inside(head_forms(&codecs));
    let skipped = call.not_quantized(&head_arguments(&codecs));
    let (x, w, targets) = (call.reads(x)?, call.reads(w)?, call.reads(targets)?);
    let grad = match grad {
        Some(HeadLossGrad { wt, control, dw, accumulate }) => {
            Some((call.reads(wt)?, call.reads(control)?, call.writes(dw)?, accumulate))
        }
        None => None,
    };
    call.issue(move |b: &B, run| {
        let (x, w, targets) = (open(b, &x)?, open(b, &w)?, open(b, &targets)?);
        let mut grad = match &grad {
            Some((wt, control, dw, accumulate)) => {
                Some((open(b, wt)?, open(b, control)?, Taken::new(b, dw, run)?, *accumulate))
            }
            None => None,
        };
        let grad = grad.as_mut().map(|(wt, control, dw, accumulate)| {
            let (wt, control, dw, accumulate) = (&*wt, &*control, &mut **dw, *accumulate);
            HeadLossGrad { wt, control, dw, accumulate }
        });
        let op = HeadLoss { x: &x, w: &w, codecs, targets: &targets, shards, chunk, grad };
        match skipped {
            Some(argument) => head_by_parts(b, op, argument),
            None => b.head_loss(op),
        }
    })
}

pub(super) fn collect<B: Kernels>(recorder: &Recorder<B>, op: Collect<'_, Recorder<B>>) -> Result<()> {
    let mut call = recorder.call("collect", &op);
    let entries = op.entries.iter().map(|Entry { source, at, cells, stride }| {
        let source = call.reads(&OwnedSource::new(source))?;
        Ok(OwnedEntry { source, at: *at, cells: *cells, stride: *stride })
    });
    let entries: Vec<OwnedEntry<Recorder<B>>> = entries.collect::<Result<_>>()?;
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

/// The arguments that the head loss quantizes internally, each with the resulting form.
fn head_arguments(codecs: &HeadCodecs) -> Vec<(&'static str, Form)> {
    let form = |(argument, codec, columns): (_, Option<Codec>, bool)| {
        let axis = if columns { BlockAxis::Col } else { BlockAxis::Row };
        Some((argument, Form::new(codec?.format(), axis)))
    };
    codecs.arguments().into_iter().filter_map(form).collect()
}

/// The forms of the tensors that the head loss quantizes internally.
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
            OwnedSource::U64(x) => EntrySource::U64(x),
            OwnedSource::I32(x) => EntrySource::I32(x),
            OwnedSource::F32(x) => EntrySource::F32(x),
            OwnedSource::F64(x) => EntrySource::F64(x),
            OwnedSource::Largest(x) => EntrySource::Largest(x),
            OwnedSource::Occupancy(x) => EntrySource::Occupancy(x),
        };
        Entry { source, at: self.at, cells: self.cells, stride: self.stride }
    }
}

/// An [`EntrySource`] that owns its handles.
enum OwnedSource<A: Backend> {
    U64(A::Buf<u64>),
    I32(A::Buf<i32>),
    F32(A::Buf<f32>),
    F64(A::Buf<f64>),
    Largest(A::Buf<f32>),
    Occupancy(Occupancy<A>),
}

impl<A: Backend> OwnedSource<A> {
    fn new(source: &EntrySource<'_, A>) -> Self {
        match *source {
            EntrySource::U64(x) => Self::U64(x.clone()),
            EntrySource::I32(x) => Self::I32(x.clone()),
            EntrySource::F32(x) => Self::F32(x.clone()),
            EntrySource::F64(x) => Self::F64(x.clone()),
            EntrySource::Largest(x) => Self::Largest(x.clone()),
            EntrySource::Occupancy(x) => Self::Occupancy(x.clone()),
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
    fn mapped_from<C: Backend>(on: &OwnedSource<C>, m: &mut impl Mapping<C, A>) -> Result<Self> {
        on.mapped(m)
    }
}
