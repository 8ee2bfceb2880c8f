//! 2-D blocks of weights in formats that store one scale record per row of a block. All rows and columns of a 2-D block are quantized with
//! the scales of the 2-D block, so the codes of a transposed weight are the transposed codes. Each row still stores its own record, so the
//! memory layout is that of blocks along rows.
//!
//! In a format with several levels of scales, each level covers a square: under HiFloat4, the first-level scale covers 64 × 64 values, and
//! the second and third levels cover 8 × 8 and 4 × 4 values.

use std::ops::Range;

/// The values of a 2-D block, row after row. At the edge of a weight, a 2-D block may be smaller than the format's block.
#[derive(Clone, Copy, Debug)]
pub struct Square<'a> {
    x: &'a [f32],
    width: usize,
    /// Whether the lines are the columns instead of the rows.
    is_turned: bool,
}

impl<'a> Square<'a> {
    /// A 2-D block with rows of `width` values. The lines of the returned block are its rows.
    pub const fn new(x: &'a [f32], width: usize) -> Self {
        Self { x, width, is_turned: false }
    }

    /// The same 2-D block, but its lines are its columns.
    #[must_use]
    pub const fn turned(self) -> Self {
        Self { is_turned: !self.is_turned, ..self }
    }

    /// The values, row after row.
    pub const fn values(&self) -> &'a [f32] {
        self.x
    }

    /// The number of lines: rows, or columns after [`Square::turned`].
    pub fn lines(&self) -> usize {
        if self.is_turned { self.width } else { self.x.len() / self.width.max(1) }
    }

    /// The largest magnitude among the values at the positions `places` of the lines `lines`. Positions and lines outside the 2-D block are
    /// ignored. The result is 0 if there are no values.
    pub fn largest(&self, lines: Range<usize>, places: Range<usize>) -> f32 {
        let (rows, cols) = if self.is_turned { (places, lines) } else { (lines, places) };
        let height = self.x.len() / self.width.max(1);
        let bits = (rows.start..rows.end.min(height))
            .flat_map(|row| &self.x[row * self.width..][cols.start.min(self.width)..cols.end.min(self.width)])
            .fold(0, |largest, x| largest.max(x.to_bits() & 0x7FFF_FFFF));
        f32::from_bits(bits)
    }
}
