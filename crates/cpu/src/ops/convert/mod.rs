//! Conversions: quantize, dequantize, transcode, what they count, and scales of whole lines.

pub mod measure_quantization;
pub mod quantize;
pub mod scale_tiles;
pub mod transcode;

pub(crate) use {measure_quantization::*, quantize::*, scale_tiles::*, transcode::*};
