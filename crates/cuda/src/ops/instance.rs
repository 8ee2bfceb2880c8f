//! How an operation lists its kernels, for the check that compiles all of them.

use crate::compile::jit::KernelSpec;

/// A kernel instance that an operation may launch.
#[derive(Debug, Clone, PartialEq)]
pub struct Instance {
    /// The instance for NVRTC.
    pub spec: KernelSpec,
    /// Dynamic shared memory of its launch, in bytes.
    pub shared_bytes: usize,
}

/// Dynamic shared memory that a launch computes from the problem's sizes, and the device's expression for the same number.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SharedSize {
    /// The kernel's source.
    pub source: &'static str,
    /// A constant expression of the device.
    pub expression: String,
    /// Bytes that the launch asks for.
    pub bytes: usize,
}
