//! Decides how an op runs on a GPU: the op's path, and its temporary buffers in order of allocation. The decisions are pure functions of
//! shapes, formats and groups. The functions are generic over the backend of the arguments' buffers, so that callers need no GPU.
//!
//! An op has three forms: the request (`nibble-core`'s arguments; for a product, `ProductDesc`), the choice of this crate (`ProductPath`,
//! `QuantizePath` and so on), and the launches of `nibble-cuda`. `nibble-dry` counts the memory of the same choice, and commands explain
//! the choice. No condition is evaluated in two places.

pub mod attention;
mod gpu_kernels;
pub mod head_loss;
pub mod norm;
pub mod products;
pub mod quantize;
pub mod routing;
pub mod squares;
pub mod swiglu;
mod swiglu_path;
pub mod transcode;
pub mod vocabulary;

pub use gpu_kernels::GpuKernels;

use std::fmt;

/// Memory that an operation allocates besides its results, and frees before it returns.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Temporary {
    /// The purpose of the memory.
    pub what: &'static str,
    /// The size in bytes.
    pub bytes: usize,
}

impl Temporary {
    /// Temporary memory of `bytes` bytes for the purpose `what`.
    pub const fn new(what: &'static str, bytes: usize) -> Self {
        Self { what, bytes }
    }
}

impl fmt::Display for Temporary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {} bytes", self.what, self.bytes)
    }
}

/// Compiles the README's example as a doc test.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
