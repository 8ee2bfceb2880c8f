use crate::error::expect_eq;
use crate::{Agreement, Backend, Error, Result};
use nibble_formats::{TILE_COLS, TILE_ROWS};

/// Which side of a matrix of scales is cut into groups.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum CutSide {
    /// Groups of rows, as the tokens of experts in a forward product.
    Rows,
    /// Groups of columns, as the tokens of experts in a weight gradient's contraction.
    Cols,
}

/// A dense matrix of scales, one byte each, that is cut into ragged groups.
///
/// In tiles ([`nibble_formats::ScaleLayout::Tiled128x4`]: 128 × 4 scales) each group begins with a new tile, and what its last tiles
/// have left over is zero. Groups lie one after the other, the tiles of each row by row. This is what grouped products with block-scaled
/// units read (Blackwell): the bytes of torchao's `torch_to_blocked_2d_M_groups` and `torch_to_blocked_2d_K_groups`, where those
/// take the sizes (rows that are cut have a multiple of 4 columns there).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct CutScales {
    /// Rows of scales.
    pub rows: usize,
    /// Columns of scales.
    pub cols: usize,
    /// Which side is cut.
    pub side: CutSide,
    /// What a start of a group counts to one scale: 1 where rows are cut, and where columns are, the values of a block.
    pub per_scale: usize,
}

impl CutScales {
    /// Scales on the side that is cut, and on the other.
    pub const fn sides(&self) -> [usize; 2] {
        match self.side {
            CutSide::Rows => [self.rows, self.cols],
            CutSide::Cols => [self.cols, self.rows],
        }
    }

    /// Scales of a tile on the side that is cut, and on the other.
    pub const fn tile(&self) -> [usize; 2] {
        match self.side {
            CutSide::Rows => [TILE_ROWS, TILE_COLS],
            CutSide::Cols => [TILE_COLS, TILE_ROWS],
        }
    }

    /// Bytes that the tiles of so many groups are given: enough wherever they are cut, since the host does not know where. What no group
    /// needs is zero.
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
        // In 128 bits nothing overflows before it is compared.
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

/// Lays the scales of ragged groups in tiles of each group: [`CutScales::tiled_len`] bytes.
///
/// Starts lie on the device. A backend that sees them on the host names one that is out of range or order; to others it counts as the
/// nearest that is not.
#[derive(Debug)]
pub struct TileScales<'a, B: Backend> {
    /// `rows · cols` scales.
    pub scales: &'a B::Buf<u8>,
    /// Where each group begins, ascending, and where the last one ends: of [`crate::Groups`] its `start`.
    pub starts: &'a B::Buf<i32>,
    /// What is cut.
    pub matrix: CutScales,
}

impl<B: Backend> TileScales<'_, B> {
    /// What backends owe each other.
    pub const AGREEMENT: Agreement = Agreement::Bitwise;

    /// Checks lengths.
    pub fn check(&self) -> Result<()> {
        const OP: &str = "tile_scales";
        self.matrix.check::<B>(OP, self.starts)?;
        expect_eq(OP, "scales.len()", B::len(self.scales), self.matrix.rows * self.matrix.cols)
    }

    /// Its result, all zeros so far. For checked arguments.
    pub fn result(&self, b: &B) -> Result<B::Buf<u8>> {
        b.zeros(self.matrix.tiled_len(B::len(self.starts) - 1))
    }
}

/// Undoes [`TileScales`]: to `[rows][cols]`, zero where no group is. Starts are as there.
#[derive(Debug)]
pub struct UntileScales<'a, B: Backend> {
    /// [`CutScales::tiled_len`] bytes.
    pub tiles: &'a B::Buf<u8>,
    /// As in [`TileScales`].
    pub starts: &'a B::Buf<i32>,
    /// What was cut.
    pub matrix: CutScales,
}

impl<B: Backend> UntileScales<'_, B> {
    /// What backends owe each other.
    pub const AGREEMENT: Agreement = Agreement::Bitwise;

    /// Checks lengths.
    pub fn check(&self) -> Result<()> {
        const OP: &str = "untile_scales";
        self.matrix.check::<B>(OP, self.starts)?;
        expect_eq(OP, "tiles.len()", B::len(self.tiles), self.matrix.tiled_len(B::len(self.starts) - 1))
    }

    /// Its result, all zeros so far. For checked arguments.
    pub fn result(&self, b: &B) -> Result<B::Buf<u8>> {
        b.zeros(self.matrix.rows * self.matrix.cols)
    }
}
