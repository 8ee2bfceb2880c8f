//! How a parameter's rows are sharded over the ranks that hold the same values: the masters, moments and gradient sums that each rank
//! keeps.
//!
//! If a matrix's number of columns is a multiple of 32, a slice consists of whole tiles of 128 rows. Otherwise a slice consists of whole
//! matrices. So a slice boundary splits neither a block of codes nor a chunk of the norm.

use nibble_core::formats::fnv1a32;
use nibble_core::ops::{SQUARES_CHUNK, squares_chunks};
use std::ops::Range;

/// Number of rows of a tile. A slice boundary never splits a tile, so it never splits a block of codes in either direction.
pub(super) const TILE: usize = 128;

/// The rows of a parameter that each rank stores. The parameter's matrices are stacked by rows. A single rank keeps all rows.
///
/// A slice consists of whole tiles of 128 rows of each matrix, provided that such tiles are whole chunks of the gradient's norm. Otherwise
/// a slice consists of whole matrices. So the blocks and chunks of a slice are also blocks and chunks of the whole matrix. The slices of
/// two ranks differ by at most one tile. The parameter's name determines which ranks have the smaller slices, so that these are not always
/// the same ranks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Slices {
    /// Number of rows of each matrix; `cols` and `stack` are the numbers of columns and of matrices.
    matrix: usize,
    cols: usize,
    stack: usize,
    /// Number of tiles of a matrix.
    tiles: usize,
    /// The index of the first rank's share among the equal shares.
    shift: usize,
    rank: usize,
    ranks: usize,
}

/// A part of a slice: some rows of one matrix, or several consecutive whole matrices.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Piece {
    /// Index of the piece's first matrix.
    pub first: usize,
    /// Number of matrices in the piece: either one matrix (all or some of its rows), or several whole matrices.
    pub matrices: usize,
    /// The range of rows in each matrix of the piece.
    pub rows: Range<usize>,
}

impl Slices {
    /// Divides the parameter `name` into slices, from the viewpoint of rank `rank` of `ranks`; the parameter has `stack` matrices of
    /// `matrix` rows and `cols` columns.
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

    /// Whether the parameter is sharded, so that other ranks keep some of its rows.
    pub fn is_divided(&self) -> bool {
        self.ranks > 1
    }

    /// Number of rows of the slices of all ranks together.
    pub fn num_rows(&self) -> usize {
        self.stack * self.matrix
    }

    /// Number of values of a row.
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

    /// The pieces of a rank's slice, in order: the end of a matrix, whole matrices, the beginning of a matrix. Pieces that the slice does
    /// not have are left out.
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

    /// The index of this rank.
    pub(super) fn rank(&self) -> usize {
        self.rank
    }

    /// Number of matrices.
    pub(super) fn stack(&self) -> usize {
        self.stack
    }

    /// Number of rows of each matrix.
    pub(super) fn matrix_rows(&self) -> usize {
        self.matrix
    }

    /// The range of values of every rank's slice, in the order of the ranks.
    pub fn values(&self) -> Vec<Range<usize>> {
        self.scaled(self.cols).collect()
    }

    /// The range of bytes of every rank's slice, with `of_value` bytes per value.
    pub fn bytes(&self, of_value: usize) -> Vec<Vec<Range<usize>>> {
        self.scaled(self.cols * of_value).map(|range| vec![range]).collect()
    }

    fn scaled(&self, by: usize) -> impl Iterator<Item = Range<usize>> + '_ {
        (0..self.ranks).map(|rank| self.rows(rank)).map(move |rows| rows.start * by..rows.end * by)
    }

    /// Number of values of a matrix. The gradient's norm is computed matrix by matrix.
    pub fn matrix_values(&self) -> usize {
        self.matrix * self.cols
    }

    /// Number of values that come before this rank's slice within the slice's first matrix.
    pub fn skip(&self) -> usize {
        self.mine().start.checked_rem(self.matrix).unwrap_or(0) * self.cols
    }

    /// For each rank, the range of chunks of the gradient's norm that are in the rank's slice.
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
                    // No slice has more than one tile more than another slice.
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
