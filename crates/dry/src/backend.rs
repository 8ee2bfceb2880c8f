//! Memory and ordering: the simulated device's implementation of [`Backend`].

use crate::Dry;
use crate::memory::{Arena, Buf, InPlace};
use nibble_core::{
    Backend, DeviceKind, Error, Lines, MemoryStats, Plain, Result, Room, Traffic, ValueRun, check_range,
    check_runs,
};
use std::convert::Infallible;
use std::fmt;
use std::ops::Range;

impl fmt::Debug for Dry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.name())
    }
}

impl Dry {
    /// Peak bytes that were allocated outside arenas.
    pub fn pooled_peak(&self) -> usize {
        self.inner.memory.pooled_peak()
    }

    /// Whether more memory was requested than any device has ([`Dry::MOST_BYTES`]).
    pub fn has_overflowed(&self) -> bool {
        self.inner.memory.has_overflowed()
    }
}

impl Backend for Dry {
    type Buf<T: Plain> = Buf<T>;
    type Arena = Arena;
    type Pending<T: Plain> = Vec<T>;
    type Recording = Infallible;
    type Host = Vec<f32>;

    fn name(&self) -> String {
        match self.inner.kind {
            DeviceKind::Host => "a host by its shapes alone".into(),
            DeviceKind::Gpu => "a GPU by its shapes alone".into(),
        }
    }

    fn kind(&self) -> DeviceKind {
        self.inner.kind
    }

    fn zeros<T: Plain>(&self, len: usize) -> Result<Buf<T>> {
        self.buf(len)
    }

    fn counters(&self, len: usize) -> Result<Buf<u64>> {
        if self.is_gpu() { self.cut_counters(len) } else { self.buf(len) }
    }

    fn alloc<T: Plain>(&self, len: usize) -> Result<Buf<T>> {
        self.buf(len)
    }

    fn upload<T: Plain>(&self, values: &[T]) -> Result<Buf<T>> {
        self.buf(values.len())
    }

    fn download<T: Plain>(&self, buf: &Buf<T>) -> Result<Vec<T>> {
        Ok(buf.values())
    }

    fn len<T: Plain>(buf: &Buf<T>) -> usize {
        buf.len()
    }

    fn buffer_id<T: Plain>(buf: &Buf<T>) -> u64 {
        buf.id()
    }

    fn memory(&self) -> MemoryStats {
        self.inner.memory.stats()
    }

    fn room(&self) -> Option<Room> {
        self.inner.room
    }

    fn traffic(&self) -> Traffic {
        Traffic::default()
    }

    fn write<T: Plain>(&self, buf: &mut Buf<T>, at: usize, values: &[T]) -> Result<()> {
        check_range("write", buf.len(), at..at.saturating_add(values.len()))?;
        buf.make_own(self)
    }

    fn copy<T: Plain>(&self, from: &Buf<T>, range: Range<usize>, to: &mut Buf<T>, at: usize) -> Result<()> {
        let range = check_range("copy", from.len(), range)?;
        check_range("copy", to.len(), at..at.saturating_add(range.len())).map(drop)
    }

    fn copy_lines<T: Plain>(
        &self,
        (from, of): (&Buf<T>, Lines),
        (to, into): (&mut Buf<T>, Lines),
        lines_and_len: (usize, usize),
    ) -> Result<()> {
        of.check("copy_lines", lines_and_len, from.len())?;
        into.check("copy_lines", lines_and_len, to.len())
    }

    fn copy_out<T: Plain>(&self, from: &[ValueRun<'_, Self, T>], to: &mut [T]) -> Result<()> {
        check_runs("copy_out", from.iter().map(|run| (run.buf.len(), run.range.clone())), to.len())?;
        let mut rest = to;
        for ValueRun { buf, range } in from {
            let (here, behind) = rest.split_at_mut(range.len());
            here.copy_from_slice(&buf.values()[range.clone()]);
            rest = behind;
        }
        Ok(())
    }

    fn host_values(&self, len: usize) -> Result<Vec<f32>> {
        Ok(vec![0.0; len])
    }

    fn clear<T: Plain>(&self, buf: &mut Buf<T>) -> Result<()> {
        buf.make_own(self)
    }

    fn begin_download<T: Plain>(&self, buf: &Buf<T>, range: Range<usize>) -> Result<Vec<T>> {
        let range = check_range("begin_download", buf.len(), range)?;
        Ok(buf.values()[range].to_vec())
    }

    fn finish_download<T: Plain>(&self, pending: Vec<T>) -> Result<Vec<T>> {
        Ok(pending)
    }

    fn reinterpret<T: Plain, U: Plain>(&self, buf: &Buf<T>) -> Result<Buf<U>> {
        buf.reinterpreted()
    }

    fn arena(&self, name: &'static str) -> Result<Arena> {
        Ok(Arena::new(self.inner.kind, name))
    }

    fn within<R>(&self, arena: &Arena, work: impl FnOnce() -> Result<R>) -> Result<R> {
        self.forget_counters();
        let done = self.inner.scope.run(arena, work);
        self.forget_counters();
        done
    }

    fn arena_memory(&self, arena: &Arena) -> MemoryStats {
        arena.stats()
    }

    fn can_record(&self) -> bool {
        false
    }

    fn record(&self, _: &mut dyn FnMut() -> Result<()>) -> Result<Infallible> {
        Err(Error::Device { call: "record".into(), why: "there is nothing to execute later".into() })
    }

    fn replay(&self, recording: &Infallible) -> Result<()> {
        match *recording {}
    }
}
