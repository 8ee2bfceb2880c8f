//! Conversions of number formats: plain to blocks, blocks to plain, blocks to blocks.

pub(crate) mod dequantize;
pub(crate) mod lift;
pub(crate) mod measure_quantization;
pub(crate) mod quantize;
pub(crate) mod scale_tiles;
pub(crate) mod transcode;
mod units;

pub use units::has_own_kernels;

pub(crate) use {dequantize::*, measure_quantization::*, quantize::*, scale_tiles::*, transcode::*};
