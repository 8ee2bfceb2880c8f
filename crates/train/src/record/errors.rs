//! The error of a quantization, for analysis without training.

use nibble_core::formats::BlockAxis;
use serde::Serialize;

/// What blocks along this axis are called.
pub(crate) const fn planes_of(axis: BlockAxis) -> &'static str {
    match axis {
        BlockAxis::Row => "rows",
        BlockAxis::Col => "columns",
        BlockAxis::Tile => "tiles",
    }
}

/// The quantization error of one tensor in a step. The error is measured on the values that are quantized, that is after the Hadamard
/// transform if there is one.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct SiteError {
    /// The layer's name.
    pub layer: String,
    /// The tensor's name within the layer.
    pub tensor: String,
    /// The direction along which blocks run: `rows`, `columns` or `tiles`.
    pub blocks: &'static str,
    /// The format's name.
    pub format: String,
    /// Length of the Hadamard transform; 0 without a transform.
    pub transform: usize,
    /// Number of values other than zero.
    pub values: u64,
    /// Number of values that the quantization did not change.
    pub exact: u64,
    /// Number of values that became zero.
    pub underflowed: u64,
    /// Number of values whose magnitude exceeds the largest code under their scale.
    pub saturated: u64,
    /// Sum of x².
    pub signal: f64,
    /// Sum of (x − q)², where q is the dequantized value.
    pub noise: f64,
    /// Each block has a largest magnitude; the two values are the minimum and the maximum of these magnitudes over all non-zero blocks, or
    /// 0 if all blocks are zero. The scale rule and the range of these magnitudes determine the range of the scales.
    pub block_amax: [f32; 2],
}

impl SiteError {
    /// The ratio of signal to quantization noise, 10 · log₁₀(Σx² / Σ(x − q)²), in dB. Infinite without noise, and NaN if
    /// all values are zero.
    #[must_use]
    pub fn qsnr_db(&self) -> f64 {
        10.0 * (self.signal / self.noise).log10()
    }

    /// The site's name without the number of the decoder layer, like [`CountSite::in_any_layer`](super::CountSite::in_any_layer).
    #[must_use]
    pub fn in_any_layer(&self) -> String {
        super::site::in_any_layer(&self.layer, &self.tensor)
    }

    /// Adds the counts of another tensor, for example of the same site in another layer.
    pub fn add(&mut self, other: &Self) {
        self.values += other.values;
        self.exact += other.exact;
        self.underflowed += other.underflowed;
        self.saturated += other.saturated;
        self.signal += other.signal;
        self.noise += other.noise;
        self.block_amax = match (self.block_amax, other.block_amax) {
            ([_, 0.0], range) | (range, [_, 0.0]) => range,
            ([low, high], [other_low, other_high]) => [low.min(other_low), high.max(other_high)],
        };
    }
}
