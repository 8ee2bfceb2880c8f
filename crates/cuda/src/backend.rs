//! The CUDA backend's memory: what [`Backend`] asks of it. Operations are in [`ops`](crate::ops).

use crate::device::{Buffer, Device};
use crate::profile::Marks;
use nibble_core::{Backend, Error, MemoryStats, Plain, Result, Traffic};
use std::convert::Infallible;
use std::fmt;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// One GPU as a backend.
#[derive(Clone)]
pub struct Cuda {
    device: Device,
    marks: Arc<Marks>,
}

impl Cuda {
    /// Opens a GPU by the driver's number.
    ///
    /// # Errors
    /// [`nibble_core::Error::Device`] where there is no driver, no such GPU, no Hopper, or no NVRTC.
    pub fn new(ordinal: usize) -> Result<Self> {
        Device::open(ordinal).map(Self::on)
    }

    /// On an opened device.
    pub fn on(device: Device) -> Self {
        Self { device, marks: Arc::default() }
    }

    /// The device.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// What is being timed.
    pub(crate) fn marks(&self) -> &Marks {
        &self.marks
    }
}

impl fmt::Debug for Cuda {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.name())
    }
}

/// A reference-counted device buffer; a clone shares the bytes.
pub struct Buf<T: Plain> {
    shared: Arc<Allocation<T>>,
}

struct Allocation<T: Plain> {
    buffer: Buffer<T>,
    id: u64,
}

impl<T: Plain> Buf<T> {
    /// Takes over a buffer.
    pub fn new(buffer: Buffer<T>) -> Self {
        // Addresses come back; numbers do not.
        static NEXT: AtomicU64 = AtomicU64::new(1);
        let id = NEXT.fetch_add(1, Ordering::Relaxed);
        Self { shared: Arc::new(Allocation { buffer, id }) }
    }

    /// To read.
    pub fn get(&self) -> &Buffer<T> {
        &self.shared.buffer
    }

    /// To write: a copy of its own first, where another handle shares the bytes.
    pub fn make_mut(&mut self) -> Result<&mut Buffer<T>> {
        if Arc::get_mut(&mut self.shared).is_none() {
            *self = Self::new(self.get().copied()?);
        }
        // The handle was alone, or has just been made.
        Ok(&mut Arc::get_mut(&mut self.shared).expect("a sole handle").buffer)
    }
}

impl<T: Plain> Clone for Buf<T> {
    fn clone(&self) -> Self {
        Self { shared: self.shared.clone() }
    }
}

impl<T: Plain> fmt::Debug for Buf<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.get().fmt(f)
    }
}

impl Backend for Cuda {
    type Buf<T: Plain> = Buf<T>;
    type Arena = ();
    type Pending<T: Plain> = Vec<T>;
    type Recording = Infallible;

    fn name(&self) -> String {
        let info = self.device.info();
        format!("CUDA device {}: {}", info.ordinal, info.name)
    }

    fn zeros<T: Plain>(&self, len: usize) -> Result<Buf<T>> {
        self.device.filled(len, 0).map(Buf::new)
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
        buf.shared.id
    }

    fn memory(&self) -> MemoryStats {
        self.device.memory()
    }
    fn traffic(&self) -> Traffic {
        Traffic::default()
    }

    fn write<T: Plain>(&self, buf: &mut Buf<T>, at: usize, values: &[T]) -> Result<()> {
        if (at, values.len()) != (0, buf.get().len()) {
            return Err(Error::shape("write", "range", at, "the whole buffer"));
        }
        buf.make_mut()?.write(values)
    }

    fn clear<T: Plain>(&self, buf: &mut Buf<T>) -> Result<()> {
        buf.make_mut()?.fill(0)
    }

    fn begin_download<T: Plain>(&self, buf: &Buf<T>, range: Range<usize>) -> Result<Vec<T>> {
        Ok(buf.get().download()?[range].to_vec())
    }

    fn finish_download<T: Plain>(&self, pending: Vec<T>) -> Result<Vec<T>> {
        Ok(pending)
    }

    fn reinterpret<T: Plain, U: Plain>(&self, buf: &Buf<T>) -> Result<Buf<U>> {
        self.upload(&bytemuck::pod_collect_to_vec::<T, U>(&buf.get().download()?))
    }

    fn arena(&self, _: &'static str) -> Result<()> {
        Ok(())
    }

    fn within<R>(&self, _: &(), work: impl FnOnce() -> Result<R>) -> Result<R> {
        work()
    }

    fn arena_memory(&self, _: &()) -> MemoryStats {
        MemoryStats::default()
    }

    fn can_record(&self) -> bool {
        false
    }

    fn record(&self, _: &mut dyn FnMut() -> Result<()>) -> Result<Infallible> {
        Err(Error::Device { call: "record".into(), why: "not through this trait yet".into() })
    }

    fn replay(&self, recording: &Infallible) -> Result<()> {
        match *recording {}
    }
}
