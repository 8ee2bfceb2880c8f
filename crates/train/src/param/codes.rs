//! The copies of a quantized weight of which every rank keeps some rows: each quantizes its own, and codes and scales go to all.

use super::slices::{Piece, Slices, TILE};
use crate::cx::Cx;
use nibble_core::formats::{BlockAxis, Codec};
use nibble_core::ops::{Counts, Emitted, Planes, Quantize, weight_planes};
use nibble_core::{BlockScaled, Comm, Data, Error, Kernels, Lines, Operand, Result, Tensor};
use std::ops::Range;

/// Whether the codes of a slice are those of the same rows of the whole weight, in both copies: no block reaches over the end of a tile, and
/// the scale of none follows from more than its own values.
pub(super) fn travel(codec: Codec) -> bool {
    TILE.is_multiple_of(codec.format().spec().block) && !codec.scale_kind().has_tensor_scale()
}

/// A weight's rows on this rank, quantized.
pub(super) struct OfRank<B: Kernels> {
    /// One after the other.
    pieces: Vec<Emitted<B>>,
}

impl<B: Kernels> OfRank<B> {
    /// Of this rank's rows of the master.
    pub fn new(b: &B, slices: &Slices, master: &Tensor<B>, codec: Codec) -> Result<Self> {
        let mine = slices.pieces(slices.rank());
        let mut at = 0;
        let quantized = mine.iter().map(|piece| {
            let rows = at..at + piece.matrices * piece.rows.len();
            at = rows.end;
            let x = rows_of(b, master, rows)?;
            Quantize { stack: piece.matrices, ..Quantize::new(&x, codec, Planes::Tiles) }.run(b)
        });
        Ok(Self { pieces: quantized.collect::<Result<_>>()? })
    }

    /// What was counted of them; of a rank that has none, zeros, since all ranks count at the same sites.
    pub fn keep_counts(&self, cx: &Cx<'_, B>, name: &str) -> Result<()> {
        let counts = Some(Counts::zeros(cx.b)?);
        let none = [Emitted { rows: None, cols: None, counts, found: None }];
        let counted = if self.pieces.is_empty() { &none[..] } else { &self.pieces };
        counted.iter().for_each(|made| cx.keep_quantized(name, "w", made, None));
        Ok(())
    }

    /// The weight as it stands, and transposed if a backward pass will follow, on every rank of `replicas`.
    pub fn gathered(
        self,
        cx: &Cx<'_, B>,
        replicas: &dyn Comm<B>,
        slices: &Slices,
        codec: Codec,
    ) -> Result<(Operand<B>, Option<Operand<B>>)> {
        let b = cx.b;
        let (rows, cols, stack) = (slices.num_rows(), slices.cols(), slices.stack());
        let mut whole = weight_planes(b, (codec.format(), codec.rule()), (rows, cols, stack))?.to_vec();
        // Nobody reads the other.
        whole.truncate(if cx.training { 2 } else { 1 });
        // In this order: codes and scales of the one copy, then of the other.
        let planes: Vec<[PlaneBytes; 2]> = [upright, transposed]
            .iter()
            .zip(&whole)
            .map(|(plane, made)| plane(codec, made.axis, cols))
            .collect();
        let places = Places::of(slices, planes.as_flattened());

        let mut mine = b.alloc::<u8>(places.of_rank(slices.rank()).len())?;
        let mut at = 0;
        for (number, plane) in planes.as_flattened().iter().enumerate() {
            for (piece, made) in slices.pieces(slices.rank()).iter().zip(&self.pieces) {
                let copy = if number < 2 { &made.rows } else { &made.cols };
                let copy = copy.as_ref().ok_or_else(|| Error::shape("prepare", "planes", "one", "both"))?;
                let bytes = plane.bytes_of(piece);
                b.copy(buffers(copy.block("prepare")?)[number % 2], 0..bytes, &mut mine, at)?;
                at += bytes;
            }
        }
        drop(self);
        let mut staged = b.alloc::<u8>(places.bytes)?;
        replicas.all_gather_parts(b, &mine, &places.parts(), &mut staged)?;
        for Place { plane, piece, at } in &places.all {
            let BlockScaled { codes, scales, .. } = &mut whole[plane / 2];
            let to = if plane % 2 == 0 { codes } else { scales };
            planes.as_flattened()[*plane].put(b, &staged, *at, slices.matrix_rows(), piece, to)?;
        }
        let mut whole = whole.into_iter().map(Operand::Block);
        let w = whole.next().ok_or_else(|| Error::shape("prepare", "planes", "none", "one or both"))?;
        Ok((w, whole.next()))
    }
}

/// Some rows of a tensor; all of them share its buffer.
fn rows_of<B: Kernels>(b: &B, x: &Tensor<B>, rows: Range<usize>) -> Result<Tensor<B>> {
    if rows == (0..x.rows) {
        return Ok(x.clone());
    }
    let mut part = Tensor::unwritten(b, x.dtype(), rows.len(), x.cols)?;
    let values = rows.start * x.cols..rows.end * x.cols;
    match (&x.data, &mut part.data) {
        (Data::F32(from), Data::F32(to)) => b.copy(from, values, to, 0)?,
        (Data::Bf16(from), Data::Bf16(to)) => b.copy(from, values, to, 0)?,
        _ => return Err(Error::shape("prepare", "type of the part", part.dtype(), x.dtype())),
    }
    Ok(part)
}

/// Codes and scales.
fn buffers<B: Kernels>(x: &BlockScaled<B>) -> [&B::Buf<u8>; 2] {
    [&x.codes, &x.scales]
}

/// How a plane's bytes lie: of each matrix so many lines, and in each of these the rows of the weight one after the other.
#[derive(Debug, Clone, Copy)]
struct PlaneBytes {
    /// Of a matrix.
    lines: usize,
    /// Rows that have bits together.
    each: usize,
    /// As many of a line.
    bits: usize,
}

/// Codes and scales of the weight as it stands: a matrix is one line.
fn upright(codec: Codec, axis: BlockAxis, cols: usize) -> [PlaneBytes; 2] {
    let (format, record) = (codec.format(), codec.scale_kind().bytes());
    let each = if axis == BlockAxis::Tile { format.spec().block } else { 1 };
    [
        PlaneBytes { lines: 1, each: 1, bits: 8 * format.row_code_bytes(cols) },
        PlaneBytes { lines: 1, each, bits: 8 * record * format.scales_per_row(cols) },
    ]
}

/// The same transposed: a line for each column, or row of tiles.
fn transposed(codec: Codec, axis: BlockAxis, cols: usize) -> [PlaneBytes; 2] {
    let (format, record) = (codec.format(), codec.scale_kind().bytes());
    let lines = if axis == BlockAxis::Tile { format.scales_per_row(cols) } else { cols };
    [
        PlaneBytes { lines: cols, each: 1, bits: format.spec().code_bits as usize },
        PlaneBytes { lines, each: format.spec().block, bits: 8 * record },
    ]
}

impl PlaneBytes {
    /// Where in a line a row begins that is the first of a tile, or of the next matrix.
    fn at(&self, row: usize) -> usize {
        (row.div_ceil(self.each) * self.bits).div_ceil(8)
    }

    /// Of each line what a piece has.
    fn width(&self, piece: &Piece) -> usize {
        self.at(piece.rows.end) - self.at(piece.rows.start)
    }

    fn bytes_of(&self, piece: &Piece) -> usize {
        piece.matrices * self.lines * self.width(piece)
    }

    /// Copies a piece to its place among matrices of so many rows.
    fn put<B: Kernels>(
        &self,
        b: &B,
        staged: &B::Buf<u8>,
        at: usize,
        matrix_rows: usize,
        piece: &Piece,
        to: &mut B::Buf<u8>,
    ) -> Result<()> {
        let (line, width) = (self.at(matrix_rows), self.width(piece));
        let first = piece.first * self.lines * line + self.at(piece.rows.start);
        let lines = piece.matrices * self.lines;
        if lines == 1 || width == line {
            return b.copy(staged, at..at + lines * width, to, first);
        }
        let (from, into) = (Lines { first: at, stride: width }, Lines { first, stride: line });
        b.copy_lines((staged, from), (to, into), (lines, width))
    }
}

/// Where the pieces of all ranks lie as they come: rank by rank, of each its planes.
struct Places {
    all: Vec<Place>,
    /// Where each rank's begin.
    starts: Vec<usize>,
    bytes: usize,
}

/// One piece of a plane.
struct Place {
    /// Number of the plane.
    plane: usize,
    piece: Piece,
    /// Its first byte, of all that come.
    at: usize,
}

impl Places {
    fn of(slices: &Slices, planes: &[PlaneBytes]) -> Self {
        let (mut all, mut starts, mut bytes) = (Vec::new(), Vec::new(), 0);
        for rank in 0..slices.ranks() {
            starts.push(bytes);
            for (number, plane) in planes.iter().enumerate() {
                for piece in slices.pieces(rank) {
                    let at = bytes;
                    bytes += plane.bytes_of(&piece);
                    all.push(Place { plane: number, piece, at });
                }
            }
        }
        Self { all, starts, bytes }
    }

    fn of_rank(&self, rank: usize) -> Range<usize> {
        let end = self.starts.get(rank + 1).copied().unwrap_or(self.bytes);
        self.starts.get(rank).map_or(end..end, |start| *start..end)
    }

    fn parts(&self) -> Vec<Vec<Range<usize>>> {
        (0..self.starts.len()).map(|rank| vec![self.of_rank(rank)]).collect()
    }
}
