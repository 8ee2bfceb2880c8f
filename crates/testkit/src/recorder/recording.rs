//! Recorded work: operations and dropped buffers, in order.

use super::cell::{Cell, Elements, Output};
use super::{Recordings, Shared};
use nibble_core::recipe::Form;
use nibble_core::{Backend, Result};
use std::fmt;
use std::sync::Arc;

/// Work to be replayed.
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

/// Runs an operation on the contents of its cells, and puts the results into their cells.
type Replay<B> = Box<dyn Fn(&B) -> Result<()> + Send>;

/// One step of a replay.
pub(super) enum Entry<B: Backend> {
    Op(Box<Op<B>>, Replay<B>),
    /// The last handle of a buffer that recorded work allocated is dropped here.
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
    /// Empty unless someone watches or records.
    pub(super) arguments: String,
    /// Cells of everything that it reads, in-place arguments included.
    pub(super) reads: Vec<Arc<Cell<B>>>,
    /// Buffers that it writes in place.
    pub(super) writes: Vec<Output<B>>,
    /// Buffers that it returns.
    pub(super) made: Vec<Output<B>>,
    /// Which of the buffers read, returned and written in place are elements of tensors, by index.
    pub(super) tensors: [Vec<(usize, Elements)>; 3],
    /// Forms of internal tensors, with the tensor's name.
    pub(super) inside: Vec<(&'static str, Form)>,
    /// Whether it computes something; allocations and shares are neither logged nor poisoned.
    pub(super) computes: bool,
}
