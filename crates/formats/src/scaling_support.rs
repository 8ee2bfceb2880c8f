//! The scaling choices that a format supports under a scale rule.

use crate::e8m0::ScaleRule;
use crate::element::Element;
use crate::error::{Error, Result};
use crate::format::Format;
use crate::scale::ScaleNumber;
use crate::scaling::{Headroom, Scaling, Thresholds};

impl Scaling {
    /// The options with which stochastic rounding and `dither:0.5` are unbiased. Their headroom is the smallest with which no code
    /// saturates. The rounding is unbiased only for blocks whose scale is a normal (not subnormal) number of its format. `None` for plain
    /// formats, for rules that a format does not have, and for `cann`, which rounds products before codes.
    ///
    /// A scale rounded to nearest with m mantissa bits is too small by a factor of at most 1 + 2^-(m+1). HiFloat4's scale is first rounded
    /// to eight bits and computed with 1/7 in BF16. Together, these roundings require a headroom of 1.125 · 512/511 · (1 + 2^-9), so 1.125
    /// is too small, and the next larger sixteenth, 1.1875, is enough. The headroom of power-of-two rules follows from the largest element:
    /// scaled magnitudes are below 2^(emax + 1) under `floor`, and half a step smaller under `even`. If F32 operations precede the
    /// encoding, their rounding errors may exceed the largest code.
    pub fn unbiased(format: Format, rule: ScaleRule) -> Option<Scaling> {
        let spec = format.spec();
        let element = spec.element.filter(|_| spec.rules.contains(&rule) && rule != ScaleRule::Cann)?;
        // For a hierarchy, this is the finest number; the numbers above it, if any, are powers of two that are rounded up.
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

    /// Returns an error if an option has no effect for this format and scale rule, or if it is impossible. The error names the option.
    ///
    /// # Errors
    /// [`Error::Unsupported`] if an option has no effect or is impossible.
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
                self.block != default.block && !spec.squares,
                "block",
                "its lines do not share scales in squares",
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
                why: format!("it has no effect, since {why}"),
            }),
        }
    }
}

/// The largest possible magnitude of a block, divided by its power-of-two scale and by the largest element; at least 1.
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
    use crate::scaling::{Candidates, Correction, Outer};
    use crate::{Codec, Rounding};

    fn named(scaling: Scaling, format: Format, rule: ScaleRule) -> String {
        let codec = Codec::new(format, rule, Rounding::NearestEven).unwrap();
        codec.with(scaling).map_or_else(|e| e.to_string(), |codec| format!("{:?}", codec.scaling()))
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
                        said.contains(&format!("`{format}` does not go with `{key}`: it has no effect"));
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

    /// By hand: the ratios are 8/6, 512/448, 8/7.5, 32/28 and 2/(127/64) for `floor`; 7/6, 496/448 and so on for `even`.
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
}
