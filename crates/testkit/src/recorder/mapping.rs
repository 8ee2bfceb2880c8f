//! What is made of buffers, brought from one backend to another buffer by buffer. A structure's parts are listed here, once.

use super::buf::Buf;
use super::cell::{Cell, Element, Elements, Output};
use super::{Recorder, device};
use nibble_core::formats::{BlockAxis, ScaleKind};
use nibble_core::ops::*;
use nibble_core::recipe::Form;
use nibble_core::{
    Backend, BlockScaled, DType, Data, Groups, Occupancy, Operand, PermuteMap, Plain, Result, Tensor,
};
use std::sync::Arc;

/// What becomes of each buffer.
pub(super) trait Mapping<A: Backend, C: Backend> {
    fn buf<T: Plain>(&mut self, buf: &A::Buf<T>) -> Result<C::Buf<T>>;
    /// The buffer that comes next holds these elements of a tensor.
    fn elements(&mut self, _elements: Elements) {}
    /// A plane of records of scales.
    fn scales(&mut self, _kind: ScaleKind, buf: &A::Buf<u8>) -> Result<C::Buf<u8>> {
        self.buf(buf)
    }
}

/// Something made of buffers of the backend `A`.
pub(super) trait Over: Sized {
    type A: Backend;
    /// The same, of buffers of another backend.
    type On<C: Backend>;
    /// To the other backend.
    fn mapped<C: Backend>(&self, m: &mut impl Mapping<Self::A, C>) -> Result<Self::On<C>>;
    /// From the other backend.
    fn mapped_from<C: Backend>(on: &Self::On<C>, m: &mut impl Mapping<C, Self::A>) -> Result<Self>;
}

impl<T: Plain, B: Backend> Over for Buf<T, B> {
    type A = Recorder<B>;
    type On<C: Backend> = C::Buf<T>;
    fn mapped<C: Backend>(&self, m: &mut impl Mapping<Recorder<B>, C>) -> Result<C::Buf<T>> {
        m.buf(self)
    }
    fn mapped_from<C: Backend>(on: &C::Buf<T>, m: &mut impl Mapping<C, Recorder<B>>) -> Result<Self> {
        m.buf(on)
    }
}

impl<X: Over> Over for Option<X> {
    type A = X::A;
    type On<C: Backend> = Option<X::On<C>>;
    fn mapped<C: Backend>(&self, m: &mut impl Mapping<X::A, C>) -> Result<Option<X::On<C>>> {
        self.as_ref().map(|x| x.mapped(m)).transpose()
    }
    fn mapped_from<C: Backend>(on: &Option<X::On<C>>, m: &mut impl Mapping<C, X::A>) -> Result<Self> {
        on.as_ref().map(|on| X::mapped_from(on, m)).transpose()
    }
}

/// `Over` for a structure: what becomes of its parts, given a mapping.
macro_rules! over {
    ($name:ident, |$x:ident, $m:ident| $body:expr) => {
        impl<A: Backend> Over for $name<A> {
            type A = A;
            type On<C: Backend> = $name<C>;
            fn mapped<C: Backend>(&self, $m: &mut impl Mapping<A, C>) -> Result<$name<C>> {
                let $x = self;
                Ok($body)
            }
            fn mapped_from<C: Backend>(on: &$name<C>, m: &mut impl Mapping<C, A>) -> Result<Self> {
                on.mapped(m)
            }
        }
    };
}

over!(Tensor, |x, m| {
    m.elements(Elements { form: x.dtype().into(), lines: x.rows, scales: None });
    let data = match &x.data {
        Data::F32(buf) => Data::F32(m.buf(buf)?),
        Data::Bf16(buf) => Data::Bf16(m.buf(buf)?),
    };
    Tensor { data, rows: x.rows, cols: x.cols }
});
over!(BlockScaled, |x, m| {
    let lines = if x.axis == BlockAxis::Col { x.cols } else { x.rows };
    m.elements(Elements { form: Form::new(x.format, x.axis), lines, scales: Some(x.scale_kind()) });
    let codes = m.buf(&x.codes)?;
    let scales = m.scales(x.scale_kind(), &x.scales)?;
    let tensor_scale = x.tensor_scale.as_ref().map(|scale| m.buf(scale)).transpose()?;
    let &BlockScaled { format, axis, rule, rows, cols, stack, scale_layout, shared_cols, taken, .. } = x;
    BlockScaled {
        format,
        axis,
        rule,
        rows,
        cols,
        stack,
        codes,
        scales,
        tensor_scale,
        scale_layout,
        shared_cols,
        taken,
    }
});
over!(Operand, |x, m| match x {
    Operand::Plain(x) => Operand::Plain(x.mapped(m)?),
    Operand::Block(x) => Operand::Block(x.mapped(m)?),
});
over!(Groups, |x, m| Groups {
    start: m.buf(&x.start)?,
    len: m.buf(&x.len)?,
    row_id: m.buf(&x.row_id)?,
    num_groups: x.num_groups,
    align: x.align,
    capacity: x.capacity,
    rows_each: x.rows_each,
});
over!(Occupancy, |x, m| Occupancy { found: m.buf(&x.found)?, num_slots: x.num_slots, capacity: x.capacity });
over!(PermuteMap, |x, m| PermuteMap {
    groups: x.groups.mapped(m)?,
    source_row: m.buf(&x.source_row)?,
    row_slot: m.buf(&x.row_slot)?,
    slot_row: m.buf(&x.slot_row)?,
    num_slots: x.num_slots,
    occupancy: x.occupancy.mapped(m)?,
});
over!(Counts, |x, m| Counts(m.buf(&x.0)?));
over!(Found, |x, m| Found { amax: m.buf(&x.amax)?, counts: m.buf(&x.counts)? });
over!(Emitted, |x, m| Emitted {
    rows: x.rows.mapped(m)?,
    cols: x.cols.mapped(m)?,
    counts: x.counts.mapped(m)?,
    found: x.found.mapped(m)?,
});
over!(PackedRows, |x, m| PackedRows {
    bytes: m.buf(&x.bytes)?,
    counts: x.counts.mapped(m)?,
    found: x.found.mapped(m)?,
});
over!(Transcoded, |x, m| Transcoded {
    out: x.out.mapped(m)?,
    transposed: x.transposed.mapped(m)?,
    counts: x.counts.mapped(m)?,
});
over!(Routing, |x, m| Routing {
    expert: m.buf(&x.expert)?,
    weight: m.buf(&x.weight)?,
    kept: x.kept.mapped(m)?,
    log_sum_exp: m.buf(&x.log_sum_exp)?,
    load: m.buf(&x.load)?,
    losses: m.buf(&x.losses)?,
});
over!(SwigluOut, |x, m| SwigluOut { a: x.a.mapped(m)?, h: x.h.mapped(m)? });
over!(SwigluGrads, |x, m| SwigluGrads {
    dh: x.dh.mapped(m)?,
    a: x.a.mapped(m)?,
    dweight: m.buf(&x.dweight)?
});
over!(EmbedOut, |x, m| EmbedOut { x: x.x.mapped(m)?, bad_ids: m.buf(&x.bad_ids)? });
over!(RmsNormOut, |x, m| RmsNormOut {
    y: x.y.mapped(m)?,
    inv_rms: m.buf(&x.inv_rms)?,
    sum: x.sum.mapped(m)?
});
over!(AttentionOut, |x, m| AttentionOut {
    out: x.out.mapped(m)?,
    lse: {
        m.elements(Elements { form: DType::F32.into(), lines: x.out.rows, scales: None });
        m.buf(&x.lse)?
    },
});
over!(AssembledKv, |x, m| AssembledKv { k: x.k.mapped(m)?, v: x.v.mapped(m)? });
over!(AssembledKvGrads, |x, m| AssembledKvGrads { dup: x.dup.mapped(m)?, dshared: x.dshared.mapped(m)? });
over!(AttentionGrads, |x, m| AttentionGrads {
    dq: x.dq.mapped(m)?,
    dk: x.dk.mapped(m)?,
    dv: x.dv.mapped(m)?
});
over!(Windows, |x, m| Windows { first_key: m.buf(&x.first_key)?, end_query: m.buf(&x.end_query)? });
over!(Positions, |x, m| Positions {
    seq_len: x.seq_len,
    first: x.first,
    starts: x.starts.as_ref().map(|starts| m.buf(starts)).transpose()?,
});
over!(CrossEntropyOut, |x, m| CrossEntropyOut {
    loss: m.buf(&x.loss)?,
    shard_nats: m.buf(&x.shard_nats)?,
    bad_ids: m.buf(&x.bad_ids)?,
    dlogits: x.dlogits.mapped(m)?,
});
over!(HeadLossOut, |x, m| HeadLossOut {
    shard_nats: m.buf(&x.shard_nats)?,
    bad_ids: m.buf(&x.bad_ids)?,
    dx: x.dx.mapped(m)?,
    x_counts: x.x_counts.mapped(m)?,
    dlogits_counts: x.dlogits_counts.mapped(m)?,
});
over!(SlotRanks, |x, m| SlotRanks {
    rank: m.buf(&x.rank)?,
    first: m.buf(&x.first)?,
    counts: m.buf(&x.counts)?
});
over!(ReceivedSlots, |x, m| ReceivedSlots {
    token_id: m.buf(&x.token_id)?,
    expert: m.buf(&x.expert)?,
    weight: m.buf(&x.weight)?,
});

/// What an operation returns.
pub(super) trait Returned<B: Backend>: Sized {
    /// What the same operation of the inner backend returns.
    type Inner;
    /// The recorder's handles of it.
    fn wrapped(inner: &Self::Inner, m: &mut impl Mapping<B, Recorder<B>>) -> Result<Self>;
    /// What is returned by an operation that returns nothing: there is nothing to learn of it before a replay.
    fn nothing() -> Option<Self>;
}

impl<B: Backend, X: Over<A = Recorder<B>>> Returned<B> for X {
    type Inner = X::On<B>;
    fn wrapped(inner: &X::On<B>, m: &mut impl Mapping<B, Recorder<B>>) -> Result<X> {
        X::mapped_from(inner, m)
    }
    fn nothing() -> Option<X> {
        None
    }
}

/// Everything was written in place.
impl<B: Backend> Returned<B> for () {
    type Inner = ();
    fn wrapped((): &(), _: &mut impl Mapping<B, Recorder<B>>) -> Result<()> {
        Ok(())
    }
    fn nothing() -> Option<()> {
        Some(())
    }
}

/// Handles that own nothing, and a list of their cells: what recorded work keeps of its arguments. Beside it the cells that hold
/// elements of tensors, by their places in that list.
pub(super) struct Seal<'a, B: Backend> {
    pub cells: &'a mut Vec<Arc<Cell<B>>>,
    pub tensors: &'a mut Vec<(usize, Elements)>,
}

impl<B: Backend> Mapping<Recorder<B>, Recorder<B>> for Seal<'_, B> {
    fn buf<T: Plain>(&mut self, buf: &Buf<T, B>) -> Result<Buf<T, B>> {
        self.cells.push(buf.cell.clone());
        Ok(buf.unowned())
    }

    fn elements(&mut self, elements: Elements) {
        self.tensors.push((self.cells.len(), elements));
    }
}

/// What the cells hold.
pub(super) struct Open<'a, B: Backend>(pub &'a B);

impl<B: Backend> Mapping<Recorder<B>, B> for Open<'_, B> {
    fn buf<T: Plain>(&mut self, buf: &Buf<T, B>) -> Result<B::Buf<T>> {
        buf.inner(self.0)
    }
}

/// New cells for what an operation returned.
pub(super) struct Wrap<'a, B: Backend> {
    pub recorder: &'a Recorder<B>,
    pub made: Vec<Output<B>>,
    /// Which of them hold elements of tensors, by their places.
    pub tensors: Vec<(usize, Elements)>,
}

impl<B: Backend> Mapping<B, Recorder<B>> for Wrap<'_, B> {
    fn buf<T: Plain>(&mut self, buf: &B::Buf<T>) -> Result<Buf<T, B>> {
        let wrapped = Buf::new(self.recorder, buf)?;
        self.made.push(wrapped.output());
        Ok(wrapped)
    }

    fn elements(&mut self, elements: Elements) {
        self.tensors.push((self.made.len(), elements));
    }

    fn scales(&mut self, kind: ScaleKind, buf: &B::Buf<u8>) -> Result<Buf<u8, B>> {
        let wrapped = Buf::new(self.recorder, buf)?;
        self.made.push(Output { element: Element::Scales(kind), ..wrapped.output() });
        Ok(wrapped)
    }
}

/// What an operation returned, into the cells that it had in the recording.
pub(super) struct Store<'a, B: Backend> {
    pub b: &'a B,
    pub cells: std::slice::Iter<'a, Output<B>>,
}

impl<B: Backend> Mapping<B, Recorder<B>> for Store<'_, B> {
    fn buf<T: Plain>(&mut self, buf: &B::Buf<T>) -> Result<Buf<T, B>> {
        let Some(Output { cell, .. }) = self.cells.next() else {
            return Err(device("replay", "an operation returned more buffers than when it was recorded"));
        };
        cell.put(self.b.reinterpret(buf)?);
        Ok(Buf::of_cell(cell.clone(), B::len(buf)))
    }
}
