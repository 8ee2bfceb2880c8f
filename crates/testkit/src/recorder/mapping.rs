//! Maps structures of buffers from one backend to another, buffer by buffer. [`for_each_result!`] declares the fields of results.

use super::Recorder;
use super::buf::Buf;
use super::cell::device;
use super::cell::{Cell, Element, Elements, Output};
use nibble_core::formats::{BlockAxis, ScaleKind};
use nibble_core::ops::*;
use nibble_core::recipe::Form;
use nibble_core::{
    Backend, BlockScaled, DType, Data, Groups, Occupancy, Operand, PermuteMap, Plain, Result, Tensor,
    for_each_result,
};
use std::sync::Arc;

/// Defines how each buffer is mapped.
pub(super) trait Mapping<A: Backend, C: Backend> {
    fn buf<T: Plain>(&mut self, buf: &A::Buf<T>) -> Result<C::Buf<T>>;
    /// Announces that the next buffer holds elements of a tensor.
    fn elements(&mut self, _elements: Elements) {}
    /// Maps a buffer of scale records.
    fn scales(&mut self, _kind: ScaleKind, buf: &A::Buf<u8>) -> Result<C::Buf<u8>> {
        self.buf(buf)
    }
}

/// A structure of buffers of the backend `A`.
pub(super) trait Over: Sized {
    type A: Backend;
    /// The same structure with buffers of another backend.
    type On<C: Backend>;
    /// Maps the structure to the other backend.
    fn mapped<C: Backend>(&self, m: &mut impl Mapping<Self::A, C>) -> Result<Self::On<C>>;
    /// Maps the structure from the other backend.
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

/// Implements `Over` for a structure, given how its fields are mapped.
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
over!(Positions, |x, m| Positions {
    seq_len: x.seq_len,
    first: x.first,
    starts: x.starts.as_ref().map(|starts| m.buf(starts)).transpose()?,
});

/// Maps a field of a result, by its kind in the list of results.
macro_rules! result_part {
    (part, $x:ident, $m:ident, $name:ident) => {
        $x.$name.mapped($m)?
    };
    (counts, $x:ident, $m:ident, $name:ident) => {
        $x.$name.mapped($m)?
    };
    (buffer, $x:ident, $m:ident, $name:ident) => {
        $m.buf(&$x.$name)?
    };
    (counter, $x:ident, $m:ident, $name:ident) => {
        $m.buf(&$x.$name)?
    };
    (plain, $x:ident, $m:ident, $name:ident) => {
        $x.$name
    };
    (per_row($of:ident), $x:ident, $m:ident, $name:ident) => {{
        $m.elements(Elements { form: DType::F32.into(), lines: $x.$of.rows, scales: None });
        $m.buf(&$x.$name)?
    }};
}

macro_rules! results {
    ($($out:ident { $($name:ident: $kind:ident $(($of:ident))?),+ })+) => {
        $(over!($out, |x, m| $out { $($name: result_part!($kind $(($of))?, x, m, $name)),+ });)+
    };
}

for_each_result! { [results] }

/// The result of an operation.
pub(super) trait Returned<B: Backend>: Sized {
    /// The result of the inner backend's operation.
    type Inner;
    /// The recorder's handles for the inner result.
    fn wrapped(inner: &Self::Inner, m: &mut impl Mapping<B, Recorder<B>>) -> Result<Self>;
    /// The result of an operation that returns nothing; such an operation needs no dry run.
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

/// The result of an operation that writes everything in place.
impl<B: Backend> Returned<B> for () {
    type Inner = ();
    fn wrapped((): &(), _: &mut impl Mapping<B, Recorder<B>>) -> Result<()> {
        Ok(())
    }
    fn nothing() -> Option<()> {
        Some(())
    }
}

/// Maps buffers to non-owning handles and lists their cells; recorded work holds these handles as arguments. Also lists, by index, which
/// cells hold elements of tensors.
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

/// Maps handles to the contents of their cells.
pub(super) struct Open<'a, B: Backend>(pub &'a B);

impl<B: Backend> Mapping<Recorder<B>, B> for Open<'_, B> {
    fn buf<T: Plain>(&mut self, buf: &Buf<T, B>) -> Result<B::Buf<T>> {
        buf.inner(self.0)
    }
}

/// Maps an operation's results to new cells.
pub(super) struct Wrap<'a, B: Backend> {
    pub recorder: &'a Recorder<B>,
    pub made: Vec<Output<B>>,
    /// The indices of the entries of `made` that are buffers of tensor elements.
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

/// Stores an operation's results in the cells of its recording.
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
