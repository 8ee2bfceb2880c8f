//! The CPU code of `nibble_core::ops::Transcode`.

mod lift;
mod simd;
mod spec;
#[cfg(test)]
mod tests;

use crate::ops::convert::quantize::spans::Spans;
use crate::{CodePath, Cpu};
use nibble_core::ops::{Counts, Transcode, Transcoded};
use nibble_core::{BlockScaled, Error, Result};
use nibble_formats::{BlockAxis, Codec, Format, Lift, Rounding};

/// Converts between block formats; see [`Transcode`].
pub(crate) fn transcode(cpu: &Cpu, op: Transcode<'_, Cpu>) -> Result<Transcoded<Cpu>> {
    let mut made = op.result(cpu)?;
    if op.axis == BlockAxis::Tile {
        return lift_tiles(cpu, op.x, made);
    }
    let block = match op.axis {
        BlockAxis::Col => op.to.spec().block,
        BlockAxis::Row | BlockAxis::Tile => 1,
    };
    let spans = Spans::new("transcode", op.x.rows, op.groups, block)?;
    // Only a conversion to MXFP4 chooses new scales.
    let codec = if op.to == Format::Mxfp4 {
        Some(Codec::new(Format::Mxfp4, op.rule, Rounding::NearestEven)?)
    } else {
        None
    };
    if cpu.path() == CodePath::Simd {
        return match (codec, op.axis) {
            (Some(codec), _) => simd::requantize_rows(cpu, op.x, codec, &spans, made),
            (None, BlockAxis::Col) => simd::to_cols(cpu, op.x, &spans, made),
            (None, _) => simd::lift_rows(cpu, op.x, &spans, made),
        };
    }
    let out = &mut made.out;
    let tally = match (codec, op.axis) {
        (Some(codec), _) => spec::requantize_rows(op.x, codec, &spans, out)?,
        (None, BlockAxis::Col) => spec::to_cols(op.x, &spans, out),
        (None, _) => spec::lift_rows(op.x, &spans, out)?,
    };
    made.counts.0.as_mut_slice().copy_from_slice(&tally);
    Ok(made)
}

/// Lifts a weight to 2-D blocks, both as it is and transposed.
fn lift_tiles(cpu: &Cpu, x: &BlockScaled<Cpu>, mut made: Transcoded<Cpu>) -> Result<Transcoded<Cpu>> {
    if cpu.path() == CodePath::Simd {
        return simd::lift_tiles(cpu, x, made);
    }
    let Some(transposed) = &mut made.transposed else { return Err(one_plane()) };
    let tally = spec::lift_tiles(Lift::E2M1, x, (&mut made.out, Some(transposed)));
    made.counts.0.as_mut_slice().copy_from_slice(&tally);
    Ok(made)
}

/// Column blocks as the rows as which they are stored; other blocks as they are.
fn as_rows(x: &BlockScaled<Cpu>) -> BlockScaled<Cpu> {
    let (rows, cols) = if x.axis == BlockAxis::Col { (x.cols, x.rows) } else { (x.rows, x.cols) };
    BlockScaled { axis: BlockAxis::Row, rows, cols, stack: 1, ..x.clone() }
}

/// Counts the source blocks that a lift changes, without lifting; see [`nibble_core::ops::MeasureLift`]. `matrices` is given if 2-D blocks of
/// so many matrices share scales. `is_counted` says of a row whether it is counted.
pub(in crate::ops) fn count_lift(
    cpu: &Cpu,
    x: &BlockScaled<Cpu>,
    matrices: Option<usize>,
    is_counted: impl Fn(usize) -> bool + Sync,
) -> Result<[u64; 3]> {
    let lines = as_rows(x);
    match cpu.path() {
        _ if x.rows == 0 || x.cols == 0 => Ok([0; 3]),
        CodePath::Simd => simd::count_lift(cpu, &lines, matrices, is_counted),
        CodePath::Scalar => spec::count_lift(&lines, matrices, is_counted),
    }
}

/// Lifts row blocks, or stored column blocks, to [`Format::LIFTED`] along the same axis; see [`Format::lift`].
///
/// # Errors
/// [`Error::Unsupported`] if the format has no lift.
pub(in crate::ops) fn lift(cpu: &Cpu, x: &BlockScaled<Cpu>) -> Result<BlockScaled<Cpu>> {
    let lines = as_rows(x);
    let shape = (lines.rows, lines.cols, 1);
    let out = BlockScaled::unwritten(cpu, Format::LIFTED, BlockAxis::Row, shape)?;
    let (spans, counts) = (Spans::new("transcode", lines.rows, None, 1)?, Counts::zeros(cpu)?);
    let mut made = Transcoded { out, transposed: None, counts };
    match cpu.path() {
        CodePath::Simd => made = simd::lift_rows(cpu, &lines, &spans, made)?,
        CodePath::Scalar => drop(spec::lift_rows(&lines, &spans, &mut made.out)?),
    }
    Ok(BlockScaled { axis: x.axis, rows: x.rows, cols: x.cols, stack: x.stack, ..made.out })
}

/// Lifts row blocks of `matrices` stacked matrices to [`Format::LIFTED`] in 2-D blocks; see [`nibble_core::ops::Stored::lifted_as`].
///
/// # Errors
/// The errors of [`lift()`].
pub(in crate::ops) fn lift_squares(
    cpu: &Cpu,
    x: &BlockScaled<Cpu>,
    matrices: usize,
) -> Result<BlockScaled<Cpu>> {
    let shape = (x.rows, x.cols, matrices);
    let mut out = BlockScaled::unwritten(cpu, Format::LIFTED, BlockAxis::Tile, shape)?;
    match cpu.path() {
        CodePath::Simd => simd::lift_squares(cpu, x, &mut out)?,
        CodePath::Scalar => drop(spec::lift_tiles(lift_of(x)?, x, (&mut out, None))),
    }
    Ok(out)
}

/// The lift of a format's row blocks.
fn lift_of(x: &BlockScaled<Cpu>) -> Result<Lift> {
    let lift = x.format.lift(x.rule, BlockAxis::Row);
    lift.ok_or_else(|| Error::unsupported("transcode", x.format, "its codes are not lifted"))
}

fn one_plane() -> Error {
    Error::shape("transcode", "planes of the result", 1, 2)
}
