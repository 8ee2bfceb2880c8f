//! Reserved address ranges that get memory as needed.

use crate::driver::check;
use cudarc::driver::sys;
use nibble_core::Result;

/// A reserved range of addresses whose beginning is backed by memory. Dropping it frees nothing: see [`Mapping::unmap`].
#[derive(Default)]
pub(crate) struct Mapping {
    pub base: u64,
    pub reserved: usize,
    /// Bytes of each mapping, back to back from `base` on.
    pieces: Vec<usize>,
}

impl Mapping {
    /// Reserves a range of `reserved` bytes, a multiple of the granularity, and maps nothing. The context must be
    /// current.
    pub fn reserve(reserved: usize, name: &str) -> Result<Self> {
        let mut base = 0;
        // SAFETY: writes one address; the range is given back by `Mapping::unmap`.
        let code = unsafe { sys::cuMemAddressReserve(&mut base, reserved, 0, 0, 0) };
        check(&format!("cuMemAddressReserve({reserved} bytes) for arena `{name}`"), code)?;
        Ok(Self { base, reserved, pieces: Vec::new() })
    }

    /// Bytes backed by memory.
    pub fn mapped(&self) -> usize {
        self.pieces.iter().sum()
    }

    /// Maps another `bytes` bytes, a multiple of the granularity, within the range. The context must be current.
    pub fn extend(&mut self, bytes: usize, ordinal: usize) -> Result<()> {
        let address = self.base + self.mapped() as u64;
        let mut handle = 0;
        // SAFETY: the properties are complete and read during the call; writes one handle.
        let code = unsafe { sys::cuMemCreate(&mut handle, bytes, &properties(ordinal), 0) };
        check(&format!("cuMemCreate({bytes} bytes)"), code)?;
        // SAFETY: the addresses are reserved, and nothing is mapped there yet; the memory has as many bytes.
        let mapped = check("cuMemMap", unsafe { sys::cuMemMap(address, bytes, 0, handle, 0) });
        // SAFETY: created above, released once. The mapping keeps the memory; without one it is freed now.
        let released = check("cuMemRelease", unsafe { sys::cuMemRelease(handle) });
        mapped?;
        let access = sys::CUmemAccessDesc {
            location: location(ordinal),
            flags: sys::CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
        };
        // SAFETY: the range was mapped just now; one description is read during the call.
        let code = unsafe { sys::cuMemSetAccess(address, bytes, &access, 1) };
        check("cuMemSetAccess", code).and(released).inspect_err(|_| {
            // SAFETY: mapped above, used by nobody. The first error is the one to report.
            let _ = unsafe { sys::cuMemUnmap(address, bytes) };
        })?;
        self.pieces.push(bytes);
        Ok(())
    }

    /// Frees memory and addresses.
    ///
    /// # Safety
    /// The context is current. Nothing issued uses the memory any more, and nothing will.
    pub unsafe fn unmap(self) {
        let mut address = self.base;
        for &bytes in &self.pieces {
            // SAFETY: exactly what `extend` mapped, once; unused by the caller's promise. An error has nobody to go to.
            let _ = unsafe { sys::cuMemUnmap(address, bytes) };
            address += bytes as u64;
        }
        if self.reserved > 0 {
            // SAFETY: exactly what was reserved, with nothing mapped in it any more.
            let _ = unsafe { sys::cuMemAddressFree(self.base, self.reserved) };
        }
    }
}

/// The mapping granularity in bytes. The context must be current.
pub(crate) fn granularity(ordinal: usize) -> Result<usize> {
    let properties = properties(ordinal);
    let mut granularity = 0;
    // SAFETY: writes one size; the properties are complete and read during the call.
    let code = unsafe {
        sys::cuMemGetAllocationGranularity(
            &mut granularity,
            &properties,
            sys::CUmemAllocationGranularity_flags::CU_MEM_ALLOC_GRANULARITY_RECOMMENDED,
        )
    };
    check("cuMemGetAllocationGranularity", code).map(|()| granularity)
}

/// Properties of memory that only this device accesses.
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
