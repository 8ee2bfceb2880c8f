//! How a parameter's rows are divided among the ranks that hold the same values: which rank keeps which masters, moments and gradient sums.
//!
//! A slice is whole tiles of 128 rows where a matrix's columns are a multiple of 32, and otherwise whole matrices. So slices cut neither
//! a block of codes nor a chunk of the norm.

use nibble_core::formats::fnv1a32;
use nibble_core::ops::{SQUARES_CHUNK, squares_chunks};
use std::ops::Range;

/// Rows of a tile, which no slice cuts: those of a block of codes in either direction.
pub(super) const TILE: usize = 128;

/// Which rank keeps which rows of a parameter, whose matrices are stacked by rows. A single rank keeps all rows.
///
/// A slice is whole tiles of 128 rows of each matrix, where these are whole chunks of the gradient's norm, and otherwise whole matrices. So
/// the blocks and chunks of a slice are those of the whole matrix. The slices of two ranks differ by at most one tile. Which ranks have the
/// smaller slices depends on the parameter's name, so that they are not always the same ranks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Slices {
    /// Rows and columns of each matrix, and how many there are.
    matrix: usize,
    cols: usize,
    stack: usize,
    /// Tiles of a matrix.
    tiles: usize,
    /// Which of the equal shares the first rank has.
    shift: usize,
    rank: usize,
    ranks: usize,
}

/// A part of a slice: the same rows of one matrix, or of several matrices in sequence.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Piece {
    /// Number of the first matrix.
    pub first: usize,
    /// How many there are: one, or several whole ones.
    pub matrices: usize,
    /// Which rows of each.
    pub rows: Range<usize>,
}

impl Slices {
    /// For a parameter of this name: `stack` matrices of `matrix` rows and `cols` columns, on rank `rank` of `ranks`.
    pub fn new(
        name: &str,
        (matrix, cols): (usize, usize),
        stack: usize,
        (rank, ranks): (usize, usize),
    ) -> Self {
        let ranks = ranks.max(1);
        let in_tiles = cols.is_multiple_of(SQUARES_CHUNK / TILE);
        let tiles = if in_tiles { matrix.div_ceil(TILE) } else { 1 };
        Self { matrix, cols, stack, tiles, shift: fnv1a32(name) as usize % ranks, rank, ranks }
    }

    /// Whether other ranks keep some of it.
    pub fn is_divided(&self) -> bool {
        self.ranks > 1
    }

    /// Rows of all slices.
    pub fn num_rows(&self) -> usize {
        self.stack * self.matrix
    }

    /// Values of a row.
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// The rows that this rank keeps.
    pub fn mine(&self) -> Range<usize> {
        self.rows(self.rank)
    }

    /// The rows that a rank keeps. Rank numbers wrap around.
    pub fn rows(&self, rank: usize) -> Range<usize> {
        let tiles = self.tiles.max(1);
        let begin = |tile: usize| tile / tiles * self.matrix + (tile % tiles * TILE).min(self.matrix);
        let (place, all) = ((rank + self.shift) % self.ranks, self.stack * self.tiles);
        begin(place * all / self.ranks)..begin((place + 1) * all / self.ranks)
    }

    /// A rank's slice in pieces, in order: the end of a matrix, whole matrices, the beginning of a matrix, as far as it has these.
    pub(super) fn pieces(&self, rank: usize) -> Vec<Piece> {
        let Range { start: mut row, end } = self.rows(rank);
        let mut pieces = Vec::new();
        while row < end {
            let (first, begin, left) = (row / self.matrix, row % self.matrix, end - row);
            let (matrices, rows) = match left / self.matrix {
                whole if begin == 0 && whole > 0 => (whole, 0..self.matrix),
                _ => (1, begin..self.matrix.min(begin + left)),
            };
            row += matrices * rows.len();
            pieces.push(Piece { first, matrices, rows });
        }
        pieces
    }

    /// This rank.
    pub(super) fn rank(&self) -> usize {
        self.rank
    }

    /// How many matrices there are.
    pub(super) fn stack(&self) -> usize {
        self.stack
    }

    /// Rows of each matrix.
    pub(super) fn matrix_rows(&self) -> usize {
        self.matrix
    }

    /// The values of every rank's slice, in the order of the ranks.
    pub fn values(&self) -> Vec<Range<usize>> {
        self.scaled(self.cols).collect()
    }

    /// The bytes of every rank's slice, with `of_value` bytes per value.
    pub fn bytes(&self, of_value: usize) -> Vec<Vec<Range<usize>>> {
        self.scaled(self.cols * of_value).map(|range| vec![range]).collect()
    }

    fn scaled(&self, by: usize) -> impl Iterator<Item = Range<usize>> + '_ {
        (0..self.ranks).map(|rank| self.rows(rank)).map(move |rows| rows.start * by..rows.end * by)
    }

    /// Values of a matrix: a part of the gradient's norm.
    pub fn matrix_values(&self) -> usize {
        self.matrix * self.cols
    }

    /// Values before this rank's slice in the matrix in which the slice begins.
    pub fn skip(&self) -> usize {
        self.mine().start.checked_rem(self.matrix).unwrap_or(0) * self.cols
    }

    /// The norm's chunks of every rank's slice, in the order of the ranks.
    pub fn chunks(&self) -> Vec<Range<usize>> {
        let of_matrix = squares_chunks(self.matrix_values());
        let before = |row: usize| match self.matrix {
            0 => 0,
            matrix => row / matrix * of_matrix + squares_chunks(row % matrix * self.cols),
        };
        (0..self.ranks).map(|rank| self.rows(rank)).map(|rows| before(rows.start)..before(rows.end)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slices_are_all_rows_once_and_end_where_tiles_and_chunks_do() {
        for (matrix, cols, stack) in [
            (1, 64, 1),
            (257, 64, 1),
            (256, 96, 1),
            (64, 64, 8),
            (384, 32, 3),
            (1, 64, 5),
            (300, 40, 4),
            (8, 7168, 1),
        ] {
            for ranks in [1, 2, 3, 4, 8] {
                for name in ["a", "model.layers.0.mlp", "lm_head.weight"] {
                    let all = Slices::new(name, (matrix, cols), stack, (0, ranks));
                    let mut rows: Vec<_> = (0..ranks).map(|rank| all.rows(rank)).collect();
                    rows.sort_by_key(|rows| (rows.start, rows.end));
                    assert_eq!(rows[0].start, 0);
                    assert!(rows.windows(2).all(|pair| pair[0].end == pair[1].start), "{rows:?}");
                    assert_eq!(rows[ranks - 1].end, stack * matrix, "{rows:?}");
                    for end in rows.iter().map(|rows| rows.end % matrix) {
                        assert!(end == 0 || end % TILE == 0 && (end * cols) % SQUARES_CHUNK == 0, "{rows:?}");
                    }
                    for rank in 0..ranks {
                        let rows = |piece: &Piece| {
                            let first = piece.first * matrix + piece.rows.start;
                            first..first + piece.matrices * piece.rows.len()
                        };
                        let pieces = all.pieces(rank);
                        assert!(pieces.len() <= 3, "{pieces:?}");
                        assert!(
                            pieces.iter().all(|p| p.matrices == 1 || p.rows == (0..matrix)),
                            "{pieces:?}"
                        );
                        let one_after_the_other: Vec<_> = pieces.iter().flat_map(rows).collect();
                        assert_eq!(one_after_the_other, all.rows(rank).collect::<Vec<_>>());
                    }
                    let mut chunks = all.chunks();
                    chunks.sort_by_key(|chunks| (chunks.start, chunks.end));
                    assert!(chunks.windows(2).all(|pair| pair[0].end == pair[1].start), "{chunks:?}");
                    assert_eq!(chunks[ranks - 1].end, stack * (matrix * cols).div_ceil(SQUARES_CHUNK));
                    // None has more than a tile more than another.
                    let tiles = |rows: &Range<usize>| rows.len().div_ceil(TILE.min(matrix));
                    let most = rows.iter().map(tiles).max().unwrap();
                    assert!(rows.iter().all(|rows| tiles(rows) + 1 + stack >= most), "{rows:?}");
                }
            }
        }
    }

    #[test]
    fn what_is_left_over_does_not_always_go_to_the_same_rank() {
        let owner = |name: &str| {
            let slices = Slices::new(name, (1, 64), 1, (0, 4));
            (0..4).position(|rank| !slices.rows(rank).is_empty()).unwrap()
        };
        let owners: std::collections::BTreeSet<usize> =
            (0..40).map(|layer| owner(&format!("model.layers.{layer}.input_layernorm.weight"))).collect();
        assert_eq!(owners.len(), 4);
    }
}
