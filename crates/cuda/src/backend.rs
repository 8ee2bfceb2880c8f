//! Memory of the CUDA backend: its implementation of [`Backend`]. The operations are in
//! [`ops`](crate::ops).

use crate::device::arena::{Arena, Entered};
pub use crate::device::buf::Buf;
use crate::device::download::{Pending, copy_out};
use crate::device::pinned::Pinned;
use crate::device::recording::Recording;
use crate::device::{Device, Event};
use crate::driver::failed;
use nibble_choice::products::ProductTrial;
use nibble_core::{
    Backend, DeviceKind, Lent, LineCopy, Lines, MemoryStats, Plain, Result, Room, Traffic, ValueRun,
    check_range,
};
use std::fmt;
use std::ops::Range;
use std::sync::{Arc, Mutex};

/// The operations timed so far, each with the events before and after it; `None` if times are not being
/// recorded.
pub(crate) type Marks = Mutex<Option<Vec<(&'static str, Event, Event)>>>;

/// The backend that computes on one GPU.
#[derive(Clone)]
pub struct Cuda {
    device: Device,
    marks: Arc<Marks>,
    trial: ProductTrial,
}

impl Cuda {
    /// Opens the GPU that the driver lists under this number.
    ///
    /// # Errors
    /// [`nibble_core::Error::Device`] if there is no driver, no such GPU, no NVRTC, or the GPU is
    /// not Hopper.
    pub fn new(ordinal: usize) -> Result<Self> {
        Device::open(ordinal).map(Self::on)
    }

    /// The backend on a device that is already open.
    pub fn on(device: Device) -> Self {
        Self { device, marks: Arc::default(), trial: ProductTrial::default() }
    }

    /// The device of this backend.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// A buffer of memory that the backend does not own: [`Device::borrow`].
    ///
    /// # Errors
    /// [`nibble_core::Error::Shape`] if the bytes are not a whole number of values of type `T`, or not aligned for them.
    pub fn borrow<T: Plain>(&self, lent: Lent) -> Result<Buf<T>> {
        self.device.borrow(lent).map(Buf::new)
    }

    /// A handle of the same device, whose GEMMs use the kernel configurations of `trial`.
    pub fn with_trial(&self, trial: ProductTrial) -> Self {
        Self { trial, ..self.clone() }
    }

    /// The settings of GEMMs on the tensor cores.
    pub(crate) const fn trial(&self) -> &ProductTrial {
        &self.trial
    }

    /// The list of operations that are being timed.
    pub(crate) fn marks(&self) -> &Marks {
        &self.marks
    }
}

impl fmt::Debug for Cuda {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.name())
    }
}

impl Backend for Cuda {
    type Buf<T: Plain> = Buf<T>;
    type Arena = Arena;
    type Pending<T: Plain> = Pending<T>;
    type Recording = Recording;
    type Host = Pinned;

    fn name(&self) -> String {
        let info = self.device.info();
        format!("CUDA device {}: {}", info.ordinal, info.name)
    }

    fn kind(&self) -> DeviceKind {
        DeviceKind::Gpu
    }

    fn zeros<T: Plain>(&self, len: usize) -> Result<Buf<T>> {
        self.device.filled(len, 0).map(Buf::new)
    }

    fn counters(&self, len: usize) -> Result<Buf<u64>> {
        self.device.counters(len).map(Buf::new)
    }

    fn alloc<T: Plain>(&self, len: usize) -> Result<Buf<T>> {
        self.device.alloc(len).map(Buf::new)
    }

    fn upload<T: Plain>(&self, values: &[T]) -> Result<Buf<T>> {
        self.device.upload(values).map(Buf::new)
    }

    fn download<T: Plain>(&self, buf: &Buf<T>) -> Result<Vec<T>> {
        buf.get().download()
    }

    fn len<T: Plain>(buf: &Buf<T>) -> usize {
        buf.get().len()
    }

    fn buffer_id<T: Plain>(buf: &Buf<T>) -> u64 {
        buf.get().address()
    }

    fn memory(&self) -> MemoryStats {
        self.device.memory()
    }

    fn room(&self) -> Option<Room> {
        self.device.room()
    }

    fn traffic(&self) -> Traffic {
        self.device.traffic().so_far()
    }

    fn write<T: Plain>(&self, buf: &mut Buf<T>, at: usize, values: &[T]) -> Result<()> {
        check_range("write", buf.get().len(), at..at.saturating_add(values.len()))?;
        buf.make_mut()?.write_at(at, values)
    }

    fn copy<T: Plain>(&self, from: &Buf<T>, range: Range<usize>, to: &mut Buf<T>, at: usize) -> Result<()> {
        to.make_mut()?.copy_from(at, from.get(), range)
    }

    fn copy_lines<T: Plain>(
        &self,
        (from, of): (&Buf<T>, Lines),
        (to, into): (&mut Buf<T>, Lines),
        lines_and_len: (usize, usize),
    ) -> Result<()> {
        to.make_mut()?.copy_lines_from(into, (from.get(), of), lines_and_len)
    }

    fn copy_many(&self, from: &[Buf<u8>], to: &mut [Buf<u8>], copies: &[LineCopy]) -> Result<()> {
        crate::ops::plain::copy_many::copy_many(self.device(), from, to, copies)
    }

    fn clear<T: Plain>(&self, buf: &mut Buf<T>) -> Result<()> {
        buf.make_mut()?.fill(0)
    }

    fn begin_download<T: Plain>(&self, buf: &Buf<T>, range: Range<usize>) -> Result<Pending<T>> {
        buf.get().begin_download(range)
    }

    fn finish_download<T: Plain>(&self, pending: Pending<T>) -> Result<Vec<T>> {
        pending.finish()
    }

    fn copy_out<T: Plain>(&self, from: &[ValueRun<'_, Self, T>], to: &mut [T]) -> Result<()> {
        if from.iter().any(|run| !run.buf.get().device().is_same(&self.device)) {
            let why = "a buffer is another device's".to_owned();
            return Err(nibble_core::Error::Device { call: "copy_out".to_owned(), why });
        }
        let runs: Vec<_> = from.iter().map(|run| (run.buf.get(), run.range.clone())).collect();
        copy_out(&self.device, &runs, to)
    }

    fn host_values(&self, len: usize) -> Result<Pinned> {
        Pinned::new(&self.device, len)
    }

    fn reinterpret<T: Plain, U: Plain>(&self, buf: &Buf<T>) -> Result<Buf<U>> {
        buf.get().reinterpreted().map(Buf::new)
    }

    fn arena(&self, name: &'static str) -> Result<Arena> {
        Arena::new(self.device.gpu(), name)
    }

    fn within<R>(&self, arena: &Arena, work: impl FnOnce() -> Result<R>) -> Result<R> {
        if !Arc::ptr_eq(arena.gpu(), self.device.gpu()) {
            let why = format!("it is of {:?}, another device than {:?}", arena.gpu(), self.device);
            return Err(failed(format!("within({arena:?})"), why));
        }
        self.device.scope().run(&Entered::new(arena.clone()), work)
    }

    fn arena_memory(&self, arena: &Arena) -> MemoryStats {
        arena.stats()
    }

    fn can_record(&self) -> bool {
        true
    }

    fn record(&self, work: &mut dyn FnMut() -> Result<()>) -> Result<Recording> {
        self.device.record(work)
    }

    fn replay(&self, recording: &Recording) -> Result<()> {
        self.device.replay(recording)
    }
}
