//! How a parameter's rows are divided among the ranks that hold the same values: who keeps which masters, moments and sums of gradients.

use nibble_core::formats::fnv1a32;
use nibble_core::ops::SQUARES_CHUNK;
use std::ops::Range;

/// Rows of a tile that a slice has whole: those of a block of codes in both directions.
const TILE: usize = 128;

/// The rows of a parameter, of all its matrices one under the other, by the rank that keeps them. A rank alone keeps all of them.
///
/// A slice is whole tiles of 128 rows of each matrix, where these are whole chunks of the gradient's norm, and otherwise whole matrices. So
/// blocks and chunks are those of the whole. Ranks have as many tiles as others, or one fewer; which have fewer depends on the
/// parameter's name, so that it is not always the same ones.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Slices {
    /// Rows of each matrix.
    matrix: usize,
    cols: usize,
    /// By rank.
    rows: Vec<Range<usize>>,
    rank: usize,
}

impl Slices {
    /// Of a parameter of this name, `stack` matrices of so many rows and columns, among ranks of which this is one.
    pub fn new(
        name: &str,
        (matrix, cols): (usize, usize),
        stack: usize,
        (rank, ranks): (usize, usize),
    ) -> Self {
        let in_tiles = cols.is_multiple_of(SQUARES_CHUNK / TILE);
        let tiles = if in_tiles { matrix.div_ceil(TILE) } else { 1 };
        let begin = |tile: usize| tile / tiles.max(1) * matrix + (tile % tiles.max(1) * TILE).min(matrix);
        let all = stack * tiles;
        let slice = |rank: usize| {
            let place = (rank + fnv1a32(name) as usize) % ranks;
            begin(place * all / ranks)..begin((place + 1) * all / ranks)
        };
        Self { matrix, cols, rows: (0..ranks).map(slice).collect(), rank }
    }

    /// Whether other ranks keep some of it.
    pub fn is_divided(&self) -> bool {
        self.rows.len() > 1
    }

    /// Rows of all slices.
    pub fn num_rows(&self) -> usize {
        self.rows.iter().map(|slice| slice.end).max().unwrap_or(0)
    }

    /// Values of a row.
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// The rows that this rank keeps.
    pub fn mine(&self) -> Range<usize> {
        self.rows[self.rank].clone()
    }

    /// The values of every rank's slice, in the order of the ranks.
    pub fn values(&self) -> Vec<Range<usize>> {
        self.scaled(self.cols)
    }

    /// The bytes of every rank's slice where a value has so many.
    pub fn bytes(&self, of_value: usize) -> Vec<Vec<Range<usize>>> {
        self.scaled(self.cols * of_value).into_iter().map(|range| vec![range]).collect()
    }

    fn scaled(&self, by: usize) -> Vec<Range<usize>> {
        self.rows.iter().map(|rows| rows.start * by..rows.end * by).collect()
    }

    /// Values of a matrix: a part of the gradient's norm.
    pub fn matrix_values(&self) -> usize {
        self.matrix * self.cols
    }

    /// Values of the matrix in which this rank's slice begins that lie before it.
    pub fn skip(&self) -> usize {
        self.mine().start.checked_rem(self.matrix).unwrap_or(0) * self.cols
    }

    /// The norm's chunks of every rank's slice, in the order of the ranks.
    pub fn chunks(&self) -> Vec<Range<usize>> {
        let of_matrix = self.matrix_values().div_ceil(SQUARES_CHUNK);
        let before = |row: usize| match self.matrix {
            0 => 0,
            matrix => row / matrix * of_matrix + (row % matrix * self.cols).div_ceil(SQUARES_CHUNK),
        };
        self.rows.iter().map(|rows| before(rows.start)..before(rows.end)).collect()
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
                    let mut rows = all.rows.clone();
                    rows.sort_by_key(|rows| (rows.start, rows.end));
                    assert_eq!(rows[0].start, 0);
                    assert!(rows.windows(2).all(|pair| pair[0].end == pair[1].start), "{rows:?}");
                    assert_eq!(rows[ranks - 1].end, stack * matrix, "{rows:?}");
                    for end in rows.iter().map(|rows| rows.end % matrix) {
                        assert!(end == 0 || end % TILE == 0 && (end * cols) % SQUARES_CHUNK == 0, "{rows:?}");
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
            slices.rows.iter().position(|rows| !rows.is_empty()).unwrap()
        };
        let owners: std::collections::BTreeSet<usize> =
            (0..40).map(|layer| owner(&format!("model.layers.{layer}.input_layernorm.weight"))).collect();
        assert_eq!(owners.len(), 4);
    }
}
