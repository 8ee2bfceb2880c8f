//! One file an operation, each in three steps: a description, checked; the configuration chosen for it, a pure function that
//! can be printed and tested without a GPU; the launch.

pub(crate) mod adamw;
pub(crate) mod attention;
pub(crate) mod attention_decode;
mod attention_wgmma;
pub(crate) mod copy_rows;
pub(crate) mod cross_entropy;
pub(crate) mod dequantize;
pub(crate) mod elementwise;
pub(crate) mod embed;
pub(crate) mod gemm;
mod grouped_config;
pub(crate) mod grouped_gemm;
pub mod grouped_product;
pub(crate) mod grouped_wgrad;
pub(crate) mod head_loss;
mod head_rows;
mod held;
pub(crate) mod init_normal;
pub(crate) mod norm_rope;
pub(crate) mod permute;
pub(crate) mod plan_permute;
mod planes;
mod product;
mod product_parts;
mod product_runs;
pub(crate) mod product_simt;
pub(crate) mod quantize;
pub(crate) mod rms_norm;
pub(crate) mod rope;
pub(crate) mod route;
mod row_tree;
pub(crate) mod slots;
pub(crate) mod step;
pub(crate) mod sum_squares;
pub(crate) mod swiglu;
pub(crate) mod swiglu_backward;
pub(crate) mod transcode;
pub mod trial;
pub(crate) mod wire;

pub use attention_wgmma::DIMS as ATTENTION_DIMS;
pub use planes::has_kernels;

use crate::Cuda;
use crate::backend::Buf;
use crate::jit::KernelSpec;
use nibble_core::Result;
use nibble_core::ops::Counts;

/// Counts to add to: all zero.
pub(crate) fn counts(cuda: &Cuda) -> Result<Counts<Cuda>> {
    Ok(Counts(Buf::new(cuda.device().counters(3)?)))
}

/// A kernel instance that an operation may launch.
#[derive(Debug, Clone, PartialEq)]
pub struct Instance {
    /// What NVRTC compiles.
    pub spec: KernelSpec,
    /// Dynamic shared memory of its launch, in bytes.
    pub shared_bytes: usize,
}

/// Every instance that operations launch, by operation: the compile check goes through them all.
pub fn instances() -> Vec<Instance> {
    [
        grouped_config::instances(),
        product_parts::instances(),
        product_runs::instances(),
        product_simt::instances(),
        quantize::instances(),
        dequantize::instances(),
        transcode::instances(),
        swiglu::instances(),
        swiglu_backward::instances(),
        permute::instances(),
        plan_permute::instances(),
        route::instances(),
        slots::instances(),
        elementwise::instances(),
        attention::instances(),
        embed::instances(),
        rms_norm::instances(),
        row_tree::instances(),
        attention_decode::instances(),
        norm_rope::instances(),
        rope::instances(),
        cross_entropy::instances(),
        head_loss::instances(),
        head_rows::instances(),
        step::instances(),
        sum_squares::instances(),
        adamw::instances(),
        init_normal::instances(),
    ]
    .concat()
}
