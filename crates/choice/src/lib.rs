//! How an op runs on a GPU: its path, and its temporaries in order of allocation. Pure functions of shapes, formats and groups, generic
//! over the backend of the arguments' buffers, so that they can be called without a GPU.
//!
//! An op has three forms: what is asked (`nibble-core`'s arguments; for a product, `ProductDesc`), what is chosen here (`ProductPath`,
//! `QuantizePath` and so on), and what `nibble-cuda` launches. `nibble-dry` counts the memory of the same choice, and commands explain it.
//! No condition is evaluated in two places.

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
    /// Its purpose.
    pub what: &'static str,
    /// How large it is.
    pub bytes: usize,
}

impl Temporary {
    /// `bytes` bytes.
    pub const fn new(what: &'static str, bytes: usize) -> Self {
        Self { what, bytes }
    }
}

impl fmt::Display for Temporary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {} bytes", self.what, self.bytes)
    }
}

/// The example of the README compiles.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
