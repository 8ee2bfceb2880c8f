use crate::error::expect_eq;
use crate::{Agreement, Backend, Error, Result};
use nibble_formats::{TILE_COLS, TILE_ROWS};

/// Which side of a matrix of scales is cut into groups.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum CutSide {
    /// Groups of rows, such as the tokens of each expert in a forward product.
    Rows,
    /// Groups of columns, such as the tokens of each expert in the contraction of a weight gradient.
    Cols,
}

/// A dense matrix of one-byte scales, cut into groups of different lengths.
///
/// In the tiled layout, a tile holds 128 × 4 scales ([`nibble_formats::ScaleLayout::Tiled128x4`]). Each group begins with a new tile, and
/// the last tiles of a group are padded with zeros. The tiles of a group are stored row by row, and the groups follow each other.
/// Blackwell's tensor cores read this layout in grouped block-scaled GEMMs. The functions `torch_to_blocked_2d_M_groups` and
/// `torch_to_blocked_2d_K_groups` of torchao write the same bytes for the shapes that they accept. If rows are cut, these functions accept
/// only a multiple of 4 columns.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct CutScales {
    /// Number of rows of scales.
    pub rows: usize,
    /// Number of columns of scales.
    pub cols: usize,
    /// Which side is cut.
    pub side: CutSide,
    /// The number of rows of the quantized matrix per scale along the cut side: 1 if rows of scales are cut, or the length of a block if
    /// columns of scales are cut.
    pub per_scale: usize,
}

impl CutScales {
    /// The number of scales along the side that is cut, and the number along the other side.
    pub const fn sides(&self) -> [usize; 2] {
        match self.side {
            CutSide::Rows => [self.rows, self.cols],
            CutSide::Cols => [self.cols, self.rows],
        }
    }

    /// The number of scales of a tile along the side that is cut, and the number along the other side.
    pub const fn tile(&self) -> [usize; 2] {
        match self.side {
            CutSide::Rows => [TILE_ROWS, TILE_COLS],
            CutSide::Cols => [TILE_COLS, TILE_ROWS],
        }
    }

    /// The number of bytes that the tiles of `num_groups` groups need at most. The number suffices wherever the groups start, because the
    /// host does not know the starts. Bytes that no group needs are zero.
    pub const fn tiled_len(&self, num_groups: usize) -> usize {
        let ([cut, other], [tile, other_tile]) = (self.sides(), self.tile());
        (cut + num_groups * tile) * other.next_multiple_of(other_tile)
    }

    fn check<B: Backend>(&self, op: &'static str, starts: &B::Buf<i32>) -> Result<()> {
        let Some(num_groups) = B::len(starts).checked_sub(1) else {
            return Err(Error::shape(op, "starts.len()", 0, "one more than there are groups"));
        };
        if self.per_scale == 0 {
            return Err(Error::shape(op, "per_scale", 0, "at least 1"));
        }
        // The arithmetic has 128 bits, so that it does not overflow before the comparison.
        let [cut, other] = self.sides().map(|n| n as u128);
        let bytes = (cut + num_groups as u128 * 128) * (other + 128);
        if cut * self.per_scale as u128 >= 1 << 31 || bytes >= 1 << 40 {
            let got = format!("{} x {} scales in {num_groups} groups", self.rows, self.cols);
            return Err(Error::shape(
                op,
                "matrix",
                got,
                "starts below 2^31, and tiles of less than 2^40 bytes",
            ));
        }
        Ok(())
    }
}

/// Copies scales into the tiled layout, group after group. Groups may have different lengths. The result has [`CutScales::tiled_len`] bytes.
///
/// The start of each group is a number on the device. A backend that can read the starts on the host reports an error if a start is out of
/// range or out of order. Other backends clamp such a start to the nearest valid start.
#[derive(Debug)]
pub struct TileScales<'a, B: Backend> {
    /// The scales: `rows · cols` bytes.
    pub scales: &'a B::Buf<u8>,
    /// The start of each group in ascending order, followed by the end of the last group, as in the field `start` of [`crate::Groups`].
    pub starts: &'a B::Buf<i32>,
    /// The matrix of scales.
    pub matrix: CutScales,
}

impl<B: Backend> TileScales<'_, B> {
    /// How closely the results of two backends must agree.
    pub const AGREEMENT: Agreement = Agreement::Bitwise;

    /// Checks lengths.
    pub fn check(&self) -> Result<()> {
        const OP: &str = "tile_scales";
        self.matrix.check::<B>(OP, self.starts)?;
        expect_eq(OP, "scales.len()", B::len(self.scales), self.matrix.rows * self.matrix.cols)
    }

    /// Allocates the result, zeroed. Call `check` first.
    pub fn result(&self, b: &B) -> Result<B::Buf<u8>> {
        b.zeros(self.matrix.tiled_len(B::len(self.starts) - 1))
    }
}

/// The inverse of [`TileScales`]: converts tiles to a row-major matrix `[rows][cols]`, which is zero outside all groups. An invalid start
/// has the same consequence as in [`TileScales`].
#[derive(Debug)]
pub struct UntileScales<'a, B: Backend> {
    /// The tiles: [`CutScales::tiled_len`] bytes.
    pub tiles: &'a B::Buf<u8>,
    /// The start of each group in ascending order, followed by the end of the last group.
    pub starts: &'a B::Buf<i32>,
    /// The matrix of scales.
    pub matrix: CutScales,
}

impl<B: Backend> UntileScales<'_, B> {
    /// How closely the results of two backends must agree.
    pub const AGREEMENT: Agreement = Agreement::Bitwise;

    /// Checks lengths.
    pub fn check(&self) -> Result<()> {
        const OP: &str = "untile_scales";
        self.matrix.check::<B>(OP, self.starts)?;
        expect_eq(OP, "tiles.len()", B::len(self.tiles), self.matrix.tiled_len(B::len(self.starts) - 1))
    }

    /// Allocates the result, zeroed. Call `check` first.
    pub fn result(&self, b: &B) -> Result<B::Buf<u8>> {
        b.zeros(self.matrix.rows * self.matrix.cols)
    }
}
