//! Pinned host memory that receives downloads.

use crate::driver::named;
use cudarc::driver::{result, sys};
use nibble_core::Result;
use std::ptr::NonNull;

/// Pinned host memory for one download.
pub(crate) struct Landing {
    pub bytes: NonNull<u8>,
    pub size: usize,
    /// The first stream passes it when the copy on the device is done.
    pub ready: sys::CUevent,
    /// The second stream passes it when the data has arrived here.
    pub done: sys::CUevent,
}

// SAFETY: host memory and drivers' handles, used by one owner at a time with the context current.
unsafe impl Send for Landing {}

impl Landing {
    /// Allocates `size` bytes. The context must be current.
    pub fn new(size: usize) -> Result<Self> {
        let event =
            || named("cuEventCreate", result::event::create(sys::CUevent_flags::CU_EVENT_DISABLE_TIMING));
        let ready = event()?;
        let done = event().inspect_err(|_| {
            // SAFETY: made above. The first error is the one to report.
            let _ = unsafe { result::event::destroy(ready) };
        })?;
        // SAFETY: no arguments to get wrong; freed in `drop`.
        let bytes = named("cuMemHostAlloc", unsafe { result::malloc_host(size, 0) }).inspect_err(|_| {
            // SAFETY: made above. The first error is the one to report.
            unsafe {
                let _ = result::event::destroy(ready);
                let _ = result::event::destroy(done);
            }
        })?;
        // The driver does not give null with success.
        let bytes = NonNull::new(bytes.cast()).expect("pinned memory has an address");
        Ok(Self { bytes, size, ready, done })
    }

    /// Whether its last copy has arrived.
    pub fn is_free(&self) -> bool {
        // SAFETY: the event is alive.
        unsafe { result::event::query(self.done) }.is_ok()
    }

    /// Waits until its last copy has arrived; returns at once if there was none.
    pub fn wait(&self) -> Result<()> {
        // SAFETY: the event is alive.
        named("cuEventSynchronize", unsafe { result::event::synchronize(self.done) })
    }
}

impl Drop for Landing {
    fn drop(&mut self) {
        // SAFETY: made in `new` and given back once, when nothing copies to it any more. With the context current: by the device
        // as it ends, or by `Device::land`. An error has nobody to go to.
        unsafe {
            let _ = result::event::synchronize(self.done);
            let _ = result::event::destroy(self.ready);
            let _ = result::event::destroy(self.done);
            let _ = result::free_host(self.bytes.as_ptr().cast());
        }
    }
}
