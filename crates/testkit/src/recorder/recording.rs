//! Recorded work: operations and what they drop, in order.

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

/// Runs an operation on what its cells hold, and puts its results into theirs.
type Replay<B> = Box<dyn Fn(&B) -> Result<()> + Send>;

/// One thing that a replay does.
pub(super) enum Entry<B: Backend> {
    Op(Box<Op<B>>, Replay<B>),
    /// The last handle of what recorded work made is dropped here.
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

/// What is known of an operation.
#[derive(Debug)]
pub(super) struct Op<B: Backend> {
    pub(super) name: &'static str,
    /// Empty unless someone watches or records.
    pub(super) arguments: String,
    /// Cells of all it reads, in place too.
    pub(super) reads: Vec<Arc<Cell<B>>>,
    /// What it writes in place.
    pub(super) writes: Vec<Output<B>>,
    /// What it returns.
    pub(super) made: Vec<Output<B>>,
    /// Which of what it reads, of what it returns and of what it writes in place are elements of tensors, by their places.
    pub(super) tensors: [Vec<(usize, Elements)>; 3],
    /// Forms that it makes and keeps to itself, with the tensor's name.
    pub(super) inside: Vec<(&'static str, Form)>,
    /// Whether it computes something: what only allocates or shares is neither noted nor poisoned.
    pub(super) computes: bool,
}
