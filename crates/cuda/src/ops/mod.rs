//! The operations: a folder for related ones, a file for one or a few of them. Each has three steps: a checked description;
//! the configuration that a pure function chooses for it, which can be printed and tested without a GPU; and the
//! launch.

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

// Each operation is the function of its name here.
pub(crate) use {
    attention::*, convert::*, norm::*, plain::*, products::*, routing::*, step::*, swiglu::*, vocabulary::*,
};

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
