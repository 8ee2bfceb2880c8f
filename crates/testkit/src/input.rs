//! Reproducible values that are difficult for number formats. Each value is a function of a stream and an index.

use nibble_core::formats::philox::normal_from_bits;
use nibble_core::formats::{Purpose, Stream, fnv1a32};

/// Creates a stream of test values, named after their purpose.
pub fn stream(name: &str) -> Stream {
    Stream::new(0x4E69_6262_6C65, Purpose::Data, fnv1a32(name), 0)
}

/// A kind of test values.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Input {
    /// Standard normal values.
    Normal,
    /// Cubes of normal numbers: most of them small, a few large.
    HeavyTailed,
    /// Normal numbers, of which one in 97 is a thousand times larger.
    Outliers,
    /// All zeros.
    Zeros,
    /// Zeros of both signs, but every third value is another number.
    SignedZeros,
    /// Magnitudes below the smallest normal F32, and zeros.
    Subnormals,
    /// All exponents of F32, which vary from block to block and within blocks.
    ExtremeExponents,
    /// Normal numbers mixed with NaN and both infinities.
    NonFinite,
    /// Integers of magnitude at most 4, which are exact in every format, as are the partial sums of their products.
    Integers,
}

impl Input {
    /// All kinds of values.
    pub const ALL: [Input; 9] = [
        Input::Normal,
        Input::HeavyTailed,
        Input::Outliers,
        Input::Zeros,
        Input::SignedZeros,
        Input::Subnormals,
        Input::ExtremeExponents,
        Input::NonFinite,
        Input::Integers,
    ];

    /// The kinds whose sums of products stay finite, so that they can be compared by relative error.
    pub const TAME: [Input; 5] =
        [Input::Normal, Input::HeavyTailed, Input::Outliers, Input::Zeros, Input::Integers];

    /// Value `i` of a stream.
    pub fn at(self, stream: &Stream, i: u64) -> f32 {
        self.of_bits(stream.u32_at(i), stream, i)
    }

    /// The first `len` values of a stream.
    pub fn values(self, stream: &Stream, len: usize) -> Vec<f32> {
        // One Philox block of random bits serves four elements.
        let blocks = (0..len.div_ceil(4) as u64).flat_map(|q| stream.block(q));
        (0..len as u64).zip(blocks).map(|(i, bits)| self.of_bits(bits, stream, i)).collect()
    }

    /// Value `i`, from its 32 random bits.
    fn of_bits(self, bits: u32, stream: &Stream, i: u64) -> f32 {
        let normal = || normal_from_bits(bits);
        match self {
            Input::Normal => normal(),
            Input::HeavyTailed => normal().powi(3),
            Input::Outliers if i % 97 == 13 => 1000.0 * normal(),
            Input::Outliers => normal(),
            Input::Zeros => 0.0,
            Input::SignedZeros => match bits % 3 {
                0 => 0.0,
                1 => -0.0,
                _ => normal(),
            },
            // The value has a random sign and random mantissa bits; every eighth value is zero.
            Input::Subnormals if i % 8 == 5 => 0.0,
            Input::Subnormals => f32::from_bits(bits & 0x807F_FFFF & (u32::MAX >> (i % 20)) | bits & 1 << 31),
            Input::ExtremeExponents => {
                // Exponents within a run of 64 are at most 16 apart; the runs cover the whole range.
                let run = stream.block(i / 64 + (1 << 40))[0] % 240;
                let exponent = (run + bits % 16).min(254);
                f32::from_bits(bits & 0x807F_FFFF | exponent << 23)
            }
            Input::NonFinite => match bits % 211 {
                0 => f32::NAN,
                1 => f32::INFINITY,
                2 => f32::NEG_INFINITY,
                _ => normal(),
            },
            Input::Integers => (bits % 9) as f32 - 4.0,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_kind_is_what_it_says() {
        let of = |input: Input| input.values(&stream("kinds"), 20_000);
        let any = |input: Input, f: fn(&f32) -> bool| of(input).iter().any(f);
        assert!(of(Input::Zeros).iter().all(|x| x.to_bits() == 0));
        assert!(any(Input::SignedZeros, |x| x.to_bits() == 1 << 31) && any(Input::SignedZeros, |x| *x > 0.1));
        assert!(of(Input::Subnormals).iter().all(|x| x.abs() < f32::MIN_POSITIVE));
        assert!(of(Input::Subnormals).iter().filter(|x| **x != 0.0).count() > 10_000);
        assert!(any(Input::Subnormals, |x| *x < 0.0) && any(Input::Subnormals, |x| *x > 1e-39));
        assert!(of(Input::ExtremeExponents).iter().all(|x| x.is_finite()));
        assert!(
            any(Input::ExtremeExponents, |x| x.abs() > 1e36)
                && any(Input::ExtremeExponents, |x| x.abs() < 1e-36)
        );
        for class in [f32::is_nan, f32::is_infinite, f32::is_finite] as [fn(f32) -> bool; 3] {
            assert!(of(Input::NonFinite).into_iter().any(class));
        }
        assert!(of(Input::Integers).iter().all(|x| x.fract() == 0.0 && x.abs() <= 4.0));
        assert!(any(Input::Outliers, |x| x.abs() > 1000.0) && any(Input::HeavyTailed, |x| x.abs() > 20.0));
    }

    #[test]
    fn values_are_a_function_of_stream_and_index() {
        for input in Input::ALL {
            let (all, name) = (input.values(&stream("a"), 300), stream("b"));
            for i in [0, 7, 298, 299] {
                assert_eq!(all[i].to_bits(), input.at(&stream("a"), i as u64).to_bits());
            }
            let other = input.values(&name, 300);
            let differ = all.iter().zip(&other).any(|(a, b)| a.to_bits() != b.to_bits());
            assert_eq!(differ, input != Input::Zeros, "{input:?}");
        }
    }
}
