//! The interfaces of Nibble: tensors, the traits of a backend, the arguments of each op with their checks, and the recipe that decides
//! every precision.
//!
//! This crate contains no kernels. A backend implements two traits. [`Backend`] manages memory and the order of work, and does nothing
//! numeric; [`Kernels`] has a method for each op. [`Kernels`] has no default methods, so a backend without a kernel does not compile. A
//! layer builds an op's argument struct and calls its `run`, which checks shapes once for all backends.
//!
//! Products everywhere are D = A·Bᵀ with A `[m, k]` and B `[n, k]`.
//!
//! | | is | lives in |
//! |---|---|---|
//! | format | a record of facts, and a codec for one block | crate `formats` |
//! | op | a struct of arguments with `check()` and `result()`, and a row of `for_each_op!` | [`ops`] |
//! | kernel | an op's code on one backend: a function of the op's name | the same folder of each backend's `ops` |
//! | recipe | sections for linear layers, experts, head and router, with a precision for each site; overrides | [`recipe`] |
//! | layer | weights, `forward`, `backward`, and what it saves | crate `train` |

mod agreement;
pub mod allocation;
mod backend;
mod block_scaled;
mod comm;
mod error;
mod exchange;
mod groups;
mod heap;
mod kernels;
mod lent;
pub mod ops;
pub mod recipe;
mod scope;
mod tensor;
mod traffic;
mod visible;

pub use agreement::Agreement;
pub use backend::{Backend, DeviceKind, LineCopy, Lines, MemoryStats, Plain, Room, ValueRun};
pub use block_scaled::{BlockScaled, Operand, RowKind};
pub use comm::{Axes, Comm, Mesh, MeshShape, Peers, SoloComm, Transfer, TreeSum};
pub use error::{Error, Result, check_range, check_runs};
pub use exchange::{ExchangeRoom, Leg, PendingRows, RowPlan};
pub use groups::{Grouping, Groups, Occupancy, PermuteMap, round_up};
pub use heap::{HEAP_ALIGN, Heap, Segments};
pub use kernels::Kernels;
pub use lent::Lent;
pub use nibble_formats as formats;
pub use recipe::Recipe;
pub use scope::Scope;
pub use tensor::{DType, Data, Tensor};
pub use traffic::{Traffic, TrafficCounter};
pub use visible::{Visible, readable, shortened, visible};

/// Compiles the README's example as a doc test.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
