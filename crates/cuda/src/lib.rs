//! The CUDA backend.
//!
//! CUDA is found at run time: this crate builds, links and loads without it, and [`probe()`] reports what is installed. Kernels are
//! CUDA C++ templates in `csrc/`, embedded in the binary, compiled by NVRTC to `sm_90a` cubins on first use and cached on disk by
//! content. From the bottom up:
//!
//! | module | what |
//! | --- | --- |
//! | [`env`](mod@env) | the environment variables, read in one place |
//! | `driver` | what the driver answers, and which functions of NVIDIA's libraries are called |
//! | [`compile`] | instance → cubin: embedded sources, NVRTC, the cache on disk, one compilation at a time per instance |
//! | [`probe`](mod@probe) | what CUDA there is here |
//! | [`device`] | context, streams, events, loaded kernels; pooled and arena buffers; copies to the host; recordings |
//! | [`launch`] | checked, typed launches: grid, cluster, shared memory; TMA descriptors |
//! | [`cublaslt`] | dense BF16 and FP8 products by NVIDIA's library |
//! | [`measure`], [`Cuda::profiled`] | burst and sustained times, watts and clocks; times of each op, also inside a recording |
//! | [`backend`] | `nibble-core`'s `Backend` |
//! | [`comm`] | ranks on GPUs: collectives by NCCL, which is loaded when there are such ranks |
//! | [`ops`] | a folder for related ops, a file for one or a few: description → configuration → launch |
//!
//! **Asynchronous.** Everything is issued on one stream, and memory is freed in stream order. Sizes of ragged groups, counts of blocks
//! and overflow flags stay on the device until the end of a step. An upload waits only for megabytes of earlier uploads. A second stream
//! copies to the host.
//!
//! **Same addresses.** `within(arena, …)` gives the same allocations the same addresses each time. Such work can be recorded without
//! being executed (no uploads, no downloads, no memory outside an arena) and replayed as a whole.
//!
//! **The CPU's bits**, for every conversion and every input, except that NaNs only match as NaNs. So parallel sums have an order that CPU
//! and GPU share. Functions such as `exp` and `sigmoid` have twins in `csrc/math/` with the same IEEE operations; where the hardware only
//! approximates, one corrected step makes the result exact. NVRTC runs with `--fmad=false`, and subnormals are preserved. Products on
//! tensor cores keep fewer bits than F32: they guarantee a relative error (`FP8_AGREEMENT`, `BF16_AGREEMENT`), the CPU's bits where sums
//! are exact, and the same bits in every run.
//!
//! **A format** is a header in `csrc/formats/`: a struct with its block, its scale, and the conversion of sixteen values to codes and
//! back, and a line that declares it. From these lines the build script generates the table that launches use (`ops/convert/units.rs`),
//! and the header that includes them all. The general kernels are templates over the struct. Kernels for MXFP4 and FP8 blocks are
//! templates over the element. They support default scales only; any other `Scaling` goes through the general kernel.

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
