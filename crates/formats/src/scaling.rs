//! What may be asked of a format's scales beside its rule: keys of their own, each for the formats that have the choice.

use crate::e8m0::ScaleRule;
use crate::element::Element;
use crate::error::{Error, Result, find_by_name};
use crate::format::Format;
use crate::scale::ScaleNumber;

/// How scales are chosen within a rule. The default gives the bits that the format has by itself.
///
/// ```
/// use nibble_formats::{Codec, Format, Headroom, Rounding, ScaleRule, Scaling};
/// let codec = Codec::new(Format::Mxfp4, ScaleRule::Floor, Rounding::Stochastic)?;
/// let roomy = codec.with(Scaling { headroom: Headroom::new(1.375)?, ..Scaling::default() })?;
/// // 7 is above the largest code, 6, of the scale 1; with room it is chosen as 9.625 is.
/// assert_eq!([codec, roomy].map(|codec| codec.scale_of(7.0).inv), [1.0, 0.5]);
/// # Ok::<(), nibble_formats::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub struct Scaling {
    /// What a largest magnitude, of a block or a tensor, is multiplied by before a scale is chosen from it.
    pub headroom: Headroom,
    /// From where on shares of a block get another octave.
    pub thresholds: Thresholds,
    /// The scales of which a block takes the best.
    pub candidates: Candidates,
    /// What the tensor's scale is rounded to.
    pub outer: Outer,
    /// What a block's scale is multiplied by once its values are rounded.
    pub correction: Correction,
}

/// A factor from 1 to 2 in sixteenths, by which a largest magnitude seems larger when a scale is chosen from it, a block's or that of a tensor above it: one
/// F32 multiplication, which ends at the largest number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Headroom(u8);

impl Headroom {
    /// None: the factor is 1.
    pub const NONE: Headroom = Headroom(16);
    /// The largest: the factor is 2.
    pub const MOST: Headroom = Headroom(32);

    /// A factor.
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

    /// The least factor in sixteenths that is no less than this one, of 1 to 2.
    const fn reaching(factor: f64) -> Headroom {
        let sixteenths = (factor * 16.0) as u8;
        Headroom(sixteenths + ((sixteenths as f64) < factor * 16.0) as u8)
    }

    /// The factor.
    pub const fn factor(self) -> f32 {
        self.0 as f32 / 16.0
    }

    /// A finite magnitude with this room above it; what is not finite is as it was.
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

/// Makes an enum whose variants have names, with a default.
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
            /// Every one, the default first.
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
    /// From which magnitude on, in units of a block's first scale, an eighth of a HiFloat4 block gets an octave, and a sixteenth: of an eighth
    /// that has one the first number, of the others the second.
    Thresholds {
        /// 4 and 2, as the format's authors have them: a share's largest magnitudes below 4 may saturate at 3.5.
        FourTwo = "4,2",
        /// 3.5 and 1.75, which are the largest code with one octave and with none: no share saturates. So that nothing else has a bias, values are
        /// then multiplied by the reciprocal of their scale in F32, where the authors have BF16.
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

    /// Whether values are multiplied by the scale's reciprocal as an F32 number, rather than as a BF16 number.
    #[inline]
    pub const fn divides(self) -> bool {
        matches!(self, Thresholds::OfLargestCode)
    }
}

named! {
    "candidates",
    /// The scales that an NVFP4 block is tried with. Four Over Six (Cook et al., arXiv 2512.02010) takes the largest magnitude to 6 or to 4, and keeps
    /// what loses less.
    Candidates {
        /// One: the largest magnitude becomes 6.
        Six = "6",
        /// Of both the one with the smaller sum of squared errors; 6 where they are equal.
        FourOrSixMse = "4/6-mse",
        /// Of both the one with the smaller sum of absolute errors; 6 where they are equal.
        FourOrSixMae = "4/6-mae",
    }
}

named! {
    "outer",
    /// What the scale that a tensor's blocks share is rounded to, where they have scales of their own beside it.
    Outer {
        /// To an F32.
        Tensor = "tensor",
        /// Up to a power of two.
        Power = "power",
    }
}

named! {
    "correction",
    /// What is multiplied into the scale of an NVFP4 block once its values are rounded.
    ///
    /// **MS-EDEN** (Panferov et al., "Quartet II", arXiv 2601.22813) takes a tensor after a random Hadamard transform whose signs are drawn each time.
    /// A block's scale is the E4M3 number nearest to [`CLIP`](Correction::CLIP) · amax / 6 over the tensor's scale, under which the largest values saturate a
    /// little: of normal values that loses least. The tensor's scale is CLIP · amax / (6 · 256), which leaves room above the largest block's.
    /// Of the values v in units of their scale and their codes c, the nearest ones, the block is corrected by
    ///
    /// ```text
    /// S = Σ v² / Σ v·c        S · scale is rounded to E4M3 at random, up or down so that its mean is S · scale
    /// ```
    ///
    /// So ⟨v, S·c⟩ = ⟨v, v⟩ whatever the signs: along the tensor's own direction nothing is lost on average. What is left stands across it, and has the mean
    /// zero over rotations; Hadamard transforms with random signs come close to those. Sums are over the block, as the authors' fused kernels have them
    /// (`rht128_eden`); over a transform's blocks together, as in their emulation, the sums would be of numbers in different units. There the tensor's scale
    /// is made of the corrected scales; here of the values, as in the emulation, and values are encoded under scales that are E4M3 already.
    Correction {
        /// Nothing.
        None = "none",
        /// What makes a tensor under fresh signs unbiased.
        MsEden = "ms-eden",
    }
}

impl Correction {
    /// By how much a block's scale is smaller than the one under which nothing saturates, but for the rounding of that: 0.93 · 17/16.
    pub const CLIP: f32 = 0.93 * 17.0 / 16.0;
}

impl Scaling {
    /// Whether it is the default, under which formats have their bits by themselves.
    pub fn is_default(&self) -> bool {
        *self == Scaling::default()
    }

    /// Whether blocks choose their scales as they do by default; that of the tensor may be another.
    pub fn is_default_in_blocks(&self) -> bool {
        Scaling { outer: Outer::default(), ..*self }.is_default()
    }

    /// What makes stochastic rounding unbiased, with `dither:0.5`: the least room in which no code saturates, as long as a block's scale is one of
    /// the normal numbers of its kind. None for plain formats, rules that a format does not know, and `cann`, which rounds products before codes.
    ///
    /// Scales that are rounded to nearest with m mantissa bits come out too small by a factor of 1 + 2^-(m+1) at most. HiFloat4's scale is rounded before,
    /// to eight bits, and made with a seventh that is a BF16 number: together 1.125 · 512/511 · (1 + 2^-9), for which 1.125 is too little and the next
    /// sixteenth is enough. The rules of powers of two follow from the largest element: `floor` leaves magnitudes below 2^(emax + 1), `even` below that
    /// less half a step. Where F32 operations stand between a magnitude and its code, their last bits may lie above the largest code.
    pub fn unbiased(format: Format, rule: ScaleRule) -> Option<Scaling> {
        let spec = format.spec();
        let element = spec.element.filter(|_| spec.rules.contains(&rule) && rule != ScaleRule::Cann)?;
        // Of a hierarchy the finest number: those above it are powers of two that are rounded up, or there is none.
        let numbers = format.scale_kind(rule).levels().iter().map(|level| level.number);
        let headroom = match numbers.rev().find(|number| *number != ScaleNumber::Bit) {
            Some(ScaleNumber::E4m3 | ScaleNumber::UnsignedE4m3) => Headroom(17),
            Some(ScaleNumber::E6m2) => Headroom(19),
            Some(ScaleNumber::E8m0) => Headroom::reaching(reach(rule, element)),
            _ => Headroom::NONE,
        };
        let thresholds = if spec.has_thresholds { Thresholds::OfLargestCode } else { Thresholds::default() };
        Some(Scaling { headroom, thresholds, ..Scaling::default() })
    }

    /// Refuses by its name what decides nothing for a format under a rule, or cannot be.
    ///
    /// # Errors
    /// [`Error::Unsupported`].
    pub fn check(&self, format: Format, rule: ScaleRule) -> Result<()> {
        let (spec, kind) = (format.spec(), format.scale_kind(rule));
        let has_records = format.is_block() && !kind.levels().is_empty();
        let default = Scaling::default();
        let fixed = rule == ScaleRule::Cann;
        let cases = [
            (
                self.headroom != default.headroom && (fixed || !has_records),
                "headroom",
                if fixed { "rule `cann` fixes how scales are chosen" } else { "its blocks have no scales" },
            ),
            (
                self.thresholds != default.thresholds && (fixed || !spec.has_thresholds),
                "thresholds",
                if fixed { "rule `cann` fixes them" } else { "its scales have no octaves of shares" },
            ),
            (
                self.candidates != default.candidates && !spec.has_candidates,
                "candidates",
                "it has one scale for a block",
            ),
            (
                self.correction != default.correction && !(spec.has_correction && kind.has_tensor_scale()),
                "correction",
                if spec.has_correction {
                    "without a scale of the tensor the largest blocks' have no room for it"
                } else {
                    "its scales are not corrected"
                },
            ),
            (
                self.correction != default.correction && self.candidates != default.candidates,
                "candidates",
                "a corrected block has one scale",
            ),
            (
                self.outer != default.outer && !(has_records && kind.has_tensor_scale()),
                "outer",
                "its blocks have no scales under one of the tensor",
            ),
        ];
        match cases.into_iter().find(|(refused, ..)| *refused) {
            None => Ok(()),
            Some((_, key, why)) => Err(Error::Unsupported {
                format: spec.name,
                with: format!("`{key}`"),
                why: format!("it decides nothing, since {why}"),
            }),
        }
    }
}

/// What a rule of powers of two leaves of a block's largest magnitude at most, over the largest element; 1 where less.
fn reach(rule: ScaleRule, element: Element) -> f64 {
    let binade = f64::from(element.emax()).exp2();
    let below = match rule {
        ScaleRule::Floor => 2.0,
        ScaleRule::Even => 2.0 - (-1.0 - f64::from(element.mantissa_bits())).exp2(),
        _ => 0.0,
    };
    (below * binade / f64::from(element.max())).max(1.0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Codec, Rounding};

    fn named(scaling: Scaling, format: Format, rule: ScaleRule) -> String {
        let codec = Codec::new(format, rule, Rounding::NearestEven).unwrap();
        codec.with(scaling).map_or_else(|e| e.to_string(), |codec| format!("{:?}", codec.scaling()))
    }

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
    fn what_decides_nothing_is_refused_by_name() {
        let default = Scaling::default();
        let room = Scaling { headroom: Headroom(17), ..default };
        let shares = Scaling { thresholds: Thresholds::OfLargestCode, ..default };
        let two = Scaling { candidates: Candidates::FourOrSixMae, ..default };
        let power = Scaling { outer: Outer::Power, ..default };
        let corrected = Scaling { correction: Correction::MsEden, ..default };
        for format in Format::ALL.into_iter().filter(|format| format.is_block()) {
            for &rule in format.spec().rules {
                let says = |scaling, key: &str, takes: bool| {
                    let said = named(scaling, format, rule);
                    let refusal =
                        said.contains(&format!("`{format}` does not go with `{key}`: it decides nothing"));
                    assert_eq!(refusal, !takes, "{format} {rule}: {said}");
                };
                let (fixed, kind) = (rule == ScaleRule::Cann, format.scale_kind(rule));
                says(room, "headroom", !fixed && !kind.levels().is_empty());
                says(shares, "thresholds", !fixed && format == Format::Hif4);
                says(two, "candidates", format == Format::Nvfp4);
                says(power, "outer", format == Format::Nvfp4 && rule == ScaleRule::TensorAmax);
                says(corrected, "correction", format == Format::Nvfp4 && rule == ScaleRule::TensorAmax);
                assert!(default.check(format, rule).is_ok());
            }
        }
    }

    #[test]
    fn corrected_blocks_have_one_scale_and_are_rounded_to_nearest() {
        let (format, rule) = (Format::Nvfp4, ScaleRule::TensorAmax);
        let corrected = Scaling { correction: Correction::MsEden, ..Scaling::default() };
        let both = Scaling { candidates: Candidates::FourOrSixMse, ..corrected };
        let said = named(both, format, rule);
        assert!(
            said.contains("`nvfp4` does not go with `candidates`") && said.contains("corrected"),
            "{said}"
        );
        for rounding in [Rounding::NearestAway, Rounding::Stochastic, Rounding::Dither { delta_q16: 1 }] {
            let codec = Codec::new(format, rule, rounding).unwrap();
            let said = codec.with(corrected).unwrap_err().to_string();
            assert!(said.contains("rounding") && said.contains("correction"), "{said}");
        }
    }

    /// By hand: 8/6, 512/448, 8/7.5, 32/28 and 2/(127/64) for `floor`; 7/6, 496/448 and so on for `even`.
    #[test]
    fn the_room_that_powers_of_two_want() {
        let sixteenths = |format, rule| Scaling::unbiased(format, rule).unwrap().headroom.0;
        for (format, floor, even) in [
            (Format::Mxfp4, 22, 19),
            (Format::E4m3, 19, 18),
            (Format::E5m2, 19, 18),
            (Format::Mxfp6E2m3, 18, 17),
            (Format::Mxfp6E3m2, 19, 18),
            (Format::Mxint8, 17, 17),
        ] {
            assert_eq!(sixteenths(format, ScaleRule::Floor), floor, "{format}");
            assert_eq!(sixteenths(format, ScaleRule::Even), even, "{format}");
            assert_eq!(sixteenths(format, ScaleRule::Rceil), 16, "{format}");
        }
        assert_eq!(Scaling::unbiased(Format::Hif4, ScaleRule::Cann), None);
        assert_eq!(Scaling::unbiased(Format::Bf16, ScaleRule::Amax), None);
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
