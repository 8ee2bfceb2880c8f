//! The CUDA backend.
//!
//! CUDA is found at run time: this crate builds, links and loads where there is none, and [`probe()`] says what it found.
//! Kernels are CUDA C++ templates in `csrc/`, embedded in the binary, compiled by NVRTC to `sm_90a` cubins on first use
//! and kept on disk by content. From the bottom up:
//!
//! | module | what |
//! | --- | --- |
//! | [`env`](mod@env) | the environment variables, read in one place |
//! | [`probe`](mod@probe) | what CUDA there is here |
//! | [`source`] | the embedded kernel sources and what each includes |
//! | [`jit`] | instance → cubin: NVRTC, the cache on disk, one compilation at a time per instance |
//! | [`device`] | context, stream, memory pool, pinned staging, typed buffers, events, loaded kernels |
//! | [`graph`] | work recorded once and issued as a whole |
//! | [`launch`] | checked, typed launches: grid, cluster, shared memory |
//! | [`tensor_map`] | descriptors of the bulk tensor copy engine, checked before they are encoded |
//! | [`backend`] | the same as `nibble-core`'s `Backend` |
//! | [`ops`] | one file an operation: description → configuration → launch |
//! | [`cublaslt`] | dense BF16 and FP8 products by NVIDIA's library |
//! | [`timing`], [`Cuda::profiled`] | burst and sustained times; the time of each operation |

pub mod backend;
mod cubin_cache;
pub mod cublaslt;
pub mod device;
mod driver;
pub mod env;
pub mod graph;
pub mod jit;
mod kernels;
pub mod launch;
pub mod ops;
mod power;
pub mod probe;
mod profile;
pub mod source;
mod staging;
pub mod tensor_map;
pub mod timing;

pub use backend::Cuda;
pub use device::{Buffer, Device, Event};
pub use graph::Graph;
pub use jit::{Jit, KernelSpec};
pub use nibble_core::{Error, Result};
pub use probe::probe;
pub use profile::OpTime;
