//! Pinned host memory that receives downloads.

use crate::driver::named;
use cudarc::driver::{result, sys};
use nibble_core::Result;
use std::ptr::NonNull;

/// Pinned host memory for one download.
pub(crate) struct Landing {
    pub bytes: NonNull<u8>,
    pub size: usize,
    /// The event on the first stream that the device passes when the copy within the device is complete.
    pub ready: sys::CUevent,
    /// The event on the second stream that the device passes when the data has arrived in host memory.
    pub done: sys::CUevent,
}

// SAFETY: host memory and driver handles, used by one owner at a time with the context current.
unsafe impl Send for Landing {}

impl Landing {
    /// Allocates `size` bytes. The context must be current.
    pub fn new(size: usize) -> Result<Self> {
        let event =
            || named("cuEventCreate", result::event::create(sys::CUevent_flags::CU_EVENT_DISABLE_TIMING));
        let ready = event()?;
        let done = event().inspect_err(|_| {
            // SAFETY: the event was created above. The first error is the one that is reported.
            let _ = unsafe { result::event::destroy(ready) };
        })?;
        // SAFETY: any arguments are valid; the memory is freed in `drop`.
        let bytes = named("cuMemHostAlloc", unsafe { result::malloc_host(size, 0) }).inspect_err(|_| {
            // SAFETY: these objects were created above. The first error is the one that is
            // reported.
            unsafe {
                let _ = result::event::destroy(ready);
                let _ = result::event::destroy(done);
            }
        })?;
        // The driver does not return null together with success.
        let bytes = NonNull::new(bytes.cast()).expect("pinned memory has an address");
        Ok(Self { bytes, size, ready, done })
    }

    /// Whether the last copy to this memory has arrived.
    pub fn is_free(&self) -> bool {
        // SAFETY: the event is alive.
        unsafe { result::event::query(self.done) }.is_ok()
    }

    /// Waits until the last copy to this memory has arrived; returns at once if there was none.
    pub fn wait(&self) -> Result<()> {
        // SAFETY: the event is alive.
        named("cuEventSynchronize", unsafe { result::event::synchronize(self.done) })
    }
}

impl Drop for Landing {
    fn drop(&mut self) {
        // SAFETY: these objects were created in `new` and are released once, when no copy writes to the memory any more. The
        // context is current: `drop` is called when the device closes, or by `Device::land`. An error here cannot be reported.
        unsafe {
            let _ = result::event::synchronize(self.done);
            let _ = result::event::destroy(self.ready);
            let _ = result::event::destroy(self.done);
            let _ = result::free_host(self.bytes.as_ptr().cast());
        }
    }
}
