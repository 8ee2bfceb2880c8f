//! See `nibble_core::ops::Transcode`.

mod spec;
#[cfg(test)]
mod tests;

use super::quantize::planes::unwritten;
use super::quantize::spans::Spans;
use crate::Cpu;
use nibble_core::Result;
use nibble_core::ops::{Counts, Transcode, Transcoded};
use nibble_formats::{BlockAxis, Codec, Format, Rounding};

/// See [`Transcode`].
pub(crate) fn transcode(cpu: &Cpu, op: Transcode<'_, Cpu>) -> Result<Transcoded<Cpu>> {
    let block = match op.axis {
        BlockAxis::Col => op.to.spec().block,
        BlockAxis::Row | BlockAxis::Tile => 1,
    };
    let spans = Spans::new("transcode", op.x.rows, op.groups, block)?;
    let (rows, rule) = match op.axis {
        BlockAxis::Col => (spans.capacity, op.x.rule),
        BlockAxis::Row | BlockAxis::Tile => (op.x.rows, op.x.rule),
    };
    let rule = if op.to == Format::Mxfp4 { op.rule } else { rule };
    let mut out = unwritten(cpu, op.to, rule, op.axis, (rows, op.x.cols, 1));
    let [non_zero, inexact, non_finite] = match (op.x.format, op.axis) {
        (_, BlockAxis::Col) => spec::to_cols(op.x, &spans, &mut out),
        (Format::Mxfp4, _) => spec::lift_rows(op.x, &spans, &mut out),
        _ => {
            let codec = Codec::new(Format::Mxfp4, op.rule, Rounding::NearestEven)?;
            spec::requantize_rows(op.x, codec, &spans, &mut out)
        }
    };
    Ok(Transcoded { out, counts: Counts::new(cpu, non_zero, inexact, non_finite)? })
}
