//! Square blocks of weights in formats whose blocks are stored line by line: all lines of a square, along its rows and down its columns, are
//! quantized under scales of the whole square. Each line stores its own record, so a tensor looks like one in blocks along its rows, and
//! the codes of a transposed weight are the transposed codes.
//!
//! A scale of the whole block becomes one of the whole square, and a scale of a share of the block becomes one of a square of that side:
//! under HiFloat4 an octave of 8 × 8 values, and a further octave of 4 × 4.

use std::ops::Range;

/// The values of a square, row after row, or of the part of one that a weight ends in: at most the format's block in both directions.
#[derive(Clone, Copy, Debug)]
pub struct Square<'a> {
    x: &'a [f32],
    width: usize,
    /// Whether lines run down the columns.
    is_turned: bool,
}

impl<'a> Square<'a> {
    /// Rows of `width` values; their lines are the rows.
    pub const fn new(x: &'a [f32], width: usize) -> Self {
        Self { x, width, is_turned: false }
    }

    /// The same square, with its columns as lines.
    #[must_use]
    pub const fn turned(self) -> Self {
        Self { is_turned: !self.is_turned, ..self }
    }

    /// The values, row after row.
    pub const fn values(&self) -> &'a [f32] {
        self.x
    }

    /// How many lines there are.
    pub fn lines(&self) -> usize {
        if self.is_turned { self.width } else { self.x.len() / self.width.max(1) }
    }

    /// The largest magnitude of the values at these places of these lines, as far as they exist; 0 without values.
    pub fn largest(&self, lines: Range<usize>, places: Range<usize>) -> f32 {
        let (rows, cols) = if self.is_turned { (places, lines) } else { (lines, places) };
        let height = self.x.len() / self.width.max(1);
        let bits = (rows.start..rows.end.min(height))
            .flat_map(|row| &self.x[row * self.width..][cols.start.min(self.width)..cols.end.min(self.width)])
            .fold(0, |largest, x| largest.max(x.to_bits() & 0x7FFF_FFFF));
        f32::from_bits(bits)
    }
}
