//! What an operation says of its kernels, for the check that compiles them all.

use crate::compile::jit::KernelSpec;

/// A kernel instance that an operation may launch.
#[derive(Debug, Clone, PartialEq)]
pub struct Instance {
    /// What NVRTC compiles.
    pub spec: KernelSpec,
    /// Dynamic shared memory of its launch, in bytes.
    pub shared_bytes: usize,
}

/// Dynamic shared memory that a launch computes from the sizes of its problem, and how the device computes the same.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SharedSize {
    /// The kernel's source.
    pub source: &'static str,
    /// A constant expression of the device.
    pub expression: String,
    /// What the launch asks for.
    pub bytes: usize,
}
