//! An opened GPU without its kernels: context, streams, a memory pool that frees in the order of the first stream, and memory
//! statistics. The first stream and the memory of buffers may be those of another library ([`Given`]).

use crate::device::given::Given;
use crate::device::kept::{Block, Kept, Recordings};
use crate::driver::{failed, named};
use crate::probe::GpuInfo;
use cudarc::driver::{result, sys};
use nibble_core::{MemoryStats, Result, Room};
use std::fmt;
use std::sync::atomic::{AtomicUsize, Ordering};

/// An opened GPU. The GPU is closed when the device, and all of its arenas and buffers, are gone.
pub(crate) struct Gpu {
    pub info: GpuInfo,
    device: sys::CUdevice,
    context: sys::CUcontext,
    stream: sys::CUstream,
    /// The second stream, for copies to the host.
    pub copies: sys::CUstream,
    pub pool: sys::CUmemoryPool,
    /// The owner of the first stream and of the memory of buffers, if these are another library's.
    pub given: Option<Given>,
    pub recordings: Recordings,
    /// The size of the device memory, and the number of bytes that other processes used when the device was opened.
    pub room: Option<Room>,
    live_bytes: AtomicUsize,
    peak_bytes: AtomicUsize,
}

// SAFETY: the driver's handles may be used from any thread on which the context is current, and every method here
// first makes it current. Mutable state is behind a mutex or atomic.
unsafe impl Send for Gpu {}
// SAFETY: handles are used with the context current, and mutable state is behind a mutex or atomic.
unsafe impl Sync for Gpu {}

impl Gpu {
    /// Opens the GPU, and makes its context current on this thread. If `given` is `None`, the first stream is a new one.
    pub fn open(info: GpuInfo, given: Option<Given>) -> Result<Self> {
        let device = named("cuDeviceGet", result::device::get(info.ordinal as i32))?;
        // SAFETY: the driver returned `device`. The context is made current before any object is created in it, and
        // `drop` releases all objects in reverse order.
        unsafe {
            let context = named("cuDevicePrimaryCtxRetain", result::primary_ctx::retain(device))?;
            let stream =
                || named("cuStreamCreate", result::stream::create(result::stream::StreamKind::NonBlocking));
            let made = named("cuCtxSetCurrent", result::ctx::set_current(context)).and_then(|()| {
                let first = given.as_ref().map_or_else(stream, |given| Ok(given.stream()))?;
                // A device on a given stream may be opened while that stream's work is captured, and no pool can be created then.
                let pool = match given {
                    Some(_) => {
                        named("cuDeviceGetDefaultMemPool", result::device::get_default_mem_pool(device))
                    }
                    None => create_pool(info.ordinal),
                };
                Ok((first, stream()?, pool?))
            });
            let (stream, copies, pool) = made.inspect_err(|_| {
                // The first error is the one that is reported.
                let _ = result::primary_ctx::release(device);
            })?;
            let (live_bytes, peak_bytes) = (AtomicUsize::new(0), AtomicUsize::new(0));
            let (recordings, room) = (Recordings::default(), room());
            Ok(Self {
                info,
                device,
                context,
                stream,
                copies,
                pool,
                given,
                recordings,
                room,
                live_bytes,
                peak_bytes,
            })
        }
    }

    /// Makes the context current on this thread.
    pub fn bind(&self) -> Result<()> {
        // SAFETY: the context is retained until `drop`.
        named("cuCtxSetCurrent", unsafe { result::ctx::set_current(self.context) })
    }

    /// The first stream, after making the context current on this thread.
    pub fn stream(&self) -> Result<sys::CUstream> {
        self.bind()?;
        Ok(self.stream)
    }

    /// Waits for all work issued on the first stream so far.
    pub fn synchronize(&self) -> Result<()> {
        self.not_recording("Device::synchronize")?;
        // SAFETY: the stream lives as long as `self`.
        named("cuStreamSynchronize", unsafe { result::stream::synchronize(self.stream()?) })
    }

    /// Bytes in live buffers.
    pub fn memory(&self) -> MemoryStats {
        MemoryStats {
            live_bytes: self.live_bytes.load(Ordering::Relaxed),
            peak_bytes: self.peak_bytes.load(Ordering::Relaxed),
            total_bytes: self.bind().ok().and_then(|()| result::mem_get_info().ok()).map(|(_, total)| total),
        }
    }

    /// The number of bytes of device memory that all processes together use now.
    pub fn in_use(&self) -> Option<usize> {
        self.bind().ok()?;
        result::mem_get_info().ok().map(|(free, total)| total.saturating_sub(free))
    }

    pub fn count_live(&self, bytes: usize) {
        let live = self.live_bytes.fetch_add(bytes, Ordering::Relaxed) + bytes;
        self.peak_bytes.fetch_max(live, Ordering::Relaxed);
    }

    pub fn uncount_live(&self, bytes: usize) {
        self.live_bytes.fetch_sub(bytes, Ordering::Relaxed);
    }

    /// Returns an error while work is being recorded.
    pub fn not_recording(&self, call: &str) -> Result<()> {
        match self.recordings.is_under_way() {
            true => Err(failed(call, "not while work is being recorded")),
            false => Ok(()),
        }
    }

    /// Frees memory as soon as no recording is left that may use the memory.
    pub fn give_back(&self, born: u64, kept: Kept) {
        if let Some(kept) = self.recordings.keep(born, kept) {
            self.free(kept);
        }
    }

    /// Frees memory. `free` must be called only while no work is being recorded, because the stream
    /// would record the free.
    pub fn free(&self, kept: Kept) {
        // A failure means that the context is lost, and so is the memory.
        let Ok(stream) = self.stream() else { return };
        match kept {
            Kept::Pooled { block, counted } => {
                self.uncount_live(counted);
                match block {
                    // SAFETY: the memory was allocated from this device's pool and is freed once, after all issued work
                    // that may use it.
                    Block::Pool(address) => drop(unsafe { result::free_async(address, stream) }),
                    Block::Given(memory) => drop(memory),
                }
            }
            Kept::Mapping(mapping) => {
                if self.synchronize().is_ok() {
                    // SAFETY: the context is current, the stream has passed all work, and no handle is left. Downloads that
                    // are still in flight read a copy.
                    unsafe { mapping.unmap() };
                }
            }
        }
    }
}

impl Drop for Gpu {
    fn drop(&mut self) {
        // SAFETY: the last handle is gone, and so is every buffer, event and kernel; the streams are drained first. An
        // error here cannot be reported: the process is exiting or the device is lost.
        unsafe {
            let _ = result::ctx::set_current(self.context);
            let _ = result::stream::synchronize(self.stream);
            let _ = result::stream::synchronize(self.copies);
            let _ = result::stream::destroy(self.copies);
            if self.given.is_none() {
                let _ = result::mem_pool::destroy(self.pool);
                let _ = result::stream::destroy(self.stream);
            }
            let _ = result::primary_ctx::release(self.device);
        }
    }
}

impl fmt::Debug for Gpu {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Device({}: {})", self.info.ordinal, self.info.name)
    }
}

/// Creates a memory pool that keeps freed memory, because every training step allocates the same sizes.
fn create_pool(ordinal: usize) -> Result<sys::CUmemoryPool> {
    let props = sys::CUmemPoolProps {
        allocType: sys::CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED,
        handleTypes: sys::CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_NONE,
        location: sys::CUmemLocation {
            type_: sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE,
            id: ordinal as i32,
        },
        win32SecurityAttributes: std::ptr::null_mut(),
        maxSize: 0,
        usage: 0,
        reserved: [0; 54],
    };
    let mut keep = u64::MAX;
    // SAFETY: the properties are complete; the attribute has 64 bits and is read during the call.
    unsafe {
        let pool = named("cuMemPoolCreate", result::mem_pool::create(&props))?;
        let set = result::mem_pool::set_attribute(
            pool,
            sys::CUmemPool_attribute::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD,
            (&raw mut keep).cast(),
        );
        named("cuMemPoolSetAttribute", set).inspect_err(|_| {
            let _ = result::mem_pool::destroy(pool);
        })?;
        Ok(pool)
    }
}

/// The memory of the device whose context is current. The driver reports how much memory is in use, but not by which
/// process. At this time this process uses only its context.
fn room() -> Option<Room> {
    /// An upper bound of the memory of a CUDA context.
    const CONTEXT: usize = 1 << 30;
    let (free, total_bytes) = result::mem_get_info().ok()?;
    Some(Room { total_bytes, others_bytes: total_bytes.saturating_sub(free).saturating_sub(CONTEXT) })
}
