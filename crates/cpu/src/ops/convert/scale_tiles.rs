//! The CPU code of [`nibble_core::ops::TileScales`] and [`nibble_core::ops::UntileScales`].

use crate::{Buf, Cpu};
use nibble_core::formats::tiled_128x4_offset;
use nibble_core::ops::{CutScales, CutSide, TileScales, UntileScales};
use nibble_core::{Error, Result};

/// Calls `tell` for every scale of every group, with the scale's index in the dense matrix and its index in the tiled layout.
fn each_scale(
    op: &'static str,
    matrix: &CutScales,
    starts: &[i32],
    mut tell: impl FnMut(usize, usize),
) -> Result<()> {
    let ([cut, other], [tile, other_tile]) = (matrix.sides(), matrix.tile());
    let start_of = |at: usize| {
        let start = starts[at];
        let (least, most) = (at.checked_sub(1).map_or(0, |before| starts[before]), cut * matrix.per_scale);
        let refused = |expected| Error::shape(op, "starts", format!("{start} at {at}"), expected);
        match usize::try_from(start) {
            Ok(values) if start >= least && values <= most => match values % matrix.per_scale {
                0 => Ok(values / matrix.per_scale),
                _ => Err(refused(format!("a multiple of {}", matrix.per_scale))),
            },
            _ => Err(refused(format!("from {least} to {most}"))),
        }
    };
    let mut first = start_of(0)?;
    // `padded` counts the scales of the preceding groups along the divided dimension, with each group padded to whole tiles.
    let mut padded = 0;
    for group in 1..starts.len() {
        let end = start_of(group)?;
        let len = end - first;
        let at = padded * other.next_multiple_of(other_tile);
        for along in 0..len {
            for across in 0..other {
                match matrix.side {
                    CutSide::Rows => {
                        tell((first + along) * other + across, at + tiled_128x4_offset(along, across, other))
                    }
                    CutSide::Cols => {
                        tell(across * cut + first + along, at + tiled_128x4_offset(across, along, len))
                    }
                }
            }
        }
        padded += len.next_multiple_of(tile);
        first = end;
    }
    Ok(())
}

/// Converts scales to the tiled layout; see [`TileScales`].
pub(crate) fn tile_scales(cpu: &Cpu, op: TileScales<'_, Cpu>) -> Result<Buf<u8>> {
    op.check()?;
    let (scales, starts) = (op.scales.as_slice(), op.starts.as_slice());
    let mut out = op.result(cpu)?;
    let tiles = out.as_mut_slice();
    each_scale("tile_scales", &op.matrix, starts, |dense, tiled| tiles[tiled] = scales[dense])?;
    Ok(out)
}

/// Converts scales from the tiled layout; see [`UntileScales`].
pub(crate) fn untile_scales(cpu: &Cpu, op: UntileScales<'_, Cpu>) -> Result<Buf<u8>> {
    op.check()?;
    let (tiles, starts) = (op.tiles.as_slice(), op.starts.as_slice());
    let mut out = op.result(cpu)?;
    let scales = out.as_mut_slice();
    each_scale("untile_scales", &op.matrix, starts, |dense, tiled| scales[dense] = tiles[tiled])?;
    Ok(out)
}
