//! The operations whose fields are not a plain list: they have lists of tensors, or structs of tensors and values.

use super::Recorder;
use super::buf::Buf;
use super::call::{Call, Taken, open};
pub(super) use super::head::head_loss;
use super::mapping::{Mapping, Over};
use super::random::{OwnedHadamard, OwnedRandom};
use nibble_core::formats::Codec;
use nibble_core::ops::*;
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
    random: Option<OwnedRandom<Recorder<B>>>,
    hadamard: Option<OwnedHadamard<Recorder<B>>>,
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
            random: call.reads(&random.as_ref().map(OwnedRandom::new))?,
            hadamard: call.reads(&hadamard.as_ref().map(OwnedHadamard::new))?,
            records: delayed.map(|delayed| call.reads(delayed.records)).transpose()?,
            first,
            stride,
            amax: amax.map(|amax| call.reads(amax)).transpose()?,
            only_for,
        })
    }

    /// Runs an operation of the inner backend on the arguments' inner buffers.
    fn run<R>(&self, b: &B, operation: impl FnOnce(Quantize<'_, B>) -> Result<R>) -> Result<R> {
        let &Self { codec, planes, stack, first, stride, only_for, .. } = self;
        let x = open(b, &self.x)?;
        let records = self.records.as_ref().map(|records| open(b, records)).transpose()?;
        let delayed = records.as_ref().map(|records| Delayed { records, first, stride });
        let groups = self.groups.as_ref().map(|groups| open(b, groups)).transpose()?;
        let (random, hadamard) = (open(b, &self.random)?, open(b, &self.hadamard)?);
        let random = random.as_ref().map(OwnedRandom::lent);
        let hadamard = hadamard.as_ref().map(OwnedHadamard::lent);
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
