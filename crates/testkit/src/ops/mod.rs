//! Conformance tests, each the function of its operation's name. Files are named as in `nibble_core::ops`: one for an operation or several related ones.

mod adamw;
mod assemble_kv;
mod attention;
mod bias;
mod combine_tree;
mod cross_entropy;
mod dequantize;
mod elementwise;
mod embed;
mod gemm;
mod head_loss;
mod measure_quantization;
mod norm_rope;
mod parts;
mod permute;
mod quantize;
mod quantize_pack;
mod rms_norm;
mod rope;
mod route;
mod scale_tiles;
mod slots;
mod step;
mod swiglu;
mod transcode;
mod windows;

pub use {
    adamw::*, assemble_kv::*, attention::*, bias::*, combine_tree::*, cross_entropy::*, dequantize::*,
    elementwise::*, embed::*, gemm::*, head_loss::*, measure_quantization::*, norm_rope::*, parts::*,
    permute::*, quantize::*, quantize_pack::*, rms_norm::*, rope::*, route::*, scale_tiles::*, slots::*,
    step::*, swiglu::*, transcode::*, windows::*,
};

use nibble_core::DType;

/// Both plain types.
const PLAIN: [DType; 2] = [DType::F32, DType::Bf16];
