//! Conversions: quantize, dequantize, transcode, their counts, and layouts of scales.

pub(super) mod measure_lift;
pub(super) mod measure_quantization;
pub(super) mod quantize;
pub(super) mod quantize_pack;
pub(super) mod random;
pub(super) mod scale_tiles;
pub(super) mod transcode;

pub use {
    measure_lift::*, measure_quantization::*, quantize::*, quantize_pack::*, random::*, scale_tiles::*,
    transcode::*,
};
