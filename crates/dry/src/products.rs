//! The GEMMs of some work, and the GEMMs and attention that run slowly on a GPU.

use crate::Dry;
use nibble_core::ops::ProductDesc;

/// A GEMM, with the description from which a GPU chooses its path.
#[derive(Debug, Clone, PartialEq)]
pub struct Multiplied {
    /// Name of the operation.
    pub op: &'static str,
    /// The description of the GEMM.
    pub desc: ProductDesc,
}

/// A GEMM or attention that does not run on tensor cores.
#[derive(Debug, Clone, PartialEq)]
pub struct Slow {
    /// Name of the operation.
    pub op: &'static str,
    /// Why the tensor cores cannot run it.
    pub why: String,
    /// Flops, two per multiply-add.
    pub flops: f64,
}

impl Dry {
    /// Runs `work` and returns the GEMMs that it issued on a GPU, in order.
    ///
    /// # Errors
    /// The error of `work`. If calls are nested, the outer call does not get the GEMMs of the inner call.
    pub fn products<R, E>(&self, work: impl FnOnce() -> Result<R, E>) -> Result<(R, Vec<Multiplied>), E> {
        self.inner.products.collect(work)
    }

    /// Number of GEMMs so far, while GEMMs are collected.
    pub fn products_so_far(&self) -> usize {
        self.inner.products.len()
    }

    /// Runs `work` and returns the GEMMs and attention that a GPU would run on CUDA cores, in order.
    ///
    /// # Errors
    /// The error of `work`. If calls are nested, the outer call does not get the results of the inner call.
    pub fn slow<R, E>(&self, work: impl FnOnce() -> Result<R, E>) -> Result<(R, Vec<Slow>), E> {
        self.inner.slow.collect(work)
    }
}
