//! Conversions: quantize, dequantize, transcode, what they count, and scales of whole lines.

pub(super) mod measure_quantization;
pub(super) mod quantize;
pub(super) mod quantize_pack;
pub(super) mod scale_tiles;
pub(super) mod transcode;

pub use measure_quantization::MeasureQuantization;
pub use quantize::{
    Counts, Delayed, Dequantize, Emit, Emitted, Found, Hadamard, MeasureAmax, Planes, Quantize, Random,
    check_random, weight_planes,
};
pub use quantize_pack::{PackedRows, QuantizePack};
pub use scale_tiles::{CutScales, CutSide, TileScales, UntileScales};
pub use transcode::{CONVERSIONS, Transcode, Transcoded, converted_rule};
