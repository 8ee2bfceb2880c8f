//! The time that each operation takes on the device, measured by events around every operation.

use crate::Cuda;
use crate::backend::Marks;
use crate::device::{Event, Launched, Launches};
use crate::driver::failed;
use nibble_core::Result;
use std::sync::PoisonError;

/// An operation and the milliseconds that it took on the device.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct OpTime {
    /// The operation's name, as in [`nibble_core::ops`].
    pub op: &'static str,
    /// The time from the end of all work that was issued before the operation to the end of the operation.
    pub ms: f32,
}

impl Cuda {
    /// Runs `work`, waits for it, and returns the time of each of its operations on the device, in order. The times are those of a busy
    /// device only if the host issues work faster than the device completes it. To ensure this, issue a long operation first.
    ///
    /// # Errors
    /// The error of `work`; [`nibble_core::Error::Device`] from the events.
    pub fn profiled<R>(&self, work: impl FnOnce() -> Result<R>) -> Result<(R, Vec<OpTime>)> {
        // The outer list is restored even if `work` panics.
        struct Outer<'a>(&'a Marks, Option<Vec<(&'static str, Event, Event)>>);
        impl Outer<'_> {
            fn swap(&mut self) {
                std::mem::swap(&mut *self.0.lock().unwrap_or_else(PoisonError::into_inner), &mut self.1);
            }
        }
        impl Drop for Outer<'_> {
            fn drop(&mut self) {
                self.swap();
            }
        }
        let mut outer = Outer(self.marks(), Some(Vec::new()));
        outer.swap();
        let result = work();
        let taken = self.marks().lock().unwrap_or_else(PoisonError::into_inner).take().unwrap_or_default();
        drop(outer);
        let times = taken.iter().map(|(op, begin, end)| Ok(OpTime { op, ms: end.elapsed_ms(begin)? }));
        Ok((result?, times.collect::<Result<_>>()?))
    }

    /// Runs `work` and returns the kernels that ran for it, in order. The list contains the kernels that `work` launched, and the kernels
    /// of each recording as often as the recording was replayed.
    ///
    /// # Errors
    /// The error of `work`; [`nibble_core::Error::Device`] inside another call of this function.
    pub fn logged<R>(&self, work: impl FnOnce() -> Result<R>) -> Result<(R, Vec<Launched>)> {
        let device = self.device();
        if device.launches().is_some() {
            return Err(failed("logged", "launches are being noted already"));
        }
        *device.launches() = Some(Launches::default());
        let result = work();
        let launches = device.launches().take().unwrap_or_default();
        Ok((result?, launches.all))
    }

    /// Runs an operation, between two events if times are being recorded.
    pub(crate) fn timed<R>(&self, op: &'static str, run: impl FnOnce() -> Result<R>) -> Result<R> {
        let marks = || self.marks().lock().unwrap_or_else(PoisonError::into_inner);
        let run = || self.device().for_op(op, run);
        if marks().is_none() {
            return run();
        }
        let begin = self.device().event()?;
        let result = run()?;
        let end = self.device().event()?;
        if let Some(marks) = marks().as_mut() {
            marks.push((op, begin, end));
        }
        Ok(result)
    }
}
