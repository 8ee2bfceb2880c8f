//! Conversions of number formats: plain to block formats, block formats to plain, and between block
//! formats.

pub(crate) mod dequantize;
pub(crate) mod lift;
pub(crate) mod measure_lift;
pub(crate) mod measure_quantization;
pub(crate) mod quantize;
pub(crate) mod scale_tiles;
pub(crate) mod transcode;
mod units;

pub use units::has_own_kernels;

pub(crate) use {
    dequantize::*, measure_lift::*, measure_quantization::*, quantize::*, scale_tiles::*, transcode::*,
};

/// Every kernel instance of this module.
pub(crate) fn instances() -> Vec<crate::ops::Instance> {
    [
        quantize::instances(),
        dequantize::instances(),
        lift::instances(),
        measure_lift::instances(),
        measure_quantization::instances(),
        scale_tiles::instances(),
        transcode::instances(),
    ]
    .concat()
}
