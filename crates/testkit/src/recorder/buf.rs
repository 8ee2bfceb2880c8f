//! Handles to cells.

use super::cell::{Cell, Element, Output};
use super::recording::Entry;
use super::{Recorder, Shared};
use nibble_core::{Backend, Plain, Result};
use std::fmt;
use std::marker::PhantomData;
use std::sync::Arc;

/// A typed handle to a buffer of the recorder (a cell). Clones of the handle share the bytes; a write through a shared handle first copies
/// the bytes.
///
/// Recorded work does not own the cells to which it refers, so recorded work does not count as another handle to a cell.
pub struct Buf<T: Plain, B: Backend> {
    owner: Option<Arc<Owner<B>>>,
    pub(super) cell: Arc<Cell<B>>,
    len: usize,
    element: PhantomData<fn() -> T>,
}

/// The owner that all handles to a cell share. The last handle frees the buffer.
#[derive(Debug)]
struct Owner<B: Backend> {
    cell: Arc<Cell<B>>,
    shared: Arc<Shared<B>>,
    /// Whether recorded work allocates the buffer. A recorded buffer is allocated again in every replay.
    recorded: bool,
}

impl<B: Backend> Drop for Owner<B> {
    fn drop(&mut self) {
        // As on a device, a buffer that recorded work allocates and drops is free from this point on in every replay. Any other buffer is
        // free at once, even if recorded work still refers to it.
        if self.recorded {
            let mut state = self.shared.lock();
            if let Some(recording) = &mut state.recording {
                recording.push(Entry::Free(self.cell.clone()));
            }
        }
        self.cell.free();
    }
}

impl<T: Plain, B: Backend> Buf<T, B> {
    /// A handle to a new cell with this inner buffer.
    pub(super) fn new(recorder: &Recorder<B>, inner: &B::Buf<T>) -> Result<Self> {
        let cell = Cell::new(recorder.inner.reinterpret(inner)?);
        let (shared, recorded) = (recorder.shared.clone(), recorder.shared.is_recording());
        let owner = Some(Arc::new(Owner { cell: cell.clone(), shared, recorded }));
        Ok(Self { owner, cell, len: B::len(inner), element: PhantomData })
    }

    /// A non-owning handle to a cell of `len` values.
    pub(super) fn of_cell(cell: Arc<Cell<B>>, len: usize) -> Self {
        Self { owner: None, cell, len, element: PhantomData }
    }

    /// A non-owning copy of the handle.
    pub(super) fn unowned(&self) -> Self {
        Self::of_cell(self.cell.clone(), self.len)
    }

    /// Whether another handle shares the bytes.
    pub(super) fn is_shared(&self) -> bool {
        self.owner.as_ref().is_none_or(|owner| Arc::strong_count(owner) > 1)
    }

    /// The inner buffer, which the cell continues to share.
    pub(super) fn inner(&self, b: &B) -> Result<B::Buf<T>> {
        b.reinterpret(&self.cell.get()?)
    }

    /// Takes the inner buffer out of the cell, so that it is not shared.
    pub(super) fn take(&self, b: &B) -> Result<B::Buf<T>> {
        b.reinterpret(&self.cell.take()?)
    }

    /// Puts the inner buffer back into the cell.
    pub(super) fn put(&self, b: &B, inner: &B::Buf<T>) -> Result<()> {
        self.cell.put(b.reinterpret(inner)?);
        Ok(())
    }

    pub(super) fn output(&self) -> Output<B> {
        Output { cell: self.cell.clone(), element: Element::of::<T>() }
    }

    pub(super) fn len(&self) -> usize {
        self.len
    }

    /// A handle to the same cell with another element type. The inner backend determines `len`.
    pub(super) fn with_type<U: Plain>(&self, len: usize) -> Buf<U, B> {
        Buf { owner: self.owner.clone(), cell: self.cell.clone(), len, element: PhantomData }
    }
}

impl<T: Plain, B: Backend> Clone for Buf<T, B> {
    fn clone(&self) -> Self {
        Self { owner: self.owner.clone(), ..self.unowned() }
    }
}

/// Prints type and length, which are the same in every run, because the log compares arguments by this text.
impl<T: Plain, B: Backend> fmt::Debug for Buf<T, B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} × {}", self.len, std::any::type_name::<T>())
    }
}
