//! The specification of every op that writes quantized or plain results: one block after the other through
//! `Codec::quantize_block`, from a matrix of F32 values.

use super::planes::{ScalesRef, get_code, put_codes, put_scale, unwritten_as};
use super::spans::Spans;
use crate::Cpu;
use nibble_core::ops::{Counts, Emit, Emitted, Planes};
use nibble_core::{BlockScaled, DType, Data, Operand, Result, Tensor};
use nibble_formats::{BlockAxis, Codec, Element, Stream, bf16};

/// F32 values `[rows, cols]` with zeros on padding.
pub(crate) struct Matrix {
    pub values: Vec<f32>,
    pub cols: usize,
}

impl Matrix {
    /// The rows of `x` that count.
    pub fn of(x: &Tensor<Cpu>, spans: &Spans) -> Self {
        let mut values = vec![0.0; x.rows * x.cols];
        for row in spans.valid() {
            let first = row * x.cols;
            for (col, out) in values[first..][..x.cols].iter_mut().enumerate() {
                *out = value(x, first + col);
            }
        }
        Self { values, cols: x.cols }
    }
}

/// Element `i` of a plain tensor.
pub(crate) fn value(x: &Tensor<Cpu>, i: usize) -> f32 {
    match &x.data {
        Data::F32(x) => x.as_slice()[i],
        Data::Bf16(x) => x.as_slice()[i].to_f32(),
    }
}

/// What decides a quantization beside the values.
pub(crate) struct Casting<'a> {
    pub codec: Codec,
    pub random: Option<Stream>,
    pub spans: &'a Spans<'a>,
}

impl Casting<'_> {
    /// Sixteen random bits of an element; the random roundings are only let in with a stream.
    fn bits(&self, row: usize, col: usize, cols: usize) -> u16 {
        let element = self.spans.row_index(row) * cols as u64 + col as u64;
        self.random.map_or(0, |stream| stream.u16_at(element))
    }
}

/// Blocks counted in the order of [`Counts`].
pub(crate) type Tally = [u64; 3];

fn count(tally: &mut Tally, codec: Codec, codes: &[u8], nonfinite: bool) {
    let magnitude = (1u8 << (codec.format().spec().code_bits - 1)) - 1;
    tally[Counts::<Cpu>::NON_ZERO] += u64::from(codes.iter().any(|code| code & magnitude != 0));
    tally[Counts::<Cpu>::NON_FINITE] += u64::from(nonfinite);
}

/// Writes a matrix in the form asked for.
pub(crate) fn emit(
    cpu: &Cpu,
    x: &Matrix,
    emit: Emit,
    spans: &Spans,
    random: Option<Stream>,
) -> Result<Emitted<Cpu>> {
    match emit {
        Emit::Plain(dtype) => {
            let rows = Some(Operand::Plain(plain(cpu, x, dtype, spans.rows)?));
            Ok(Emitted { rows, cols: None, counts: None })
        }
        Emit::Block { codec, planes } => {
            let casting = Casting { codec, random, spans };
            let rows = matches!(planes, Planes::Rows | Planes::Both).then(|| rows(cpu, x, &casting));
            let cols = matches!(planes, Planes::Cols | Planes::Both).then(|| cols(cpu, x, &casting));
            let tally = rows.as_ref().or(cols.as_ref()).map_or([0; 3], |(_, tally)| *tally);
            let [non_zero, inexact, non_finite] = tally;
            Ok(Emitted {
                rows: rows.map(|(plane, _)| Operand::Block(plane)),
                cols: cols.map(|(plane, _)| Operand::Block(plane)),
                counts: Some(Counts(cpu.computed(&[non_zero, inexact, non_finite]))),
            })
        }
    }
}

/// A matrix as a plain tensor.
pub(crate) fn plain(cpu: &Cpu, x: &Matrix, dtype: DType, rows: usize) -> Result<Tensor<Cpu>> {
    match dtype {
        DType::F32 => Tensor::new(Data::F32(cpu.computed(&x.values)), rows, x.cols),
        DType::Bf16 => {
            let values: Vec<bf16> = x.values.iter().map(|&v| bf16::from_f32(v)).collect();
            Tensor::new(Data::Bf16(cpu.computed(&values)), rows, x.cols)
        }
    }
}

/// Blocks along the rows.
fn rows(cpu: &Cpu, x: &Matrix, casting: &Casting) -> (BlockScaled<Cpu>, Tally) {
    let Casting { codec, spans, .. } = *casting;
    let mut out = unwritten_as(cpu, codec, BlockAxis::Row, (spans.rows, x.cols, 1));
    let mut tally = Tally::default();
    let mut codes = vec![0; codec.format().spec().block];
    for row in 0..spans.rows {
        let blocks = x.values[row * x.cols..(row + 1) * x.cols].chunks(codes.len());
        let per_row = blocks.len();
        for (b, block) in blocks.enumerate() {
            let first = b * codes.len();
            let codes = &mut codes[..block.len()];
            let random = |i| casting.bits(row, first + i, x.cols);
            let (scale, nonfinite) = codec.quantize_block(block, random, codes);
            put_codes(&mut out.codes, codec.format(), (row, x.cols), first, codes);
            put_scale(&mut out.scales, row * per_row + b, scale);
            count(&mut tally, codec, codes, nonfinite);
        }
    }
    (out, tally)
}

/// Blocks down the columns, stored transposed.
fn cols(cpu: &Cpu, x: &Matrix, casting: &Casting) -> (BlockScaled<Cpu>, Tally) {
    let Casting { codec, spans, .. } = *casting;
    let capacity = spans.capacity;
    let mut out = unwritten_as(cpu, codec, BlockAxis::Col, (capacity, x.cols, 1));
    let mut tally = Tally::default();
    let block = codec.format().spec().block;
    let mut codes = vec![0; block];
    for col in 0..x.cols {
        for (b, first) in (0..capacity).step_by(block).enumerate() {
            // Rows past the matrix read as zero: `quantize_block` extends a short block.
            let column: Vec<f32> =
                (first..spans.rows.min(first + block)).map(|row| x.values[row * x.cols + col]).collect();
            let codes = &mut codes[..block.min(capacity - first)];
            let random = |i| casting.bits(first + i, col, x.cols);
            let (scale, nonfinite) = codec.quantize_block(&column, random, codes);
            put_codes(&mut out.codes, codec.format(), (col, capacity), first, codes);
            put_scale(&mut out.scales, col * capacity.div_ceil(block) + b, scale);
            count(&mut tally, codec, codes, nonfinite);
        }
    }
    (out, tally)
}

/// Square tiles of `stack` matrices, as they stand and transposed.
pub(crate) fn tiles(cpu: &Cpu, x: &Matrix, stack: usize, casting: &Casting) -> Result<Emitted<Cpu>> {
    let Casting { codec, spans, .. } = *casting;
    let (n, k) = (spans.rows / stack, x.cols);
    let mut rows = unwritten_as(cpu, codec, BlockAxis::Tile, (stack * n, k, stack));
    let mut cols = unwritten_as(cpu, codec, BlockAxis::Tile, (stack * k, n, stack));
    let mut tally = Tally::default();
    let (format, block) = (codec.format(), codec.format().spec().block);
    let (tiles_n, tiles_k) = (n.div_ceil(block), k.div_ceil(block));
    for (matrix, tile_n, tile_k) in tile_indices(stack, tiles_n, tiles_k) {
        let (n0, k0) = (tile_n * block, tile_k * block);
        let (height, width) = (block.min(n - n0), block.min(k - k0));
        let place = |i: usize| (matrix * n + n0 + i / width, k0 + i % width);
        let tile: Vec<f32> =
            (0..height * width).map(place).map(|(row, col)| x.values[row * k + col]).collect();
        let mut codes = vec![0; tile.len()];
        let random = |i| casting.bits(place(i).0, place(i).1, k);
        let (scale, nonfinite) = codec.quantize_block(&tile, random, &mut codes);
        for (i, line) in codes.chunks(width).enumerate() {
            put_codes(&mut rows.codes, format, (matrix * n + n0 + i, k), k0, line);
        }
        for i in 0..width {
            let line: Vec<u8> = codes.iter().skip(i).step_by(width).copied().collect();
            put_codes(&mut cols.codes, format, (matrix * k + k0 + i, n), n0, &line);
        }
        put_scale(&mut rows.scales, (matrix * tiles_n + tile_n) * tiles_k + tile_k, scale);
        put_scale(&mut cols.scales, (matrix * tiles_k + tile_k) * tiles_n + tile_n, scale);
        count(&mut tally, codec, &codes, nonfinite);
    }
    let [non_zero, inexact, non_finite] = tally;
    Ok(Emitted {
        rows: Some(Operand::Block(rows)),
        cols: Some(Operand::Block(cols)),
        counts: Some(Counts(cpu.computed(&[non_zero, inexact, non_finite]))),
    })
}

/// Matrix, and place down and across, of every tile of a stack.
pub(crate) fn tile_indices(
    stack: usize,
    tiles_n: usize,
    tiles_k: usize,
) -> impl Iterator<Item = (usize, usize, usize)> {
    (0..stack * tiles_n * tiles_k).map(move |i| (i / tiles_k / tiles_n, i / tiles_k % tiles_n, i % tiles_k))
}

/// Element (row, col) of a quantized tensor, `element` being that of its format.
pub(crate) fn decoded(x: &BlockScaled<Cpu>, element: Element, row: usize, col: usize) -> f32 {
    let block = x.format.spec().block;
    let (line, len, i, scale) = match x.axis {
        BlockAxis::Row => (row, x.cols, col, row * x.cols.div_ceil(block) + col / block),
        BlockAxis::Col => (col, x.rows, row, col * x.rows.div_ceil(block) + row / block),
        BlockAxis::Tile => {
            let (n, per_row) = (x.rows / x.stack, x.cols.div_ceil(block));
            let tile_row = row / n * n.div_ceil(block) + row % n / block;
            (row, x.cols, col, tile_row * per_row + col / block)
        }
    };
    let code = get_code(x.codes.as_slice(), x.format, (line, len), i);
    element.decode(code) * ScalesRef::of(x).get(scale).decode()
}

/// Decodes the rows of a quantized tensor that count.
pub(crate) fn decode(x: &BlockScaled<Cpu>, element: Element, valid: impl Iterator<Item = usize>) -> Matrix {
    let mut values = vec![0.0; x.rows * x.cols];
    for row in valid {
        for col in 0..x.cols {
            values[row * x.cols + col] = decoded(x, element, row, col);
        }
    }
    Matrix { values, cols: x.cols }
}
