//! Compiles embedded CUDA C++ to cubins: the sources and their includes, NVRTC, and the cache on
//! disk.

mod cubin;
mod cubin_cache;
pub mod jit;
pub mod source;
// This module belongs to the build script; its tests run here.
#[cfg(test)]
mod unit_formats;
