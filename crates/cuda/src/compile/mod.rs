//! From embedded CUDA C++ to cubins: sources and what each includes, NVRTC, the cache on disk.

mod cubin;
mod cubin_cache;
pub mod jit;
pub mod source;
// A module of the build script; it is tested here.
#[cfg(test)]
mod unit_formats;
