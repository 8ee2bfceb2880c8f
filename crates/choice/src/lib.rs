//! What an op takes on a GPU: which path, and which temporaries in which order. Pure functions of shapes, formats and groups, generic
//! over the backend whose buffers the arguments are, so that they can be asked where there is no GPU.
//!
//! An op has three forms: what is asked (`nibble-core`'s arguments; of a product, `ProductDesc`), what is chosen here (`ProductPath`,
//! `QuantizePath` and so on), and what `nibble-cuda` launches. `nibble-dry` counts the memory of the same choice, and the commands
//! explain it. None of them asks a condition a second time.

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

/// Memory that an operation takes beside its results and gives back before it returns.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Temporary {
    /// What it is for.
    pub what: &'static str,
    /// How large it is.
    pub bytes: usize,
}

impl Temporary {
    /// So many bytes.
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
