//! What a GPU would leave to its ordinary cores, many times slower than its tensor cores.

use crate::Dry;
use std::sync::PoisonError;

/// A product that no tensor core takes, or attention.
#[derive(Debug, Clone, PartialEq)]
pub struct Slow {
    /// The operation that asked for it.
    pub op: &'static str,
    /// Why.
    pub why: String,
    /// Two a multiply-add.
    pub flops: f64,
}

impl Dry {
    /// Runs `work` and says what of it a GPU would leave to its ordinary cores, in order.
    ///
    /// # Errors
    /// What `work` returns. Inside another such call the outer one is not told of what the inner one is.
    pub fn slow<R, E>(&self, work: impl FnOnce() -> Result<R, E>) -> Result<(R, Vec<Slow>), E> {
        let swap = |noted| {
            let mut slow = self.inner.slow.lock().unwrap_or_else(PoisonError::into_inner);
            std::mem::replace(&mut *slow, noted)
        };
        let outer = swap(Some(Vec::new()));
        let done = work();
        let slow = swap(outer).unwrap_or_default();
        Ok((done?, slow))
    }

    /// Notes an operation that no tensor core takes.
    pub(crate) fn note_slow(&self, op: &'static str, why: String, flops: f64) {
        if let Some(slow) = &mut *self.inner.slow.lock().unwrap_or_else(PoisonError::into_inner) {
            slow.push(Slow { op, why, flops });
        }
    }
}
