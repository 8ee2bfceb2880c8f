//! See `nibble_core::ops::Transcode`.

mod lift;
mod simd;
mod spec;
#[cfg(test)]
mod tests;

use super::quantize::planes::unwritten;
use super::quantize::spans::Spans;
use crate::{CodePath, Cpu};
use nibble_core::ops::{Counts, Transcode, Transcoded};
use nibble_core::{BlockScaled, Result};
use nibble_formats::{BlockAxis, Codec, Format, Rounding};

/// See [`Transcode`].
pub(crate) fn transcode(cpu: &Cpu, op: Transcode<'_, Cpu>) -> Result<Transcoded<Cpu>> {
    if op.axis == BlockAxis::Tile {
        return lift_tiles(cpu, op.x);
    }
    let block = match op.axis {
        BlockAxis::Col => op.to.spec().block,
        BlockAxis::Row | BlockAxis::Tile => 1,
    };
    let spans = Spans::new("transcode", op.x.rows, op.groups, block)?;
    let (rows, rule) = match op.axis {
        BlockAxis::Col => (spans.capacity, op.x.rule),
        BlockAxis::Row | BlockAxis::Tile => (op.x.rows, op.x.rule),
    };
    // Only MXFP4 gets scales chosen anew.
    let codec = if op.to == Format::Mxfp4 {
        Some(Codec::new(Format::Mxfp4, op.rule, Rounding::NearestEven)?)
    } else {
        None
    };
    let rule = codec.map_or(rule, |codec| codec.rule());
    let mut out = unwritten(cpu, op.to, rule, op.axis, (rows, op.x.cols, 1));
    if op.axis == BlockAxis::Col {
        out.shared_cols = op.x.format.spec().block;
    }
    if cpu.path() == CodePath::Simd {
        return match (codec, op.axis) {
            (Some(codec), _) => simd::requantize_rows(cpu, op.x, codec, &spans, out),
            (None, BlockAxis::Col) => simd::to_cols(cpu, op.x, &spans, out),
            (None, _) => simd::lift_rows(cpu, op.x, &spans, out),
        };
    }
    let [non_zero, inexact, non_finite] = match (codec, op.axis) {
        (Some(codec), _) => spec::requantize_rows(op.x, codec, &spans, &mut out)?,
        (None, BlockAxis::Col) => spec::to_cols(op.x, &spans, &mut out),
        (None, _) => spec::lift_rows(op.x, &spans, &mut out),
    };
    Ok(Transcoded { out, transposed: None, counts: Counts(cpu.computed(&[non_zero, inexact, non_finite])) })
}

/// Both planes of a weight.
fn lift_tiles(cpu: &Cpu, x: &BlockScaled<Cpu>) -> Result<Transcoded<Cpu>> {
    if cpu.path() == CodePath::Simd {
        return simd::lift_tiles(cpu, x);
    }
    let (n, k, stack) = (x.rows / x.stack.max(1), x.cols, x.stack);
    let plane =
        |rows, cols| unwritten(cpu, Format::E4m3, x.rule, BlockAxis::Tile, (stack * rows, cols, stack));
    let (mut out, mut transposed) = (plane(n, k), plane(k, n));
    let [non_zero, inexact, non_finite] = spec::lift_tiles(x, &mut out, &mut transposed);
    let counts = Counts(cpu.computed(&[non_zero, inexact, non_finite]));
    Ok(Transcoded { out, transposed: Some(transposed), counts })
}
