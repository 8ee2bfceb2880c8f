//! Comparisons of outputs: equal bits, a few units in the last place, or a relative L2 error. The message of a failure has the output's
//! name, the number of wrong values, and the first wrong value with its bits.

use half::bf16;
use nibble_core::{Agreement, Backend, LineCopy, Lines};
use std::fmt;

/// A value whose bits can be compared.
pub trait Bits: Copy {
    /// Whether the bits are equal, or both are NaN.
    fn same(self, other: Self) -> bool;
    /// Formats the value and its bits.
    fn show(self) -> String;
}

macro_rules! integer_bits {
    ($($t:ty: $hex:literal),*) => {$(
        impl Bits for $t {
            fn same(self, other: Self) -> bool {
                self == other
            }
            fn show(self) -> String {
                format!(concat!("{} (", $hex, ")"), self, self)
            }
        }
    )*};
}
integer_bits!(u8: "{:#04x}", i8: "{:#04x}", i32: "{:#x}", u16: "{:#06x}", u32: "{:#x}", u64: "{:#x}");

macro_rules! float_bits {
    ($($t:ty: $hex:literal),*) => {$(
        impl Bits for $t {
            fn same(self, other: Self) -> bool {
                self.to_bits() == other.to_bits() || (self.is_nan() && other.is_nan())
            }
            fn show(self) -> String {
                format!(concat!("{:e} (", $hex, ")"), self, self.to_bits())
            }
        }
    )*};
}
float_bits!(f32: "{:#010x}", f64: "{:#018x}", bf16: "{:#06x}");

/// The reason why two outputs disagree.
#[derive(Debug, Clone, PartialEq)]
pub enum Mismatch {
    /// The outputs have different lengths.
    Length {
        /// Length of the output under test.
        got: usize,
        /// Expected length.
        want: usize,
    },
    /// At least one value is wrong.
    Values {
        /// Number of wrong values.
        wrong: usize,
        /// Number of values.
        len: usize,
        /// Index of the first wrong value.
        first: usize,
        /// The first wrong value and its bits.
        got: String,
        /// The expected value at `first`.
        want: String,
        /// The tolerance, as text.
        bound: String,
    },
    /// The relative L2 error is too large.
    RelL2 {
        /// The relative L2 error ‖got − want‖ / ‖want‖.
        error: f64,
        /// The tolerance.
        bound: f64,
        /// Index of the largest absolute error.
        worst: usize,
        /// The value at `worst`.
        got: String,
        /// The expected value at `worst`.
        want: String,
    },
}

impl fmt::Display for Mismatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Length { got, want } => write!(f, "{got} values, expected {want}"),
            Self::Values { wrong, len, first, got, want, bound } => {
                write!(f, "{wrong} of {len} values differ ({bound}); first [{first}]: {got}, expected {want}")
            }
            Self::RelL2 { error, bound, worst, got, want } => write!(
                f,
                "relative L2 error {error:.3e} is above {bound:.3e}; largest error at [{worst}]: {got}, expected {want}"
            ),
        }
    }
}

fn compare<T: Bits>(
    got: &[T],
    want: &[T],
    bound: impl fmt::Display,
    good: impl Fn(T, T) -> bool,
) -> Result<(), Mismatch> {
    if got.len() != want.len() {
        return Err(Mismatch::Length { got: got.len(), want: want.len() });
    }
    let mut wrong = (0..got.len()).filter(|&i| !good(got[i], want[i]));
    let Some(first) = wrong.next() else { return Ok(()) };
    Err(Mismatch::Values {
        wrong: 1 + wrong.count(),
        len: got.len(),
        first,
        got: got[first].show(),
        want: want[first].show(),
        bound: bound.to_string(),
    })
}

/// Compares two outputs bit by bit; all NaNs count as equal.
///
/// # Errors
/// Returns a [`Mismatch`] that describes the difference.
pub fn compare_bits<T: Bits>(got: &[T], want: &[T]) -> Result<(), Mismatch> {
    compare(got, want, "same bits", T::same)
}

/// Computes ‖got − want‖ / ‖want‖ in F64 over the finite values; the result is 0 if both are all zeros.
pub fn rel_l2(got: &[f32], want: &[f32]) -> f64 {
    let (mut error, mut norm) = (0.0, 0.0);
    for (&got, &want) in got.iter().zip(want).filter(|(g, w)| g.is_finite() && w.is_finite()) {
        let (got, want) = (f64::from(got), f64::from(want));
        error += (got - want) * (got - want);
        norm += want * want;
    }
    if error == 0.0 { 0.0 } else { (error / norm).sqrt() }
}

/// Compares two outputs by their relative L2 error. NaNs and infinities must be at the expected positions.
///
/// # Errors
/// Returns a [`Mismatch`] that describes the difference.
pub fn compare_rel_l2(got: &[f32], want: &[f32], max: f64) -> Result<(), Mismatch> {
    compare(got, want, "finite where finite is expected", |a, b| {
        if a.is_finite() && b.is_finite() { true } else { a.same(b) }
    })?;
    let error = rel_l2(got, want);
    if error <= max {
        return Ok(());
    }
    let distance = |i: usize| {
        let d = (f64::from(got[i]) - f64::from(want[i])).abs();
        if d.is_finite() { d } else { 0.0 }
    };
    // At least one error is above `max` ≥ 0, so there is at least one value.
    let worst = (0..got.len()).max_by(|&i, &j| distance(i).total_cmp(&distance(j))).unwrap_or(0);
    let (got, want) = (got[worst].show(), want[worst].show());
    Err(Mismatch::RelL2 { error, bound: max, worst, got, want })
}

/// Compares two outputs with the tolerance that an operation declares.
///
/// # Errors
/// Returns a [`Mismatch`] that describes the difference.
pub fn compare_agreement(agreement: Agreement, got: &[f32], want: &[f32]) -> Result<(), Mismatch> {
    match agreement {
        Agreement::Bitwise => compare_bits(got, want),
        Agreement::RelL2(max) => compare_rel_l2(got, want, max),
    }
}

#[track_caller]
fn require(what: &str, compared: Result<(), Mismatch>) {
    if let Err(mismatch) = compared {
        panic!("{what}: {mismatch}");
    }
}

/// Asserts that two outputs have equal bits; all NaNs count as equal.
///
/// # Panics
/// Panics with a report if the bits differ.
#[track_caller]
pub fn assert_bits_equal<T: Bits>(what: &str, got: &[T], want: &[T]) {
    require(what, compare_bits(got, want));
}

/// Asserts that the relative L2 error of an output is at most `max`.
///
/// # Panics
/// Panics with a report if the error is larger than `max`.
#[track_caller]
pub fn assert_rel_l2(what: &str, got: &[f32], want: &[f32], max: f64) {
    require(what, compare_rel_l2(got, want, max));
}

/// Asserts that two outputs agree as closely as an operation declares.
///
/// # Panics
/// Panics with a report if the outputs do not agree.
#[track_caller]
pub fn assert_agreement(agreement: Agreement, what: &str, got: &[f32], want: &[f32]) {
    require(what, compare_agreement(agreement, got, want));
}

/// Asserts that a backend copies strided rows, and refuses rows out of range.
///
/// # Panics
/// Panics if the backend does not.
#[track_caller]
pub fn assert_copies_lines<B: Backend>(b: &B) {
    let from = b.upload(&(0u8..12).collect::<Vec<_>>()).unwrap();
    let at = |first, stride| Lines { first, stride };
    let mut to = b.zeros(9).unwrap();
    // The call copies columns 1 and 2 of three rows of four columns, to columns 1 and 2 of three rows of three columns.
    b.copy_lines((&from, at(1, 4)), (&mut to, at(1, 3)), (3, 2)).unwrap();
    assert_eq!(b.download(&to).unwrap(), [0, 1, 2, 0, 5, 6, 0, 9, 10]);
    // A copy of a single row ignores the stride; a copy of no rows ignores all arguments.
    b.copy_lines((&from, at(10, 0)), (&mut to, at(0, 0)), (1, 2)).unwrap();
    b.copy_lines((&from, at(99, 0)), (&mut to, at(99, 0)), (2, 0)).unwrap();
    assert_eq!(b.download(&to).unwrap(), [10, 11, 2, 0, 5, 6, 0, 9, 10]);
    // The next call makes many copies at once, from and to several buffers, with every alignment.
    let bytes =
        |seed: u8, len: usize| (0..len).map(|i| (i as u8).wrapping_mul(31) ^ seed).collect::<Vec<u8>>();
    let sources = [bytes(1, 5000), bytes(2, 40_000)].map(|bytes| b.upload(&bytes).unwrap());
    let copies: Vec<LineCopy> = (0..150usize)
        .map(|i| {
            let (len, lines) = (1 + i * 7 % 64, 1 + i % 3);
            let into = (i / 75, Lines { first: i % 75 * 256 + i % 2, stride: 70 });
            LineCopy { from: (i % 2, at(i % 5 * 16, len + i % 4 * 16)), to: into, lines, len }
        })
        .chain([LineCopy::line((1, 16), (0, 19_200), 20_480), LineCopy::line((0, 0), (1, 39_999), 1)])
        .collect();
    let of = |together: bool| {
        let mut to = [40_000, 40_000].map(|len| b.zeros::<u8>(len).unwrap());
        match together {
            true => b.copy_many(&sources, &mut to, &copies).unwrap(),
            false => copies.iter().for_each(|copy| {
                let (from, to) = copy.buffers(&sources, &mut to).unwrap();
                b.copy_lines((from, copy.from.1), (to, copy.to.1), (copy.lines, copy.len)).unwrap();
            }),
        }
        to.map(|to| b.download(&to).unwrap())
    };
    assert!(of(true) == of(false), "copies of many lines");
    assert!(b.copy_many(&sources, &mut [], &copies[..1]).is_err(), "a buffer that is not there");
    assert!(b.copy_many(&sources, &mut [b.zeros(9).unwrap()], &copies[..1]).is_ok());
    assert!(b.copy_many(&sources, &mut [b.zeros(9).unwrap()], &[LineCopy::line((0, 0), (0, 1), 9)]).is_err());
    for (of, into, lines, why) in [
        (at(3, 4), at(0, 3), (3, 2), "3..13"),
        (at(0, 4), at(2, 3), (3, 2), "2..10"),
        (at(0, 1), at(0, 3), (2, 2), "`stride`"),
        (at(0, 4), at(0, 1), (2, 2), "`stride`"),
    ] {
        let error = b.copy_lines((&from, of), (&mut to, into), lines).unwrap_err().to_string();
        assert!(error.contains("copy_lines") && error.contains(why), "{error}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_report_counts_and_shows_the_first() {
        let e = compare_bits(&[1.0f32, -0.0, 3.0], &[1.0, 0.0, 4.0]).unwrap_err();
        let want =
            "2 of 3 values differ (same bits); first [1]: -0e0 (0x80000000), expected 0e0 (0x00000000)";
        assert_eq!(e.to_string(), want);
        let e = compare_bits(&[0x1Fu8], &[0x0F]).unwrap_err();
        assert!(e.to_string().ends_with("first [0]: 31 (0x1f), expected 15 (0x0f)"), "{e}");
        assert_eq!(compare_bits(&[1u8], &[]).unwrap_err().to_string(), "1 values, expected 0");
    }

    #[test]
    fn nans_are_equal_whatever_their_payload() {
        let other = f32::from_bits(0xFFC0_1234);
        assert!(compare_bits(&[f32::NAN], &[other]).is_ok());
        assert!(compare_rel_l2(&[f32::NAN], &[other], 0.0).is_ok());
        assert!(compare_rel_l2(&[1.0], &[f32::INFINITY], 1.0).is_err());
        assert!(compare_rel_l2(&[f32::NEG_INFINITY], &[f32::INFINITY], 1.0).is_err());
    }

    #[test]
    fn relative_errors_are_of_the_whole() {
        assert!((rel_l2(&[3.0, 4.1], &[3.0, 4.0]) - 0.1 / 5.0).abs() < 1e-7);
        assert_eq!(rel_l2(&[0.0], &[0.0]), 0.0);
        assert_eq!(rel_l2(&[1.0], &[0.0]), f64::INFINITY);
        let e = compare_rel_l2(&[3.0, 4.1], &[3.0, 4.0], 0.01).unwrap_err().to_string();
        assert!(e.starts_with("relative L2 error 2.000e-2 is above 1.000e-2; largest error at [1]"), "{e}");
    }

    #[test]
    #[should_panic(expected = "codes: 1 of 2 values differ")]
    fn assertions_name_the_output() {
        assert_bits_equal("codes", &[1u8, 2], &[1, 3]);
    }
}
