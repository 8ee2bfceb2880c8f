//! Pinned host memory that a caller owns. The copy engine writes to pinned memory directly, at the
//! full bandwidth of the bus.

use crate::device::Device;
use crate::driver::named;
use cudarc::driver::{result, sys};
use nibble_core::Result;
use std::fmt;
use std::ptr::NonNull;

/// F32 values in pinned memory.
pub struct Pinned {
    values: NonNull<f32>,
    len: usize,
    device: Device,
}

// SAFETY: this is host memory with one owner, and the driver frees it from any thread.
unsafe impl Send for Pinned {}
// SAFETY: a shared reference only reads the values.
unsafe impl Sync for Pinned {}

impl Pinned {
    /// Allocates `len` zeros.
    pub(crate) fn new(device: &Device, len: usize) -> Result<Self> {
        device.stream()?;
        // The driver does not allocate zero bytes.
        let bytes = len.max(1).saturating_mul(size_of::<f32>());
        // SAFETY: any arguments are valid; the memory is freed in `drop`.
        let values = named("cuMemHostAlloc", unsafe { result::malloc_host(bytes, 0) })?;
        // The driver does not return null together with success.
        let values = NonNull::new(values.cast::<f32>()).expect("pinned memory has an address");
        // SAFETY: memory for `len` values was just allocated, and no other code has its address.
        unsafe { values.write_bytes(0, len) };
        Ok(Self { values, len, device: device.clone() })
    }

    /// Whether the copy engine can access this address directly, because it is pinned.
    pub(crate) fn is_at(address: *const u8) -> bool {
        let mut kind = 0_u32;
        let attribute = sys::CUpointer_attribute::CU_POINTER_ATTRIBUTE_MEMORY_TYPE;
        // SAFETY: the attribute is a `u32`; the driver refuses an address that it does not know, and does not access it.
        let code = unsafe { sys::cuPointerGetAttribute((&raw mut kind).cast(), attribute, address as u64) };
        code == sys::CUresult::CUDA_SUCCESS && kind == sys::CUmemorytype::CU_MEMORYTYPE_HOST as u32
    }
}

impl AsRef<[f32]> for Pinned {
    fn as_ref(&self) -> &[f32] {
        // SAFETY: there are `len` values, written in `new` and alive as long as `self`.
        unsafe { std::slice::from_raw_parts(self.values.as_ptr(), self.len) }
    }
}

impl AsMut<[f32]> for Pinned {
    fn as_mut(&mut self) -> &mut [f32] {
        // SAFETY: there are `len` values, and they are accessible only through `self`.
        unsafe { std::slice::from_raw_parts_mut(self.values.as_ptr(), self.len) }
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        // If the context is lost, so is its memory.
        if self.device.stream().is_ok() {
            // SAFETY: the memory was allocated in `new` and is freed once, after all copies to it are complete. An
            // error here cannot be reported.
            let _ = unsafe { result::free_host(self.values.as_ptr().cast()) };
        }
    }
}

impl fmt::Debug for Pinned {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Pinned[{}]", self.len)
    }
}
