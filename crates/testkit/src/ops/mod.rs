//! One file an operation, named as in `nibble_core::ops`: its conformance test.

mod adamw;
mod attention;
mod cross_entropy;
mod elementwise;
mod embed;
mod gemm;
mod head_loss;
mod norm_rope;
mod permute;
mod quantize;
mod rms_norm;
mod rope;
mod route;
mod scale_tiles;
mod slots;
mod step;
mod swiglu;
mod transcode;

pub use adamw::adamw;
pub use attention::{attention, attention_backward, attention_decode};
pub use cross_entropy::cross_entropy;
pub use elementwise::{add, cast, init_normal, sum_shards, sum_squares, transpose};
pub use embed::{embed, embed_backward};
pub use gemm::{gemm, grouped_gemm, grouped_wgrad};
pub use head_loss::head_loss;
pub use norm_rope::{norm_rope, norm_rope_backward};
pub use permute::{combine_slots, gather_scalars, pack_rows, permute, plan_permute, unpack_rows, unpermute};
pub use quantize::{dequantize, quantize};
pub use rms_norm::{rms_norm, rms_norm_backward};
pub use rope::rope;
pub use route::{route, route_backward};
pub use scale_tiles::{tile_scales, untile_scales};
pub use slots::{assign_ranks, pack_slots, unpack_slots};
pub use step::{begin_micro_batch, begin_step, collect, end_step, push_amax};
pub use swiglu::{swiglu, swiglu_backward};
pub use transcode::transcode;

use nibble_core::DType;

/// Both plain types.
const PLAIN: [DType; 2] = [DType::F32, DType::Bf16];
