//! Converts a very large number of random elements on two backends, to find errors that the selected cases of the conformance suite may
//! miss.

use crate::case::{Case, Outputs, Pads};
use crate::host::plain;
use crate::input::{Input, stream};
use crate::pair::Pair;
use nibble_core::formats::{Codec, Format, Rounding};
use nibble_core::ops::{Dequantize, Planes, Quantize};
use nibble_core::{Agreement, DType, Error, Kernels, Result};
use std::fmt;
use std::sync::Arc;

/// Number of rows and columns of the matrix that is converted at a time.
const SHAPE: (usize, usize) = (2048, 4096);

/// One of the random matrices. Reports print its number instead of its values.
#[derive(Clone)]
struct Matrix {
    number: u64,
    values: Arc<Vec<f32>>,
}

impl fmt::Debug for Matrix {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "number {}", self.number)
    }
}

/// Quantizes a matrix into row blocks and column blocks, and decodes both.
#[derive(Debug)]
struct There {
    codec: Codec,
    dtype: DType,
    matrix: Matrix,
}

impl<B: Kernels> Case<B> for There {
    fn agreement(&self) -> Agreement {
        Agreement::Bitwise
    }

    fn run(&self, b: &B, _: Pads) -> Result<Outputs> {
        let x = plain(b, self.dtype, &self.matrix.values, SHAPE.0, SHAPE.1)?;
        let random = self.codec.draws().then(|| stream("random elements' rounding").into());
        let made = Quantize { random, ..Quantize::new(&x, self.codec, Planes::Both) }.run(b)?;
        let mut out = Outputs::default();
        out.emitted(b, "out", &made)?;
        for (name, plane) in [("rows", &made.rows), ("cols", &made.cols)] {
            let plane =
                plane.as_ref().ok_or_else(|| Error::shape("quantize", name, "not written", "both planes"))?;
            let back = Dequantize { x: plane.block("quantize")?, dtype: DType::F32 }.run(b)?;
            out.tensor(b, &format!("decoded {name}"), &back)?;
        }
        Ok(out)
    }
}

impl Matrix {
    /// The values alternate between exponents of the whole range, ties between codes, heavy tails, and NaN and infinities.
    fn new(number: u64) -> Self {
        let stream = stream(&format!("random elements {number}"));
        let of = |input: Input| input.values(&stream, SHAPE.0 * SHAPE.1);
        // Values have four mantissa bits and formats have at most three, so many values are halfway between two codes.
        let coarse = |x: f32| f32::from_bits(x.to_bits() & 0xFFF8_0000);
        let values = match number % 4 {
            0 => of(Input::ExtremeExponents),
            1 => of(Input::ExtremeExponents).into_iter().map(coarse).collect(),
            2 => of(Input::HeavyTailed),
            _ => of(Input::NonFinite),
        };
        Self { number, values: Arc::new(values) }
    }
}

/// Tests at least this many random elements, alternating between F32 and BF16. Both backends quantize the elements in row blocks and column
/// blocks of every block format, and decode them.
///
/// # Panics
/// Panics with a report if the backends differ by a bit, or if one of the backends refuses a conversion.
pub fn random_elements<A: Kernels, B: Kernels>(pair: &Pair<A, B>, elements: u64) {
    let codecs: Vec<Codec> = Format::ALL
        .into_iter()
        .filter_map(|format| {
            let rule = format.spec().default_rule()?;
            Some(Codec::new(format, rule, Rounding::NearestEven).unwrap_or_else(|e| panic!("{e}")))
        })
        .collect();
    for number in 0..elements.div_ceil((SHAPE.0 * SHAPE.1) as u64) {
        let matrix = Matrix::new(number);
        let dtype = [DType::F32, DType::Bf16][(number / 4 % 2) as usize];
        for &codec in &codecs {
            pair.check(&There { codec, dtype, matrix: matrix.clone() });
        }
    }
}
