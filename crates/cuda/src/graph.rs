//! Work recorded once and issued again as a whole: a training step's hundreds of launches become one.
//!
//! Memory asked for while recording comes from blocks of the graph's own, at addresses that stay: what is dropped during
//! the recording is reused within it, as on the stream.

use crate::device::Device;
use crate::driver::{check, named};
use cudarc::driver::{result, sys};
use nibble_core::{Error, Result};
use std::collections::HashMap;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::{Arc, Mutex, PoisonError};

/// Recorded work and what it returned: buffers that each launch writes anew.
pub struct Graph<R> {
    exec: sys::CUgraphExec,
    graph: sys::CUgraph,
    /// What the recorded work returned.
    pub outputs: R,
    memory: Arc<GraphMemory>,
    device: Device,
}

// SAFETY: the driver's handles may be used from any thread once the context is current there, which every method sees to.
unsafe impl<R: Send> Send for Graph<R> {}

impl<R> fmt::Debug for Graph<R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Graph({:?}, {} bytes)", self.device, self.memory.bytes())
    }
}

impl Device {
    /// Records the work of `work`, which issues to this device from this thread alone and waits for nothing: no upload, no
    /// download. It runs twice: once for real, so that its kernels are compiled and loaded, and once to be recorded. A device has
    /// one stream: what other threads issue to it meanwhile is recorded too, or refused.
    ///
    /// # Errors
    /// What `work` returns; [`Error::Device`] if it does what cannot be recorded, or a recording is under way.
    pub fn capture<R>(&self, mut work: impl FnMut() -> Result<R>) -> Result<Graph<R>> {
        drop(work()?);
        let memory = Arc::new(GraphMemory { device: self.clone(), blocks: Mutex::default() });
        self.set_recording(Some(memory.clone()))?;
        let recorded = self.record(&mut work);
        self.set_recording(None)?;
        let (graph, outputs) = recorded?;
        // SAFETY: the graph was just recorded.
        let exec = unsafe { result::graph::instantiate(graph, sys::CUgraphInstantiate_flags(0)) };
        let exec = named("cuGraphInstantiate", exec).inspect_err(|_| {
            // SAFETY: recorded above and used by nobody. The first error is the one to report.
            let _ = unsafe { result::graph::destroy(graph) };
        })?;
        Ok(Graph { exec, graph, outputs, memory, device: self.clone() })
    }

    fn record<R>(&self, work: &mut impl FnMut() -> Result<R>) -> Result<(sys::CUgraph, R)> {
        let stream = self.stream()?;
        // Relaxed: the blocks of the graph's memory are allocated during the recording.
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
        // SAFETY: the stream lives as long as the device.
        named("cuStreamBeginCapture", unsafe { result::stream::begin_capture(stream, mode) })?;
        // The recording is ended also where `work` panics: the device must not stay in it.
        let outputs = catch_unwind(AssertUnwindSafe(&mut *work));
        let mut graph = std::ptr::null_mut();
        // SAFETY: the recording begun above; ends it also where it was spoiled, and writes null then.
        let ended = check("cuStreamEndCapture", unsafe { sys::cuStreamEndCapture(stream, &mut graph) });
        match (outputs, ended) {
            (Ok(Ok(outputs)), Ok(())) => Ok((graph, outputs)),
            (outputs, ended) => {
                if !graph.is_null() {
                    // SAFETY: a graph of this recording, used by nobody.
                    let _ = unsafe { result::graph::destroy(graph) };
                }
                let outputs = outputs.unwrap_or_else(|panic| {
                    // The lock was free when `work` ran.
                    let _ = self.set_recording(None);
                    resume_unwind(panic)
                });
                Err(outputs.err().or(ended.err()).unwrap_or_else(|| Error::Device {
                    call: "Device::capture".to_owned(),
                    why: "nothing was recorded".to_owned(),
                }))
            }
        }
    }
}

impl<R> Graph<R> {
    /// Issues the recorded work on the device's stream.
    ///
    /// # Safety
    /// Every buffer that the work uses and did not make itself must be alive until the stream has passed it.
    pub unsafe fn launch(&self) -> Result<()> {
        // SAFETY: the graph is alive, and so is its memory; the stream orders it with everything else; the rest is the
        // caller's promise.
        named("cuGraphLaunch", unsafe { result::graph::launch(self.exec, self.device.stream()?) })
    }
}

impl<R> Drop for Graph<R> {
    fn drop(&mut self) {
        // Its memory must outlive its last launch.
        let _ = self.device.synchronize();
        // SAFETY: made by `capture`, destroyed once, not running. An error here has nobody to go to.
        unsafe {
            let _ = result::graph::exec_destroy(self.exec);
            let _ = result::graph::destroy(self.graph);
        }
    }
}

/// The memory of one graph: freed when the graph and every buffer in it are gone.
pub(crate) struct GraphMemory {
    device: Device,
    blocks: Mutex<Blocks>,
}

#[derive(Default)]
struct Blocks {
    /// Address and size.
    all: Vec<(u64, usize)>,
    /// The same of buffers of the pool that were dropped while work was recorded.
    kept: Vec<(u64, usize)>,
    /// Addresses not in use, by size.
    free: HashMap<usize, Vec<u64>>,
}

impl GraphMemory {
    /// A block of so many bytes. With the context current.
    pub(crate) fn alloc(&self, bytes: usize) -> Result<u64> {
        let mut blocks = self.blocks.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(address) = blocks.free.get_mut(&bytes).and_then(Vec::pop) {
            return Ok(address);
        }
        // SAFETY: freed in `drop`. The driver has no empty allocations; one byte stands for them.
        let address = unsafe { result::malloc_sync(bytes.max(1)) };
        let address = named(&format!("cuMemAlloc({bytes} bytes)"), address)?;
        self.device.count_live(bytes);
        blocks.all.push((address, bytes));
        Ok(address)
    }

    /// Gives a block back to the recording.
    pub(crate) fn release(&self, address: u64, bytes: usize) {
        let mut blocks = self.blocks.lock().unwrap_or_else(PoisonError::into_inner);
        blocks.free.entry(bytes).or_default().push(address);
    }

    /// Takes over a buffer of the pool.
    pub(crate) fn keep(&self, address: u64, bytes: usize) {
        self.blocks.lock().unwrap_or_else(PoisonError::into_inner).kept.push((address, bytes));
    }

    fn bytes(&self) -> usize {
        let blocks = self.blocks.lock().unwrap_or_else(PoisonError::into_inner);
        blocks.all.iter().map(|(_, bytes)| bytes).sum()
    }
}

impl Drop for GraphMemory {
    fn drop(&mut self) {
        let blocks = self.blocks.get_mut().unwrap_or_else(PoisonError::into_inner);
        // What was issued may still use it.
        let _ = self.device.synchronize();
        for &(address, bytes) in blocks.all.iter().chain(&blocks.kept) {
            self.device.uncount_live(bytes);
            // SAFETY: allocated in `alloc` or taken over by `keep`, freed once, used by nothing issued; the driver frees the
            // pool's memory by this call too. An error here has nobody to go to.
            let _ = unsafe { result::free_sync(address) };
        }
    }
}
