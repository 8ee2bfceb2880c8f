//! Pinned host memory that a caller owns: the copy engine writes it directly, at the speed of the bus.

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

// SAFETY: memory of the host, with one owner; the driver takes it back from any thread.
unsafe impl Send for Pinned {}
// SAFETY: shared, it is only read.
unsafe impl Sync for Pinned {}

impl Pinned {
    /// `len` zeros.
    pub(crate) fn new(device: &Device, len: usize) -> Result<Self> {
        device.stream()?;
        // The driver gives no memory of no bytes.
        let bytes = len.max(1).saturating_mul(size_of::<f32>());
        // SAFETY: no arguments to get wrong; freed in `drop`.
        let values = named("cuMemHostAlloc", unsafe { result::malloc_host(bytes, 0) })?;
        // The driver does not give null with success.
        let values = NonNull::new(values.cast::<f32>()).expect("pinned memory has an address");
        // SAFETY: room for `len` values was just allocated, and nobody else has its address.
        unsafe { values.write_bytes(0, len) };
        Ok(Self { values, len, device: device.clone() })
    }

    /// Whether the copy engine reaches this address directly, because it is pinned.
    pub(crate) fn is_at(address: *const u8) -> bool {
        let mut kind = 0_u32;
        let attribute = sys::CUpointer_attribute::CU_POINTER_ATTRIBUTE_MEMORY_TYPE;
        // SAFETY: the attribute is a `u32`; the driver refuses an address that it does not know, and reads nothing there.
        let code = unsafe { sys::cuPointerGetAttribute((&raw mut kind).cast(), attribute, address as u64) };
        code == sys::CUresult::CUDA_SUCCESS && kind == sys::CUmemorytype::CU_MEMORYTYPE_HOST as u32
    }
}

impl AsRef<[f32]> for Pinned {
    fn as_ref(&self) -> &[f32] {
        // SAFETY: `len` values, written in `new`, alive as long as `self`.
        unsafe { std::slice::from_raw_parts(self.values.as_ptr(), self.len) }
    }
}

impl AsMut<[f32]> for Pinned {
    fn as_mut(&mut self) -> &mut [f32] {
        // SAFETY: as above, and `self` is the only way to them.
        unsafe { std::slice::from_raw_parts_mut(self.values.as_ptr(), self.len) }
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        // Where the context is lost, so is its memory.
        if self.device.stream().is_ok() {
            // SAFETY: made in `new` and given back once; copies to it were waited for. An error has nobody to go to.
            let _ = unsafe { result::free_host(self.values.as_ptr().cast()) };
        }
    }
}

impl fmt::Debug for Pinned {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Pinned[{}]", self.len)
    }
}
