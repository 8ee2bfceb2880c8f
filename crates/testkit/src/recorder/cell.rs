//! Cells, each of which holds a buffer of the inner backend.

use half::bf16;
use nibble_core::formats::ScaleKind;
use nibble_core::recipe::Form;
use nibble_core::{Backend, Error, Plain, Result};
use std::any::TypeId;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The bytes of one buffer; `None` after the buffer is freed, and while an operation writes it.
#[derive(Debug)]
pub(super) struct Cell<B: Backend> {
    bytes: Mutex<Option<B::Buf<u8>>>,
}

/// A buffer that an operation writes.
#[derive(Debug)]
pub(super) struct Output<B: Backend> {
    pub cell: Arc<Cell<B>>,
    pub element: Element,
}

/// The element type of a buffer, as far as a fault needs it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Element {
    F32,
    F64,
    Bf16,
    /// Records of scales.
    Scales(ScaleKind),
    /// Codes, counts and indices, which cannot be NaN.
    Other,
}

/// The buffers of a tensor: its elements, followed by its scales if it has scales.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Elements {
    pub form: Form,
    /// Number of stored rows (or stored columns) of elements.
    pub lines: usize,
    /// The kind of block scales, and whether a tensor scale follows the block scales.
    pub scales: Option<ScaleKind>,
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

    /// A clone of the wrapped backend's handle.
    pub fn get(&self) -> Result<B::Buf<u8>> {
        self.lock().clone().ok_or_else(freed)
    }

    /// Takes the wrapped backend's handle out of the cell, so that nothing shares it; the caller must put it back.
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

    /// The id of the wrapped backend's buffer; 0 if the buffer was freed.
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

/// An error of the device.
pub(super) fn device(call: impl Into<String>, why: impl Into<String>) -> Error {
    Error::Device { call: call.into(), why: why.into() }
}
