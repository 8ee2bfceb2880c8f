//! A backend that wraps another backend: it logs the issued work, records and replays it, and injects faults.
//!
//! * **Watch**: [`Recorder::watch`] starts a log of every operation and transfer: its name, the buffers that it reads and writes, and every
//!   argument that is not a buffer. If two steps issue the same work, their logs are equal.
//! * **Record and replay**: [`Backend::record`] runs work once without changing any value; [`Backend::replay`] executes it. A handle stands
//!   for a *cell* that holds a buffer of the inner backend. While recording, an operation with results runs on copies, only to determine
//!   the shapes of its results; the recorder stores a closure that runs the operation on the cells' contents in a replay. Uploads, writes
//!   and downloads, which a GPU cannot record, are errors. A buffer that the recorded work drops is freed at the same point of every
//!   replay, so replays get the same addresses as the work itself.
//! * **Faults**: [`Recorder::poison`] sets one element of one operation's result to NaN, when the operation is issued or in a replay.
//! * **Defects**: [`Recorder::defects`] can make every call of an operation compute something wrong: a tile of an operand is transposed, a
//!   block's scale is doubled, or a quantization is skipped.
//!
//! ```text
//! let recorder = Recorder::new(Cpu::new(2)?);
//! recorder.watch();
//! recorder.poison(Point::Named("gemm", 3));
//! let mut trainer = Trainer::new(&recorder, &SoloComm, &config)?;
//! ```

mod backend;
mod buf;
mod by_hand;
mod call;
mod cell;
mod defect;
mod fault;
mod head;
mod kernels;
mod mapping;
mod random;
mod recording;
mod trace;

pub use buf::Buf;
pub use defect::{Defect, Defects, Seen, Spot};
pub use fault::{Point, Struck};
pub use recording::Recording;
pub use trace::traced;

use cell::device;
use fault::Fault;
use nibble_core::Backend;
use nibble_core::recipe::Form;
use recording::Entry;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// A backend that wraps the backend `B`, logs its operations, and can record and replay them. Clones share one recorder.
#[derive(Clone)]
pub struct Recorder<B: Backend> {
    inner: B,
    shared: Arc<Shared<B>>,
}

/// How the recorder treats an operation that is issued outside of [`Backend::record`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Mode {
    /// The operation runs at once; the recorder reports that it cannot record.
    Eager,
    /// The operation runs at once; the recorder can record.
    Recording,
    /// The operation is recorded separately and replayed.
    EachReplayed,
}

/// State that the clones of a recorder and its buffers share.
#[derive(Debug)]
struct Shared<B: Backend> {
    mode: Mode,
    defects: Arc<Defects>,
    state: Mutex<State<B>>,
}

#[derive(Debug)]
struct State<B: Backend> {
    /// The work that is being recorded.
    recording: Option<Vec<Entry<B>>>,
    /// The operations logged since the last [`Recorder::watch`].
    log: Option<Vec<Event>>,
    /// The fault to inject, until it is injected.
    fault: Option<Fault>,
    struck: Option<Struck>,
    refuses_replay: bool,
    recordings: Recordings,
}

/// Counts of recordings.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Recordings {
    /// Number of recordings created so far.
    pub made: usize,
    /// Number of recordings that are alive now.
    pub alive: usize,
    /// The largest number of recordings that were alive at the same time.
    pub most: usize,
}

/// An operation or transfer that was executed.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Event {
    /// The operation's name, such as `gemm`; for transfers and clears, the name of the [`Backend`] method.
    pub op: &'static str,
    /// All arguments except the contents of buffers: shapes, flags, and streams of random numbers.
    pub arguments: String,
    /// The [`Backend::buffer_id`] of each buffer that was read, including buffers written in place.
    pub inputs: Vec<u64>,
    /// The ids of the buffers that were written: first the results, then the in-place arguments.
    pub outputs: Vec<u64>,
    /// The inputs that are buffers of tensor elements and are only read, with the forms of their tensors.
    pub tensors_read: Vec<(u64, Form)>,
    /// The results that are buffers of tensor elements, with the forms of their tensors.
    pub tensors_made: Vec<(u64, Form)>,
    /// The names and forms of internal tensors, which the operation computes but does not return.
    pub made_inside: Vec<(&'static str, Form)>,
}

impl Event {
    /// Whether the event is a copy between host and device, or a wait for such a copy.
    pub fn is_transfer(&self) -> bool {
        let transfers = ["upload", "write", "download", "begin_download", "finish_download", "copy_out"];
        transfers.contains(&self.op)
    }
}

impl<B: Backend> Recorder<B> {
    /// A recorder whose work can be recorded and replayed.
    pub fn new(inner: B) -> Self {
        Self::with(inner, Mode::Recording)
    }

    /// A recorder that reports that it cannot record, so that all work runs at once when it is issued.
    pub fn eager(inner: B) -> Self {
        Self::with(inner, Mode::Eager)
    }

    /// A recorder that records each operation separately and then replays it. Tests of single operations use such a recorder to compare
    /// recorded operations with operations that run at once.
    pub fn replaying(inner: B) -> Self {
        Self::with(inner, Mode::EachReplayed)
    }

    fn with(inner: B, mode: Mode) -> Self {
        let (recording, log, fault, struck) = (None, None, None, None);
        let recordings = Recordings::default();
        let state = State { recording, log, fault, struck, refuses_replay: false, recordings };
        Self { inner, shared: Arc::new(Shared { mode, defects: Arc::default(), state: Mutex::new(state) }) }
    }

    /// The backend that this recorder wraps.
    pub fn inner(&self) -> &B {
        &self.inner
    }

    /// Starts to log operations; recorded work is logged when it is replayed.
    pub fn watch(&self) {
        self.shared.lock().log = Some(Vec::new());
    }

    /// The operations executed since [`Recorder::watch`] or since the last call; empty if no log was started.
    pub fn take_log(&self) -> Vec<Event> {
        self.shared.lock().log.as_mut().map(std::mem::take).unwrap_or_default()
    }

    /// Injects one fault; operations are counted from this call on. The new fault replaces an earlier fault that has not hit an operation
    /// yet.
    pub fn poison(&self, point: Point) {
        let mut state = self.shared.lock();
        (state.fault, state.struck) = (Some(Fault::new(point)), None);
    }

    /// The operation that the fault hit, if that operation has been executed.
    pub fn struck(&self) -> Option<Struck> {
        self.shared.lock().struck.clone()
    }

    /// Makes the next replay fail before the replay executes any operation.
    pub fn refuse_replay(&self) {
        self.shared.lock().refuses_replay = true;
    }

    /// The numbers of this recorder's recordings.
    pub fn recordings(&self) -> Recordings {
        self.shared.lock().recordings
    }

    /// Logs an event, if a log was started.
    fn note(&self, event: impl FnOnce() -> Event) {
        if self.is_watched() {
            let event = event();
            if let Some(log) = &mut self.shared.lock().log {
                log.push(event);
            }
        }
    }

    fn is_watched(&self) -> bool {
        self.shared.lock().log.is_some()
    }

    /// An error if a recording is in progress, because a GPU cannot record work that waits for the host or gets data from it.
    fn refuse_while_recording(&self, call: &'static str) -> nibble_core::Result<()> {
        match self.shared.is_recording() {
            true => Err(device(call, "not while work is recorded: its values would be those of that moment")),
            false => Ok(()),
        }
    }
}

impl<B: Backend> Shared<B> {
    /// Every change is a single assignment or push, so the state is valid even after a panic. No handle may be dropped while the state is
    /// locked, because dropping a buffer's last handle locks it again.
    fn lock(&self) -> MutexGuard<'_, State<B>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn is_recording(&self) -> bool {
        self.lock().recording.is_some()
    }
}

impl<B: Backend> fmt::Debug for Recorder<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Recorder({:?})", self.inner)
    }
}
