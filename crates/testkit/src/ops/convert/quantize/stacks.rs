//! Tests of random bits for the parts of a stack that is sharded among ranks.

use super::{codec, codecs};
use crate::case::{Case, Outputs, Pads};
use crate::host::plain;
use crate::input::{Input, stream};
use crate::ops::PLAIN;
use crate::pair::Pair;
use nibble_core::formats::{Codec, Format, Rounding, ScaleRule};
use nibble_core::ops::{Dequantize, Emitted, Planes, Quantize, Random};
use nibble_core::{Agreement, DType, Kernels, Result};

/// The last matrices of a stack, with the random bits that they have in the whole stack.
#[derive(Debug)]
struct LastMatrices {
    codec: Codec,
    planes: Planes,
    /// Number of rows per matrix.
    rows: usize,
    cols: usize,
    /// Number of matrices, out of three in the whole stack.
    last: usize,
    dtype: DType,
}

impl<B: Kernels> Case<B> for LastMatrices {
    fn agreement(&self) -> Agreement {
        Quantize::<B>::AGREEMENT
    }

    fn run(&self, b: &B, _: Pads) -> Result<Outputs> {
        let Self { codec, planes, rows, cols, last, dtype } = *self;
        let values = Input::Normal.values(&stream("quantize"), 3 * rows * cols);
        let before = (3 - last) * rows * cols;
        let made = |values: &[f32], stack, first: usize| {
            let x = plain(b, dtype, values, stack * rows, cols)?;
            let random = Some(Random { first: first as u64, ..stream("quantize.random").into() });
            Quantize { stack, random, ..Quantize::new(&x, codec, planes) }.run(b)
        };
        let decoded = |made: &Emitted<B>| {
            let planes = [&made.rows, &made.cols].into_iter().flatten();
            let all = planes.map(|plane| {
                Dequantize { x: plane.block("quantize")?, dtype: DType::F32 }.run(b)?.to_f32_vec(b)
            });
            all.collect::<Result<Vec<_>>>()
        };
        let (whole, part, other) =
            (made(&values, 3, 0)?, made(&values[before..], last, before)?, made(&values[before..], last, 0)?);
        let of_part = decoded(&part)?;
        let in_whole: Vec<_> = decoded(&whole)?.iter().map(|plane| plane[before..].to_vec()).collect();
        assert!(of_part == in_whole, "{self:?}: matrices are those of the whole");
        assert!(of_part != decoded(&other)?, "{self:?}: the first element's number decides");
        let mut out = Outputs::default();
        out.emitted(b, "out", &part)?;
        Ok(out)
    }
}

/// A case whose first element is in the middle of a row.
#[derive(Debug)]
struct NoWholeRows;

impl<B: Kernels> Case<B> for NoWholeRows {
    fn agreement(&self) -> Agreement {
        Quantize::<B>::AGREEMENT
    }

    fn run(&self, b: &B, _: Pads) -> Result<Outputs> {
        let x = plain(b, DType::F32, &[1.0; 3 * 128], 3, 128)?;
        let codec = codec(Format::Mxfp4, ScaleRule::Rceil, Rounding::Stochastic);
        let random = Some(Random { first: 129, ..stream("quantize.random").into() });
        Quantize { random, ..Quantize::new(&x, codec, Planes::Rows) }.run(b)?;
        Ok(Outputs::default())
    }
}

/// Tests every layout of a stack in every block format: the random bits must be those of the whole stack.
pub(super) fn parts_of_stacks<A: Kernels, B: Kernels>(pair: &Pair<A, B>) {
    pair.check_refused(&NoWholeRows, |e| e.to_string().contains("random.first"));
    for (i, of) in codecs().enumerate() {
        for (j, rounding) in
            [Rounding::Stochastic, Rounding::Dither { delta_q16: 0x8000 }].into_iter().enumerate()
        {
            let codec = codec(of.format(), of.rule(), rounding);
            for (k, (planes, rows, cols)) in [
                (Planes::Rows, 20, 192),
                (Planes::Tiles, 128, 256),
                (Planes::Tiles, 40, 72),
                (Planes::Rows, 7, 33),
            ]
            .into_iter()
            .enumerate()
            {
                let (last, dtype) = (1 + (i + k) % 2, PLAIN[(i + j + k) % 2]);
                pair.check(&LastMatrices { codec, planes, rows, cols, last, dtype });
            }
        }
    }
}
