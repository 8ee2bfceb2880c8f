//! Rounding of a value between two codes.

use crate::error::{Error, Result};

/// How a number between two neighbouring codes is rounded to one of them. Each rounding saturates at the largest magnitude, and keeps the
/// sign of zero.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub enum Rounding {
    /// To the nearest code, ties to the even code.
    #[default]
    NearestEven,
    /// To the nearest code, ties away from zero.
    NearestAway,
    /// Rounds the magnitude up iff the sixteen random bits `r` satisfy `r < ⌊fraction · 2¹⁶⌋`.
    Stochastic,
    /// Rounds x + d to nearest-even, with d uniform in (−δ, δ) code steps, computed from sixteen random bits: d = δ·(2r + 1 − 2¹⁶)/2¹⁶. A δ
    /// of 0 gives nearest-even rounding; with a δ of 1/2 the probability of rounding up is the fraction.
    Dither {
        /// δ in units of 2⁻¹⁶ code steps, at most 0x8000 (one half).
        delta_q16: u16,
    },
}

impl Rounding {
    /// All roundings without a parameter.
    pub const PLAIN: [Rounding; 3] = [Rounding::NearestEven, Rounding::NearestAway, Rounding::Stochastic];

    /// A rounding with a dither of `delta` code steps, where a code step is the distance between neighbouring codes.
    ///
    /// # Errors
    /// [`Error::Value`] unless 0 ≤ `delta` ≤ 0.5.
    pub fn dither(delta: f32) -> Result<Rounding> {
        if !(0.0..=0.5).contains(&delta) {
            return Err(delta_out_of_range(delta.to_string()));
        }
        Ok(Rounding::Dither { delta_q16: (delta * 65536.0) as u16 })
    }

    /// Whether the rounding needs random bits.
    pub const fn is_random(self) -> bool {
        matches!(self, Rounding::Stochastic | Rounding::Dither { .. })
    }

    /// Rejects a δ above one half, because such a dither could skip a neighbouring code.
    pub(crate) fn check(self) -> Result<()> {
        match self {
            Rounding::Dither { delta_q16 } if delta_q16 > 0x8000 => {
                Err(delta_out_of_range((f64::from(delta_q16) / 65536.0).to_string()))
            }
            _ => Ok(()),
        }
    }
}

fn delta_out_of_range(got: String) -> Error {
    Error::Value { argument: "dither delta", got, expected: "0 to 0.5 code steps".to_owned() }
}

impl std::fmt::Display for Rounding {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Rounding::NearestEven => f.pad("nearest-even"),
            Rounding::NearestAway => f.pad("nearest-away"),
            Rounding::Stochastic => f.pad("stochastic"),
            Rounding::Dither { delta_q16 } => f.pad(&format!("dither:{}", f64::from(*delta_q16) / 65536.0)),
        }
    }
}

impl std::str::FromStr for Rounding {
    type Err = Error;

    /// Parses `nearest-even`, `nearest-away`, `stochastic`, or `dither:δ` with δ in code steps.
    fn from_str(s: &str) -> Result<Self> {
        if let Some(delta) = s.strip_prefix("dither:") {
            return Rounding::dither(delta.parse().map_err(|_| delta_out_of_range(delta.to_owned()))?);
        }
        Rounding::PLAIN.into_iter().find(|r| r.to_string() == s).ok_or_else(|| Error::UnknownName {
            what: "rounding",
            got: s.to_owned(),
            expected: "nearest-even, nearest-away, stochastic, dither:DELTA (such as dither:0.25)".to_owned(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_go_there_and_back() {
        let dithers = [0.0, 0.25, 0.5].map(|d| Rounding::dither(d).unwrap());
        for r in Rounding::PLAIN.into_iter().chain(dithers) {
            assert_eq!(r.to_string().parse(), Ok(r));
        }
        assert_eq!("dither:0.25".parse(), Ok(Rounding::Dither { delta_q16: 0x4000 }));
    }

    #[test]
    fn wrong_names_and_deltas_are_errors_that_say_what_is_possible() {
        let e = "nearest".parse::<Rounding>().unwrap_err().to_string();
        assert!(e.contains("`nearest`") && e.contains("nearest-away"), "{e}");
        for bad in ["dither:0.6", "dither:-0.1", "dither:NaN", "dither:x"] {
            let e = bad.parse::<Rounding>().unwrap_err().to_string();
            assert!(e.contains("0 to 0.5"), "{e}");
        }
        assert!(Rounding::Dither { delta_q16: 0x8001 }.check().is_err());
    }
}
