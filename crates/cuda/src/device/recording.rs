//! Recordings (CUDA graphs): work captured once and launched again as a whole. A training step's hundreds of launches become one.
//!
//! A recording holds only addresses. So memory at an address that it may hold must not be reused while it lives. Pool memory and whole
//! arenas that existed during the recording and were dropped since are retained until the recording is gone. A recording cannot hold
//! addresses of memory that was freed before it, or allocated after it.

use crate::device::arena::{Arena, Entered};
use crate::device::{Device, Launched};
use crate::driver::{check, failed, named};
use cudarc::driver::{result, sys};
use nibble_core::Result;
use std::fmt;

/// Recorded work.
pub struct Recording {
    exec: sys::CUgraphExec,
    /// The arenas that the work allocates from.
    arenas: Vec<Arena>,
    /// Its kernels in order, if launches were noted during the recording.
    launched: Vec<Launched>,
    alive: Alive,
}

// SAFETY: the driver's handle may be used from any thread once the context is current there, which every method sees to.
unsafe impl Send for Recording {}

impl fmt::Debug for Recording {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Recording({:?}, {:?})", self.alive.device, self.arenas)
    }
}

impl Device {
    /// Records the work that `work` issues to this device, without executing it: no value on the device changes. The
    /// kernels that it needs are compiled and loaded. `work` must issue from this thread alone and wait for nothing: no
    /// uploads, no downloads. It must allocate in an arena ([`nibble_core::Backend::within`], around the recording or
    /// inside it), which the recording keeps alive. A device has one stream: work that other threads issue to it
    /// meanwhile is recorded too, or refused.
    ///
    /// # Errors
    /// The error of `work`; [`nibble_core::Error::Device`] for a call that cannot be recorded, or if another recording is in progress.
    pub fn record(&self, work: &mut dyn FnMut() -> Result<()>) -> Result<Recording> {
        let stream = self.stream()?;
        let alive = Alive::begin(self)?;
        let capture = Capture::begin(self, stream)?;
        let noted = self.launches().as_ref().map(|launches| launches.all.len());
        match self.scope().current() {
            // The recording has its own zeroed words, which each replay fills again.
            Some(outer) => self.scope().run(&Entered::new(outer.arena), &mut *work)?,
            None => work()?,
        }
        let (graph, arenas) = capture.end()?;
        // None of the kernels has run yet.
        let launched = match (noted, &mut *self.launches()) {
            (Some(noted), Some(launches)) => launches.all.split_off(noted),
            _ => Vec::new(),
        };
        // SAFETY: the graph was just recorded.
        let exec = unsafe { result::graph::instantiate(graph.0, sys::CUgraphInstantiate_flags(0)) };
        Ok(Recording { exec: named("cuGraphInstantiate", exec)?, arenas, launched, alive })
    }

    /// Launches recorded work on the stream, on the same addresses as recorded. If a recorded buffer was dropped since,
    /// its address in the arena may hold another buffer, which is overwritten.
    ///
    /// # Errors
    /// [`nibble_core::Error::Device`] for a recording of another device, and while work is recorded.
    pub fn replay(&self, recording: &Recording) -> Result<()> {
        if !recording.alive.device.is_same(self) {
            let why = format!("recorded on {:?}, another device than {self:?}", recording.alive.device);
            return Err(failed("Device::replay", why));
        }
        self.not_recording("Device::replay")?;
        let stream = self.stream()?;
        // SAFETY: the graph is alive. Every address it knows is still mapped: memory from before it is kept, its arenas are held.
        // The stream orders it with everything else.
        named("cuGraphLaunch", unsafe { result::graph::launch(recording.exec, stream) })?;
        if let Some(launches) = &mut *self.launches() {
            launches.all.extend(&recording.launched);
        }
        Ok(())
    }
}

impl Drop for Recording {
    fn drop(&mut self) {
        if self.alive.device.stream().is_ok() {
            // SAFETY: instantiated by `record` and destroyed once; the driver lets a launch under way finish first. An error here
            // has nobody to go to.
            let _ = unsafe { result::graph::exec_destroy(self.exec) };
        }
    }
}

/// A recording's entry in its device's list, for as long as it lives.
struct Alive {
    id: u64,
    device: Device,
}

impl Alive {
    fn begin(device: &Device) -> Result<Self> {
        let id = device.recordings().begin()?;
        device.used_arenas().begin();
        Ok(Self { id, device: device.clone() })
    }
}

impl Drop for Alive {
    fn drop(&mut self) {
        // If nothing was captured, this ends the recording.
        for kept in self.device.recordings().gone(self.id) {
            self.device.gpu().free(kept);
        }
    }
}

/// The stream while it captures. Capture ends on every way out, so that the device does not stay in it.
struct Capture<'a> {
    device: &'a Device,
    stream: sys::CUstream,
}

/// Ends the recording, and returns the arenas that it allocated from.
fn ended(device: &Device) -> Vec<Arena> {
    // The list is taken first: as soon as the recording has ended, another thread may start one with a list of its own.
    let arenas = device.used_arenas().end();
    device.recordings().end();
    arenas
}

/// A graph, destroyed when dropped.
struct Graph(sys::CUgraph);

impl<'a> Capture<'a> {
    fn begin(device: &'a Device, stream: sys::CUstream) -> Result<Self> {
        // Relaxed: kernels are loaded and memory is mapped during the capture.
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
        // SAFETY: the stream lives as long as the device.
        match named("cuStreamBeginCapture", unsafe { result::stream::begin_capture(stream, mode) }) {
            Ok(()) => Ok(Self { device, stream }),
            Err(error) => {
                drop(ended(device));
                Err(error)
            }
        }
    }

    /// The captured graph, and the arenas that it allocates from.
    fn end(self) -> Result<(Graph, Vec<Arena>)> {
        let graph = self.stop();
        let arenas = ended(self.device);
        // The capture has ended: `drop` would end it again.
        std::mem::forget(self);
        Ok((graph?, arenas))
    }

    fn stop(&self) -> Result<Graph> {
        let mut graph = std::ptr::null_mut();
        // SAFETY: the capture begun in `begin`; ends it also where it was spoiled, and writes null then.
        let ended = unsafe { sys::cuStreamEndCapture(self.stream, &mut graph) };
        let graph = Graph(graph);
        check("cuStreamEndCapture", ended)?;
        if graph.0.is_null() {
            return Err(failed("cuStreamEndCapture", "nothing was recorded"));
        }
        Ok(graph)
    }
}

impl Drop for Capture<'_> {
    fn drop(&mut self) {
        // The error that led here is the one to report.
        drop(self.stop());
        drop(ended(self.device));
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        if !self.0.is_null() {
            // SAFETY: a graph of a capture that has ended, destroyed once; what was instantiated from it is a copy.
            let _ = unsafe { result::graph::destroy(self.0) };
        }
    }
}
