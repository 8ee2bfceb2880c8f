//! Layout of a weight's code and scale buffers in the bytes that ranks send, and in the whole weight.

use super::slices::{Piece, Slices};
use nibble_core::formats::{BlockAxis, Codec};
use nibble_core::{LineCopy, Lines};

/// Number of buffers of a copy: codes, scales, and a tensor scale for each row.
pub(super) const PARTS: usize = 3;

/// The rows of a weight in the form in which ranks send them. The bytes of a rank contain one buffer after the other, and each buffer
/// contains the pieces of the rank's slice.
#[derive(Debug)]
pub(super) struct PackedRows {
    slices: Slices,
    planes: Vec<PlaneBytes>,
}

impl PackedRows {
    /// A layout with one buffer of unquantized values, each of which takes `of_value` bytes.
    pub fn plain(slices: Slices, of_value: usize) -> Self {
        let planes = vec![PlaneBytes { lines: 1, each: 1, bits: 8 * of_value * slices.cols() }];
        Self { slices, planes }
    }

    /// A layout with the [`PARTS`] buffers of a quantized weight and, if `is_twice` is true, as many buffers of the weight's transpose.
    pub fn codes(slices: Slices, codec: Codec, is_twice: bool) -> Self {
        let axis = if codec.format().spec().tiles { BlockAxis::Tile } else { BlockAxis::Row };
        let matrix = (slices.matrix_rows(), slices.cols());
        let mut planes = upright(codec, axis, matrix).to_vec();
        if is_twice {
            planes.extend(transposed(codec, axis, matrix));
        }
        Self { slices, planes }
    }

    /// The rows that each rank sends.
    pub fn slices(&self) -> &Slices {
        &self.slices
    }

    /// Number of bytes that a rank sends.
    pub fn bytes(&self, rank: usize) -> usize {
        let pieces = self.slices.pieces(rank);
        self.planes.iter().flat_map(|plane| pieces.iter().map(|piece| plane.bytes_of(piece))).sum()
    }

    /// The parts that this rank sends, in order; each tuple has the number of the buffer, the number of the piece, and the number of bytes.
    pub fn mine(&self) -> Vec<(usize, usize, usize)> {
        let pieces = self.slices.pieces(self.slices.rank());
        let of_plane = |(number, plane): (usize, &PlaneBytes)| -> Vec<_> {
            pieces.iter().enumerate().map(|(piece, of)| (number, piece, plane.bytes_of(of))).collect()
        };
        self.planes.iter().enumerate().flat_map(of_plane).collect()
    }

    /// The copies that move the rows of all ranks to their places in buffer `number`; the copies write to output buffer `to`. The copies
    /// read the received bytes from one input buffer, in which each rank's bytes begin at the offset in `starts`.
    pub fn unpack(&self, starts: &[usize], number: usize, to: usize) -> Vec<LineCopy> {
        let (before, plane) = (&self.planes[..number], &self.planes[number]);
        let matrix_rows = self.slices.matrix_rows();
        let mut copies = Vec::new();
        for (rank, start) in starts.iter().enumerate() {
            let pieces = self.slices.pieces(rank);
            let all = |plane: &PlaneBytes| pieces.iter().map(|piece| plane.bytes_of(piece)).sum::<usize>();
            let mut at = start + before.iter().map(all).sum::<usize>();
            let Some(first) = pieces.first().filter(|_| all(plane) > 0) else { continue };
            if plane.lines == 1 {
                // Rows that are consecutive in the piece are also consecutive in the whole buffer.
                copies.push(LineCopy::line((0, at), (to, plane.first(first, matrix_rows)), all(plane)));
                continue;
            }
            for piece in &pieces {
                let (line, width, bytes) = (plane.at(matrix_rows), plane.width(piece), plane.bytes_of(piece));
                let first = plane.first(piece, matrix_rows);
                if width == line {
                    copies.push(LineCopy::line((0, at), (to, first), bytes));
                } else if width > 0 {
                    let (from, into) = (Lines { first: at, stride: width }, Lines { first, stride: line });
                    let lines = piece.matrices * plane.lines;
                    copies.push(LineCopy { from: (0, from), to: (to, into), lines, len: width });
                }
                at += bytes;
            }
        }
        copies
    }
}

/// Layout of a buffer. Each matrix has `lines` lines, and each line has entries for the rows of the weight, in order.
#[derive(Debug, Clone, Copy)]
struct PlaneBytes {
    /// Number of lines of a matrix.
    lines: usize,
    /// Number of rows that share an entry of a line.
    each: usize,
    /// Number of bits of an entry.
    bits: usize,
}

/// The buffers of the weight itself, in which a matrix is one line.
fn upright(codec: Codec, axis: BlockAxis, (_, cols): (usize, usize)) -> [PlaneBytes; PARTS] {
    let (format, record) = (codec.format(), codec.scale_kind().bytes());
    let each = if axis == BlockAxis::Tile { format.spec().block } else { 1 };
    [
        PlaneBytes { lines: 1, each: 1, bits: 8 * format.row_code_bytes(cols) },
        PlaneBytes { lines: 1, each, bits: 8 * record * format.scales_per_row(cols) },
        PlaneBytes { lines: 1, each: 1, bits: tensor_scale_bits(codec) },
    ]
}

/// The buffers of the transpose, with one line per column, or per row of tiles. The tensor scales are equal for all columns, so they are
/// sent with the first row.
fn transposed(codec: Codec, axis: BlockAxis, (rows, cols): (usize, usize)) -> [PlaneBytes; PARTS] {
    let (format, record) = (codec.format(), codec.scale_kind().bytes());
    let lines = if axis == BlockAxis::Tile { format.scales_per_row(cols) } else { cols };
    [
        PlaneBytes { lines: cols, each: 1, bits: format.spec().code_bits as usize },
        PlaneBytes { lines, each: format.spec().block, bits: 8 * record },
        PlaneBytes { lines: 1, each: rows.max(1), bits: cols * tensor_scale_bits(codec) },
    ]
}

/// Number of bits of the tensor scale of one row.
fn tensor_scale_bits(codec: Codec) -> usize {
    if codec.scale_kind().has_tensor_scale() { 8 * size_of::<f32>() } else { 0 }
}

impl PlaneBytes {
    /// The byte offset of a row within a line. The row must be the first row of a tile, or of the next matrix.
    fn at(&self, row: usize) -> usize {
        (row.div_ceil(self.each) * self.bits).div_ceil(8)
    }

    /// Number of bytes of a piece in each line.
    fn width(&self, piece: &Piece) -> usize {
        self.at(piece.rows.end) - self.at(piece.rows.start)
    }

    fn bytes_of(&self, piece: &Piece) -> usize {
        piece.matrices * self.lines * self.width(piece)
    }

    /// The byte offset of a piece among matrices of `matrix_rows` rows.
    fn first(&self, piece: &Piece, matrix_rows: usize) -> usize {
        piece.first * self.lines * self.at(matrix_rows) + self.at(piece.rows.start)
    }
}
