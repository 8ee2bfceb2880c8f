//! Pinned host memory through which copies go. The copy engine reads and writes pinned memory directly, at the full bandwidth
//! of the bus. The memory has two halves: one half is filled or emptied while the other is copied. Small copies share a half,
//! so an upload waits only if megabytes of earlier uploads have not arrived.

use crate::driver::{check, named};
use cudarc::driver::{result, sys};
use nibble_core::Result;
use std::ptr::NonNull;

/// The size of each half: large enough to hide the launch of a copy, small compared with a tensor.
const HALF_BYTES: usize = 4 << 20;

/// The alignment of copies in a half.
const ALIGN: usize = 256;

/// Two halves of pinned memory, used in turn. The context must be current in every call.
pub(crate) struct Staging {
    halves: [Half; 2],
    /// The index of the half in use, and how many bytes of it are used.
    current: usize,
    used: usize,
}

struct Half {
    bytes: NonNull<u8>,
    /// The event that passes when all copies from or to this half are complete that were issued before the event was
    /// recorded.
    done: sys::CUevent,
}

// SAFETY: host memory and a driver handle, used by one thread at a time behind the device's mutex.
unsafe impl Send for Staging {}

impl Half {
    fn new() -> Result<Self> {
        // SAFETY: any arguments are valid; the memory is freed in `drop`, after its last copy.
        unsafe {
            let bytes = named("cuMemHostAlloc", result::malloc_host(HALF_BYTES, 0))?;
            let done = result::event::create(sys::CUevent_flags::CU_EVENT_DISABLE_TIMING);
            let done = named("cuEventCreate", done).inspect_err(|_| {
                // The first error is the one that is reported.
                let _ = result::free_host(bytes);
            })?;
            // The driver does not return null together with success.
            let bytes = NonNull::new(bytes.cast()).expect("pinned memory has an address");
            Ok(Self { bytes, done })
        }
    }

    /// Waits for the recorded event; returns at once if none was recorded.
    fn wait(&self) -> Result<()> {
        // SAFETY: the event is alive.
        named("cuEventSynchronize", unsafe { result::event::synchronize(self.done) })
    }

    fn mark(&self, stream: sys::CUstream) -> Result<()> {
        // SAFETY: event and stream are alive and belong to one context.
        named("cuEventRecord", unsafe { result::event::record(self.done, stream) })
    }
}

impl Drop for Half {
    fn drop(&mut self) {
        // SAFETY: these objects were created in `new` and are released once; the device has drained its stream. An
        // error here cannot be reported.
        unsafe {
            let _ = result::event::synchronize(self.done);
            let _ = result::event::destroy(self.done);
            let _ = result::free_host(self.bytes.as_ptr().cast());
        }
    }
}

impl Staging {
    /// Allocates both halves.
    pub(crate) fn new() -> Result<Self> {
        Ok(Self { halves: [Half::new()?, Half::new()?], current: 0, used: 0 })
    }

    /// Switches to the other half when the copies of that half are complete.
    fn switch(&mut self, stream: sys::CUstream) -> Result<()> {
        self.halves[self.current].mark(stream)?;
        self.current = 1 - self.current;
        self.used = 0;
        self.halves[self.current].wait()
    }

    /// Issues a copy of `from` to the device; `from` may be reused when this function returns.
    ///
    /// `to` must have as many bytes as `from`, and must stay alive until the stream has passed the
    /// copy.
    pub(crate) unsafe fn upload(
        &mut self,
        mut to: u64,
        mut from: &[u8],
        stream: sys::CUstream,
    ) -> Result<()> {
        while !from.is_empty() {
            if self.used == HALF_BYTES {
                self.switch(stream)?;
            }
            let (part, rest) = from.split_at(from.len().min(HALF_BYTES - self.used));
            // SAFETY: `part` fits into the rest of the half, which no copy is using; the caller guarantees the device range.
            unsafe {
                let place = self.halves[self.current].bytes.as_ptr().add(self.used);
                std::ptr::copy_nonoverlapping(part.as_ptr(), place, part.len());
                let code = sys::cuMemcpyHtoDAsync_v2(to, place.cast(), part.len(), stream);
                check("cuMemcpyHtoDAsync", code)?;
            }
            self.used = (self.used + part.len()).next_multiple_of(ALIGN).min(HALF_BYTES);
            to += part.len() as u64;
            from = rest;
        }
        Ok(())
    }

    /// Copies from the device to the host; waits for all earlier work and for the copy.
    ///
    /// # Safety
    /// `from` must have as many bytes as `to`.
    pub(crate) unsafe fn download(&mut self, to: &mut [u8], from: u64, stream: sys::CUstream) -> Result<()> {
        // While one half receives data, the other half, whose data has arrived, is emptied.
        let mut arriving: Option<(usize, &mut [u8])> = None;
        for (i, part) in to.chunks_mut(HALF_BYTES).enumerate() {
            self.switch(stream)?;
            self.used = HALF_BYTES;
            let half = &self.halves[self.current];
            let address = from + (i * HALF_BYTES) as u64;
            // SAFETY: the half has as many bytes and is not in use; the caller guarantees the device range.
            let code =
                unsafe { sys::cuMemcpyDtoHAsync_v2(half.bytes.as_ptr().cast(), address, part.len(), stream) };
            check("cuMemcpyDtoHAsync", code)?;
            half.mark(stream)?;
            if let Some((which, waiting)) = arriving.replace((self.current, part)) {
                self.empty(which, waiting)?;
            }
        }
        arriving.map_or(Ok(()), |(which, waiting)| self.empty(which, waiting))
    }

    /// Waits until a half has arrived and copies it to `to`.
    fn empty(&self, which: usize, to: &mut [u8]) -> Result<()> {
        let half = &self.halves[which];
        half.wait()?;
        // SAFETY: the half has at least as many bytes, and the copy to it is complete.
        unsafe { std::ptr::copy_nonoverlapping(half.bytes.as_ptr(), to.as_mut_ptr(), to.len()) };
        Ok(())
    }
}
