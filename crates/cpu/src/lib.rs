//! The CPU backend. It is the specification of every op, and fast enough to train small models.
//!
//! Each op has a scalar version that reads as its definition, and a vectorised, threaded one with the same bits. Where both would be the
//! same loop, as in most elementwise ops, one body serves: `per_isa!` compiles it for each instruction set. `tests/conformance.rs`
//! compares every op on every path with the scalar specification, bit for bit.
//!
//! Floating-point addition is not associative, so the bits are the same only because every order is fixed:
//!
//! * **Threads** divide rows, heads or blocks, never a sum. A product's contraction is one chain in ascending order. A chain that is
//!   interrupted, to stay in the caches or because the next tokens' logits are not computed yet, continues from the F32 that it left.
//! * **Instruction sets.** A sum has 16 lanes, element i in lane i mod 16, closed by the tree 8, 4, 2, 1 (`simd.rs`). Where an op
//!   documents another order, one that more threads can follow, it is in `sums.rs`: more lanes, or chunks of fixed size and a tree over
//!   them.
//! * **Multiply-adds** are fused where the definition says so and nowhere else. The BF16 dot is defined as the instruction `vdpbf16ps`
//!   computes it; other paths emulate that, its flushing of subnormals included (`gemm/spec.rs`).
//! * **Functions.** `exp`, `log`, `sigmoid` and `rsqrt` are those of `nibble_formats::math`, from IEEE operations alone. Numbers computed
//!   on the host, such as RoPE's, use `nibble_formats::double`, and not the system's library.

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
