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

/// Every instance that operations launch, by operation: the compile check goes through them all.
pub fn instances() -> Vec<Instance> {
    [
        products::grouped_config::instances(),
        products::lowered::instances(),
        products::product_parts::instances(),
        products::product_runs::instances(),
        products::product_simt::instances(),
        convert::quantize::instances(),
        convert::dequantize::instances(),
        convert::lift::instances(),
        convert::measure_quantization::instances(),
        convert::scale_tiles::instances(),
        convert::transcode::instances(),
        swiglu::instances(),
        swiglu::swiglu_backward::instances(),
        routing::permute::instances(),
        routing::combine_tree::instances(),
        routing::plan_permute::instances(),
        routing::route::instances(),
        routing::slots::instances(),
        routing::parts::instances(),
        plain::elementwise::instances(),
        plain::bias::instances(),
        attention::assemble_kv::instances(),
        attention::instances(),
        vocabulary::embed::instances(),
        norm::rms_norm::instances(),
        plain::row_tree::instances(),
        plain::copy_many::instances(),
        attention::attention_decode::instances(),
        norm::norm_rope::instances(),
        norm::rope::instances(),
        vocabulary::cross_entropy::instances(),
        vocabulary::head_loss::instances(),
        vocabulary::head_rows::instances(),
        step::instances(),
        step::sum_squares::instances(),
        step::adamw::instances(),
        step::init_normal::instances(),
    ]
    .concat()
}
