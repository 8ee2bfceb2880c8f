//! Pinned host memory that copies go through: the copy engine reads and writes it directly, at the speed of the bus, and a
//! second half is filled or emptied while the first one travels.

use crate::driver::{check, named};
use cudarc::driver::{result, sys};
use nibble_core::Result;
use std::ptr::NonNull;

/// Of each half: enough to hide the launch of a copy, little beside a tensor.
const HALF_BYTES: usize = 4 << 20;

/// Two halves of pinned memory, used in turns. All calls want the context current.
pub(crate) struct Staging {
    halves: [Half; 2],
    next: usize,
}

struct Half {
    bytes: NonNull<u8>,
    /// Passed when the last copy from or to this half is done.
    done: sys::CUevent,
}

// SAFETY: host memory and a driver's handle, used by one thread at a time behind the device's mutex.
unsafe impl Send for Staging {}

impl Half {
    fn new() -> Result<Self> {
        // SAFETY: no arguments to get wrong; the memory is freed in `drop`, after its last copy.
        unsafe {
            let bytes = named("cuMemHostAlloc", result::malloc_host(HALF_BYTES, 0))?;
            let done = result::event::create(sys::CUevent_flags::CU_EVENT_DISABLE_TIMING);
            let done = named("cuEventCreate", done).inspect_err(|_| {
                // The first error is the one to report.
                let _ = result::free_host(bytes);
            })?;
            // The driver does not give null with success.
            let bytes = NonNull::new(bytes.cast()).expect("pinned memory has an address");
            Ok(Self { bytes, done })
        }
    }

    /// Waits until this half is free: at once if it was never used.
    fn wait(&self) -> Result<()> {
        // SAFETY: the event is alive.
        named("cuEventSynchronize", unsafe { result::event::synchronize(self.done) })
    }

    fn mark(&self, stream: sys::CUstream) -> Result<()> {
        // SAFETY: event and stream are alive and of one context.
        named("cuEventRecord", unsafe { result::event::record(self.done, stream) })
    }
}

impl Drop for Half {
    fn drop(&mut self) {
        // SAFETY: made in `new` and given back once; the copies are waited for first. An error has nobody to go to.
        unsafe {
            let _ = result::event::synchronize(self.done);
            let _ = result::event::destroy(self.done);
            let _ = result::free_host(self.bytes.as_ptr().cast());
        }
    }
}

impl Staging {
    /// Takes both halves.
    pub(crate) fn new() -> Result<Self> {
        Ok(Self { halves: [Half::new()?, Half::new()?], next: 0 })
    }

    fn turn(&mut self) -> &Half {
        self.next = 1 - self.next;
        &self.halves[self.next]
    }

    /// Issues the copy of `from` to the device; `from` may be reused when this returns.
    ///
    /// # Safety
    /// `to` has as many bytes, alive until the stream has passed the copy.
    pub(crate) unsafe fn upload(&mut self, to: u64, from: &[u8], stream: sys::CUstream) -> Result<()> {
        for (i, part) in from.chunks(HALF_BYTES).enumerate() {
            let half = self.turn();
            half.wait()?;
            // SAFETY: `part` fits the half, which no copy is using; the device range is the caller's promise.
            unsafe {
                std::ptr::copy_nonoverlapping(part.as_ptr(), half.bytes.as_ptr(), part.len());
                let code = sys::cuMemcpyHtoDAsync_v2(
                    to + (i * HALF_BYTES) as u64,
                    half.bytes.as_ptr().cast(),
                    part.len(),
                    stream,
                );
                check("cuMemcpyHtoDAsync", code)?;
            }
            half.mark(stream)?;
        }
        Ok(())
    }

    /// Copies from the device, waiting for everything issued before and for the copy.
    ///
    /// # Safety
    /// `from` has as many bytes as `to`.
    pub(crate) unsafe fn download(&mut self, to: &mut [u8], from: u64, stream: sys::CUstream) -> Result<()> {
        // While one half travels, the one before it is emptied.
        let mut arriving: Option<(usize, &mut [u8])> = None;
        for (i, part) in to.chunks_mut(HALF_BYTES).enumerate() {
            let half = self.turn();
            half.wait()?;
            let address = from + (i * HALF_BYTES) as u64;
            // SAFETY: the half holds as many bytes and is not in use; the device range is the caller's promise.
            let code =
                unsafe { sys::cuMemcpyDtoHAsync_v2(half.bytes.as_ptr().cast(), address, part.len(), stream) };
            check("cuMemcpyDtoHAsync", code)?;
            half.mark(stream)?;
            let this = self.next;
            if let Some((which, waiting)) = arriving.replace((this, part)) {
                self.empty(which, waiting)?;
            }
        }
        arriving.map_or(Ok(()), |(which, waiting)| self.empty(which, waiting))
    }

    /// What has arrived in a half, once it has.
    fn empty(&self, which: usize, to: &mut [u8]) -> Result<()> {
        let half = &self.halves[which];
        half.wait()?;
        // SAFETY: the half holds at least as many bytes, and the copy into it is done.
        unsafe { std::ptr::copy_nonoverlapping(half.bytes.as_ptr(), to.as_mut_ptr(), to.len()) };
        Ok(())
    }
}
