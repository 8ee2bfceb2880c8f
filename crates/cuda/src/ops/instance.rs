//! How an operation lists its kernels, for the test that compiles all of them.

use crate::compile::jit::KernelSpec;

/// A kernel instance that an operation may launch.
#[derive(Debug, Clone, PartialEq)]
pub struct Instance {
    /// The instance, as NVRTC compiles it.
    pub spec: KernelSpec,
    /// Dynamic shared memory of the instance's launch, in bytes.
    pub shared_bytes: usize,
}

/// A size of dynamic shared memory that the host computes from the problem's sizes, and the C++ expression for the same
/// size.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SharedSize {
    /// Path of the kernel's source.
    pub source: &'static str,
    /// A constant expression in CUDA C++.
    pub expression: String,
    /// The number of bytes that the launch requests.
    pub bytes: usize,
}
