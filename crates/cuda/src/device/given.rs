//! A stream and an allocator of another library in this process, for a device that works among that library's work.

use crate::driver::named;
use cudarc::driver::{result, sys};
use nibble_core::{Lent, Result};
use std::fmt;
use std::sync::Arc;

/// An allocator of device memory of another library.
pub trait Allocator: fmt::Debug + Send + Sync {
    /// Allocates at least `bytes` writable bytes, aligned to 256 bytes, for work on the stream that was given with the allocator. The
    /// owner's drop frees them in the order of that stream. `bytes` is a multiple of 4 and not zero.
    ///
    /// # Errors
    /// [`nibble_core::Error::OutOfMemory`] if no memory is left.
    fn alloc(&self, bytes: usize) -> Result<Lent>;
}

/// A stream of another library, and the allocator for work on it.
#[derive(Debug, Clone)]
pub struct Given {
    stream: u64,
    pub(crate) allocator: Arc<dyn Allocator>,
}

impl Given {
    /// # Safety
    /// `stream` is a `cudaStream_t` of the primary context of the device that will run on it (0 is the default stream). It lives as long as
    /// this value, its clones, and every device on it.
    pub unsafe fn new(stream: u64, allocator: Arc<dyn Allocator>) -> Self {
        Self { stream, allocator }
    }

    pub(crate) fn stream(&self) -> sys::CUstream {
        self.stream as usize as sys::CUstream
    }

    /// Whether the owner of the stream is capturing its work. The context must be current.
    pub(crate) fn is_capturing(&self) -> Result<bool> {
        // SAFETY: the stream is alive, as `new` was promised.
        let status = named("cuStreamIsCapturing", unsafe { result::stream::is_capturing(self.stream()) })?;
        Ok(status != sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE)
    }
}
