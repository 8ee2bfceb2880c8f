//! Copy-on-write buffers: clones share their bytes until one of them is written to.

use super::buffer::Buffer;
use nibble_core::{Plain, Result};
use std::fmt;

/// A reference-counted device buffer whose clones share the bytes.
pub struct Buf<T: Plain> {
    buffer: Buffer<T>,
}

impl<T: Plain> Buf<T> {
    /// Takes ownership of a buffer.
    pub fn new(buffer: Buffer<T>) -> Self {
        Self { buffer }
    }

    /// The buffer, for reading.
    pub fn get(&self) -> &Buffer<T> {
        &self.buffer
    }

    /// The buffer, for writing in place: by its creator, or to a part that no other handle refers to.
    pub(crate) fn in_place(&mut self) -> &mut Buffer<T> {
        &mut self.buffer
    }

    /// The buffer, for writing. If another handle shares the bytes, the method first copies the bytes for this handle.
    pub fn make_mut(&mut self) -> Result<&mut Buffer<T>> {
        if !self.buffer.is_sole() {
            self.buffer.device().traffic().copy_on_write();
            self.buffer = self.buffer.copied()?;
        }
        Ok(&mut self.buffer)
    }
}

impl<T: Plain> Clone for Buf<T> {
    fn clone(&self) -> Self {
        Self { buffer: self.buffer.shared() }
    }
}

impl<T: Plain> fmt::Debug for Buf<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.get().fmt(f)
    }
}
