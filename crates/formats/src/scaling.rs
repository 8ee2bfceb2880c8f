//! Choices of a format's scales besides the scale rule. Each choice has its own recipe key, for the formats that have the choice.

use crate::error::{Error, Result, find_by_name};

/// How scales are chosen within a scale rule. The default options give the standard definition of the format.
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
    /// Factor by which the largest magnitude of a block or tensor is multiplied before a scale is chosen.
    pub headroom: Headroom,
    /// The magnitudes from which sub-blocks get an additional factor of two.
    pub thresholds: Thresholds,
    /// The candidate scales among which a block chooses the best.
    pub candidates: Candidates,
    /// Rounding of the tensor scale.
    pub outer: Outer,
    /// How the scale of a block is corrected after its values are rounded.
    pub correction: Correction,
    /// Which values of a weight share scales.
    pub block: BlockShape,
}

/// The headroom, which is a factor from 1 to 2 in steps of 1/16. The largest magnitude of a block or tensor is multiplied by this factor
/// when a scale is chosen. The multiplication is in F32 and saturates at the largest number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Headroom(pub(crate) u8);

impl Headroom {
    /// No headroom: the factor is 1.
    pub const NONE: Headroom = Headroom(16);
    /// The largest headroom: the factor is 2.
    pub const MOST: Headroom = Headroom(32);

    /// Headroom of this factor.
    ///
    /// # Errors
    /// [`Error::Value`] unless `factor` is one of 1, 1.0625, 1.125 .. 2.
    pub fn new(factor: f64) -> Result<Headroom> {
        let sixteenths = factor * 16.0;
        if (16.0..=32.0).contains(&sixteenths) && sixteenths.fract() == 0.0 {
            return Ok(Headroom(sixteenths as u8));
        }
        let expected = "1 to 2 in steps of 1/16 = 0.0625".to_owned();
        Err(Error::Value { argument: "headroom", got: factor.to_string(), expected })
    }

    /// The smallest headroom whose factor is at least `factor`, which is 1 to 2.
    pub(crate) const fn reaching(factor: f64) -> Headroom {
        let sixteenths = (factor * 16.0) as u8;
        Headroom(sixteenths + ((sixteenths as f64) < factor * 16.0) as u8)
    }

    /// The factor.
    pub const fn factor(self) -> f32 {
        self.0 as f32 / 16.0
    }

    /// Multiplies a finite magnitude by the factor. NaN and infinity are returned unchanged.
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
            /// All variants, the default first.
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
    /// Thresholds at which sub-blocks of a HiFloat4 block get a factor of two, as magnitudes in units of the block's E6M2 scale. An eighth
    /// of the block gets a factor at the first threshold. A sixteenth gets one at the first threshold if its eighth has a factor, otherwise
    /// at the second threshold.
    Thresholds {
        /// 4 and 2, as the format's authors define them: magnitudes slightly below 4 may saturate at 3.5.
        FourTwo = "4,2",
        /// 3.5 and 1.75, the largest values with and without one factor of two: no sub-block saturates. To avoid any other bias, values are
        /// then multiplied by the F32 reciprocal of their scale; the authors use BF16.
        OfLargestCode = "3.5,1.75",
    }
}

impl Thresholds {
    /// Both thresholds.
    #[inline]
    pub const fn bounds(self) -> [f64; 2] {
        match self {
            Thresholds::FourTwo => [4.0, 2.0],
            Thresholds::OfLargestCode => [3.5, 1.75],
        }
    }

    /// Whether values are multiplied by the reciprocal of the scale in F32 instead of BF16.
    #[inline]
    pub const fn divides(self) -> bool {
        matches!(self, Thresholds::OfLargestCode)
    }
}

named! {
    "candidates",
    /// The candidate scales of an NVFP4 block. Four Over Six (Cook et al., arXiv 2512.02010) maps the largest magnitude to 6 or to 4, and
    /// keeps the scale with the smaller error.
    Candidates {
        /// One candidate: the largest magnitude becomes 6.
        Six = "6",
        /// The scale with the smaller sum of squared errors; if the sums are equal, the scale that maps to 6.
        FourOrSixMse = "4/6-mse",
        /// The scale with the smaller sum of absolute errors; if the sums are equal, the scale that maps to 6.
        FourOrSixMae = "4/6-mae",
    }
}

named! {
    "outer",
    /// Rounding of the tensor scale, for formats whose blocks also have scales of their own.
    Outer {
        /// Rounding to an F32.
        Tensor = "tensor",
        /// Rounding up to a power of two.
        Power = "power",
    }
}

named! {
    "correction",
    /// The correction of an NVFP4 block's scale after its values are rounded.
    ///
    /// **MS-EDEN** (Panferov et al., "Quartet II", arXiv 2601.22813) applies to a tensor after a random Hadamard transform with new signs
    /// in each step. A block's scale is the E4M3 number nearest to [`CLIP`](Correction::CLIP) · amax / 6, divided by the tensor scale. So
    /// the largest values saturate slightly, which minimizes the error of normally distributed values. The tensor scale is CLIP · amax / (6
    /// · 256), which leaves range above the scale of the largest block. With the values v in units of their scale, and their nearest codes
    /// c, the correction is
    ///
    /// ```text
    /// S = Σ v² / Σ v·c        S · scale is stochastically rounded to E4M3, so that its mean is S · scale
    /// ```
    ///
    /// So ⟨v, S·c⟩ = ⟨v, v⟩ for all signs: the error has no mean component along v. The remaining error is orthogonal to v and has mean
    /// zero over random rotations, which Hadamard transforms with random signs approximate. The sums are over the block, as in the authors'
    /// fused kernels (`rht128_eden`). The authors' emulation sums over all blocks of a transform, which would mix numbers in different
    /// units. The authors' kernels compute the tensor scale from the corrected scales. Nibble computes it from the values, as the emulation
    /// does, and encodes the values with scales that are already E4M3.
    Correction {
        /// No correction.
        None = "none",
        /// Makes the quantization of a tensor unbiased over random signs.
        MsEden = "ms-eden",
    }
}

named! {
    "block",
    /// The shape of a weight's blocks, in formats that store one scale record per row of a block.
    BlockShape {
        /// A part of a row, as long as the format's block.
        Line = "line",
        /// A 2-D block with sides as long as the format's block. The weight and the transposed weight have the same codes ([`square`](crate::square)).
        Square = "square",
    }
}

impl Correction {
    /// The ratio of the scale of a block to the scale with which no value saturates, before rounding. The ratio is 0.93 · 17/16.
    pub const CLIP: f32 = 0.93 * 17.0 / 16.0;
}

impl Scaling {
    /// The names of the options in recipes.
    pub const KEYS: [&'static str; 6] =
        ["headroom", "thresholds", "candidates", "outer", "correction", "block"];

    /// The names and values of the options that differ from the defaults.
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

    /// The options of [`Scaling::chosen`] as a text. For a correction and for the shape of blocks, the text contains only the value and not
    /// the name of the option.
    pub fn in_words(&self) -> impl Iterator<Item = String> {
        self.chosen().map(|(key, value)| match key {
            "correction" | "block" => value,
            _ => format!("{key} {value}"),
        })
    }

    /// Whether random bits are needed to round scales.
    pub fn draws(&self) -> bool {
        self.correction != Correction::None
    }

    /// Whether the rows and columns of a 2-D block share scales ([`BlockShape::Square`]).
    pub fn is_square(&self) -> bool {
        self.block == BlockShape::Square
    }

    /// Whether all options have their defaults, which give the standard results of the format.
    pub fn is_default(&self) -> bool {
        *self == Scaling::default()
    }

    /// Whether all options for block scales have their defaults. The option for the tensor scale may differ from its default.
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
