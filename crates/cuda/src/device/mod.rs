//! An opened GPU: its loaded kernels, events, arenas and copies.
//!
//! All work is issued on the device's first stream, so that a buffer freed after a launch is reused only by later work.
//! The second stream only copies data to the host ([`download`]). These calls wait: [`Device::synchronize`],
//! [`Buffer::download`](crate::Buffer::download), the end of an asynchronous download, [`Event::elapsed_ms`], and an
//! upload if megabytes of earlier uploads are still in flight.

pub mod arena;
pub mod buf;
pub mod buffer;
pub mod download;
pub(crate) mod event;
pub mod given;
pub(crate) mod gpu;
pub(crate) mod kept;
mod landing;
mod mapping;
pub mod pinned;
pub mod recording;
mod staging;
pub mod workspace;

pub use crate::device::event::Event;

use crate::compile::jit::{Cubin, Jit, KernelSpec};
use crate::device::arena::{Entered, UsedArenas};
use crate::device::given::Given;
use crate::device::gpu::Gpu;
use crate::device::kept::{Block, Kept, Recordings};
use crate::device::landing::Landing;
use crate::device::staging::Staging;
use crate::driver::{check, failed, named};
use crate::probe::GpuInfo;
use cudarc::driver::{result, sys};
use nibble_core::{Error, MemoryStats, Result, Room, Scope, TrafficCounter};
use std::collections::HashMap;
use std::ffi::CString;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

/// A handle of an opened GPU; clones share the device.
#[derive(Clone)]
pub struct Device {
    inner: Arc<Inner>,
}

struct Inner {
    /// Dropped before the GPU, which keeps their context.
    modules: Arc<Modules>,
    gpu: Arc<Gpu>,
    jit: Arc<Jit>,
    /// Zeroed words of the pool, from which counters are allocated.
    zeros: Mutex<Option<(Arc<PooledZeros>, usize)>>,
    /// Pinned memory for copies; the first copy allocates it.
    staging: Mutex<Option<Staging>>,
    /// Pinned memory of asynchronous downloads.
    landings: Mutex<Vec<Landing>>,
    /// The arena in which a thread allocates, if any.
    scope: Scope<Entered>,
    /// The arenas from which the recording in progress allocates.
    used_arenas: UsedArenas,
    traffic: TrafficCounter,
    launches: Mutex<Option<Launches>>,
}

/// Loaded kernels by instance and not by content key, because computing the key takes longer than a launch, and sources do not change
/// while a device is open. Devices that were opened from one another share them.
#[derive(Default)]
struct Modules(Mutex<HashMap<KernelSpec, Arc<Module>>>);

impl Drop for Modules {
    fn drop(&mut self) {
        for (_, module) in self.0.get_mut().unwrap_or_else(PoisonError::into_inner).drain() {
            // SAFETY: the last device that shared the kernels has drained its stream, as the others did before, and its context is
            // current. An error here cannot be reported.
            let _ = unsafe { result::module::unload(module.module) };
        }
    }
}

/// Zeroed words of the pool. `PooledZeros` contains no handle of the device, because the device
/// contains it.
pub(crate) struct PooledZeros {
    pub block: Block,
    /// The number of recordings that had finished when the words were allocated.
    pub born: u64,
}

/// A kernel that an operation launched.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Launched {
    /// The operation's name, as in [`nibble_core::ops`].
    pub op: &'static str,
    /// The kernel's name, without its template arguments.
    pub kernel: &'static str,
}

/// The launches noted so far, and the operation under which further launches are noted.
#[derive(Default)]
pub(crate) struct Launches {
    op: Option<&'static str>,
    pub(crate) all: Vec<Launched>,
}

/// A loaded kernel instance, which is unloaded with the device.
pub(crate) struct Module {
    module: sys::CUmodule,
    pub(crate) function: sys::CUfunction,
    /// Size of each parameter in bytes, as the cubin declares it.
    pub(crate) param_bytes: Vec<usize>,
    /// The most dynamic shared memory that the function has been allowed so far, in bytes.
    pub(crate) shared_bytes: Mutex<i32>,
    /// How many clusters the device runs at once, for the first launch shape that was queried.
    pub(crate) max_clusters: OnceLock<((u32, u32, usize), u32)>,
}

// SAFETY: these are driver handles that are used with the context current.
unsafe impl Send for Module {}
// SAFETY: these are driver handles that are used with the context current.
unsafe impl Sync for Module {}

impl fmt::Debug for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Device({}: {})", self.inner.gpu.info.ordinal, self.inner.gpu.info.name)
    }
}

impl Device {
    /// Opens a GPU; the environment variables configure its kernels ([`Jit::from_env`]).
    pub fn open(ordinal: usize) -> Result<Self> {
        Self::with_jit(ordinal, Jit::from_env()?)
    }

    /// Opens a GPU with this compiler. An error says what is missing: the driver, the GPU, or compute capability 9.0.
    pub fn with_jit(ordinal: usize, jit: impl Into<Arc<Jit>>) -> Result<Self> {
        Self::opened(ordinal, None, jit.into(), Arc::default())
    }

    /// Opens a GPU for work on a stream of another library in this process, among that library's work. Buffers outside arenas are the
    /// allocator's memory.
    ///
    /// # Errors
    /// The errors of [`Device::with_jit`].
    pub fn on_stream(ordinal: usize, given: Given, jit: impl Into<Arc<Jit>>) -> Result<Self> {
        Self::opened(ordinal, Some(given), jit.into(), Arc::default())
    }

    fn opened(ordinal: usize, given: Option<Given>, jit: Arc<Jit>, modules: Arc<Modules>) -> Result<Self> {
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
        let inner = Inner {
            modules,
            gpu: Arc::new(Gpu::open(info, given)?),
            jit,
            zeros: Mutex::default(),
            staging: Mutex::default(),
            landings: Mutex::default(),
            scope: Scope::default(),
            used_arenas: UsedArenas::default(),
            traffic: TrafficCounter::default(),
            launches: Mutex::default(),
        };
        Ok(Self { inner: Arc::new(inner) })
    }

    /// Opens the same GPU again, with separate streams and a separate memory pool. The old and the new device share loaded kernels. The
    /// context belongs to the process, so an error that corrupts the context affects both.
    pub fn reopened(&self) -> Result<Self> {
        Self::opened(self.info().ordinal, None, self.inner.jit.clone(), self.inner.modules.clone())
    }

    /// Opens the same GPU again on another stream, as [`Device::on_stream`] does. The old and the new device share loaded kernels.
    ///
    /// # Errors
    /// The errors of [`Device::with_jit`].
    pub fn reopened_on(&self, given: Given) -> Result<Self> {
        Self::opened(self.info().ordinal, Some(given), self.inner.jit.clone(), self.inner.modules.clone())
    }

    /// Properties of the GPU.
    pub fn info(&self) -> &GpuInfo {
        &self.inner.gpu.info
    }

    /// Whether both handles refer to the same opened device.
    pub fn is_same(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.inner, &other.inner)
    }

    /// Bytes in live buffers.
    pub fn memory(&self) -> MemoryStats {
        self.inner.gpu.memory()
    }

    /// The number of bytes of device memory that all processes together use now.
    pub fn in_use(&self) -> Option<usize> {
        self.inner.gpu.in_use()
    }

    /// The size of the device memory, and the number of bytes that other processes used when the device was opened.
    pub fn room(&self) -> Option<Room> {
        self.inner.gpu.room
    }

    /// The first stream, after making the context current on this thread.
    pub(crate) fn stream(&self) -> Result<sys::CUstream> {
        self.inner.gpu.stream()
    }

    /// Waits for all work issued so far, and reports its errors. The call does not wait for copies to the host that
    /// are in flight.
    ///
    /// # Errors
    /// [`Error::Device`], also while work is being recorded.
    pub fn synchronize(&self) -> Result<()> {
        self.inner.gpu.synchronize()
    }

    /// The stream for copies to the host.
    pub(crate) fn copies(&self) -> sys::CUstream {
        self.inner.gpu.copies
    }

    /// The opened GPU, which arenas keep alive.
    pub(crate) fn gpu(&self) -> &Arc<Gpu> {
        &self.inner.gpu
    }

    /// The owner of the first stream and of the memory of buffers, if these are another library's.
    pub(crate) fn given(&self) -> Option<&Given> {
        self.inner.gpu.given.as_ref()
    }

    /// Whether another library that owns the first stream is capturing its work.
    ///
    /// # Errors
    /// [`Error::Device`] if the driver does not say.
    pub fn is_captured(&self) -> Result<bool> {
        self.inner.gpu.bind()?;
        self.given().map_or(Ok(false), Given::is_capturing)
    }

    /// Runs a pass of a layer on this thread. If the stream is another library's, all buffers that do not outlive the pass share one
    /// allocation of that library's, from the second pass of a key on. `key` stands for everything on which the pass's allocations depend:
    /// the layer, its recipe, its sizes.
    ///
    /// # Errors
    /// Passes on errors of `run` and of the allocator.
    pub fn pass<R>(&self, key: u64, run: impl FnOnce() -> Result<R>) -> Result<R> {
        match self.given() {
            // Counters are allocated in another way in a capture.
            Some(given) => given.memory.pass(key.wrapping_add(self.is_captured()?.into()), run),
            None => run(),
        }
    }

    pub(crate) fn pool(&self) -> sys::CUmemoryPool {
        self.inner.gpu.pool
    }

    pub(crate) fn zeros(&self) -> &Mutex<Option<(Arc<PooledZeros>, usize)>> {
        &self.inner.zeros
    }

    pub(crate) fn landings(&self) -> MutexGuard<'_, Vec<Landing>> {
        self.inner.landings.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The arena in which a thread allocates, if any.
    pub(crate) fn scope(&self) -> &Scope<Entered> {
        &self.inner.scope
    }

    pub(crate) fn recordings(&self) -> &Recordings {
        &self.inner.gpu.recordings
    }

    /// The arenas from which the recording in progress allocates.
    pub(crate) fn used_arenas(&self) -> &UsedArenas {
        &self.inner.used_arenas
    }

    /// The launches noted so far; `None` if launches are not being noted.
    pub(crate) fn launches(&self) -> MutexGuard<'_, Option<Launches>> {
        self.inner.launches.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes a launch, if launches are being noted.
    pub(crate) fn note_launch(&self, kernel: &'static str) {
        if let Some(launches) = &mut *self.launches() {
            launches.all.push(Launched { op: launches.op.unwrap_or(kernel), kernel });
        }
    }

    /// Runs an operation. Meanwhile launches are noted under the operation's name; nested operations count
    /// as the outer operation.
    pub(crate) fn for_op<R>(&self, op: &'static str, run: impl FnOnce() -> R) -> R {
        let outermost = match &mut *self.launches() {
            Some(launches) if launches.op.is_none() => launches.op.replace(op).is_none(),
            _ => false,
        };
        let result = run();
        if outermost && let Some(launches) = &mut *self.launches() {
            launches.op = None;
        }
        result
    }

    /// Counters of bytes copied between host and device.
    pub fn traffic(&self) -> &TrafficCounter {
        &self.inner.traffic
    }

    pub(crate) fn count_live(&self, bytes: usize) {
        self.inner.gpu.count_live(bytes);
    }

    pub(crate) fn uncount_live(&self, bytes: usize) {
        self.inner.gpu.uncount_live(bytes);
    }

    /// Returns an error while work is being recorded.
    pub(crate) fn not_recording(&self, call: &str) -> Result<()> {
        self.inner.gpu.not_recording(call)
    }

    /// Frees memory as soon as no recording is left that may use the memory. The memory was allocated when `born` recordings had finished.
    pub(crate) fn give_back(&self, born: u64, kept: Kept) {
        self.inner.gpu.give_back(born, kept);
    }

    /// Runs a copy through pinned memory. Returns an error while work is being recorded, because a recording
    /// cannot contain such a copy.
    pub(crate) fn with_staging<R>(
        &self,
        call: &str,
        copy: impl FnOnce(&mut Staging) -> Result<R>,
    ) -> Result<R> {
        self.not_recording(call)?;
        let mut staging = self.inner.staging.lock().unwrap_or_else(PoisonError::into_inner);
        if staging.is_none() {
            *staging = Some(Staging::new()?);
        }
        // The staging memory was allocated above if it was missing.
        copy(staging.as_mut().expect("staging memory"))
    }

    /// Records an event in the stream now.
    pub fn event(&self) -> Result<Event> {
        let event = Event::new(self)?;
        event.set(self.stream()?)?;
        Ok(event)
    }

    /// Returns the instance, which is compiled and loaded on first use. A cubin that the driver refuses
    /// is compiled again once.
    pub(crate) fn module(&self, spec: &KernelSpec) -> Result<Arc<Module>> {
        self.inner.gpu.bind()?;
        let mut modules = self.inner.modules.0.lock().unwrap_or_else(PoisonError::into_inner);
        match modules.get(spec) {
            Some(module) => Ok(module.clone()),
            None if self.is_captured()? => {
                let why = "it is not loaded yet: run the operation once before the stream's work is captured";
                Err(failed(format!("capture of {spec}"), why))
            }
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
                Ok(module)
            }
        }
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        // An error here cannot be reported: the process is exiting or the device is lost.
        let Ok(stream) = self.gpu.stream() else { return };
        // SAFETY: the last handle is gone, and so is every buffer and event; the streams are drained first. The kernels are unloaded and the
        // GPU is closed afterwards, or with the last device that shares them and with the last arena.
        unsafe {
            let _ = result::stream::synchronize(stream);
            let _ = result::stream::synchronize(self.gpu.copies);
        }
        if let Some((words, _)) = self.zeros.get_mut().unwrap_or_else(PoisonError::into_inner).take()
            && let Some(PooledZeros { block, .. }) = Arc::into_inner(words)
        {
            self.gpu.free(Kept::Pooled { block, counted: 0 });
        }
        self.landings.get_mut().unwrap_or_else(PoisonError::into_inner).clear();
        drop(self.staging.get_mut().unwrap_or_else(PoisonError::into_inner).take());
    }
}

impl Module {
    /// Loads a cubin. The context must be current.
    fn load(cubin: &Cubin, num_arguments: usize) -> Result<Self> {
        let symbol =
            CString::new(cubin.symbol.as_str()).map_err(|error| failed("cuModuleGetFunction", error))?;
        // SAFETY: the image is a whole ELF file, which contains its own length; the cache's digest excludes damaged
        // files.
        let module =
            named("cuModuleLoadData", unsafe { result::module::load_data(cubin.image.as_ptr().cast()) })?;
        // SAFETY: `module` was just loaded.
        let function = named("cuModuleGetFunction", unsafe { result::module::get_function(module, symbol) });
        let function = function.and_then(|function| Ok((function, param_bytes(function, num_arguments)?)));
        let (function, param_bytes) = function.inspect_err(|_| {
            // SAFETY: the module was loaded above and is not used.
            let _ = unsafe { result::module::unload(module) };
        })?;
        let shared_bytes = Mutex::new(0);
        Ok(Self { module, function, param_bytes, shared_bytes, max_clusters: OnceLock::new() })
    }
}

/// The sizes of a kernel's parameters in bytes. The caller passes the number of parameters, because drivers before
/// 13.1 do not report it, and memory checkers report an index past the last parameter as an error.
fn param_bytes(function: sys::CUfunction, num_arguments: usize) -> Result<Vec<usize>> {
    (0..num_arguments)
        .map(|index| {
            let (mut offset, mut bytes) = (0, 0);
            // SAFETY: the function is alive, any index is allowed, and the call writes two sizes.
            let code = unsafe { sys::cuFuncGetParamInfo(function, index, &mut offset, &mut bytes) };
            check("cuFuncGetParamInfo", code).map(|()| bytes)
        })
        .collect()
}
