//! Directions of blocks, and memory layouts of their scales.

use crate::error::{Error, Result};

/// The direction in which the values of a block are neighbours in the logical row-major matrix.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum BlockAxis {
    /// 1 × B along the contiguous axis.
    Row,
    /// B × 1; codes and scales are stored transposed.
    Col,
    /// B × B.
    Tile,
}

impl BlockAxis {
    /// All axes.
    pub const ALL: [BlockAxis; 3] = [BlockAxis::Row, BlockAxis::Col, BlockAxis::Tile];

    /// Lower-case name, as recipes spell it.
    pub const fn name(self) -> &'static str {
        match self {
            BlockAxis::Row => "row",
            BlockAxis::Col => "col",
            BlockAxis::Tile => "tile",
        }
    }
}

impl std::fmt::Display for BlockAxis {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.pad(self.name())
    }
}

impl std::str::FromStr for BlockAxis {
    type Err = Error;

    fn from_str(s: &str) -> Result<Self> {
        crate::error::find_by_name("block axis", &BlockAxis::ALL, s)
    }
}

/// Rows of a 128×4 tile of scales.
pub const TILE_ROWS: usize = 128;
/// Columns of a 128×4 tile of scales.
pub const TILE_COLS: usize = 4;

/// The memory order of a matrix of scales `[rows][cols]`, which has one column per block along a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub enum ScaleLayout {
    /// `[rows][cols]`, dense; a row's scales are contiguous, so they are copied with the row.
    #[default]
    RowMajor,
    /// `[cols][rows]`, the stride between columns padded to 16 bytes.
    MnMajor,
    /// 128 × 4 tiles of 512 scales, zero-padded to whole tiles ("blocked").
    Tiled128x4,
}

impl ScaleLayout {
    /// All layouts.
    pub const ALL: [ScaleLayout; 3] = [ScaleLayout::RowMajor, ScaleLayout::MnMajor, ScaleLayout::Tiled128x4];

    /// Lower-case name.
    pub const fn name(self) -> &'static str {
        match self {
            ScaleLayout::RowMajor => "row-major",
            ScaleLayout::MnMajor => "mn-major",
            ScaleLayout::Tiled128x4 => "tiled-128x4",
        }
    }

    /// The number of scales that are stored, including padding. `scale_bytes` is the size of one scale in bytes.
    pub const fn len(self, rows: usize, cols: usize, scale_bytes: usize) -> usize {
        match self {
            ScaleLayout::RowMajor => rows * cols,
            ScaleLayout::MnMajor => cols * mn_major_stride(rows, scale_bytes),
            ScaleLayout::Tiled128x4 => rows.div_ceil(TILE_ROWS) * cols.div_ceil(TILE_COLS) * 512,
        }
    }

    /// The index at which the scale of (`row`, `col`) in a matrix of `rows` × `cols` scales is stored.
    #[inline]
    pub const fn offset(self, row: usize, col: usize, rows: usize, cols: usize, scale_bytes: usize) -> usize {
        match self {
            ScaleLayout::RowMajor => row * cols + col,
            ScaleLayout::MnMajor => col * mn_major_stride(rows, scale_bytes) + row,
            ScaleLayout::Tiled128x4 => tiled_128x4_offset(row, col, cols),
        }
    }

    /// Copies a row-major matrix of scales into this layout. Padding is set to `T::default()`.
    ///
    /// # Errors
    /// [`Error::Shape`] if `row_major` does not have rows · cols scales.
    pub fn arrange<T: Copy + Default>(self, row_major: &[T], rows: usize, cols: usize) -> Result<Vec<T>> {
        check_len("row_major", row_major.len(), rows * cols)?;
        let bytes = size_of::<T>();
        let mut out = vec![T::default(); self.len(rows, cols, bytes)];
        for row in 0..rows {
            for col in 0..cols {
                out[self.offset(row, col, rows, cols, bytes)] = row_major[row * cols + col];
            }
        }
        Ok(out)
    }

    /// Undoes [`arrange`](Self::arrange).
    ///
    /// # Errors
    /// [`Error::Shape`] unless `arranged` has the length of the layout.
    pub fn restore<T: Copy + Default>(self, arranged: &[T], rows: usize, cols: usize) -> Result<Vec<T>> {
        let bytes = size_of::<T>();
        check_len("arranged", arranged.len(), self.len(rows, cols, bytes))?;
        let mut out = Vec::with_capacity(rows * cols);
        for row in 0..rows {
            out.extend((0..cols).map(|col| arranged[self.offset(row, col, rows, cols, bytes)]));
        }
        Ok(out)
    }
}

impl std::fmt::Display for ScaleLayout {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.pad(self.name())
    }
}

impl std::str::FromStr for ScaleLayout {
    type Err = Error;

    fn from_str(s: &str) -> Result<Self> {
        crate::error::find_by_name("scale layout", &ScaleLayout::ALL, s)
    }
}

/// The distance in scales between two columns of [`ScaleLayout::MnMajor`]. The distance is `rows`, rounded up so that a column has a
/// multiple of 16 bytes.
pub const fn mn_major_stride(rows: usize, scale_bytes: usize) -> usize {
    rows.next_multiple_of(if scale_bytes == 0 { 1 } else { 16usize.div_ceil(scale_bytes) })
}

/// Position of the scale (`row`, `col`) in the 128×4 tiles of a matrix with `cols` columns. Within a tile, the position of (row, col) is
/// (row % 32) · 16 + (row / 32) · 4 + col. The tiles are in row-major order.
#[inline]
pub const fn tiled_128x4_offset(row: usize, col: usize, cols: usize) -> usize {
    let tile = (row / TILE_ROWS) * cols.div_ceil(TILE_COLS) + col / TILE_COLS;
    (tile * 32 + row % 32) * 16 + (row % TILE_ROWS) / 32 * 4 + col % TILE_COLS
}

fn check_len(argument: &'static str, got: usize, expected: usize) -> Result<()> {
    if got == expected {
        return Ok(());
    }
    Err(Error::Shape { argument, got, expected: expected.to_string() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_layout_is_injective_and_in_range() {
        for (rows, cols) in [(1, 1), (5, 3), (128, 4), (129, 5), (300, 17)] {
            for layout in ScaleLayout::ALL {
                for bytes in [1, 4] {
                    let mut seen = vec![false; layout.len(rows, cols, bytes)];
                    for row in 0..rows {
                        for col in 0..cols {
                            let at = layout.offset(row, col, rows, cols, bytes);
                            assert!(!std::mem::replace(&mut seen[at], true), "{layout} {row},{col}");
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn arrange_and_restore_are_inverse_and_pad_with_zero() {
        let (rows, cols) = (130, 5);
        let x: Vec<u8> = (0..rows * cols).map(|i| (i % 251) as u8 + 1).collect();
        for layout in ScaleLayout::ALL {
            let there = layout.arrange(&x, rows, cols).unwrap();
            assert_eq!(there.iter().filter(|&&b| b != 0).count(), x.len(), "{layout}");
            assert_eq!(layout.restore(&there, rows, cols).unwrap(), x, "{layout}");
        }
        let e = ScaleLayout::MnMajor.arrange(&x, rows, 6).unwrap_err();
        assert_eq!(e.to_string(), "`row_major`: got 650, expected 780");
    }

    #[test]
    fn tiles_lie_as_published() {
        // Row 33 is the second row of the second group of 32 rows; column 5 is in the second column of tiles.
        assert_eq!(tiled_128x4_offset(33, 5, 8), 512 + 16 + 4 + 1);
        assert_eq!(tiled_128x4_offset(128, 0, 8), 1024);
        assert_eq!(mn_major_stride(5, 1), 16);
        assert_eq!(mn_major_stride(5, 4), 8);
        assert_eq!(mn_major_stride(16, 1), 16);
    }

    #[test]
    fn names_go_there_and_back() {
        for axis in BlockAxis::ALL {
            assert_eq!(axis.to_string().parse(), Ok(axis));
        }
        for layout in ScaleLayout::ALL {
            assert_eq!(layout.to_string().parse(), Ok(layout));
        }
        assert!("rows".parse::<BlockAxis>().unwrap_err().to_string().contains("row, col, tile"));
    }
}
