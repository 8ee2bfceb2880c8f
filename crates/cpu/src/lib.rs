//! The CPU backend. This backend is the specification of every op, and is fast enough to train small models.
//!
//! Each op has a scalar version that reads like its definition, and a vectorised, threaded version with the same bits. Where both versions
//! would be the same loop, as in most elementwise ops, `per_isa!` compiles one body for each instruction set. `tests/conformance.rs`
//! compares every op on every path with the scalar specification, bit for bit.
//!
//! Floating-point addition is not associative, so the bits are the same only because every order of summation is fixed:
//!
//! * **Threads** divide rows, heads or blocks, never a sum. The contraction of a GEMM is one chain in ascending order. A chain may be
//!   interrupted, to stay in the caches or because the next tokens' logits are not computed yet; it then resumes from its F32 partial sum.
//! * **Instruction sets.** A sum has 16 lanes: element i is added in lane i mod 16, and the lanes are reduced by the tree 8, 4, 2, 1
//!   (`simd.rs`). Some ops document another order that more threads can follow: more lanes, or chunks of fixed size and a tree over the
//!   chunks. The orders for more threads are in `sums.rs`.
//! * **Multiply-adds** are fused only where the definition says so. The instruction `vdpbf16ps` defines the BF16 dot product; other paths
//!   emulate the instruction, including its flushing of subnormals (`gemm/spec.rs`).
//! * **Functions.** `exp`, `log`, `sigmoid` and `rsqrt` are those of `nibble_formats::math`, which uses IEEE operations alone. Numbers
//!   computed on the host, such as RoPE's angles, use `nibble_formats::double` instead of the system's library.

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
