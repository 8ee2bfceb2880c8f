//! Handles, and the cells that hold the inner backend's buffers.

use super::call::Entry;
use super::{Recorder, Shared, device};
use half::bf16;
use nibble_core::formats::ScaleKind;
use nibble_core::{Backend, Plain, Result};
use std::any::TypeId;
use std::fmt;
use std::marker::PhantomData;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// A typed handle to a cell. A clone shares the bytes; writing through a shared handle copies first.
///
/// Recorded work holds cells and no owners, so that it does not count as somebody who shares them.
pub struct Buf<T: Plain, B: Backend> {
    owner: Option<Arc<Owner<B>>>,
    pub(super) cell: Arc<Cell<B>>,
    len: usize,
    element: PhantomData<fn() -> T>,
}

/// The bytes of one buffer; none once it was freed, and in the middle of an operation that writes them.
#[derive(Debug)]
pub(super) struct Cell<B: Backend> {
    bytes: Mutex<Option<B::Buf<u8>>>,
}

/// What the handles to a cell share. The last one gives the buffer back.
#[derive(Debug)]
struct Owner<B: Backend> {
    cell: Arc<Cell<B>>,
    shared: Arc<Shared<B>>,
    /// Whether recorded work makes the buffer, anew in every replay.
    recorded: bool,
}

/// A buffer that an operation writes.
#[derive(Debug)]
pub(super) struct Output<B: Backend> {
    pub cell: Arc<Cell<B>>,
    pub element: Element,
}

/// What a buffer holds, as far as a fault must know.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Element {
    F32,
    F64,
    Bf16,
    /// Records of scales.
    Scales(ScaleKind),
    /// Codes, counts, indices.
    Other,
}

impl Element {
    pub fn of<T: Plain>() -> Self {
        match TypeId::of::<T>() {
            id if id == TypeId::of::<f32>() => Self::F32,
            id if id == TypeId::of::<f64>() => Self::F64,
            id if id == TypeId::of::<bf16>() => Self::Bf16,
            _ => Self::Other,
        }
    }
}

impl<B: Backend> Clone for Output<B> {
    fn clone(&self) -> Self {
        Self { cell: self.cell.clone(), element: self.element }
    }
}

impl<B: Backend> Cell<B> {
    pub fn new(bytes: B::Buf<u8>) -> Arc<Self> {
        Arc::new(Self { bytes: Mutex::new(Some(bytes)) })
    }

    /// A clone of the inner handle.
    pub fn get(&self) -> Result<B::Buf<u8>> {
        self.lock().clone().ok_or_else(freed)
    }

    /// The inner handle itself, so that nobody shares it; to be put back.
    pub fn take(&self) -> Result<B::Buf<u8>> {
        self.lock().take().ok_or_else(freed)
    }

    pub fn put(&self, bytes: B::Buf<u8>) {
        let old = self.lock().replace(bytes);
        drop(old);
    }

    pub fn free(&self) {
        let old = self.lock().take();
        drop(old);
    }

    /// The inner buffer's identity; 0 where it was freed.
    pub fn id(&self) -> u64 {
        self.lock().as_ref().map_or(0, B::buffer_id)
    }

    fn lock(&self) -> MutexGuard<'_, Option<B::Buf<u8>>> {
        self.bytes.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn freed() -> nibble_core::Error {
    device("an operation", "a buffer that it needs was freed before")
}

impl<B: Backend> Drop for Owner<B> {
    fn drop(&mut self) {
        // As on a device: what recorded work makes and drops is free from here on in every replay, and all else at once, also
        // where recorded work still refers to it.
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
    /// A new cell with this inner buffer.
    pub(super) fn new(recorder: &Recorder<B>, inner: &B::Buf<T>) -> Result<Self> {
        let cell = Cell::new(recorder.inner.reinterpret(inner)?);
        let (shared, recorded) = (recorder.shared.clone(), recorder.shared.is_recording());
        let owner = Some(Arc::new(Owner { cell: cell.clone(), shared, recorded }));
        Ok(Self { owner, cell, len: B::len(inner), element: PhantomData })
    }

    /// A handle that owns nothing, to a cell of so many values.
    pub(super) fn of_cell(cell: Arc<Cell<B>>, len: usize) -> Self {
        Self { owner: None, cell, len, element: PhantomData }
    }

    /// A handle that owns nothing.
    pub(super) fn unowned(&self) -> Self {
        Self::of_cell(self.cell.clone(), self.len)
    }

    /// Whether another handle shares the bytes.
    pub(super) fn is_shared(&self) -> bool {
        self.owner.as_ref().is_none_or(|owner| Arc::strong_count(owner) > 1)
    }

    /// The inner buffer. It is shared with the cell.
    pub(super) fn inner(&self, b: &B) -> Result<B::Buf<T>> {
        b.reinterpret(&self.cell.get()?)
    }

    /// The inner buffer, out of the cell, so that nobody shares it.
    pub(super) fn take(&self, b: &B) -> Result<B::Buf<T>> {
        b.reinterpret(&self.cell.take()?)
    }

    /// Back into the cell.
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

    /// The same cell as values of another type. `len` is what the inner backend makes of it.
    pub(super) fn with_type<U: Plain>(&self, len: usize) -> Buf<U, B> {
        Buf { owner: self.owner.clone(), cell: self.cell.clone(), len, element: PhantomData }
    }
}

impl<T: Plain, B: Backend> Clone for Buf<T, B> {
    fn clone(&self) -> Self {
        Self { owner: self.owner.clone(), ..self.unowned() }
    }
}

/// Type and length, and nothing that differs from run to run: the log compares arguments by this text.
impl<T: Plain, B: Backend> fmt::Debug for Buf<T, B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} × {}", self.len, std::any::type_name::<T>())
    }
}
