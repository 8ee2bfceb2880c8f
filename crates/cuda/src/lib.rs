//! The CUDA backend.
//!
//! CUDA is found at run time: this crate builds, links and loads where there is none, and [`probe()`] says what it found.
//! Kernels are CUDA C++ templates in `csrc/`, embedded in the binary, compiled by NVRTC to `sm_90a` cubins on first use
//! and kept on disk by content. From the bottom up:
//!
//! | module | what |
//! | --- | --- |
//! | [`env`](mod@env) | the environment variables, read in one place |
//! | `driver` | what the driver answers, and which functions of NVIDIA's libraries are called |
//! | [`compile`] | instance → cubin: embedded sources, NVRTC, the cache on disk, one compilation at a time per instance |
//! | [`probe`](mod@probe) | what CUDA there is here |
//! | [`device`] | context, streams, events, loaded kernels; buffers of the pool or of an arena, copies to the host; work recorded once and issued as a whole |
//! | [`launch`] | checked, typed launches: grid, cluster, shared memory; descriptors of the bulk tensor copy engine |
//! | [`cublaslt`] | dense BF16 and FP8 products by NVIDIA's library |
//! | [`measure`], [`Cuda::profiled`] | burst and sustained times, watts and clocks; the time of each operation, and of what ran inside a recording |
//! | [`backend`] | the same as `nibble-core`'s `Backend` |
//! | [`comm`] | ranks on GPUs: collectives by NCCL, which is loaded when there are such ranks |
//! | [`ops`] | a folder for related operations, a file for one or a few: description → configuration → launch |

pub mod backend;
pub mod comm;
pub mod compile;
pub mod cublaslt;
pub mod device;
mod driver;
pub mod env;
mod kernels;
pub mod launch;
pub mod measure;
pub mod ops;
pub mod probe;
mod sequences;

pub use backend::Cuda;
pub use comm::NcclComm;
pub use compile::jit::{Jit, KernelSpec};
pub use device::arena::Arena;
pub use device::buffer::Buffer;
pub use device::recording::Recording;
pub use device::{Device, Event, Launched};
pub use measure::profile::OpTime;
pub use nibble_core::{Error, Result};
pub use probe::probe;
