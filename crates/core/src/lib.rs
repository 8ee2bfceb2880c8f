//! The seams of Nibble: what a tensor is, what a backend must do, which arguments each operation takes and how
//! they are checked, and the recipe that decides every precision.
//!
//! Nothing here computes. A backend implements [`Backend`] (memory and order) and [`Kernels`] (every operation); a
//! layer builds an operation's argument struct and calls its `run`, which checks shapes once for all backends.
//!
//! Products everywhere are D = A·Bᵀ with A `[m, k]` and B `[n, k]`.

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
pub use nibble_formats as formats;
pub use recipe::Recipe;
pub use scope::Scope;
pub use tensor::{DType, Data, Tensor};
pub use traffic::{Traffic, TrafficCounter};
pub use visible::{Visible, readable, shortened, visible};

/// The example of the README compiles.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
