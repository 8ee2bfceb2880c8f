use crate::case::{Case, Outputs, Pads};
use crate::host::HostBlock;
use crate::input::{Input, stream};
use crate::ops::convert::quantize::{codec, ragged_values};
use crate::pair::Pair;
use crate::shapes::{RaggedRows, Spread};
use nibble_core::formats::{BlockAxis, Format, Rounding};
use nibble_core::ops::MeasureLift;
use nibble_core::{Agreement, BlockScaled, Groups, Kernels, Result};

const NAME: &str = "measure_lift";

fn counted<B: Kernels>(
    b: &B,
    x: &BlockScaled<B>,
    (is_second, stack): (bool, usize),
    groups: Option<&Groups<B>>,
) -> Result<Outputs> {
    let mut out = Outputs::default();
    out.buf(b, "counts", &MeasureLift { x, is_second, stack, groups }.run(b)?, None)?;
    Ok(out)
}

/// A case of random codes and scales that differ by many powers of two, or of quantized values.
#[derive(Debug)]
struct Dense {
    format: Format,
    axis: BlockAxis,
    rows: usize,
    cols: usize,
    is_second: bool,
    stack: usize,
    /// Values to quantize; `None` for random codes.
    input: Option<Input>,
}

impl<B: Kernels> Case<B> for Dense {
    fn agreement(&self) -> Agreement {
        MeasureLift::<B>::AGREEMENT
    }

    fn run(&self, b: &B, _: Pads) -> Result<Outputs> {
        let Self { format, axis, rows, cols, is_second, stack, input } = *self;
        let x = match input {
            None => HostBlock::random(format, axis, rows, cols, &stream(NAME)),
            Some(input) => {
                let codec = codec(format, format.spec().rules[0], Rounding::NearestEven);
                HostBlock::quantize(codec, axis, &input.values(&stream(NAME), rows * cols), rows, cols, 1)
            }
        };
        counted(b, &x.upload(b)?, (is_second, stack), None)
    }
}

/// A case in which padding rows must not count, whatever they hold.
#[derive(Debug)]
struct Ragged {
    format: Format,
    spread: Spread,
    cols: usize,
}

impl<B: Kernels> Case<B> for Ragged {
    const RAGGED: bool = true;

    fn agreement(&self) -> Agreement {
        MeasureLift::<B>::AGREEMENT
    }

    fn run(&self, b: &B, pads: Pads) -> Result<Outputs> {
        let Self { format, spread, cols } = *self;
        let rows = RaggedRows::of(spread, 5, 300, 128);
        let codec = codec(format, format.spec().rules[0], Rounding::NearestEven);
        let values = ragged_values(Input::Outliers, NAME, &rows, cols, Pads::Zero);
        let mut x = HostBlock::quantize(codec, BlockAxis::Row, &values, rows.capacity, cols, 1);
        if pads == Pads::Poison {
            x.poison_pads(&rows.is_valid());
        }
        counted(b, &x.upload(b)?, (false, 1), Some(&rows.upload(b)?))
    }
}

/// The conformance test of [`MeasureLift`]: every lifted format, first and second operands, whole and partial lifted blocks.
pub fn measure_lift<A: Kernels, B: Kernels>(pair: &Pair<A, B>) {
    let lifted = |format: &Format| format.lift(format.spec().rules[0], BlockAxis::Row).is_some();
    for (turn, format) in
        Format::ALL.into_iter().filter(|format| format.is_block() && lifted(format)).enumerate()
    {
        let dense = |axis, (rows, cols), (is_second, stack), input| {
            pair.check(&Dense { format, axis, rows, cols, is_second, stack, input });
        };
        for (i, shape) in
            [(1, 32), (3, 128), (70, 160), (130, 147), (257, 640), (0, 64), (5, 0)].into_iter().enumerate()
        {
            let has_values = shape.0 * shape.1 > 0;
            let input = Some(Input::ALL[(turn + i) % Input::ALL.len()]).filter(|_| has_values);
            for (axis, of) in [
                (BlockAxis::Row, (false, 1)),
                (BlockAxis::Row, (true, 1)),
                (BlockAxis::Col, (false, 1)),
                (BlockAxis::Col, (true, 1)),
            ] {
                [None, input].into_iter().for_each(|input| dense(axis, shape, of, input));
            }
        }
        for (stack, n, k) in [(2, 144, 96), (3, 20, 288), (2, 37, 81), (2, 256, 384)] {
            dense(BlockAxis::Row, (stack * n, k), (true, stack), None);
        }
        for spread in Spread::ALL {
            pair.check(&Ragged { format, spread, cols: [72, 160][turn % 2] });
        }
    }
}
