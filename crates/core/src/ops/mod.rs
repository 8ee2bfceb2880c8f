//! The arguments of every operation, their checks and their documentation. Each backend has a file of the same name
//! with the code.
//!
//! Legend: t tokens, r routed rows (padding included), d model, f ffn, e experts, l local experts, k top-k, s shards.

mod adamw;
mod attention;
mod cross_entropy;
mod elementwise;
mod embed;
mod gemm;
mod head_loss;
mod norm_rope;
mod permute;
mod push_amax;
mod quantize;
mod rms_norm;
mod rope;
mod route;
mod scale_tiles;
mod slots;
mod step;
mod swiglu;
mod transcode;

pub use adamw::{AdamW, AdamWTensor};
pub use attention::{
    Attention, AttentionBackward, AttentionDecode, AttentionGrads, AttentionOut, GPU_HEAD_LIMIT,
    attention_agreement, check_gpu_heads,
};
pub use cross_entropy::{CrossEntropy, CrossEntropyOut, verify_ids};
pub use elementwise::{Add, Cast, InitNormal, Squared, SumShards, SumSquares, Transpose};
pub use embed::{Embed, EmbedBackward, EmbedOut};
pub use gemm::{BF16_AGREEMENT, FP8_AGREEMENT, Gemm, GroupedGemm, GroupedWgrad, ProductDims};
pub use head_loss::{HeadCodecs, HeadLoss, HeadLossChunk, HeadLossGrad, HeadLossOut, head_chunk};
pub use norm_rope::{NormRope, NormRopeBackward};
pub use permute::{CombineSlots, GatherScalars, PackRows, Permute, PlanPermute, UnpackRows, Unpermute};
pub use push_amax::{AmaxRecords, PushAmax};
pub use quantize::{Counts, Delayed, Dequantize, Emit, Emitted, Found, Hadamard, Planes, Quantize, Random};
pub use rms_norm::{RmsNorm, RmsNormBackward, RmsNormOut};
pub use rope::Rope;
pub use route::{Route, RouteBackward, Routing};
pub use scale_tiles::{CutScales, CutSide, TileScales, UntileScales};
pub use slots::{AssignRanks, PackSlots, ReceivedSlots, SlotRanks, UnpackSlots, record_words};
pub use step::{
    BeginMicroBatch, BeginStep, Clock, Collect, Control, EndStep, Entry, InputLayout, OCCUPANCY_VALUES,
    REPORT_HEAD, Source,
};
pub use swiglu::{Swiglu, SwigluBackward, SwigluGrads, SwigluOut};
pub use transcode::{CONVERSIONS, Transcode, Transcoded};
