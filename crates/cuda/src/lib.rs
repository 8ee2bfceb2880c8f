//! The CUDA backend.
//!
//! CUDA is found at run time: this crate builds, links and loads without it, and [`probe()`] reports what is installed. Kernels are CUDA
//! C++ templates in `csrc/`. Kernel sources are embedded in the binary; NVRTC compiles them to `sm_90a` cubins on first use, and the cubins
//! are cached on disk by content. The modules, from the bottom up:
//!
//! | module | what |
//! | --- | --- |
//! | [`env`](mod@env) | reads all environment variables |
//! | `driver` | converts the driver's errors, and lists the functions of NVIDIA's libraries that are called |
//! | [`compile`] | compiles a kernel instance to a cubin: embedded sources, NVRTC, the cache on disk; each instance is compiled by one thread at a time |
//! | [`probe`](mod@probe) | finds the CUDA driver, libraries and GPUs of this machine |
//! | [`device`] | context, streams, events and loaded kernels; pooled and arena buffers; copies to the host; recordings |
//! | [`launch`] | checked, typed launches: grid, cluster, shared memory; TMA descriptors |
//! | [`cublaslt`] | dense BF16 and FP8 GEMMs by cuBLASLt, as a reference |
//! | [`measure`], [`Cuda::profiled`] | burst and sustained times of calls, power and clocks; times of each operation, also inside a recording |
//! | [`backend`] | the implementation of `nibble-core`'s `Backend` |
//! | [`comm`] | ranks on GPUs: collectives by NCCL, which is loaded only if a run has such ranks |
//! | [`ops`] | the operations: one folder for related operations, one file for one or a few operations |
//!
//! **Asynchronous.** Everything is issued on one stream, and memory is freed in stream order. Sizes of ragged groups, counters of blocks
//! and overflow flags stay on the device until the end of a step. An upload waits only if megabytes of earlier uploads are in flight. A
//! second stream copies data to the host.
//!
//! **Same addresses.** `within(arena, …)` gives the same allocations the same addresses each time. Work within an arena can be recorded
//! without being executed, and replayed as a whole, if it has no uploads, no downloads and no memory outside an arena.
//!
//! **Bit-identical to the CPU**, for every conversion and every input, except that a NaN may have other bits. Therefore parallel sums have
//! an order that CPU and GPU share. Functions such as `exp` and `sigmoid` have twins in `csrc/math/` with the same IEEE operations; if the
//! hardware only approximates an operation, one correction step makes the result exact. NVRTC runs with `--fmad=false`, and subnormals are
//! preserved. GEMMs on tensor cores keep fewer bits than F32. Such GEMMs guarantee a relative error (`FP8_AGREEMENT`, `BF16_AGREEMENT`),
//! the CPU's bits if sums are exact, and the same bits in every run.
//!
//! **A format** is a header in `csrc/formats/`. The header has a struct with the format's block, its scale, and the conversion of sixteen
//! values to codes and back, and a line that declares the struct. From these lines the build script generates the table that launches use
//! (`ops/convert/units.rs`), and a header that includes all of these headers. The kernels for all formats are templates over this struct.
//! Kernels for MXFP4 and FP8 blocks are templates over the element. The kernels for MXFP4 and FP8 blocks support default scales only; any
//! other `Scaling` uses the kernels for all formats.

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
pub use device::given::Given;
pub use device::recording::Recording;
pub use device::workspace::Allocator;
pub use device::{Device, Event, Launched};
pub use measure::profile::OpTime;
pub use nibble_core::{Error, Result};
pub use probe::probe;
