//! Tests in which amax is measured separately and then passed to quantization.

use super::codecs;
use crate::case::{Case, Outputs, Pads};
use crate::host::plain;
use crate::input::{Input, stream};
use crate::ops::PLAIN;
use crate::pair::Pair;
use nibble_core::formats::Codec;
use nibble_core::ops::{Delayed, Dequantize, Emitted, MeasureAmax, Planes, Quantize};
use nibble_core::{Agreement, DType, Kernels, Result, Tensor};

/// The first rows of each matrix of a stack, with the amax of all its rows. The codes and scales of these rows must be those of the whole
/// stack.
#[derive(Debug)]
struct Part {
    codec: Codec,
    rows: usize,
    /// Number of rows of each matrix; a multiple of the tile.
    part: usize,
    cols: usize,
    stack: usize,
    dtype: DType,
    input: Input,
    /// The expected amax of the first matrix; the other matrices' values derive from it.
    expected: Option<f32>,
}

impl Part {
    /// Returns the first rows of each matrix.
    fn cut(&self, values: &[f32]) -> Vec<f32> {
        values
            .chunks(self.rows * self.cols)
            .flat_map(|matrix| &matrix[..self.part * self.cols])
            .copied()
            .collect()
    }
}

impl<B: Kernels> Case<B> for Part {
    fn agreement(&self) -> Agreement {
        Quantize::<B>::AGREEMENT
    }

    fn run(&self, b: &B, _: Pads) -> Result<Outputs> {
        let Self { codec, rows, part, cols, stack, dtype, .. } = *self;
        let mut values = self.input.values(&stream("quantize.part"), stack * rows * cols);
        // The largest value is outside the first rows.
        values.iter_mut().skip(rows * cols - 1).step_by(rows * cols).for_each(|last| *last = 3e4);
        let whole = plain(b, dtype, &values, stack * rows, cols)?;
        let first = plain(b, dtype, &self.cut(&values), stack * part, cols)?;
        let records: Vec<f32> = (0..stack).map(|i| self.expected.unwrap_or(0.0) * (i % 3) as f32).collect();
        let records = b.upload(&records)?;
        let delayed = self.expected.map(|_| Delayed { records: &records, first: 0, stride: 1 });
        let amax = MeasureAmax { x: &whole, codec, stack }.run(b)?;
        let quantized = |x: &Tensor<B>, amax| {
            Quantize { stack, delayed, amax, ..Quantize::new(x, codec, Planes::Tiles) }.run(b)
        };
        let (known, measured) = (quantized(&whole, Some(&amax))?, quantized(&whole, None)?);
        let outputs = |made: &Emitted<B>| -> Result<Outputs> {
            let mut out = Outputs::default();
            out.emitted(b, "out", made)?;
            Ok(out)
        };
        let (mut out, of_whole) = (outputs(&known)?, outputs(&measured)?);
        assert!(
            out.compare(|_| Agreement::Bitwise, &of_whole).is_ok(),
            "{self:?}: what is known is what is measured"
        );
        let made = quantized(&first, Some(&amax))?;
        let decoded = |made: &Emitted<B>| {
            let rows = made.take_rows("quantize")?;
            let x = rows.block("quantize")?;
            Dequantize { x, dtype: DType::F32 }.run(b)?.to_f32_vec(b)
        };
        let bits = |values: Vec<f32>| -> Vec<u32> {
            values.iter().map(|x| if x.is_nan() { f32::NAN.to_bits() } else { x.to_bits() }).collect()
        };
        let in_whole = self.cut(&decoded(&measured)?);
        assert!(bits(decoded(&made)?) == bits(in_whole), "{self:?}: rows are those of the whole");
        out.emitted(b, "part", &made)?;
        out.buf(b, "amax", &amax, None)?;
        Ok(out)
    }
}

/// Tests rows of matrices whose amax is known, for every format with a tensor scale.
pub(super) fn parts<A: Kernels, B: Kernels>(pair: &Pair<A, B>) {
    for (i, codec) in codecs().filter(|codec| codec.scale_kind().has_tensor_scale()).enumerate() {
        for (j, input) in Input::ALL.into_iter().enumerate() {
            for (rows, part, cols, stack) in [(200, 128, 136, 3), (256, 128, 64, 1)] {
                let dtype = PLAIN[(i + j) % 2];
                let case = |expected| Part { codec, rows, part, cols, stack, dtype, input, expected };
                pair.check(&case(None));
                if codec.format().may_be_delayed() {
                    pair.check(&case(Some(4.0)));
                }
            }
        }
    }
}

#[derive(Debug)]
struct Measuring {
    codec: Codec,
    rows: usize,
    cols: usize,
    stack: usize,
    dtype: DType,
    input: Input,
}

impl<B: Kernels> Case<B> for Measuring {
    fn agreement(&self) -> Agreement {
        MeasureAmax::<B>::AGREEMENT
    }

    fn run(&self, b: &B, _: Pads) -> Result<Outputs> {
        let Self { codec, rows, cols, stack, dtype, .. } = *self;
        let x = plain(b, dtype, &self.input.values(&stream("measure_amax"), rows * cols), rows, cols)?;
        let mut out = Outputs::default();
        out.buf(b, "amax", &MeasureAmax { x: &x, codec, stack }.run(b)?, None)?;
        Ok(out)
    }
}

/// The conformance test of [`MeasureAmax`].
pub fn measure_amax<A: Kernels, B: Kernels>(pair: &Pair<A, B>) {
    for codec in codecs().filter(|codec| codec.scale_kind().has_tensor_scale()) {
        for input in Input::ALL {
            for (i, (rows, cols, stack)) in
                [(1, 1, 1), (37, 200, 1), (3 * 20, 131, 3), (8, 4, 8), (320, 448, 2), (0, 64, 2), (4, 0, 2)]
                    .into_iter()
                    .enumerate()
            {
                pair.check(&Measuring { codec, rows, cols, stack, dtype: PLAIN[i % 2], input });
            }
        }
    }
}
