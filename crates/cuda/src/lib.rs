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
//! | [`device`] | context, streams, memory pool, pinned staging, events, loaded kernels |
//! | [`buffer`] | typed buffers: of the pool, or of an arena |
//! | [`arena`] | memory at addresses that come back, for work done over and over |
//! | [`recording`] | work recorded once and issued as a whole |
//! | [`download`], [`pinned`] | copies to the host on a stream of their own, and host memory that they reach at full speed |
//! | [`launch`] | checked, typed launches: grid, cluster, shared memory |
//! | [`tensor_map`] | descriptors of the bulk tensor copy engine, checked before they are encoded |
//! | [`backend`] | the same as `nibble-core`'s `Backend` |
//! | [`ops`] | a folder a family, one file an operation: description → configuration → launch |
//! | [`cublaslt`] | dense BF16 and FP8 products by NVIDIA's library |
//! | [`timeline`] | what ran inside a recording, and when, by CUPTI |
//! | [`timing`], [`Cuda::profiled`] | burst and sustained times; the time of each operation |
//! | [`power`] | watts and clocks |

pub mod arena;
pub mod backend;
pub mod buffer;
mod cubin;
mod cubin_cache;
pub mod cublaslt;
pub mod device;
pub mod download;
mod driver;
pub mod env;
mod gpu;
pub mod jit;
mod kept;
mod kernels;
mod landing;
pub mod launch;
mod mapping;
pub mod ops;
pub mod pinned;
pub mod power;
pub mod probe;
mod profile;
pub mod recording;
pub mod source;
mod staging;
mod symbols;
pub mod tensor_map;
pub mod timeline;
pub mod timing;

pub use arena::Arena;
pub use backend::Cuda;
pub use buffer::Buffer;
pub use device::{Device, Event, Launched};
pub use jit::{Jit, KernelSpec};
pub use nibble_core::{Error, Result};
pub use probe::probe;
pub use profile::OpTime;
pub use recording::Recording;
