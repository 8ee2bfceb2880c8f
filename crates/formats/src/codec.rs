//! Quantization of blocks to codes, and decoding. This scalar code is the specification for every faster path. [`Codec::quantize_block`]
//! handles one block, with the format's `FormatSpec` and `BlockCodec`.

use crate::block::{BlockParams, BlockScale, amax};
use crate::e8m0::ScaleRule;
use crate::element::Element;
use crate::error::{Error, Result};
use crate::format::Format;
use crate::philox::{Purpose, Stream};
use crate::rounding::Rounding;
use crate::scale::{Scale, ScaleKind};
use crate::scaling::{Correction, Scaling};

/// A codec says how blocks are quantized. A codec consists of a format, a scale rule and a rounding that are compatible, and of the tensor
/// scale if the format has one. The tensor scale is 1 until [`Codec::for_tensor`] or [`Codec::under`] sets it.
///
/// ```
/// use nibble_formats::{Codec, Format, Rounding, Scale, ScaleRule};
/// let codec = Codec::new(Format::Mxfp4, ScaleRule::Rceil, Rounding::NearestEven)?;
/// let mut x = [0.0f32; 32];
/// x[..3].copy_from_slice(&[12.0, -2.0, 0.4]);
/// let mut codes = [0u8; 32];
/// let (scale, nonfinite) = codec.quantize_block(&x, |_| 0, &mut codes);
/// assert_eq!((scale, nonfinite), (Scale::byte(128), false)); // 12 = 6 · 2
/// assert_eq!(codes[..4], [7, 8 | 2, 0, 0]);
/// assert_eq!(codec.decode(codes[1], 1, scale), -2.0);
/// # Ok::<(), nibble_formats::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Codec {
    format: Format,
    params: BlockParams,
}

impl Codec {
    /// A codec of a block format.
    ///
    /// # Errors
    /// [`Error::Unsupported`] if the format is plain or does not have this scale rule, and [`Error::Value`] if a dither is above half a
    /// code step.
    pub fn new(format: Format, rule: ScaleRule, rounding: Rounding) -> Result<Codec> {
        let spec = format.spec();
        let unsupported =
            |why| Err(Error::Unsupported { format: spec.name, with: format!("scale rule `{rule}`"), why });
        let Some(element) = spec.element else {
            return unsupported("it is a plain format, without block scales".to_owned());
        };
        if !spec.rules.contains(&rule) {
            let names: Vec<_> = spec.rules.iter().map(|r| r.name()).collect();
            return unsupported(format!("expected one of {}", names.join(", ")));
        }
        rounding.check()?;
        let (kind, tensor) = (format.scale_kind(rule), [1.0f32.to_bits(); 2]);
        let (scaling, block) = (Scaling::default(), spec.block);
        Ok(Codec { format, params: BlockParams { element, rule, rounding, kind, scaling, block, tensor } })
    }

    /// The same codec with these options of the scale rule.
    ///
    /// # Errors
    /// [`Error::Unsupported`] if an option has no effect with this format and rule ([`Scaling::check`]), or if a correction is used without
    /// rounding to nearest even.
    pub fn with(self, scaling: Scaling) -> Result<Codec> {
        scaling.check(self.format, self.params.rule)?;
        if scaling.correction != Correction::None && self.params.rounding != Rounding::NearestEven {
            return Err(Error::Unsupported {
                format: self.format.spec().name,
                with: format!("rounding `{}`", self.params.rounding),
                why: format!(
                    "under `correction` = {} values are rounded to nearest even",
                    scaling.correction
                ),
            });
        }
        Ok(Codec { params: BlockParams { scaling, ..self.params }, ..self })
    }

    /// The format.
    pub const fn format(&self) -> Format {
        self.format
    }

    /// The parameters of the block arithmetic.
    pub const fn params(&self) -> &BlockParams {
        &self.params
    }

    /// The element format of the codes.
    pub const fn element(&self) -> Element {
        self.params.element
    }

    /// The scale rule.
    pub const fn rule(&self) -> ScaleRule {
        self.params.rule
    }

    /// The rounding of the elements.
    pub const fn rounding(&self) -> Rounding {
        self.params.rounding
    }

    /// Whether the codec needs random bits. A codec needs them to round elements or to round corrected scales, but never for both.
    pub fn draws(&self) -> bool {
        self.params.rounding.is_random() || self.params.scaling.draws()
    }

    /// The stream of random bits for a tensor, with the purpose for which this codec uses random bits.
    pub fn drawn_from(&self, stream: Stream) -> Stream {
        match self.params.scaling.correction {
            Correction::None => stream,
            Correction::MsEden => Stream { purpose: Purpose::Scale, ..stream },
        }
    }

    /// The options of the scale rule.
    pub const fn scaling(&self) -> Scaling {
        self.params.scaling
    }

    /// The kind of scales in a block's scale record.
    pub const fn scale_kind(&self) -> ScaleKind {
        self.params.kind
    }

    /// The same codec with the tensor scale of a tensor whose largest magnitude is `amax`, before this magnitude is multiplied by the
    /// headroom. If `amax` is NaN, the tensor scale is NaN, which marks the whole tensor. The codec is unchanged if the format has no
    /// tensor scale.
    pub fn for_tensor(self, amax: f32) -> Codec {
        if !self.params.kind.has_tensor_scale() {
            return self;
        }
        let amax = self.params.scaling.headroom.over(amax);
        self.under_multipliers(self.format.spec().codec.tensor_scale(&self.params, amax))
    }

    /// The number to which the tensor scale maps the largest magnitude of a tensor (times the headroom).
    pub fn tensor_most(&self) -> f32 {
        self.format.spec().codec.tensor_most(&self.params)
    }

    /// The same codec for a tensor whose stored tensor scale is already known.
    pub fn under(self, tensor_scale: f32) -> Codec {
        self.under_multipliers([1.0 / tensor_scale, tensor_scale])
    }

    fn under_multipliers(self, of_encoding_and_decoding: [f32; 2]) -> Codec {
        let tensor = of_encoding_and_decoding.map(f32::to_bits);
        Codec { params: BlockParams { tensor, ..self.params }, ..self }
    }

    /// The same codec for a tensor that contains a NaN or an infinity. The stored tensor scale of this codec is NaN.
    pub fn marked(self) -> Codec {
        self.under_multipliers([self.tensor_inv(), f32::NAN])
    }

    /// The largest finite magnitude of these values, for [`Codec::for_tensor`]. If a block has no scale that could mark a NaN, the result
    /// is NaN if any value is NaN or infinite.
    pub fn tensor_amax(&self, x: impl Iterator<Item = f32>) -> f32 {
        let marks_all = self.params.kind.levels().is_empty();
        x.fold(0.0, |amax: f32, x| match x.is_finite() {
            true if amax.is_nan() => amax,
            true => amax.max(x.abs()),
            false if marks_all => f32::NAN,
            false => amax,
        })
    }

    /// The factor by which values are multiplied when they are encoded, instead of being divided by the tensor scale.
    #[inline]
    pub const fn tensor_inv(&self) -> f32 {
        self.params.tensor_inv()
    }

    /// The tensor scale; 1 if the format has none.
    #[inline]
    pub const fn tensor_scale(&self) -> f32 {
        self.params.tensor_scale()
    }

    /// Multiplies `amax` by the headroom and returns [`BlockParams::scale_of`] of the product.
    #[inline]
    pub fn scale_of(&self, amax: f32) -> BlockScale {
        self.params.scale_of(self.params.scaling.headroom.over(amax))
    }

    /// The code of value `i` of a block. The argument `r` contains sixteen random bits, which only stochastic roundings use.
    #[inline]
    pub fn encode(&self, x: f32, i: usize, scale: BlockScale, r: u16) -> u8 {
        let scaled = self.format.spec().codec.scaled(&self.params, x, i, scale);
        self.params.element.encode_rounded(scaled, self.params.rounding, r)
    }

    /// The value that code `i` of a block represents: element · scales, rounded to F32, and multiplied by the tensor scale.
    #[inline]
    pub fn decode(&self, code: u8, i: usize, record: Scale) -> f32 {
        let multiplier = self.format.spec().codec.multiplier(&self.params, i, record);
        let value = self.params.element.decode(code) * multiplier;
        if self.params.kind.has_tensor_scale() { value * self.tensor_scale() } else { value }
    }

    /// The scale of a block with the largest magnitude `amax`. If a value is NaN or infinite, `amax` is `None` and the scale is NaN. If the
    /// format has scales per sub-block, a block that is longer than the block length of the format also gets a NaN scale.
    pub fn block_scale(&self, x: &[f32], amax: Option<f32>) -> BlockScale {
        let has_shares = self.params.kind.levels().len() > 1;
        match amax {
            Some(amax) if !has_shares || x.len() <= self.params.block => {
                let amax = self.params.scaling.headroom.over(amax);
                self.format.spec().codec.scale(&self.params, x, amax)
            }
            _ => BlockScale { record: self.params.kind.nan(), inv: f32::NAN },
        }
    }

    /// The scale with which the codes of a block without NaN or infinity are decoded. A [`Correction`] may make it differ from the scale of
    /// encoding. The argument `r` contains sixteen random bits, those of the first element of the block.
    pub fn corrected(&self, x: &[f32], scale: BlockScale, r: u16) -> BlockScale {
        self.format.spec().codec.corrected(&self.params, x, scale, r)
    }

    /// Quantizes one block of any length. A short block is extended by zeros. A 2-D block is passed with all its values. If the format has
    /// scales per sub-block, a block that is longer than the block length of the format gets a NaN scale.
    ///
    /// Writes one code per byte: `codes[i]` for `x[i]`. Codes past the end of `x` become 0; values past the end of `codes` affect only the
    /// scale. `rand(i)` returns sixteen random bits for element `i`. Only stochastic roundings call `rand`. If only the corrected scale is
    /// rounded stochastically, `rand` is called only for the first element. If any value is NaN or infinite, the scale is NaN and all codes
    /// are 0. Returns the scale record, and whether its scale is NaN (some rules also give a finite block a NaN scale if it is out of
    /// range).
    pub fn quantize_block(
        &self,
        x: &[f32],
        mut rand: impl FnMut(usize) -> u16,
        codes: &mut [u8],
    ) -> (Scale, bool) {
        codes.fill(0);
        let scale = self.block_scale(x, amax(x));
        if scale.is_nan() {
            return (scale.record, true);
        }
        let corrects = self.params.scaling.correction != Correction::None;
        let scale = if corrects { self.corrected(x, scale, rand(0)) } else { scale };
        let random = self.params.rounding.is_random();
        for (i, (code, &x)) in codes.iter_mut().zip(x).enumerate() {
            let r = if random { rand(i) } else { 0 };
            *code = self.encode(x, i, scale, r);
        }
        (scale.record, false)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scale::ScaleNumber;
    use crate::spec::WHOLE_LINE;

    fn codec(format: Format, rule: ScaleRule) -> Codec {
        Codec::new(format, rule, Rounding::NearestEven).unwrap()
    }

    #[test]
    fn impossible_combinations_are_named() {
        let new = |format, rule| Codec::new(format, rule, Rounding::NearestEven);
        let e = new(Format::Mxfp4, ScaleRule::Amax).unwrap_err().to_string();
        let want =
            "format `mxfp4` does not go with scale rule `amax`: expected one of rceil, floor, ceil, even";
        assert_eq!(e, want);
        let e = new(Format::Bf16, ScaleRule::Rceil).unwrap_err().to_string();
        assert!(e.starts_with("format `bf16` does not go with scale rule `rceil`: it is a plain"), "{e}");
        assert!(Codec::new(Format::E4m3, ScaleRule::Amax, Rounding::Dither { delta_q16: 0x9000 }).is_err());
        for format in Format::ALL {
            for rule in ScaleRule::ALL {
                assert_eq!(new(format, rule).is_ok(), format.spec().rules.contains(&rule));
            }
        }
    }

    /// Expected codes, computed by hand, of −4, −3.75 … 3.75 with scale 1 (every rule gives scale 1 for amax 4).
    #[test]
    fn a_block_of_quarters_by_hand() {
        let x: [f32; 32] = std::array::from_fn(|i| i as f32 * 0.25 - 4.0);
        let want =
            [0xEE, 0xDE, 0xDD, 0xCC, 0xCC, 0xAB, 0xAA, 0x89, 0x00, 0x21, 0x22, 0x43, 0x44, 0x54, 0x55, 0x66];
        for rule in [ScaleRule::Floor, ScaleRule::Rceil, ScaleRule::Ceil, ScaleRule::Even] {
            let (mut codes, mut packed) = ([9; 32], [9; 16]);
            let made = codec(Format::Mxfp4, rule).quantize_block(&x, |_| unreachable!(), &mut codes);
            assert_eq!(made, (Scale::byte(127), false), "{rule}");
            crate::packing::pack_codes(4, &codes, &mut packed).unwrap();
            assert_eq!(packed, want, "{rule}");
        }
    }

    /// By hand: amax 7 saturates under `floor` (scale 1), but not under `rceil` (scale 2).
    #[test]
    fn floor_saturates_where_rceil_doubles() {
        let x = [7.0, -7.0, 1.0, 0.5, -0.0];
        let mut codes = [0; 5];
        let (scale, _) = codec(Format::Mxfp4, ScaleRule::Floor).quantize_block(&x, |_| 0, &mut codes);
        assert_eq!((scale, codes), (Scale::byte(127), [7, 15, 2, 1, 8]));
        let (scale, _) = codec(Format::Mxfp4, ScaleRule::Rceil).quantize_block(&x, |_| 0, &mut codes);
        // 3.5 ties up to 4 (even code 6), 0.25 ties down to 0.
        assert_eq!((scale, codes), (Scale::byte(128), [6, 14, 1, 0, 8]));
    }

    /// By hand, for an FP8 block with amax 3: the F32 scale is 3/448, and 3 becomes the largest code. The power-of-two scale is 2⁻⁷ (448 ·
    /// 2⁻⁸ = 1.75 < 3 ≤ 3.5), and 3 becomes 3 · 2⁷ = 384.
    #[test]
    fn fp8_blocks_by_hand() {
        let x = [3.0, -1.5, 0.0, 1e-9];
        let mut codes = [0; 4];
        let (scale, _) = codec(Format::E4m3, ScaleRule::Amax).quantize_block(&x, |_| 0, &mut codes);
        assert_eq!((scale, codes), (Scale::single(3.0 / 448.0), [0x7E, 0xF6, 0, 0]));
        let (scale, _) = codec(Format::E4m3, ScaleRule::Rceil).quantize_block(&x, |_| 0, &mut codes);
        assert_eq!((scale, codes), (Scale::byte(120), [0x7C, 0xF4, 0, 0]));
    }

    #[test]
    fn a_block_longer_than_its_shares_is_marked() {
        let x = [1.0; 129];
        for format in Format::ALL.into_iter().filter(|f| f.is_block()) {
            let x = &x[..format.spec().block.min(128) + 1];
            let (codec, mut codes) =
                (codec(format, format.spec().rules[0]).for_tensor(1.0), vec![9; x.len()]);
            let (scale, marked) = codec.quantize_block(x, |_| 0, &mut codes);
            assert_eq!(marked, codec.scale_kind().levels().len() > 1, "{format}");
            assert!(
                !marked || (scale == codec.scale_kind().nan() && codes.iter().all(|code| *code == 0)),
                "{format}"
            );
        }
    }

    #[test]
    fn a_block_of_zeros_is_finite_and_keeps_signs() {
        for format in Format::ALL.into_iter().filter(|f| f.is_block()) {
            let sign = 1u8 << (format.spec().code_bits - 1);
            for &rule in format.spec().rules {
                let (mut codes, codec) = ([9; 2], codec(format, rule).for_tensor(0.0));
                let (scale, nonfinite) = codec.quantize_block(&[0.0, -0.0], |_| 0, &mut codes);
                // Ascend's convention has no scale for a block of zeros.
                assert_eq!(nonfinite, rule == ScaleRule::Cann, "{format} {rule}");
                if nonfinite {
                    continue;
                }
                let sign = if codec.element() == Element::INT8 { 0 } else { sign };
                assert_eq!(codes, [0, sign], "{format} {rule}");
                assert!((0..2).all(|i| codec.decode(codes[i], i, scale) == 0.0), "{format} {rule}");
                if format.spec().block != WHOLE_LINE {
                    assert_eq!(scale, format.scale_kind(rule).least(), "{format} {rule}");
                }
            }
        }
    }

    #[test]
    fn a_nan_or_infinity_anywhere_marks_the_whole_block() {
        for format in Format::ALL.into_iter().filter(|f| f.is_block()) {
            for &rule in format.spec().rules {
                for bad in [f32::NAN, -f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
                    for at in [0, 17, 31] {
                        let mut x = [1.0; 32];
                        x[at] = bad;
                        let mut codes = [9; 32];
                        let codec = codec(format, rule);
                        // The tensor scale is NaN if blocks have no scales.
                        let codec = codec.for_tensor(codec.tensor_amax(x.iter().copied()));
                        let (scale, nonfinite) = codec.quantize_block(&x, |_| 0, &mut codes);
                        let marked = codec.scale_kind().is_nan(scale) || codec.tensor_scale().is_nan();
                        assert!(nonfinite && marked, "{format} {rule} {bad}");
                        assert_eq!(codes, [0; 32]);
                        assert!((0..32).all(|i| codec.decode(0, i, scale).is_nan()));
                    }
                }
            }
        }
    }

    #[test]
    fn even_reports_the_finite_block_it_cannot_hold() {
        let mut codes = [9; 1];
        let (scale, nonfinite) =
            codec(Format::Mxfp4, ScaleRule::Even).quantize_block(&[f32::MAX], |_| 0, &mut codes);
        assert_eq!((scale, nonfinite, codes), (Scale::byte(0xFF), true, [0]));
    }

    /// Exponents of values whose scales have full precision, without a tensor scale.
    fn reach(format: Format, rule: ScaleRule) -> std::ops::Range<i32> {
        match format.scale_kind(rule).levels().first().map(|level| level.number) {
            Some(ScaleNumber::E4m3) => -4..8,
            Some(ScaleNumber::E6m2) => -40..12,
            _ if format.spec().block == WHOLE_LINE => -30..100,
            _ => -100..100,
        }
    }

    #[test]
    fn error_is_at_most_half_a_step_at_every_magnitude() {
        for format in Format::ALL.into_iter().filter(|f| f.is_block()) {
            let bounded = [ScaleRule::Rceil, ScaleRule::Amax, ScaleRule::TensorAmax];
            for &rule in format.spec().rules.iter().filter(|rule| bounded.contains(rule)) {
                let codec = codec(format, rule);
                let wide = codec.scale_kind().has_tensor_scale();
                for exponent in if wide { -100..100 } else { reach(format, rule) } {
                    let unit = 2f64.powi(exponent) as f32;
                    let x: [f32; 32] = std::array::from_fn(|i| (i as f32 - 15.5) * 0.37 * unit);
                    let codec = codec.for_tensor(codec.tensor_amax(x.into_iter()));
                    let (block, mut codes) = (format.spec().block.min(32), [0; 32]);
                    // The bound is half a step of the top binade relative to amax, for a scale that may be up to 2× too coarse.
                    let bound = 16.0 * 0.37 * unit * 0.5f32.powi(codec.element().mantissa_bits() as i32);
                    for (x, codes) in x.chunks(block).zip(codes.chunks_mut(block)) {
                        let (scale, _) = codec.quantize_block(x, |_| 0, codes);
                        for (i, (x, &code)) in x.iter().zip(&*codes).enumerate() {
                            let error = (codec.decode(code, i, scale) - x).abs();
                            assert!(error <= bound, "{format} {rule} 2^{exponent}: {x} off by {error}");
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn stochastic_blocks_ask_for_bits_by_position() {
        let codec = Codec::new(Format::Mxfp4, ScaleRule::Rceil, Rounding::Stochastic).unwrap();
        let x = [6.0, 2.25, 2.25, -2.25]; // 2.25 is a quarter of the way from 2 to 3
        let mut codes = [0; 4];
        let bits = [0, 0x3FFF, 0x4000, 0x3FFF];
        codec.quantize_block(&x, |i| bits[i], &mut codes);
        assert_eq!(codes, [7, 5, 4, 13]);
    }

    #[test]
    fn short_blocks_are_extended_by_zero() {
        let mut codes = [9; 4];
        let made = codec(Format::E4m3, ScaleRule::Rceil).quantize_block(&[448.0], |_| 0, &mut codes);
        assert_eq!((made, codes), ((Scale::byte(127), false), [0x7E, 0, 0, 0]));
        let made = codec(Format::E4m3, ScaleRule::Rceil).quantize_block(&[], |_| 0, &mut codes);
        assert_eq!((made, codes), ((Scale::byte(0), false), [0; 4]));
    }
}
