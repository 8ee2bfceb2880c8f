//! The CPU backend. It is the specification of every operation, and fast enough to train small models for real.
//!
//! Each `ops/x.rs` holds a scalar version that can be read as the definition, and a vectorised, threaded one with the
//! same bits. Bits depend neither on the number of threads nor on the instruction set: threads divide rows, never a
//! reduction, and every reduction has a fixed order.

mod backend;
mod comm;
pub mod gemm;
mod kernels;
mod memory;
pub mod ops;
mod room;
mod simd;
mod sums;

pub use backend::{Buf, CodePath, Cpu, OpTime};
pub use comm::{Arrivals, HostComm, Link};
pub use memory::Arena;
pub use ops::quantize::has_own_code;

/// The example of the README compiles.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
