//! The products of some work, and which of them a GPU is slow at.

use crate::Dry;
use nibble_core::ops::ProductDesc;

/// A product, as a GPU's choice of paths knows it.
#[derive(Debug, Clone, PartialEq)]
pub struct Multiplied {
    /// The operation that asked for it.
    pub op: &'static str,
    /// What it is.
    pub desc: ProductDesc,
}

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
    /// Runs `work` and says which products it asked a GPU for, in order.
    ///
    /// # Errors
    /// What `work` returns. Inside another such call the outer one is not told of what the inner one is.
    pub fn products<R, E>(&self, work: impl FnOnce() -> Result<R, E>) -> Result<(R, Vec<Multiplied>), E> {
        self.inner.products.collect(work)
    }

    /// How many products were noted so far, of work whose products are collected.
    pub fn products_so_far(&self) -> usize {
        self.inner.products.len()
    }

    /// Runs `work` and says what of it a GPU would leave to its ordinary cores, in order.
    ///
    /// # Errors
    /// What `work` returns. Inside another such call the outer one is not told of what the inner one is.
    pub fn slow<R, E>(&self, work: impl FnOnce() -> Result<R, E>) -> Result<(R, Vec<Slow>), E> {
        self.inner.slow.collect(work)
    }
}
