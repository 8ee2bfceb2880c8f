//! A GPU: its context, one stream, a memory pool ordered by that stream, events, and loaded kernels.
//!
//! Everything is issued on the device's one stream, so that a buffer freed after a launch is reused only by what comes
//! later. Calls that wait: [`Device::synchronize`], [`Buffer::download`] and [`Event::elapsed_ms`]; and an upload, where
//! megabytes of others before it are still on their way.

use crate::driver::{check, failed, named};
use crate::graph::GraphMemory;
use crate::jit::{Cubin, Jit, KernelSpec};
use crate::launch::Kernel;
use crate::probe::GpuInfo;
use crate::staging::Staging;
use bytemuck::Pod;
use cudarc::driver::{result, sys};
use nibble_core::{Error, MemoryStats, Result};
use std::collections::HashMap;
use std::ffi::CString;
use std::fmt;
use std::marker::PhantomData;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

/// A handle; clones share the device.
#[derive(Clone)]
pub struct Device {
    inner: Arc<Inner>,
}

struct Inner {
    info: GpuInfo,
    device: sys::CUdevice,
    context: sys::CUcontext,
    stream: sys::CUstream,
    pool: sys::CUmemoryPool,
    jit: Jit,
    /// By instance and not by content, which takes longer to find than a launch: sources do not change while a device is open.
    modules: Mutex<HashMap<KernelSpec, Arc<Module>>>,
    /// Zeroed words that counters are cut from.
    zeros: Mutex<Option<(Arc<ZeroWords>, usize)>>,
    /// Made by the first copy.
    staging: Mutex<Option<Staging>>,
    /// Where memory comes from while work is recorded.
    recording: Mutex<Option<Arc<GraphMemory>>>,
    live_bytes: AtomicUsize,
    peak_bytes: AtomicUsize,
}

// SAFETY: the driver's handles may be used from any thread once the context is current there, which every method here
// sees to first; what is mutable on this side is behind a mutex or atomic.
unsafe impl Send for Inner {}
// SAFETY: as above.
unsafe impl Sync for Inner {}

/// A loaded instance; unloaded with the device.
pub(crate) struct Module {
    module: sys::CUmodule,
    pub(crate) function: sys::CUfunction,
    /// Size of each parameter in bytes, as the cubin declares it.
    pub(crate) param_bytes: Vec<usize>,
    /// Clusters the device holds at once, for the launch shape first asked about.
    pub(crate) max_clusters: OnceLock<((u32, u32, usize), u32)>,
}

// SAFETY: as for `Inner`: handles, used with the context current.
unsafe impl Send for Module {}
// SAFETY: as above.
unsafe impl Sync for Module {}

impl fmt::Debug for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Device({}: {})", self.inner.info.ordinal, self.inner.info.name)
    }
}

impl Device {
    /// Opens a GPU, with kernels as the environment says ([`Jit::from_env`]).
    pub fn open(ordinal: usize) -> Result<Self> {
        Self::with_jit(ordinal, Jit::from_env()?)
    }

    /// Opens a GPU. An error names what is missing: the driver, the GPU, or its being a Hopper.
    pub fn with_jit(ordinal: usize, jit: Jit) -> Result<Self> {
        let found = crate::probe();
        found.driver.as_ref().map_err(|why| failed("Device::open", why))?;
        let info = found.gpus.iter().find(|gpu| gpu.ordinal == ordinal).cloned();
        let info = info.ok_or_else(|| {
            Error::shape("Device::open", "ordinal", ordinal, format!("one of {} GPUs", found.gpus.len()))
        })?;
        if info.compute_capability != (9, 0) {
            let (major, minor) = info.compute_capability;
            return Err(failed(
                "Device::open",
                format!("{} is {major}.{minor}; the kernels need 9.0", info.name),
            ));
        }
        let device = named("cuDeviceGet", result::device::get(ordinal as i32))?;
        // SAFETY: `device` was given by the driver; the context is made current before anything is created in it, and
        // all of it is given back in `Inner::drop`, in the opposite order.
        unsafe {
            let context = named("cuDevicePrimaryCtxRetain", result::primary_ctx::retain(device))?;
            let made = named("cuCtxSetCurrent", result::ctx::set_current(context))
                .and_then(|()| {
                    named("cuStreamCreate", result::stream::create(result::stream::StreamKind::NonBlocking))
                })
                .and_then(|stream| Ok((stream, create_pool(ordinal)?)));
            let (stream, pool) = made.inspect_err(|_| {
                // The first error is the one to report.
                let _ = result::primary_ctx::release(device);
            })?;
            let inner = Inner {
                info,
                device,
                context,
                stream,
                pool,
                jit,
                modules: Mutex::default(),
                zeros: Mutex::default(),
                staging: Mutex::default(),
                recording: Mutex::default(),
                live_bytes: AtomicUsize::new(0),
                peak_bytes: AtomicUsize::new(0),
            };
            Ok(Self { inner: Arc::new(inner) })
        }
    }

    /// What the GPU is.
    pub fn info(&self) -> &GpuInfo {
        &self.inner.info
    }

    /// Whether two handles are of one opened device.
    pub fn is_same(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.inner, &other.inner)
    }

    /// Bytes in live buffers.
    pub fn memory(&self) -> MemoryStats {
        MemoryStats {
            live_bytes: self.inner.live_bytes.load(Ordering::Relaxed),
            peak_bytes: self.inner.peak_bytes.load(Ordering::Relaxed),
            total_bytes: self
                .inner
                .bind()
                .ok()
                .and_then(|()| result::mem_get_info().ok())
                .map(|(_, total)| total),
        }
    }

    /// The stream, with the context made current on this thread.
    pub(crate) fn stream(&self) -> Result<sys::CUstream> {
        self.inner.bind()?;
        Ok(self.inner.stream)
    }

    /// Waits for everything issued so far, and reports what went wrong in it.
    pub fn synchronize(&self) -> Result<()> {
        // SAFETY: the stream lives as long as `self`.
        named("cuStreamSynchronize", unsafe { result::stream::synchronize(self.stream()?) })
    }

    /// A buffer whose content is undefined: for outputs that a kernel writes in full.
    pub fn alloc<T: Pod>(&self, len: usize) -> Result<Buffer<T>> {
        let bytes = len
            .checked_mul(size_of::<T>())
            .ok_or_else(|| Error::shape("Device::alloc", "len", len, "a size in bytes below 2^64"))?;
        let stream = self.stream()?;
        let recording = self.recording().clone();
        let (address, memory) = match recording {
            Some(graph) => (graph.alloc(bytes)?, Memory::Graph(graph)),
            None => {
                // The driver has no empty allocations; one byte stands for them.
                // SAFETY: pool and stream live as long as the device, which the buffer keeps.
                let address = unsafe { result::mem_pool::alloc_async(self.inner.pool, bytes.max(1), stream) };
                self.count_live(bytes);
                let address = named(&format!("cuMemAllocFromPoolAsync({bytes} bytes)"), address)
                    .inspect_err(|_| self.uncount_live(bytes))?;
                (address, Memory::Pool)
            }
        };
        Ok(Buffer { address, len, memory, device: self.clone(), element: PhantomData })
    }

    /// A few words of zeros, without a fill of their own: counters of a conversion. Recorded work fills its own, at each launch.
    pub(crate) fn counters(&self, len: usize) -> Result<Buffer<u64>> {
        if len > ZEROS || self.recording().is_some() {
            return self.filled(len, 0);
        }
        let stream = self.stream()?;
        let mut zeros = self.inner.zeros.lock().unwrap_or_else(PoisonError::into_inner);
        let (words, first) = match zeros.take().filter(|(_, used)| used + len <= ZEROS) {
            Some(left) => left,
            None => {
                let bytes = ZEROS * size_of::<u64>();
                // SAFETY: pool and stream are alive; the range is that of the allocation.
                let words = unsafe {
                    let address = result::mem_pool::alloc_async(self.inner.pool, bytes, stream);
                    let address = named("cuMemAllocFromPoolAsync", address)?;
                    let words = ZeroWords { address, stream };
                    named("cuMemsetD8Async", result::memset_d8_async(address, 0, bytes, stream))?;
                    words
                };
                (Arc::new(words), 0)
            }
        };
        let address = words.address + (first * size_of::<u64>()) as u64;
        let memory = Memory::Zeros(words.clone());
        *zeros = Some((words, first + len));
        Ok(Buffer { address, len, memory, device: self.clone(), element: PhantomData })
    }

    pub(crate) fn count_live(&self, bytes: usize) {
        let live = self.inner.live_bytes.fetch_add(bytes, Ordering::Relaxed) + bytes;
        self.inner.peak_bytes.fetch_max(live, Ordering::Relaxed);
    }

    pub(crate) fn uncount_live(&self, bytes: usize) {
        self.inner.live_bytes.fetch_sub(bytes, Ordering::Relaxed);
    }

    fn recording(&self) -> MutexGuard<'_, Option<Arc<GraphMemory>>> {
        self.inner.recording.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Begins or ends a recording.
    pub(crate) fn set_recording(&self, memory: Option<Arc<GraphMemory>>) -> Result<()> {
        let mut recording = self.recording();
        if memory.is_some() && recording.is_some() {
            return Err(failed("Device::capture", "a recording is under way"));
        }
        *recording = memory;
        Ok(())
    }

    /// Copies go through the host now, which a recording cannot hold.
    fn with_staging<R>(&self, call: &str, copy: impl FnOnce(&mut Staging) -> Result<R>) -> Result<R> {
        if self.recording().is_some() {
            return Err(failed(call, "not while work is being recorded"));
        }
        let mut staging = self.inner.staging.lock().unwrap_or_else(PoisonError::into_inner);
        if staging.is_none() {
            *staging = Some(Staging::new()?);
        }
        // Just made, if it was not there.
        copy(staging.as_mut().expect("staging memory"))
    }

    /// A buffer with every byte set to `byte`: 0, or a poison.
    pub fn filled<T: Pod>(&self, len: usize, byte: u8) -> Result<Buffer<T>> {
        let mut buffer = self.alloc(len)?;
        buffer.fill(byte)?;
        Ok(buffer)
    }

    /// A buffer with these values; the slice may be reused when this returns.
    pub fn upload<T: Pod>(&self, values: &[T]) -> Result<Buffer<T>> {
        let mut buffer = self.alloc(values.len())?;
        buffer.write(values)?;
        Ok(buffer)
    }

    /// A point in the stream, marked now.
    pub fn event(&self) -> Result<Event> {
        let stream = self.stream()?;
        let event = named("cuEventCreate", result::event::create(sys::CUevent_flags::CU_EVENT_DEFAULT))?;
        let event = Event { event, device: self.clone() };
        // SAFETY: event and stream are alive and of one context.
        named("cuEventRecord", unsafe { result::event::record(event.event, stream) })?;
        Ok(event)
    }

    /// The kernel, compiled and loaded if this is its first use. A cubin the driver refuses is built again, once.
    pub fn kernel(&self, spec: &KernelSpec) -> Result<Kernel> {
        self.inner.bind()?;
        let mut modules = self.inner.modules.lock().unwrap_or_else(PoisonError::into_inner);
        let module = match modules.get(spec) {
            Some(module) => module.clone(),
            None => {
                let num_arguments = self.inner.jit.num_arguments(spec)?;
                let cubin = self.inner.jit.cubin(spec)?;
                let module = match Module::load(&cubin, num_arguments) {
                    Ok(module) => module,
                    Err(_) => Module::load(&*self.inner.jit.rebuild(spec)?, num_arguments)
                        .map_err(|error| Error::Jit { kernel: spec.to_string(), log: error.to_string() })?,
                };
                let module = Arc::new(module);
                modules.insert(spec.clone(), module.clone());
                module
            }
        };
        Ok(Kernel { spec: spec.clone(), module, device: self.clone() })
    }
}

/// A pool of this backend's own that keeps what it was given: a training step allocates the same sizes again.
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
    // SAFETY: the properties are complete; the attribute is 64 bits and is read during the call.
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

impl Inner {
    fn bind(&self) -> Result<()> {
        // SAFETY: the context is retained until `drop`.
        named("cuCtxSetCurrent", unsafe { result::ctx::set_current(self.context) })
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        // SAFETY: the last handle is gone, and with it every buffer, event and kernel; the stream is drained first. An
        // error here has nobody to go to: the process is shutting down or the device is lost.
        unsafe {
            let _ = result::ctx::set_current(self.context);
            let _ = result::stream::synchronize(self.stream);
            drop(self.zeros.get_mut().unwrap_or_else(PoisonError::into_inner).take());
            drop(self.staging.get_mut().unwrap_or_else(PoisonError::into_inner).take());
            for (_, module) in self.modules.get_mut().unwrap_or_else(PoisonError::into_inner).drain() {
                let _ = result::module::unload(module.module);
            }
            let _ = result::mem_pool::destroy(self.pool);
            let _ = result::stream::destroy(self.stream);
            let _ = result::primary_ctx::release(self.device);
        }
    }
}

impl Module {
    /// With the context current.
    fn load(cubin: &Cubin, num_arguments: usize) -> Result<Self> {
        let symbol =
            CString::new(cubin.symbol.as_str()).map_err(|error| failed("cuModuleGetFunction", error))?;
        // SAFETY: the image is a whole ELF file, which carries its own length; damage is kept out by the cache's digest.
        let module =
            named("cuModuleLoadData", unsafe { result::module::load_data(cubin.image.as_ptr().cast()) })?;
        // SAFETY: `module` was just loaded.
        let function = named("cuModuleGetFunction", unsafe { result::module::get_function(module, symbol) });
        let function = function.and_then(|function| Ok((function, param_bytes(function, num_arguments)?)));
        let (function, param_bytes) = function.inspect_err(|_| {
            // SAFETY: loaded above and used by nobody.
            let _ = unsafe { result::module::unload(module) };
        })?;
        Ok(Self { module, function, param_bytes, max_clusters: OnceLock::new() })
    }
}

/// The sizes of a kernel's parameters. Their number is the caller's: the driver has no count of them before 13.1, and an
/// index past the last is an error that memory checkers report.
fn param_bytes(function: sys::CUfunction, num_arguments: usize) -> Result<Vec<usize>> {
    (0..num_arguments)
        .map(|index| {
            let (mut offset, mut bytes) = (0, 0);
            // SAFETY: a live function; any index is allowed; writes two sizes.
            let code = unsafe { sys::cuFuncGetParamInfo(function, index, &mut offset, &mut bytes) };
            check("cuFuncGetParamInfo", code).map(|()| bytes)
        })
        .collect()
}

/// A typed allocation. Dropping it frees the bytes once the stream has come so far.
pub struct Buffer<T: Pod> {
    address: sys::CUdeviceptr,
    len: usize,
    /// Given back before the device's handle is.
    memory: Memory,
    device: Device,
    element: PhantomData<T>,
}

/// Where a buffer's bytes are from.
enum Memory {
    /// The pool: freed by the buffer.
    Pool,
    /// A recorded graph's.
    Graph(Arc<GraphMemory>),
    /// Cut from zeroed words, which outlive it.
    Zeros(#[expect(dead_code, reason = "kept, not read")] Arc<ZeroWords>),
}

/// Zeroed words that are handed out once each. Without a handle of the device, which holds one of these: freed by the last
/// buffer that was cut from it, or by the device.
struct ZeroWords {
    address: sys::CUdeviceptr,
    stream: sys::CUstream,
}

// SAFETY: an address and a driver's handle, used with the context current.
unsafe impl Send for ZeroWords {}
// SAFETY: as above.
unsafe impl Sync for ZeroWords {}

impl Drop for ZeroWords {
    fn drop(&mut self) {
        // SAFETY: allocated from the pool and freed once, behind everything issued that may use it; whoever holds the last
        // handle, a buffer or the device itself, still keeps the stream alive. An error has nobody to go to.
        let _ = unsafe { result::free_async(self.address, self.stream) };
    }
}

/// Words zeroed at a time: enough for the conversions of a training step.
const ZEROS: usize = 6 << 10;

impl<T: Pod> Buffer<T> {
    /// Number of values.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Size in bytes.
    pub fn bytes(&self) -> usize {
        self.len * size_of::<T>()
    }

    /// Where it is on the device.
    pub fn address(&self) -> u64 {
        self.address
    }

    /// The field itself: a launch passes a pointer to it.
    pub(crate) fn address_ref(&self) -> &u64 {
        &self.address
    }

    /// The device it is on.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Sets every byte, after everything issued so far.
    pub fn fill(&mut self, byte: u8) -> Result<()> {
        let stream = self.device.stream()?;
        // SAFETY: the range is the buffer's, and any bytes are a value of a `Pod`.
        let set = unsafe { result::memset_d8_async(self.address, byte, self.bytes(), stream) };
        named("cuMemsetD8Async", set)
    }

    /// Another buffer with the same values.
    pub fn copied(&self) -> Result<Self> {
        let copy = self.device.alloc(self.len)?;
        let stream = self.device.stream()?;
        // SAFETY: both ranges are whole buffers of one size, alive until the stream has passed the copy.
        let copied = unsafe { result::memcpy_dtod_async(copy.address, self.address, self.bytes(), stream) };
        named("cuMemcpyDtoDAsync", copied)?;
        Ok(copy)
    }

    /// Overwrites the values, after everything issued so far; the slice may be reused when this returns.
    ///
    /// # Errors
    /// [`Error::Shape`] unless there are as many.
    pub fn write(&mut self, values: &[T]) -> Result<()> {
        if values.len() != self.len {
            let expected = format!("the buffer's {}", self.len);
            return Err(Error::shape("Buffer::write", "values.len()", values.len(), expected));
        }
        let stream = self.device.stream()?;
        // SAFETY: as many bytes as the buffer has, which is freed behind the copy in the stream.
        self.device.with_staging("Buffer::write", |staging| unsafe {
            staging.upload(self.address, bytemuck::cast_slice(values), stream)
        })
    }

    /// The values, after everything issued so far.
    pub fn download(&self) -> Result<Vec<T>> {
        let mut values = vec![T::zeroed(); self.len];
        let stream = self.device.stream()?;
        // SAFETY: as many bytes as the buffer has.
        self.device.with_staging("Buffer::download", |staging| unsafe {
            staging.download(bytemuck::cast_slice_mut(&mut values), self.address, stream)
        })?;
        Ok(values)
    }
}

impl<T: Pod> fmt::Debug for Buffer<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Buffer<{}>[{}]", std::any::type_name::<T>(), self.len)
    }
}

impl<T: Pod> Drop for Buffer<T> {
    fn drop(&mut self) {
        match &self.memory {
            Memory::Graph(graph) => graph.release(self.address, self.bytes()),
            // The words may go with it: they want the context current.
            Memory::Zeros(_) => drop(self.device.stream()),
            Memory::Pool => {
                // What is being recorded may use it at every launch.
                if let Some(graph) = &*self.device.recording() {
                    return graph.keep(self.address, self.bytes());
                }
                self.device.uncount_live(self.bytes());
                if let Ok(stream) = self.device.stream() {
                    // SAFETY: allocated from this device's pool and freed once, after everything issued that may use it. A
                    // failure means the context is lost, and the memory with it.
                    let _ = unsafe { result::free_async(self.address, stream) };
                }
            }
        }
    }
}

/// A marked point in the stream.
pub struct Event {
    event: sys::CUevent,
    device: Device,
}

// SAFETY: a driver's handle, used with the context current.
unsafe impl Send for Event {}

impl Event {
    /// Milliseconds from `earlier` to this point, waiting until the device has passed it.
    pub fn elapsed_ms(&self, earlier: &Event) -> Result<f32> {
        self.device.inner.bind()?;
        // SAFETY: both events are alive and recorded.
        unsafe {
            named("cuEventSynchronize", result::event::synchronize(self.event))?;
            named("cuEventElapsedTime", result::event::elapsed(earlier.event, self.event))
        }
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        if self.device.inner.bind().is_ok() {
            // SAFETY: created once, destroyed once; the driver allows it before the event has passed.
            let _ = unsafe { result::event::destroy(self.event) };
        }
    }
}
