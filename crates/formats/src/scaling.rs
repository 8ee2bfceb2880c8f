//! Choices of a format's scales besides the rule. Each has its own key, for the formats that have the choice.

use crate::error::{Error, Result, find_by_name};

/// How scales are chosen within a rule. The default gives the format's own bits.
///
/// ```
/// use nibble_formats::{Codec, Format, Headroom, Rounding, ScaleRule, Scaling};
/// let codec = Codec::new(Format::Mxfp4, ScaleRule::Floor, Rounding::Stochastic)?;
/// let roomy = codec.with(Scaling { headroom: Headroom::new(1.375)?, ..Scaling::default() })?;
/// // 7 is above the largest code, 6, of the scale 1; with headroom, the scale is that of 9.625.
/// assert_eq!([codec, roomy].map(|codec| codec.scale_of(7.0).inv), [1.0, 0.5]);
/// # Ok::<(), nibble_formats::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub struct Scaling {
    /// Factor of the largest magnitude, of a block or a tensor, before a scale is chosen from it.
    pub headroom: Headroom,
    /// Magnitudes from which on shares of a block get another octave.
    pub thresholds: Thresholds,
    /// The scales among which a block takes the best.
    pub candidates: Candidates,
    /// Rounding of the tensor scale.
    pub outer: Outer,
    /// Factor of a block's scale once its values are rounded.
    pub correction: Correction,
    /// The values of a weight that share scales.
    pub block: BlockShape,
}

/// A factor from 1 to 2 in sixteenths. It multiplies the largest magnitude of a block or tensor when a scale is chosen from it, in one F32
/// multiplication that saturates at the largest number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Headroom(pub(crate) u8);

impl Headroom {
    /// None: the factor is 1.
    pub const NONE: Headroom = Headroom(16);
    /// The largest: the factor is 2.
    pub const MOST: Headroom = Headroom(32);

    /// Headroom of this factor.
    ///
    /// # Errors
    /// [`Error::Value`] unless it is one of 1, 1.0625, 1.125 .. 2.
    pub fn new(factor: f64) -> Result<Headroom> {
        let sixteenths = factor * 16.0;
        if (16.0..=32.0).contains(&sixteenths) && sixteenths.fract() == 0.0 {
            return Ok(Headroom(sixteenths as u8));
        }
        let expected = "1 to 2 in steps of 1/16 = 0.0625".to_owned();
        Err(Error::Value { argument: "headroom", got: factor.to_string(), expected })
    }

    /// The least headroom with at least this factor, from 1 to 2.
    pub(crate) const fn reaching(factor: f64) -> Headroom {
        let sixteenths = (factor * 16.0) as u8;
        Headroom(sixteenths + ((sixteenths as f64) < factor * 16.0) as u8)
    }

    /// The factor.
    pub const fn factor(self) -> f32 {
        self.0 as f32 / 16.0
    }

    /// A finite magnitude with headroom; other values stay as they are.
    #[inline]
    pub fn over(self, amax: f32) -> f32 {
        if amax.is_finite() { (amax * self.factor()).clamp(-f32::MAX, f32::MAX) } else { amax }
    }
}

impl Default for Headroom {
    fn default() -> Self {
        Headroom::NONE
    }
}

impl std::fmt::Display for Headroom {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.pad(&self.factor().to_string())
    }
}

/// Defines an enum whose variants have names, with a default.
macro_rules! named {
    ($what:literal, $(#[$doc:meta])* $enum:ident { $(#[$first_doc:meta])* $first:ident = $first_name:literal, $($(#[$more:meta])* $variant:ident = $name:literal,)* }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
        pub enum $enum {
            $(#[$first_doc])*
            #[default]
            $first,
            $($(#[$more])* $variant,)*
        }

        impl $enum {
            /// Every variant, the default first.
            pub const ALL: &'static [$enum] = &[$enum::$first, $($enum::$variant),*];

            /// The name, as recipes spell it.
            pub const fn name(self) -> &'static str {
                match self {
                    $enum::$first => $first_name,
                    $($enum::$variant => $name,)*
                }
            }
        }

        impl std::fmt::Display for $enum {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.pad(self.name())
            }
        }

        impl std::str::FromStr for $enum {
            type Err = Error;

            fn from_str(s: &str) -> Result<Self> {
                find_by_name($what, $enum::ALL, s)
            }
        }
    };
}

named! {
    "thresholds",
    /// Thresholds at which shares of a HiFloat4 block get an octave, as magnitudes in units of the block's first scale. An eighth gets one
    /// from the first threshold on; a sixteenth from the first one on if its eighth has one, otherwise from the second on.
    Thresholds {
        /// 4 and 2, as the format's authors define them: magnitudes just below 4 may saturate at 3.5.
        FourTwo = "4,2",
        /// 3.5 and 1.75, the largest code with one octave and with none: no share saturates. To avoid any other bias, values are then
        /// multiplied by the F32 reciprocal of their scale, where the authors use BF16.
        OfLargestCode = "3.5,1.75",
    }
}

impl Thresholds {
    /// Both numbers.
    #[inline]
    pub const fn bounds(self) -> [f64; 2] {
        match self {
            Thresholds::FourTwo => [4.0, 2.0],
            Thresholds::OfLargestCode => [3.5, 1.75],
        }
    }

    /// Whether values are multiplied by the scale's reciprocal in F32, instead of in BF16.
    #[inline]
    pub const fn divides(self) -> bool {
        matches!(self, Thresholds::OfLargestCode)
    }
}

named! {
    "candidates",
    /// The scales that are tried for an NVFP4 block. Four Over Six (Cook et al., arXiv 2512.02010) maps the largest magnitude to 6 or to 4,
    /// and keeps the scale with the smaller error.
    Candidates {
        /// One: the largest magnitude becomes 6.
        Six = "6",
        /// The scale with the smaller sum of squared errors; 6 if they are equal.
        FourOrSixMse = "4/6-mse",
        /// The scale with the smaller sum of absolute errors; 6 if they are equal.
        FourOrSixMae = "4/6-mae",
    }
}

named! {
    "outer",
    /// Rounding of the tensor scale, for formats whose blocks also have scales of their own.
    Outer {
        /// To an F32.
        Tensor = "tensor",
        /// Up to a power of two.
        Power = "power",
    }
}

named! {
    "correction",
    /// Factor of an NVFP4 block's scale once its values are rounded.
    ///
    /// **MS-EDEN** (Panferov et al., "Quartet II", arXiv 2601.22813) applies to a tensor after a random Hadamard transform with new signs
    /// each time. A block's scale is the E4M3 number nearest to [`CLIP`](Correction::CLIP) · amax / 6 over the tensor scale, so the largest
    /// values saturate a little: this minimizes the error of normal values. The tensor scale is CLIP · amax / (6 · 256), which leaves range
    /// above the largest block's scale. With the values v in units of their scale, and their nearest codes c, the block is corrected by
    ///
    /// ```text
    /// S = Σ v² / Σ v·c        S · scale is stochastically rounded to E4M3, so that its mean is S · scale
    /// ```
    ///
    /// So ⟨v, S·c⟩ = ⟨v, v⟩ whatever the signs: along the tensor's own direction nothing is lost on average. The remaining error is
    /// orthogonal to it, and has mean zero over rotations; Hadamard transforms with random signs approximate these. Sums are over the
    /// block, as in the authors' fused kernels (`rht128_eden`); in their emulation they are over all blocks of a transform, which would mix
    /// numbers in different units. In the kernels the tensor scale is computed from the corrected scales; here, as in the emulation, from
    /// the values, which are encoded with scales that are already E4M3.
    Correction {
        /// No correction.
        None = "none",
        /// Makes the quantization of a tensor unbiased over new signs.
        MsEden = "ms-eden",
    }
}

named! {
    "block",
    /// The values of a weight that share scales, in formats whose blocks are stored line by line.
    BlockShape {
        /// A line of a block's length.
        Line = "line",
        /// A square of that side, for the weight as it is and for the transposed weight alike ([`square`](crate::square)).
        Square = "square",
    }
}

impl Correction {
    /// A block's scale relative to the one with which nothing saturates, before rounding: 0.93 · 17/16.
    pub const CLIP: f32 = 0.93 * 17.0 / 16.0;
}

impl Scaling {
    /// The names of the choices in recipes.
    pub const KEYS: [&'static str; 6] =
        ["headroom", "thresholds", "candidates", "outer", "correction", "block"];

    /// The choices that differ from the defaults: names and values.
    pub fn chosen(&self) -> impl Iterator<Item = (&'static str, String)> {
        let values = |of: &Scaling| {
            let Scaling { headroom, thresholds, candidates, outer, correction, block } = of;
            [headroom as &dyn std::fmt::Display, thresholds, candidates, outer, correction, block]
                .map(|v| v.to_string())
        };
        let both = values(self).into_iter().zip(values(&Scaling::default()));
        Self::KEYS
            .into_iter()
            .zip(both)
            .filter(|(_, (is, default))| is != default)
            .map(|(key, (is, _))| (key, is))
    }

    /// The same in words: a correction and the shape of blocks are named by their values alone.
    pub fn in_words(&self) -> impl Iterator<Item = String> {
        self.chosen().map(|(key, value)| match key {
            "correction" | "block" => value,
            _ => format!("{key} {value}"),
        })
    }

    /// Whether scales need random bits.
    pub fn draws(&self) -> bool {
        self.correction != Correction::None
    }

    /// Whether the lines of a square share scales.
    pub fn is_square(&self) -> bool {
        self.block == BlockShape::Square
    }

    /// Whether it is the default, which gives a format's own bits.
    pub fn is_default(&self) -> bool {
        *self == Scaling::default()
    }

    /// Whether blocks choose their scales by default; the choice for the tensor scale may differ.
    pub fn is_default_in_blocks(&self) -> bool {
        Scaling { outer: Outer::default(), ..*self }.is_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn factors_are_sixteenths() {
        for sixteenths in 16..=32u8 {
            let factor = f64::from(sixteenths) / 16.0;
            let headroom = Headroom::new(factor).unwrap();
            assert_eq!((f64::from(headroom.factor()), headroom), (factor, Headroom(sixteenths)));
            assert_eq!(headroom.to_string().parse::<f64>().unwrap(), factor);
        }
        for factor in [0.9375, 2.0625, 1.1, f64::NAN, f64::INFINITY, -1.0] {
            let error = Headroom::new(factor).unwrap_err().to_string();
            assert!(error.starts_with("`headroom`: got"), "{error}");
        }
        let two = Headroom(32);
        assert_eq!([1.5, f32::MAX, f32::INFINITY].map(|x| two.over(x)), [3.0, f32::MAX, f32::INFINITY]);
        assert!(two.over(f32::NAN).is_nan());
    }

    #[test]
    fn names_are_read_back() {
        assert!(Thresholds::ALL.iter().all(|t| t.name().parse() == Ok(*t)));
        assert!(Candidates::ALL.iter().all(|c| c.name().parse() == Ok(*c)));
        assert!(Correction::ALL.iter().all(|c| c.name().parse() == Ok(*c)));
        assert!(Outer::ALL.iter().all(|o| o.name().parse() == Ok(*o)));
        let error = "4/6".parse::<Candidates>().unwrap_err().to_string();
        assert_eq!(error, "unknown candidates `4/6`: expected one of 6, 4/6-mse, 4/6-mae");
    }
}
