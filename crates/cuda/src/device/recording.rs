//! Recordings (CUDA graphs): work that is captured once and launched again as a whole. A recording replaces the hundreds of launches
//! of a training step by one launch.
//!
//! A recording contains only addresses. So memory at an address that a recording may contain must not be reused while the recording
//! lives. Pool memory and whole arenas that existed during the recording, but were dropped since, are retained until the recording is
//! gone. A recording cannot contain addresses of memory that was freed before it or allocated after it.

use crate::device::arena::{Arena, Entered};
use crate::device::{Device, Launched};
use crate::driver::{check, failed, named};
use cudarc::driver::{result, sys};
use nibble_core::Result;
use std::fmt;

/// Recorded work, which can be replayed.
pub struct Recording {
    exec: sys::CUgraphExec,
    /// The arenas from which the work allocates.
    arenas: Vec<Arena>,
    /// The kernels of the recording in order, if launches were noted while it was made.
    launched: Vec<Launched>,
    alive: Alive,
}

// SAFETY: the driver handle may be used from any thread on which the context is current, and every method makes it
// current.
unsafe impl Send for Recording {}

impl fmt::Debug for Recording {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Recording({:?}, {:?})", self.alive.device, self.arenas)
    }
}

impl Device {
    /// Records the device work that the function `work` issues, without executing this work, so that no value on the device changes. The
    /// kernels that the work needs are compiled and loaded. The function `work` must issue device work from this thread only, and must not
    /// wait for the device. So it cannot upload or download. `work` must allocate in an arena ([`nibble_core::Backend::within`], around the
    /// recording or inside it), and the recording keeps that arena alive. If other threads issue work to the device in the meantime, this
    /// work is also recorded or returns an error, because a device has only one stream.
    ///
    /// # Errors
    /// Any error of `work`, and [`nibble_core::Error::Device`] if a call cannot be recorded or another recording is in progress.
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

    /// Launches recorded work on the stream. The work uses the same addresses as when it was recorded. If a recorded buffer has been
    /// dropped, its address in the arena may belong to another buffer, which is then overwritten.
    ///
    /// # Errors
    /// [`nibble_core::Error::Device`] for a recording of another device, or while work is being recorded.
    pub fn replay(&self, recording: &Recording) -> Result<()> {
        if !recording.alive.device.is_same(self) {
            let why = format!("recorded on {:?}, another device than {self:?}", recording.alive.device);
            return Err(failed("Device::replay", why));
        }
        self.not_recording("Device::replay")?;
        let stream = self.stream()?;
        // SAFETY: the graph is alive. Every address in the graph is still mapped, because older memory is retained and the
        // recording keeps its arenas alive. The stream orders the graph with all other work.
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
            // SAFETY: the graph was instantiated by `record` and is destroyed once; the driver first completes a launch in
            // progress. An error here cannot be reported.
            let _ = unsafe { result::graph::exec_destroy(self.exec) };
        }
    }
}

/// A recording's entry in its device's list; it exists as long as the recording lives.
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
        // If the capture failed, this ends the recording.
        for kept in self.device.recordings().gone(self.id) {
            self.device.gpu().free(kept);
        }
    }
}

/// The stream during a capture. Every exit path ends the capture, so that the device does not remain in
/// capture mode.
struct Capture<'a> {
    device: &'a Device,
    stream: sys::CUstream,
}

/// Ends the recording, and returns the arenas from which it allocated.
fn ended(device: &Device) -> Vec<Arena> {
    // The list is taken first, because as soon as the recording has ended, another thread may start a recording with
    // its own list.
    let arenas = device.used_arenas().end();
    device.recordings().end();
    arenas
}

/// A CUDA graph, which is destroyed when dropped.
struct Graph(sys::CUgraph);

impl<'a> Capture<'a> {
    fn begin(device: &'a Device, stream: sys::CUstream) -> Result<Self> {
        // The mode is relaxed because kernels are loaded and memory is mapped during the capture.
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

    /// The captured graph, and the arenas from which it allocates.
    fn end(self) -> Result<(Graph, Vec<Arena>)> {
        let graph = self.stop();
        let arenas = ended(self.device);
        // The capture has ended, and `drop` would end it again.
        std::mem::forget(self);
        Ok((graph?, arenas))
    }

    fn stop(&self) -> Result<Graph> {
        let mut graph = std::ptr::null_mut();
        // SAFETY: ends the capture that `begin` started. If the capture was invalidated, the call ends
        // it too and writes null.
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
        // The error that led here is the one that is reported.
        drop(self.stop());
        drop(ended(self.device));
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        if !self.0.is_null() {
            // SAFETY: the graph's capture has ended, and the graph is destroyed once; an instantiated graph is a
            // copy.
            let _ = unsafe { result::graph::destroy(self.0) };
        }
    }
}
