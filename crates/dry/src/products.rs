//! The products of some work, and which of them run slowly on a GPU.

use crate::Dry;
use nibble_core::ops::ProductDesc;

/// A product, as a GPU chooses its path.
#[derive(Debug, Clone, PartialEq)]
pub struct Multiplied {
    /// The operation.
    pub op: &'static str,
    /// Its description.
    pub desc: ProductDesc,
}

/// A product or attention that the tensor cores do not take.
#[derive(Debug, Clone, PartialEq)]
pub struct Slow {
    /// The operation.
    pub op: &'static str,
    /// Why.
    pub why: String,
    /// Two per multiply-add.
    pub flops: f64,
}

impl Dry {
    /// Runs `work` and returns the products that it asked a GPU for, in order.
    ///
    /// # Errors
    /// What `work` returns. Nested calls: the outer one gets no products of the inner one.
    pub fn products<R, E>(&self, work: impl FnOnce() -> Result<R, E>) -> Result<(R, Vec<Multiplied>), E> {
        self.inner.products.collect(work)
    }

    /// Number of products so far, while they are collected.
    pub fn products_so_far(&self) -> usize {
        self.inner.products.len()
    }

    /// Runs `work` and returns what a GPU would run on its CUDA cores, in order.
    ///
    /// # Errors
    /// What `work` returns. Nested calls: the outer one gets nothing of the inner one.
    pub fn slow<R, E>(&self, work: impl FnOnce() -> Result<R, E>) -> Result<(R, Vec<Slow>), E> {
        self.inner.slow.collect(work)
    }
}
