//! The operations: one folder for related operations, one file for one or a few operations. Each operation has three steps.
//!
//! | step | where | what |
//! |---|---|---|
//! | description | the operation's file | the arguments of the operation as plain numbers, checked |
//! | configuration | the operation's file | instance, grid and shared memory: pure functions of the description, tested without a GPU |
//! | launch | `launch/` | the number and sizes of the arguments are compared with those that the cubin declares |
//!
//! `instances()` lists the template instances of every folder; `tests/resources.txt` records their registers and shared memory. Kernels
//! are in `csrc/kernels/FOLDER/NAME.cuh`, built from shared headers in `csrc/pieces/FOLDER/`; inline PTX is in `csrc/ptx/` alone.

pub(crate) mod attention;
mod buffer_check;
pub(crate) mod convert;
mod instance;
pub(crate) mod norm;
pub(crate) mod plain;
mod planes;
pub mod products;
pub(crate) mod routing;
pub(crate) mod step;
pub(crate) mod swiglu;
pub(crate) mod vocabulary;

pub use convert::has_own_kernels;
pub use instance::{Instance, SharedSize};
pub use nibble_choice::attention::HEADS as ATTENTION_DIMS;

// Each operation is the function with the operation's name here.
pub(crate) use {
    attention::*, convert::*, norm::*, plain::*, products::*, routing::*, step::*, swiglu::*, vocabulary::*,
};

/// The shared-memory sizes for small, typical and the largest problems; a test compares all of them with the
/// device's expressions.
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

/// Every instance that operations launch, by folder; a test compiles all of them.
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
