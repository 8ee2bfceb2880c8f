//! From embedded CUDA C++ to cubins: sources and what each includes, NVRTC, the cache on disk.

mod cubin;
mod cubin_cache;
pub mod jit;
pub mod source;
// The build script's; here it is tested.
#[cfg(test)]
mod unit_formats;
