//! Delayed scaling: the scale of a tensor follows from the largest magnitudes of earlier steps, so that one pass quantizes the tensor and
//! measures it for later steps.
//!
//! A history holds the largest magnitudes of the last steps. The next step's expected magnitude is the maximum or the latest of these,
//! times 2^margin. A step with only zeros, or with a value that is not finite, changes neither history nor scale. For the same magnitudes,
//! the scale equals that of TransformerEngine's multi-tensor kernel.
//!
//! The first step differs from TransformerEngine's. TransformerEngine starts with a scale of 1, which flushes small gradients to zero in
//! the first steps. Nibble measures a tensor without a history before quantization. Forward passes without a backward pass always measure,
//! because an evaluation must depend on the weights alone.
//!
//! Only formats without block scales can use delayed scaling ([`Format::may_be_delayed`](crate::Format::may_be_delayed)).

use crate::error::{Error, Result, find_by_name};
use std::fmt;
use std::str::FromStr;

/// Which magnitude of the history of a tensor determines its scale.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub enum AmaxOf {
    /// The largest magnitude of the history.
    #[default]
    Max,
    /// The magnitude of the previous step.
    MostRecent,
}

impl AmaxOf {
    /// Both choices.
    pub const ALL: [AmaxOf; 2] = [AmaxOf::Max, AmaxOf::MostRecent];

    /// The name in recipes.
    pub const fn name(self) -> &'static str {
        match self {
            AmaxOf::Max => "max",
            AmaxOf::MostRecent => "most_recent",
        }
    }
}

impl fmt::Display for AmaxOf {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for AmaxOf {
    type Err = Error;

    fn from_str(s: &str) -> Result<Self> {
        find_by_name("amax", &AmaxOf::ALL, s)
    }
}

/// The rule of delayed scaling, by which the scale of a step follows from the magnitudes of earlier steps.
///
/// The state of a tensor (its record) is a list of F32 values. The list has the expected magnitude (0 if unknown), the index of the history
/// entry that is written next, and the history as a ring buffer.
///
/// ```
/// use nibble_formats::{AmaxOf, DelayedScaling};
/// let scaling = DelayedScaling::new(2, AmaxOf::Max, 0)?;
/// let mut record = vec![0.0; scaling.record_len()];
/// let expected: Vec<f32> = [3.0, 2.0, 0.0, 1.0].map(|amax| {
///     scaling.push(&mut record, amax);
///     record[DelayedScaling::EXPECTED]
/// }).to_vec();
/// assert_eq!(expected, [3.0, 3.0, 3.0, 2.0]); // zeros change nothing
/// # Ok::<(), nibble_formats::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct DelayedScaling {
    /// The number of magnitudes in the history of a tensor.
    pub history: u32,
    /// Which magnitude of the history determines the scale.
    pub amax: AmaxOf,
    /// The number of powers of two by which the largest number of the format exceeds the scaled expected magnitude.
    pub margin: u32,
}

impl Default for DelayedScaling {
    fn default() -> Self {
        Self { history: 1024, amax: AmaxOf::Max, margin: 0 }
    }
}

impl DelayedScaling {
    /// The longest allowed history.
    pub const LONGEST: u32 = 1 << 16;
    /// The largest allowed margin.
    pub const WIDEST: u32 = 16;
    /// Index of the expected magnitude in a record.
    pub const EXPECTED: usize = 0;
    /// Index, in a record, of the position in the history that is written next.
    pub const NEXT: usize = 1;
    /// The index, in a record, of the first value of the history.
    pub const HISTORY: usize = 2;

    /// Checks `history` and `margin`.
    ///
    /// # Errors
    /// [`Error::Value`] if the history is empty or too long, or if the margin is too large.
    pub fn new(history: u32, amax: AmaxOf, margin: u32) -> Result<Self> {
        let value =
            |argument, got: u32, expected| Err(Error::Value { argument, got: got.to_string(), expected });
        if history == 0 || history > Self::LONGEST {
            return value("history", history, format!("1 to {}", Self::LONGEST));
        }
        if margin > Self::WIDEST {
            return value("margin", margin, format!("0 to {}", Self::WIDEST));
        }
        Ok(Self { history, amax, margin })
    }

    /// Number of F32 values in a record.
    pub const fn record_len(&self) -> usize {
        Self::HISTORY + self.history as usize
    }

    /// Adds the largest magnitude of a step to a record of [`record_len`](Self::record_len) values, and updates the expected magnitude.
    pub fn push(&self, record: &mut [f32], amax: f32) {
        if !(amax > 0.0 && amax.is_finite()) {
            return;
        }
        let len = self.history as usize;
        let next = record[Self::NEXT] as usize % len;
        let history = &mut record[Self::HISTORY..][..len];
        history[next] = amax;
        let decides = match self.amax {
            AmaxOf::Max => history.iter().fold(0.0, |a: f32, b| a.max(*b)),
            AmaxOf::MostRecent => amax,
        };
        record[Self::EXPECTED] = (decides * (1u32 << self.margin) as f32).min(f32::MAX);
        record[Self::NEXT] = ((next + 1) % len) as f32;
    }
}

impl fmt::Display for DelayedScaling {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.amax {
            AmaxOf::Max => write!(f, "delayed, max of {} steps", self.history)?,
            AmaxOf::MostRecent => f.write_str("delayed, most recent step")?,
        }
        if self.margin > 0 { write!(f, ", margin {}", self.margin) } else { Ok(()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Codec, Format, Rounding, ScaleRule};

    fn expected(scaling: DelayedScaling, amaxes: &[f32]) -> Vec<f32> {
        let mut record = vec![0.0; scaling.record_len()];
        let one = |amax: &f32| {
            scaling.push(&mut record, *amax);
            record[DelayedScaling::EXPECTED]
        };
        amaxes.iter().map(one).collect()
    }

    /// Values computed by hand, with a history of three steps.
    #[test]
    fn the_largest_of_the_last_steps_is_expected_until_it_is_forgotten() {
        let amaxes = [5.0, 1.0, 2.0, 0.5, 0.25, 4.0, 0.125];
        let of = |amax, margin| DelayedScaling::new(3, amax, margin).unwrap();
        assert_eq!(expected(of(AmaxOf::Max, 0), &amaxes), [5.0, 5.0, 5.0, 2.0, 2.0, 4.0, 4.0]);
        assert_eq!(expected(of(AmaxOf::Max, 2), &amaxes), [20.0, 20.0, 20.0, 8.0, 8.0, 16.0, 16.0]);
        assert_eq!(expected(of(AmaxOf::MostRecent, 0), &amaxes), amaxes);
        assert_eq!(expected(of(AmaxOf::MostRecent, 1), &[f32::MAX]), [f32::MAX]);
    }

    #[test]
    fn zeros_and_what_is_not_finite_leave_a_record_as_it_is() {
        let scaling = DelayedScaling::new(2, AmaxOf::Max, 0).unwrap();
        let mut record = vec![0.0; scaling.record_len()];
        for amax in [0.0, f32::NAN, f32::INFINITY] {
            scaling.push(&mut record, amax);
            assert_eq!(record, [0.0; 4]);
        }
        scaling.push(&mut record, 7.0);
        for amax in [f32::NAN, 0.0, f32::INFINITY, 0.0] {
            scaling.push(&mut record, amax);
            assert_eq!(record, [7.0, 1.0, 7.0, 0.0]);
        }
        scaling.push(&mut record, 3.0);
        scaling.push(&mut record, 2.0);
        assert_eq!(record, [3.0, 1.0, 2.0, 3.0]);
    }

    #[test]
    fn numbers_out_of_range_are_refused() {
        for (history, margin, name) in
            [(0, 0, "history"), (DelayedScaling::LONGEST + 1, 0, "history"), (1, 17, "margin")]
        {
            let error = DelayedScaling::new(history, AmaxOf::Max, margin).unwrap_err().to_string();
            assert!(error.starts_with(&format!("`{name}`")), "{error}");
        }
        assert_eq!("most_recent".parse(), Ok(AmaxOf::MostRecent));
        assert_eq!(DelayedScaling::default().to_string(), "delayed, max of 1024 steps");
    }

    /// The magnitudes are random walks. `make_delayed.py`, a transcription of TransformerEngine's update, computed the expected factors.
    #[test]
    fn multipliers_are_those_of_a_walk_made_elsewhere() {
        let text = include_str!("../tests/vectors/delayed.txt");
        let mut walks = 0;
        let mut walk: Option<(DelayedScaling, Codec, Vec<f32>)> = None;
        for line in text.lines().filter(|line| !line.starts_with('#')) {
            let words: Vec<&str> = line.split_whitespace().collect();
            if let ["walk", format, history, amax, margin] = words[..] {
                let format: Format = format.parse().unwrap();
                let codec = Codec::new(format, ScaleRule::TensorAmax, Rounding::NearestEven).unwrap();
                let (history, margin) = (history.parse().unwrap(), margin.parse().unwrap());
                let scaling = DelayedScaling::new(history, amax.parse().unwrap(), margin).unwrap();
                walk = Some((scaling, codec, vec![0.0; scaling.record_len()]));
                walks += 1;
                continue;
            }
            let (scaling, codec, record) = walk.as_mut().unwrap();
            let [amax, scale] = [0, 1].map(|i| f32::from_bits(u32::from_str_radix(words[i], 16).unwrap()));
            scaling.push(record, amax);
            // In TransformerEngine, a scale is 1 until a magnitude is known.
            let known = record[DelayedScaling::EXPECTED] > 0.0;
            let inv =
                if known { codec.for_tensor(record[DelayedScaling::EXPECTED]).tensor_inv() } else { 1.0 };
            assert_eq!(inv.to_bits(), scale.to_bits(), "walk {walks}: {line}");
        }
        assert!(walks >= 5);
    }
}
