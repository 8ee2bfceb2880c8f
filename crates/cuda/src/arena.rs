//! Memory that work done over and over shares: one range of addresses, backed as far as it is used.

use crate::buffer::Zeros;
use crate::device::Device;
use crate::driver::{check, failed};
use crate::recording::Kept;
use cudarc::driver::{result, sys};
use nibble_core::{Error, Heap, MemoryStats, Result};
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Memory is mapped in pieces of at least so many bytes: each mapping is a call of its own that takes long.
const SMALLEST_PIECE: usize = 64 << 20;

/// See [`nibble_core::Backend::arena`]. Given back when the last handle, the last buffer, and every recording that may use it
/// are gone.
#[derive(Clone)]
pub struct Arena {
    shared: Arc<Shared>,
}

struct Shared {
    name: &'static str,
    device: Device,
    /// Recordings finished before it was made, which cannot use it.
    born: u64,
    /// What pieces are multiples of.
    piece: usize,
    state: Mutex<State>,
}

struct State {
    heap: Heap,
    mapping: Mapping,
}

impl Arena {
    /// Reserves as many addresses as the device has memory, and maps nothing.
    pub(crate) fn new(device: &Device, name: &'static str) -> Result<Self> {
        // The context is made current.
        device.stream()?;
        let properties = properties(device.info().ordinal);
        let mut granularity = 0;
        // SAFETY: writes one size; the properties are complete and read during the call.
        let code = unsafe {
            sys::cuMemGetAllocationGranularity(
                &mut granularity,
                &properties,
                sys::CUmemAllocationGranularity_flags::CU_MEM_ALLOC_GRANULARITY_RECOMMENDED,
            )
        };
        check("cuMemGetAllocationGranularity", code)?;
        let piece = SMALLEST_PIECE.next_multiple_of(granularity.max(1));
        let reserved = device.info().memory_bytes.next_multiple_of(piece);
        let mut base = 0;
        // SAFETY: writes one address; the range is given back by `Mapping::unmap`.
        let code = unsafe { sys::cuMemAddressReserve(&mut base, reserved, 0, 0, 0) };
        check(&format!("cuMemAddressReserve({reserved} bytes) for arena `{name}`"), code)?;
        let mapping = Mapping { base, reserved, pieces: Vec::new() };
        let state = Mutex::new(State { heap: Heap::new(0), mapping });
        let born = device.recordings().finished();
        Ok(Self { shared: Arc::new(Shared { name, device: device.clone(), born, piece, state }) })
    }

    /// The address of a block of so many bytes. With the context current.
    pub(crate) fn alloc(&self, bytes: usize) -> Result<u64> {
        let mut guard = self.shared.lock();
        let state = &mut *guard;
        let offset = match state.heap.alloc(bytes) {
            Some(offset) => offset,
            None => {
                self.map_for(state, bytes)?;
                // Room was made for it just now.
                state.heap.alloc(bytes).expect("a heap that was just extended")
            }
        };
        Ok(state.mapping.base + offset as u64)
    }

    /// Maps memory for a block at the end of the heap.
    fn map_for(&self, state: &mut State, bytes: usize) -> Result<()> {
        let Shared { name, device, piece, .. } = &*self.shared;
        let mapped = state.mapping.mapped();
        let end = state.heap.end_with(bytes).and_then(|end| end.checked_next_multiple_of(*piece));
        let done = match end.filter(|end| *end <= state.mapping.reserved) {
            Some(end) => state.mapping.extend(end - mapped, device.info().ordinal).map(|()| end),
            None => Err(failed("the address range", format!("it has {} bytes", state.mapping.reserved))),
        };
        let end = done.map_err(|error| {
            let (free, total) = result::mem_get_info().unwrap_or_default();
            let live = state.heap.live();
            let why = format!(
                "{live} bytes are live and {mapped} mapped in it; of the device's {total} bytes {free} are free: {error}"
            );
            Error::OutOfMemory { place: format!("arena `{name}`"), bytes, why }
        })?;
        state.heap.raise_capacity(end);
        Ok(())
    }

    /// Takes a block back. What comes later in the stream may use it.
    pub(crate) fn release(&self, address: u64, bytes: usize) {
        let mut state = self.shared.lock();
        let offset = (address - state.mapping.base) as usize;
        state.heap.free(offset, bytes);
    }

    pub(crate) fn stats(&self) -> MemoryStats {
        let state = self.shared.lock();
        MemoryStats {
            live_bytes: state.heap.live(),
            peak_bytes: state.heap.peak(),
            total_bytes: Some(state.mapping.mapped()),
        }
    }

    /// Whether two handles are of one arena.
    pub(crate) fn is_same(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.shared, &other.shared)
    }

    pub(crate) fn device(&self) -> &Device {
        &self.shared.device
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        // Nothing panics between two changes that belong together.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        let state = self.state.get_mut().unwrap_or_else(PoisonError::into_inner);
        let mapping = std::mem::take(&mut state.mapping);
        self.device.give_back(self.born, Kept::Mapping(mapping));
    }
}

impl fmt::Debug for Arena {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let MemoryStats { live_bytes, peak_bytes, .. } = self.stats();
        write!(f, "Arena({:?}, {live_bytes} bytes live, {peak_bytes} at most)", self.shared.name)
    }
}

/// Device memory of this device alone.
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

/// A reserved range of addresses whose beginning has memory. Not given back by itself: see [`Mapping::unmap`].
#[derive(Default)]
pub(crate) struct Mapping {
    base: u64,
    reserved: usize,
    /// Bytes of each mapping, back to back from `base` on.
    pieces: Vec<usize>,
}

impl Mapping {
    fn mapped(&self) -> usize {
        self.pieces.iter().sum()
    }

    /// Maps so many bytes more, a multiple of the granularity, within the range. With the context current.
    fn extend(&mut self, bytes: usize, ordinal: usize) -> Result<()> {
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

    /// Gives memory and addresses back.
    ///
    /// # Safety
    /// With the context current. Nothing issued uses the memory any more, and nothing will.
    pub(crate) unsafe fn unmap(self) {
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

/// An arena that a thread works within, and the zeroed words that its counters are cut from.
#[derive(Clone)]
pub(crate) struct Entered {
    pub arena: Arena,
    pub zeros: Arc<Mutex<Zeros>>,
}

impl Entered {
    /// With words that are zeroed when they are first asked for: by the work that asks, so that a recording zeroes its own.
    pub fn new(arena: Arena) -> Self {
        Self { arena, zeros: Arc::default() }
    }
}

impl fmt::Debug for Entered {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.arena.fmt(f)
    }
}
