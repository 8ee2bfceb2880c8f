//! The operations: a folder for related ones, a file for one or a few of them. Each has three steps: a checked description;
//! the configuration that a pure function chooses for it, which can be printed and tested without a GPU; and the
//! launch.

pub(crate) mod attention;
mod buffer_check;
pub(crate) mod convert;
pub(crate) mod norm;
pub(crate) mod plain;
mod planes;
pub mod products;
pub(crate) mod routing;
pub(crate) mod step;
pub(crate) mod swiglu;
pub(crate) mod vocabulary;

pub use convert::has_own_kernels;
pub use nibble_choice::attention::HEADS as ATTENTION_DIMS;

// Each operation is the function of its name here.
pub(crate) use {
    attention::*, convert::*, norm::*, plain::*, products::*, routing::*, step::*, swiglu::*, vocabulary::*,
};

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

/// These sizes, for small, usual and the largest problems: the compile check compares them all.
pub fn shared_sizes() -> Vec<SharedSize> {
    [
        norm::rms_norm::shared_sizes(),
        routing::route::shared_sizes(),
        routing::combine_tree::shared_sizes(),
        routing::plan_permute::shared_sizes(),
        vocabulary::cross_entropy::shared_sizes(),
        vocabulary::head_rows::shared_sizes(),
    ]
    .concat()
}

/// Every instance that operations launch, by folder: the compile check goes through them all.
pub fn instances() -> Vec<Instance> {
    [
        products::instances(),
        convert::instances(),
        swiglu::instances(),
        routing::instances(),
        plain::instances(),
        attention::instances(),
        vocabulary::instances(),
        norm::instances(),
        step::instances(),
    ]
    .concat()
}
