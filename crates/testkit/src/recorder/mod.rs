//! A backend around another one that watches what is issued, records and replays it, and makes faults.
//!
//! * **Watch**: [`Recorder::watch`] begins a log of every operation and transfer: its name, the buffers it reads and writes, and
//!   every argument that is no buffer. Two steps that issue the same work leave equal logs.
//! * **Record and replay**: [`Backend::record`] runs work once and executes nothing that changes a value; [`Backend::replay`]
//!   executes it. A handle stands for a *cell* that holds a buffer of the inner backend. While work is recorded, an operation that
//!   returns something runs on copies, only to learn what its results look like, and a closure is kept that runs it on what the
//!   cells hold in a replay. What a GPU cannot record is an error: uploads, writes and downloads. A buffer that lives no longer
//!   than the recorded work is given back at the same place of every replay, so that replays find the addresses of the work
//!   itself.
//! * **Faults**: [`Recorder::poison`] makes one element of one operation's result NaN, as it is issued or in a replay.
//! * **Defects**: [`Recorder::defects`] have an operation compute something else whenever it is issued: a tile of an operand transposed, a
//!   block's scale doubled, a quantization left out.
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
mod kernels;
mod mapping;
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

/// The backend `B`, watched and recorded. A clone is the same recorder.
#[derive(Clone)]
pub struct Recorder<B: Backend> {
    inner: B,
    shared: Arc<Shared<B>>,
}

/// What becomes of an operation that is issued outside of [`Backend::record`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Mode {
    /// It runs; whoever asks is told that nothing can be recorded.
    Eager,
    /// It runs.
    Recording,
    /// It is recorded by itself and replayed.
    EachReplayed,
}

/// What the clones of a recorder and its buffers share.
#[derive(Debug)]
struct Shared<B: Backend> {
    mode: Mode,
    defects: Arc<Defects>,
    state: Mutex<State<B>>,
}

#[derive(Debug)]
struct State<B: Backend> {
    /// The work being recorded.
    recording: Option<Vec<Entry<B>>>,
    /// What was issued since someone began to watch.
    log: Option<Vec<Event>>,
    /// The fault to make, until it is made.
    fault: Option<Fault>,
    struck: Option<Struck>,
    refuses_replay: bool,
    recordings: Recordings,
}

/// How many recordings there were and are.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Recordings {
    /// Made so far.
    pub made: usize,
    /// Not dropped yet.
    pub alive: usize,
    /// The most that were alive at once.
    pub most: usize,
}

/// An operation or a transfer, as it was executed.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Event {
    /// The operation's name, such as `gemm`; a method of [`Backend`] for what moves or clears bytes.
    pub op: &'static str,
    /// Every argument but the contents of buffers: shapes, flags, streams of random numbers.
    pub arguments: String,
    /// [`Backend::buffer_id`] of what it read, those it writes in place among them.
    pub inputs: Vec<u64>,
    /// Of what it wrote: its results, then what it wrote in place.
    pub outputs: Vec<u64>,
    /// Those inputs that are elements of tensors which it only reads, and their forms.
    pub tensors_read: Vec<(u64, Form)>,
    /// The same of its results.
    pub tensors_made: Vec<(u64, Form)>,
    /// Forms of tensors that it made and did not return, with the tensor's name.
    pub made_inside: Vec<(&'static str, Form)>,
}

impl Event {
    /// Whether it is a copy between host and device, or the wait for one.
    pub fn is_transfer(&self) -> bool {
        let transfers = ["upload", "write", "download", "begin_download", "finish_download", "copy_out"];
        transfers.contains(&self.op)
    }
}

impl<B: Backend> Recorder<B> {
    /// A recorder that can record.
    pub fn new(inner: B) -> Self {
        Self::with(inner, Mode::Recording)
    }

    /// A recorder that says it cannot record, so that everything runs as it is issued.
    pub fn eager(inner: B) -> Self {
        Self::with(inner, Mode::Eager)
    }

    /// A recorder that records every operation by itself and replays it: what tests of single operations run on, to hold
    /// recorded operations to the same results.
    pub fn replaying(inner: B) -> Self {
        Self::with(inner, Mode::EachReplayed)
    }

    fn with(inner: B, mode: Mode) -> Self {
        let (recording, log, fault, struck) = (None, None, None, None);
        let recordings = Recordings::default();
        let state = State { recording, log, fault, struck, refuses_replay: false, recordings };
        Self { inner, shared: Arc::new(Shared { mode, defects: Arc::default(), state: Mutex::new(state) }) }
    }

    /// The backend that does the work.
    pub fn inner(&self) -> &B {
        &self.inner
    }

    /// Begins a log; an older one is forgotten. Work that is being recorded appears when it is replayed.
    pub fn watch(&self) {
        self.shared.lock().log = Some(Vec::new());
    }

    /// What was executed since [`Recorder::watch`] or the last call of this; empty if nobody watches.
    pub fn take_log(&self) -> Vec<Event> {
        self.shared.lock().log.as_mut().map(std::mem::take).unwrap_or_default()
    }

    /// Makes one fault, counted from now on; an older one that was not made is forgotten.
    pub fn poison(&self, point: Point) {
        let mut state = self.shared.lock();
        (state.fault, state.struck) = (Some(Fault::new(point)), None);
    }

    /// What the fault hit, if its operation has come.
    pub fn struck(&self) -> Option<Struck> {
        self.shared.lock().struck.clone()
    }

    /// Has the next replay fail before it executes anything.
    pub fn refuse_replay(&self) {
        self.shared.lock().refuses_replay = true;
    }

    /// How many recordings there were and are.
    pub fn recordings(&self) -> Recordings {
        self.shared.lock().recordings
    }

    /// Notes an execution, if anyone watches.
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

    /// An error while work is being recorded: a GPU cannot record what the host waits for or gives.
    fn refuse_while_recording(&self, call: &'static str) -> nibble_core::Result<()> {
        match self.shared.is_recording() {
            true => Err(device(call, "not while work is recorded: its values would be those of that moment")),
            false => Ok(()),
        }
    }
}

impl<B: Backend> Shared<B> {
    /// Every change is a single assignment or push, so that the state is sound after a panic, too. Nobody drops a handle while
    /// it is locked: the last one of a buffer locks it again.
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
