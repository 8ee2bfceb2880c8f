//! Output buffers to which several threads write disjoint parts.

use crate::Buf;
use nibble_core::Plain;

/// A buffer's values, writable from several threads. The owner keeps the buffer alive and does not touch it meanwhile.
pub(crate) struct Shared<T> {
    first: *mut T,
    len: usize,
}

// SAFETY: references come only from `slice_mut`, whose callers promise that no two overlap; the values are
// plain data that any thread may write.
unsafe impl<T: Plain> Send for Shared<T> {}
// SAFETY: as above.
unsafe impl<T: Plain> Sync for Shared<T> {}

impl<T: Plain> Shared<T> {
    /// Opens a buffer.
    pub fn of(buf: &mut Buf<T>) -> Self {
        Self::of_values(buf.as_mut_slice())
    }

    /// Opens values that another owner holds.
    pub fn of_values(values: &mut [T]) -> Self {
        Self { first: values.as_mut_ptr(), len: values.len() }
    }

    /// `len` values from `start` on. Panics if they are not all in the buffer.
    ///
    /// # Safety
    /// The buffer is alive and otherwise unused, and no other slice of these values exists.
    #[allow(clippy::mut_from_ref)]
    pub unsafe fn slice_mut(&self, start: usize, len: usize) -> &mut [T] {
        assert!(start <= self.len && len <= self.len - start, "{start} + {len} of {}", self.len);
        // SAFETY: within the buffer, as just asserted; alive and unaliased, as the caller promises.
        unsafe { std::slice::from_raw_parts_mut(self.first.add(start), len) }
    }
}
