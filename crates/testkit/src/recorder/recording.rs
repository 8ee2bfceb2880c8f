//! Recorded work: operations, and the dropping of buffers, in order.

use super::cell::{Cell, Elements, Output};
use super::{Recordings, Shared};
use nibble_core::recipe::Form;
use nibble_core::{Backend, Result};
use std::fmt;
use std::sync::Arc;

/// Work that can be replayed.
pub struct Recording<B: Backend> {
    pub(super) entries: Vec<Entry<B>>,
    shared: Arc<Shared<B>>,
}

impl<B: Backend> Recording<B> {
    pub(super) fn new(entries: Vec<Entry<B>>, shared: Arc<Shared<B>>) -> Self {
        let Recordings { made, alive, most } = &mut shared.lock().recordings;
        (*made, *alive) = (*made + 1, *alive + 1);
        *most = (*most).max(*alive);
        Self { entries, shared: shared.clone() }
    }
}

impl<B: Backend> Drop for Recording<B> {
    fn drop(&mut self) {
        self.shared.lock().recordings.alive -= 1;
    }
}

impl<B: Backend> fmt::Debug for Recording<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(&self.entries).finish()
    }
}

/// Runs an operation on the contents of its cells, and stores the results in their cells.
type Replay<B> = Box<dyn Fn(&B) -> Result<()> + Send>;

/// One step of a replay.
pub(super) enum Entry<B: Backend> {
    Op(Box<Op<B>>, Replay<B>),
    /// At this point, the last handle of a buffer that recorded work allocated is dropped.
    Free(Arc<Cell<B>>),
}

impl<B: Backend> fmt::Debug for Entry<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Op(op, _) => write!(f, "{} {}", op.name, op.arguments),
            Self::Free(_) => f.write_str("free"),
        }
    }
}

/// The properties of an operation.
#[derive(Debug)]
pub(super) struct Op<B: Backend> {
    pub(super) name: &'static str,
    /// The arguments as text; empty unless a log is kept or work is recorded.
    pub(super) arguments: String,
    /// Cells of all buffers that the operation reads, including in-place arguments.
    pub(super) reads: Vec<Arc<Cell<B>>>,
    /// Buffers that the operation writes in place.
    pub(super) writes: Vec<Output<B>>,
    /// Buffers that the operation returns.
    pub(super) made: Vec<Output<B>>,
    /// The buffers read, returned and written in place that are elements of tensors, by index.
    pub(super) tensors: [Vec<(usize, Elements)>; 3],
    /// Names and forms of internal tensors.
    pub(super) inside: Vec<(&'static str, Form)>,
    /// Whether the operation computes something. Allocations and shares are not logged, and faults do not hit them.
    pub(super) computes: bool,
}
