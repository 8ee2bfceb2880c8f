//! Output buffers to which several threads write disjoint parts.

use crate::Buf;
use nibble_core::Plain;

/// A buffer's values, which several threads may write. The owner keeps the buffer alive and does not access it meanwhile.
pub(crate) struct Shared<T> {
    first: *mut T,
    len: usize,
}

// SAFETY: references come only from `slice_mut`, whose callers guarantee that no two overlap. The values are plain data that any thread may
// write.
unsafe impl<T: Plain> Send for Shared<T> {}
// SAFETY: callers of `slice_mut` guarantee disjoint slices of plain data.
unsafe impl<T: Plain> Sync for Shared<T> {}

impl<T: Plain> Shared<T> {
    /// Opens a buffer for writes from several threads.
    pub fn of(buf: &mut Buf<T>) -> Self {
        Self::of_values(buf.as_mut_slice())
    }

    /// Opens values that another object owns for writes from several threads.
    pub fn of_values(values: &mut [T]) -> Self {
        Self { first: values.as_mut_ptr(), len: values.len() }
    }

    /// The `len` values that start at `start`. Panics unless all of these values are in the buffer.
    ///
    /// # Safety
    /// The buffer is alive and otherwise unused, and no other slice of these values exists.
    #[allow(clippy::mut_from_ref)]
    pub unsafe fn slice_mut(&self, start: usize, len: usize) -> &mut [T] {
        assert!(start <= self.len && len <= self.len - start, "{start} + {len} of {}", self.len);
        // SAFETY: the assertion ensures that the range is within the buffer; the caller guarantees that the buffer is alive and unaliased.
        unsafe { std::slice::from_raw_parts_mut(self.first.add(start), len) }
    }
}
