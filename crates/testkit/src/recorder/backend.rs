//! Memory and ordering: all methods of a backend that are not operations.

use super::call::{Taken, open};
use super::cell::device;
use super::{Buf, Event, Mode, Recorder, Recording, Shared};
use nibble_core::{Backend, DeviceKind, Lines, MemoryStats, Plain, Result, Room, Traffic, ValueRun};
use std::ops::Range;

impl<B: Backend> Backend for Recorder<B> {
    type Buf<T: Plain> = Buf<T, B>;
    type Arena = B::Arena;
    type Pending<T: Plain> = B::Pending<T>;
    type Recording = Recording<B>;
    type Host = B::Host;

    fn name(&self) -> String {
        format!("{}, {} by a recorder", self.inner.name(), self.shared.mode.verb())
    }

    fn kind(&self) -> DeviceKind {
        self.inner.kind()
    }

    fn zeros<T: Plain>(&self, len: usize) -> Result<Buf<T, B>> {
        let call = self.call("zeros", &(len, std::any::type_name::<T>()));
        call.issue(move |b, _| b.zeros(len))
    }

    fn counters(&self, len: usize) -> Result<Buf<u64, B>> {
        let call = self.call("counters", &len);
        call.issue(move |b, _| b.counters(len))
    }

    fn alloc<T: Plain>(&self, len: usize) -> Result<Buf<T, B>> {
        let call = self.call("alloc", &(len, std::any::type_name::<T>())).silent();
        call.issue(move |b, _| b.alloc(len))
    }

    fn upload<T: Plain>(&self, values: &[T]) -> Result<Buf<T, B>> {
        self.refuse_while_recording("upload")?;
        let buf = Buf::new(self, &self.inner.upload(values)?)?;
        self.note(|| Event::of_transfer("upload", format!("{buf:?}"), [], [buf.cell.id()]));
        Ok(buf)
    }

    fn download<T: Plain>(&self, buf: &Buf<T, B>) -> Result<Vec<T>> {
        self.refuse_while_recording("download")?;
        self.note(|| Event::of_transfer("download", format!("{buf:?}"), [buf.cell.id()], []));
        self.inner.download(&buf.inner(&self.inner)?)
    }

    fn len<T: Plain>(buf: &Buf<T, B>) -> usize {
        buf.len()
    }

    fn buffer_id<T: Plain>(buf: &Buf<T, B>) -> u64 {
        buf.cell.id()
    }

    fn memory(&self) -> MemoryStats {
        self.inner.memory()
    }

    fn room(&self) -> Option<Room> {
        self.inner.room()
    }

    fn traffic(&self) -> Traffic {
        self.inner.traffic()
    }

    fn write<T: Plain>(&self, buf: &mut Buf<T, B>, at: usize, values: &[T]) -> Result<()> {
        self.refuse_while_recording("write")?;
        let range = at..at.saturating_add(values.len());
        let mut call = self.call("write", &buf).silent();
        let sealed = call.writes(buf)?;
        let values = values.to_vec();
        call.issue::<()>(move |b, run| b.write(&mut *Taken::new(b, &sealed, run)?, at, &values))?;
        let id = buf.cell.id();
        self.note(|| Event::of_transfer("write", format!("{buf:?} at {range:?}"), [id], [id]));
        Ok(())
    }

    fn clear<T: Plain>(&self, buf: &mut Buf<T, B>) -> Result<()> {
        let mut call = self.call("clear", &buf);
        let buf = call.writes(buf)?;
        call.issue(move |b, run| b.clear(&mut *Taken::new(b, &buf, run)?))
    }

    fn copy<T: Plain>(
        &self,
        from: &Buf<T, B>,
        range: Range<usize>,
        to: &mut Buf<T, B>,
        at: usize,
    ) -> Result<()> {
        let mut call = self.call("copy", &(&from, &range, &to, at));
        let (from, to) = (call.reads(from)?, call.writes(to)?);
        call.issue(move |b, run| b.copy(&open(b, &from)?, range.clone(), &mut *Taken::new(b, &to, run)?, at))
    }

    fn copy_lines<T: Plain>(
        &self,
        (from, of): (&Buf<T, B>, Lines),
        (to, into): (&mut Buf<T, B>, Lines),
        lines_and_len: (usize, usize),
    ) -> Result<()> {
        let mut call = self.call("copy_lines", &(&from, &of, &to, &into, lines_and_len));
        let (from, to) = (call.reads(from)?, call.writes(to)?);
        call.issue(move |b, run| {
            let to = &mut *Taken::new(b, &to, run)?;
            b.copy_lines((&open(b, &from)?, of), (to, into), lines_and_len)
        })
    }

    fn begin_download<T: Plain>(&self, buf: &Buf<T, B>, range: Range<usize>) -> Result<B::Pending<T>> {
        self.refuse_while_recording("begin_download")?;
        let arguments = || format!("{buf:?} at {range:?}");
        self.note(|| Event::of_transfer("begin_download", arguments(), [buf.cell.id()], []));
        self.inner.begin_download(&buf.inner(&self.inner)?, range.clone())
    }

    fn finish_download<T: Plain>(&self, pending: B::Pending<T>) -> Result<Vec<T>> {
        self.refuse_while_recording("finish_download")?;
        self.note(|| Event::of_transfer("finish_download", String::new(), [], []));
        self.inner.finish_download(pending)
    }

    fn copy_out<T: Plain>(&self, from: &[ValueRun<'_, Self, T>], to: &mut [T]) -> Result<()> {
        self.refuse_while_recording("copy_out")?;
        let arguments = || format!("{from:?}");
        self.note(|| {
            let inputs = from.iter().map(|run| run.buf.cell.id()).collect();
            Event { op: "copy_out", arguments: arguments(), inputs, ..Event::default() }
        });
        let inner: Vec<B::Buf<T>> =
            from.iter().map(|run| run.buf.inner(&self.inner)).collect::<Result<_>>()?;
        let runs = inner.iter().zip(from).map(|(buf, run)| ValueRun { buf, range: run.range.clone() });
        self.inner.copy_out(&runs.collect::<Vec<_>>(), to)
    }

    fn host_values(&self, len: usize) -> Result<B::Host> {
        self.inner.host_values(len)
    }

    fn reinterpret<T: Plain, U: Plain>(&self, buf: &Buf<T, B>) -> Result<Buf<U, B>> {
        let inner: B::Buf<U> = self.inner.reinterpret(&buf.inner(&self.inner)?)?;
        Ok(buf.with_type(B::len(&inner)))
    }

    fn arena(&self, name: &'static str) -> Result<B::Arena> {
        self.inner.arena(name)
    }

    fn within<R>(&self, arena: &B::Arena, work: impl FnOnce() -> Result<R>) -> Result<R> {
        self.inner.within(arena, work)
    }

    fn arena_memory(&self, arena: &B::Arena) -> MemoryStats {
        self.inner.arena_memory(arena)
    }

    fn can_record(&self) -> bool {
        self.shared.mode == Mode::Recording
    }

    fn record(&self, work: &mut dyn FnMut() -> Result<()>) -> Result<Recording<B>> {
        if !self.can_record() {
            return Err(device("record", "this recorder only runs work as it is issued"));
        }
        self.refuse_while_recording("record")?;
        self.shared.lock().recording = Some(Vec::new());
        let under_way = UnderWay(&self.shared);
        work()?;
        let entries = under_way.0.lock().recording.take().unwrap_or_default();
        Ok(Recording::new(entries, self.shared.clone()))
    }

    fn replay(&self, recording: &Recording<B>) -> Result<()> {
        self.refuse_while_recording("replay")?;
        if std::mem::take(&mut self.shared.lock().refuses_replay) {
            return Err(device("replay", "refused, as it was asked to be"));
        }
        self.execute(&recording.entries)
    }
}

/// Ends a recording that failed, also if the recorded work panicked.
struct UnderWay<'a, B: Backend>(&'a Shared<B>);

impl<B: Backend> Drop for UnderWay<'_, B> {
    fn drop(&mut self) {
        let entries = self.0.lock().recording.take();
        drop(entries);
    }
}

impl Mode {
    fn verb(self) -> &'static str {
        match self {
            Self::Eager => "watched",
            Self::Recording => "recorded",
            Self::EachReplayed => "replayed op by op",
        }
    }
}

impl Event {
    fn of_transfer<const I: usize, const O: usize>(
        op: &'static str,
        arguments: String,
        inputs: [u64; I],
        outputs: [u64; O],
    ) -> Self {
        Self { op, arguments, inputs: inputs.to_vec(), outputs: outputs.to_vec(), ..Self::default() }
    }
}
