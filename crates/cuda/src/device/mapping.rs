//! Reserved address ranges, to which memory is mapped as needed.

use crate::driver::check;
use cudarc::driver::sys;
use nibble_core::Result;

/// A reserved range of addresses whose first part is backed by memory. Dropping a `Mapping` frees nothing;
/// [`Mapping::unmap`] frees the memory.
#[derive(Default)]
pub(crate) struct Mapping {
    pub base: u64,
    pub reserved: usize,
    /// The size in bytes of each mapping; mappings are contiguous from `base` on.
    pieces: Vec<usize>,
}

impl Mapping {
    /// Reserves a range of `reserved` bytes, a multiple of the granularity, and maps no memory. The context must
    /// be current.
    pub fn reserve(reserved: usize, name: &str) -> Result<Self> {
        let mut base = 0;
        // SAFETY: the call writes one address; `Mapping::unmap` frees the range.
        let code = unsafe { sys::cuMemAddressReserve(&mut base, reserved, 0, 0, 0) };
        check(&format!("cuMemAddressReserve({reserved} bytes) for arena `{name}`"), code)?;
        Ok(Self { base, reserved, pieces: Vec::new() })
    }

    /// The number of bytes that are backed by memory.
    pub fn mapped(&self) -> usize {
        self.pieces.iter().sum()
    }

    /// Maps another `bytes` bytes, a multiple of the granularity, within the range. The context must be current.
    pub fn extend(&mut self, bytes: usize, ordinal: usize) -> Result<()> {
        let address = self.base + self.mapped() as u64;
        let mut handle = 0;
        // SAFETY: the properties are complete and read during the call; the call writes one handle.
        let code = unsafe { sys::cuMemCreate(&mut handle, bytes, &properties(ordinal), 0) };
        check(&format!("cuMemCreate({bytes} bytes)"), code)?;
        // SAFETY: the addresses are reserved and not yet mapped; the memory has as many bytes.
        let mapped = check("cuMemMap", unsafe { sys::cuMemMap(address, bytes, 0, handle, 0) });
        // SAFETY: the handle was created above and is released once. The mapping keeps the memory alive;
        // without a mapping the memory is freed now.
        let released = check("cuMemRelease", unsafe { sys::cuMemRelease(handle) });
        mapped?;
        let access = sys::CUmemAccessDesc {
            location: location(ordinal),
            flags: sys::CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
        };
        // SAFETY: the range was just mapped; one description is read during the call.
        let code = unsafe { sys::cuMemSetAccess(address, bytes, &access, 1) };
        check("cuMemSetAccess", code).and(released).inspect_err(|_| {
            // SAFETY: the range was mapped above and is not used. The first error is the one that
            // is reported.
            let _ = unsafe { sys::cuMemUnmap(address, bytes) };
        })?;
        self.pieces.push(bytes);
        Ok(())
    }

    /// Frees the memory and the addresses.
    ///
    /// # Safety
    /// The context must be current. No issued work may still use the memory, and no later work may
    /// use it.
    pub unsafe fn unmap(self) {
        let mut address = self.base;
        for &bytes in &self.pieces {
            // SAFETY: these are the ranges that `extend` mapped, each once; the caller guarantees that they are not
            // used. An error here cannot be reported.
            let _ = unsafe { sys::cuMemUnmap(address, bytes) };
            address += bytes as u64;
        }
        if self.reserved > 0 {
            // SAFETY: this is the range that was reserved, and nothing is mapped in it any more.
            let _ = unsafe { sys::cuMemAddressFree(self.base, self.reserved) };
        }
    }
}

/// The mapping granularity in bytes. The context must be current.
pub(crate) fn granularity(ordinal: usize) -> Result<usize> {
    let properties = properties(ordinal);
    let mut granularity = 0;
    // SAFETY: the call writes one size; the properties are complete and read during the call.
    let code = unsafe {
        sys::cuMemGetAllocationGranularity(
            &mut granularity,
            &properties,
            sys::CUmemAllocationGranularity_flags::CU_MEM_ALLOC_GRANULARITY_RECOMMENDED,
        )
    };
    check("cuMemGetAllocationGranularity", code).map(|()| granularity)
}

/// Properties of memory that only this device can access.
fn properties(ordinal: usize) -> sys::CUmemAllocationProp {
    sys::CUmemAllocationProp {
        type_: sys::CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED,
        requestedHandleTypes: sys::CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_NONE,
        location: location(ordinal),
        win32HandleMetaData: std::ptr::null_mut(),
        allocFlags: sys::CUmemAllocationProp_st__bindgen_ty_1 {
            compressionType: 0,
            gpuDirectRDMACapable: 0,
            usage: 0,
            reserved: [0; 4],
        },
    }
}

fn location(ordinal: usize) -> sys::CUmemLocation {
    sys::CUmemLocation { type_: sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE, id: ordinal as i32 }
}
