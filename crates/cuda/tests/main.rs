//! The CUDA backend. What needs a GPU is skipped without one, or fails under `NIBBLE_REQUIRE_GPU=1`.

mod attention;
mod borrowed;
mod conformance;
mod cublaslt;
mod device;
mod documents;
mod gpu;
mod graph;
mod grouped_product;
mod layer;
mod memory;
mod nccl;
mod probe;
mod quantize;
mod random_billion;
#[path = "../../train/tests/rig/mod.rs"]
mod rig;
