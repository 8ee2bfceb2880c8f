//! A stream and an allocator of another library in this process, for a device that works among that library's work.

use super::workspace::{Allocator, Workspaces};
use crate::driver::named;
use cudarc::driver::{result, sys};
use nibble_core::Result;
use std::sync::Arc;

/// A stream of another library, and the allocator for work on it.
#[derive(Debug, Clone)]
pub struct Given {
    stream: u64,
    pub(crate) memory: Arc<Workspaces>,
}

impl Given {
    /// # Safety
    /// `stream` is a `cudaStream_t` of the primary context of the device that will run on it (0 is the default stream). It lives as long as
    /// this value, its clones, and every device on it.
    pub unsafe fn new(stream: u64, allocator: Arc<dyn Allocator>) -> Self {
        Self { stream, memory: Arc::new(Workspaces::new(allocator)) }
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
