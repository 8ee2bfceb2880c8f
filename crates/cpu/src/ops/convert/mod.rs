//! Conversions: quantize, dequantize and transcode with their counters, and tiled layouts of scales.

pub mod measure_lift;
pub mod measure_quantization;
pub mod quantize;
pub mod scale_tiles;
pub mod transcode;

pub(crate) use {measure_lift::*, measure_quantization::*, quantize::*, scale_tiles::*, transcode::*};
