//! A file for each operation or several related ones, named as in `nibble_core::ops` with few exceptions. Each operation is the function of its name here.

pub mod adamw;
pub mod assemble_kv;
pub mod attention;
pub mod bias;
mod column_sums;
pub mod combine_tree;
pub mod cross_entropy;
pub mod elementwise;
pub mod embed;
pub mod gemm;
pub mod head_loss;
mod lowered;
pub mod measure_quantization;
pub mod norm_rope;
mod operands;
pub mod parts;
pub mod permute;
pub mod quantize;
pub mod rms_norm;
pub mod rope;
pub mod route;
pub mod scale_tiles;
pub mod slots;
pub mod step;
pub mod swiglu;
pub mod transcode;
pub mod transpose;
pub mod windows;
pub mod wire;

pub(crate) use {
    adamw::*, assemble_kv::*, attention::*, bias::*, combine_tree::*, cross_entropy::*, elementwise::*,
    embed::*, gemm::*, head_loss::*, measure_quantization::*, norm_rope::*, parts::*, permute::*,
    quantize::*, rms_norm::*, rope::*, route::*, scale_tiles::*, slots::*, step::*, swiglu::*, transcode::*,
    transpose::*, windows::*, wire::*,
};
