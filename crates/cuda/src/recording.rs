//! Work recorded once and issued again as a whole: a training step's hundreds of launches become one.
//!
//! A recording knows addresses and nothing else. So whatever it may have written down must not be given to anyone else while
//! it lives: memory of the pool, and whole arenas, that were there when it was made and were dropped since are kept until no such
//! recording is left. Memory of earlier or later days it cannot know.

use crate::arena::{Arena, Entered, Mapping};
use crate::device::Device;
use crate::driver::{check, failed, named};
use cudarc::driver::{result, sys};
use nibble_core::Result;
use std::fmt;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Recorded work.
pub struct Recording {
    exec: sys::CUgraphExec,
    /// What the work took memory from.
    arenas: Vec<Arena>,
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
    /// Records what `work` issues to this device, without executing it: no value on the device changes. Kernels that it needs are
    /// compiled and loaded. It issues from this thread alone and waits for nothing: no upload, no download. What it allocates
    /// must lie in an arena ([`nibble_core::Backend::within`], around the recording or inside it), which the recording keeps. A
    /// device has one stream: what other threads issue to it meanwhile is recorded too, or refused.
    ///
    /// # Errors
    /// What `work` returns; [`nibble_core::Error::Device`] if it does what cannot be recorded, or a recording is under way.
    pub fn record(&self, work: &mut dyn FnMut() -> Result<()>) -> Result<Recording> {
        let stream = self.stream()?;
        let alive = Alive::begin(self)?;
        let capture = Capture::begin(self, stream)?;
        match self.scope().current() {
            // Zeroed words of its own: it fills them each time.
            Some(outer) => self.scope().run(&Entered::new(outer.arena), &mut *work)?,
            None => work()?,
        }
        let (graph, arenas) = capture.end()?;
        // SAFETY: the graph was just recorded.
        let exec = unsafe { result::graph::instantiate(graph.0, sys::CUgraphInstantiate_flags(0)) };
        Ok(Recording { exec: named("cuGraphInstantiate", exec)?, arenas, alive })
    }

    /// Issues recorded work on the stream, on the very buffers that it was recorded with: what of them was dropped since may hold
    /// values of others in the same arena, which are overwritten.
    ///
    /// # Errors
    /// [`nibble_core::Error::Device`] if it was recorded on another device, and while work is recorded.
    pub fn replay(&self, recording: &Recording) -> Result<()> {
        if !recording.alive.device.is_same(self) {
            let why = format!("recorded on {:?}, another device than {self:?}", recording.alive.device);
            return Err(failed("Device::replay", why));
        }
        self.not_recording("Device::replay")?;
        let stream = self.stream()?;
        // SAFETY: the graph is alive. Every address it knows is still mapped: memory from before it is kept, its arenas are held.
        // The stream orders it with everything else.
        named("cuGraphLaunch", unsafe { result::graph::launch(recording.exec, stream) })
    }

    /// An error while work is recorded.
    pub(crate) fn not_recording(&self, call: &str) -> Result<()> {
        match self.recordings().is_under_way() {
            true => Err(failed(call, "not while work is being recorded")),
            false => Ok(()),
        }
    }

    /// Gives memory back, once no recording that may use it is left.
    pub(crate) fn give_back(&self, born: u64, kept: Kept) {
        if let Some(kept) = self.recordings().keep(born, kept) {
            self.free(kept);
        }
    }

    /// While nothing is recorded: the stream would record it.
    fn free(&self, kept: Kept) {
        // A failure means that the context is lost, and the memory with it.
        let Ok(stream) = self.stream() else { return };
        match kept {
            Kept::Pooled { address, counted } => {
                self.uncount_live(counted);
                // SAFETY: allocated from this device's pool and freed once, after everything issued that may use it.
                let _ = unsafe { result::free_async(address, stream) };
            }
            Kept::Mapping(mapping) => {
                if self.synchronize().is_ok() {
                    // SAFETY: the context is current; the stream has passed everything, and no handle is left. What a download
                    // still brings to the host is a copy.
                    unsafe { mapping.unmap() };
                }
            }
        }
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

/// Memory that nobody holds, and that a recording may still use.
pub(crate) enum Kept {
    /// Of the pool, with so many bytes counted as live.
    Pooled { address: u64, counted: usize },
    /// An arena's.
    Mapping(Mapping),
}

/// The recordings of a device.
#[derive(Default)]
pub(crate) struct Recordings {
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// Recordings ever begun, which number them from 1.
    begun: u64,
    /// Numbers of those that are not gone, the one under way included.
    alive: Vec<u64>,
    /// What the one under way has taken memory from.
    under_way: Option<Vec<Arena>>,
    /// With the recordings that were there in the memory's life: those above the first number, up to the second.
    kept: Vec<((u64, u64), Kept)>,
}

impl State {
    /// Whether one of the recordings above the first number, up to the second, is alive.
    fn is_any_alive(&self, (above, last): (u64, u64)) -> bool {
        self.alive.iter().any(|id| above < *id && *id <= last)
    }
}

impl Recordings {
    fn lock(&self) -> MutexGuard<'_, State> {
        // Nothing panics between two changes that belong together.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// How many have begun and are not under way any more: none of them can use memory that is allocated now.
    pub fn finished(&self) -> u64 {
        let state = self.lock();
        state.begun - u64::from(state.under_way.is_some())
    }

    pub fn is_under_way(&self) -> bool {
        self.lock().under_way.is_some()
    }

    /// The recording under way, if there is one, takes memory from this arena.
    pub fn uses(&self, arena: &Arena) {
        if let Some(arenas) = &mut self.lock().under_way
            && !arenas.iter().any(|known| known.is_same(arena))
        {
            arenas.push(arena.clone());
        }
    }

    /// Takes memory over, allocated when so many recordings had finished, if a recording may use it; else it is the caller's to
    /// free.
    fn keep(&self, born: u64, kept: Kept) -> Option<Kept> {
        let mut state = self.lock();
        let life = (born, state.begun);
        if state.is_any_alive(life) {
            state.kept.push((life, kept));
            return None;
        }
        Some(kept)
    }

    /// A recording's number, unless one is under way.
    fn begin(&self) -> Result<u64> {
        let mut state = self.lock();
        if state.under_way.is_some() {
            return Err(failed("Device::record", "a recording is under way"));
        }
        state.begun += 1;
        let id = state.begun;
        state.alive.push(id);
        state.under_way = Some(Vec::new());
        Ok(id)
    }

    /// Nothing is recorded any more. What was used comes back, to be dropped outside the lock.
    fn end(&self) -> Vec<Arena> {
        self.lock().under_way.take().unwrap_or_default()
    }

    /// A recording is gone. What nobody may use any more comes back, to be freed.
    fn gone(&self, id: u64) -> Vec<Kept> {
        let mut state = self.lock();
        state.alive.retain(|alive| *alive != id);
        let kept = std::mem::take(&mut state.kept);
        let (used, unused): (Vec<_>, Vec<_>) =
            kept.into_iter().partition(|(life, _)| state.is_any_alive(*life));
        state.kept = used;
        unused.into_iter().map(|(_, kept)| kept).collect()
    }
}

/// A recording's place among those of its device, from its beginning to its end.
struct Alive {
    id: u64,
    device: Device,
}

impl Alive {
    fn begin(device: &Device) -> Result<Self> {
        Ok(Self { id: device.recordings().begin()?, device: device.clone() })
    }
}

impl Drop for Alive {
    fn drop(&mut self) {
        // Where nothing was captured, this ends the recording.
        for kept in self.device.recordings().gone(self.id) {
            self.device.free(kept);
        }
    }
}

/// The stream in capture; ended on every way out, so that the device does not stay in it.
struct Capture<'a> {
    device: &'a Device,
    stream: sys::CUstream,
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
                drop(device.recordings().end());
                Err(error)
            }
        }
    }

    /// What was captured, and from which arenas it took memory.
    fn end(self) -> Result<(Graph, Vec<Arena>)> {
        let graph = self.stop();
        let arenas = self.device.recordings().end();
        // Its work is done: `drop` would end the capture again.
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
        drop(self.device.recordings().end());
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

#[cfg(test)]
mod tests {
    use super::*;

    fn pooled(address: u64) -> Kept {
        Kept::Pooled { address, counted: 0 }
    }

    fn addresses(kept: Vec<Kept>) -> Vec<u64> {
        let address = |kept| match kept {
            Kept::Pooled { address, .. } => address,
            Kept::Mapping(_) => unreachable!("this test has no arenas"),
        };
        kept.into_iter().map(address).collect()
    }

    #[test]
    fn memory_is_kept_for_recordings_that_began_after_it_was_allocated_and_no_others() {
        let recordings = Recordings::default();
        let before = recordings.finished();
        assert!(recordings.keep(before, pooled(1)).is_some(), "no recording at all");
        let first = recordings.begin().unwrap();
        assert!(recordings.is_under_way() && recordings.begin().is_err());
        assert!(recordings.keep(before, pooled(2)).is_none(), "while it is recorded");
        assert_eq!(recordings.finished(), before, "what is made meanwhile it may use");
        recordings.end();
        let between = recordings.finished();
        assert!(recordings.keep(before, pooled(3)).is_none());
        assert!(recordings.keep(between, pooled(4)).is_some(), "what came later it cannot know");
        let second = recordings.begin().unwrap();
        recordings.end();
        assert!(recordings.keep(between, pooled(5)).is_none());
        assert_eq!(addresses(recordings.gone(first)), [2, 3], "the second came when they were dropped");
        assert_eq!(addresses(recordings.gone(second)), [5]);
        assert!(recordings.keep(before, pooled(6)).is_some());
        assert!(!recordings.is_under_way() && recordings.begin().is_ok());
    }

    #[test]
    fn an_earlier_recording_alone_keeps_what_it_may_use() {
        let recordings = Recordings::default();
        let first = recordings.begin().unwrap();
        recordings.end();
        let between = recordings.finished();
        let second = recordings.begin().unwrap();
        recordings.end();
        assert!(recordings.keep(0, pooled(1)).is_none() && recordings.keep(between, pooled(2)).is_none());
        assert_eq!(addresses(recordings.gone(second)), [2], "the first began before it was there");
        assert_eq!(addresses(recordings.gone(first)), [1]);
    }
}
