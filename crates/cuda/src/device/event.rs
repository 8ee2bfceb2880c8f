//! Events: points in a stream, for which another stream can wait, and between which time can be measured.

use crate::device::Device;
use crate::driver::named;
use cudarc::driver::{result, sys};
use nibble_core::Result;

/// A CUDA event, which marks a point in a stream.
pub struct Event {
    event: sys::CUevent,
    device: Device,
}

// SAFETY: the event is a driver handle that is used with the context current.
unsafe impl Send for Event {}
// SAFETY: the driver allows calls with this handle from several threads.
unsafe impl Sync for Event {}

impl Event {
    /// An event that has not been recorded yet.
    pub(crate) fn new(device: &Device) -> Result<Self> {
        device.stream()?;
        let event = named("cuEventCreate", result::event::create(sys::CUevent_flags::CU_EVENT_DEFAULT))?;
        Ok(Self { event, device: device.clone() })
    }

    /// Records the event after all work issued on `stream` so far.
    pub(crate) fn set(&self, stream: sys::CUstream) -> Result<()> {
        // SAFETY: event and stream are alive and belong to one context.
        named("cuEventRecord", unsafe { result::event::record(self.event, stream) })
    }

    /// Makes all later work on `stream` wait for the event.
    pub(crate) fn before(&self, stream: sys::CUstream) -> Result<()> {
        let flags = sys::CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT;
        // SAFETY: event and stream are alive and belong to one context.
        named("cuStreamWaitEvent", unsafe { result::stream::wait_event(stream, self.event, flags) })
    }

    /// Whether the device has passed the event.
    pub(crate) fn is_passed(&self) -> bool {
        // SAFETY: the event is alive.
        self.device.stream().is_ok() && unsafe { result::event::query(self.event) }.is_ok()
    }

    /// The time from `earlier` to this event in milliseconds. The call waits until the device has passed this event.
    ///
    /// # Errors
    /// [`nibble_core::Error::Device`], including for an event that was never recorded.
    pub fn elapsed_ms(&self, earlier: &Self) -> Result<f32> {
        self.device.stream()?;
        // SAFETY: both events are alive; an event that was never recorded is an error of the
        // driver.
        unsafe {
            named("cuEventSynchronize", result::event::synchronize(self.event))?;
            named("cuEventElapsedTime", result::event::elapsed(earlier.event, self.event))
        }
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        if self.device.stream().is_ok() {
            // SAFETY: the event was created once and is destroyed once; the driver allows this before
            // the event has passed.
            let _ = unsafe { result::event::destroy(self.event) };
        }
    }
}
