//! The specification of every op that writes quantized or plain results. Each op passes a matrix of F32 values block by block to
//! `Codec::quantize_block`.

use super::delayed::Met;
use super::drawn::Drawn;
pub(crate) use super::encode::Tally;
use super::planes::{both, get_code, plane, put_codes, put_counts, put_scale, scales_of};
use super::source::Scales;
use super::spans::{Span, Spans};
use crate::Cpu;
use nibble_core::ops::{Counts, Delayed, Emit, Emitted, Found};
use nibble_core::{BlockScaled, Data, Error, Operand, Result, Tensor};
use nibble_formats::{
    BlockAxis, Codec, Format, Rounding, Scale, ScaleKind, ScalePlane, ScalePlaneMut, SquareScales,
    WHOLE_LINE, bf16, pack_codes,
};
use rayon::prelude::*;
use std::ops::Range;

/// F32 values `[rows, cols]`, with zeros in the padding.
pub(crate) struct Matrix {
    pub values: Vec<f32>,
    pub cols: usize,
}

impl Matrix {
    /// Copies the valid rows of `x`.
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

/// All parameters of a quantization except the values.
pub(crate) struct Casting<'a> {
    pub codec: Codec,
    /// For formats with tensor scales: the codec of each row. Rows of one span (a group or a matrix) share a codec.
    pub of_rows: Vec<Codec>,
    /// State of delayed scaling, if scales come from earlier steps.
    met: Option<Met<'a>>,
    pub random: Option<Drawn>,
    pub spans: &'a Spans<'a>,
    /// Rows per matrix, if the matrices are transposed: an element keeps the random bits of its position before the transpose.
    transposed: Option<usize>,
}

/// What is known about spans in addition to their values.
#[derive(Clone, Copy, Default)]
pub(crate) struct Known<'a> {
    /// Delayed-scaling records, and the number of spans that have a record.
    pub delayed: Option<(Delayed<'a, Cpu>, usize)>,
    /// The largest magnitude of each span, if known.
    pub amax: Option<&'a [f32]>,
}

impl Known<'_> {
    /// The largest magnitude of a span, if known.
    pub fn amax(&self, span: &Span) -> Option<f32> {
        self.amax?.get(span.number?).copied()
    }
}

impl<'a> Casting<'a> {
    /// Measures the values if the format has a tensor scale that is unknown.
    pub fn new(
        codec: Codec,
        random: Option<Drawn>,
        spans: &'a Spans<'a>,
        x: &Matrix,
        known: Known<'a>,
    ) -> Self {
        let values = |rows: Range<usize>| &x.values[rows.start * x.cols..rows.end * x.cols];
        let mut met = known.delayed.map(|(delayed, num_spans)| Met::new(delayed, num_spans));
        let of_span = |span: &Span, rows: Range<usize>| match (&mut met, known.amax(span)) {
            (Some(met), amax) => met.meet(codec, span.number, values(rows), amax),
            (None, Some(amax)) => codec.for_tensor(amax),
            (None, None) => codec.for_tensor(codec.tensor_amax(values(rows).iter().copied())),
        };
        let casting = Self::of_spans(codec, random, spans, of_span);
        Self { met, ..casting }
    }

    /// Quantization parameters in which `amax` returns the largest magnitude of a span's valid rows, as [`Codec::tensor_amax`] defines it.
    pub fn measured(
        codec: Codec,
        random: Option<Drawn>,
        spans: &'a Spans<'a>,
        amax: impl Fn(&Span, Range<usize>) -> f32,
    ) -> Self {
        Self::of_spans(codec, random, spans, |span, rows| codec.for_tensor(amax(span, rows)))
    }

    /// Quantization parameters with one codec per span, computed from its valid rows, if the format has a tensor scale.
    fn of_spans(
        codec: Codec,
        random: Option<Drawn>,
        spans: &'a Spans<'a>,
        mut of_span: impl FnMut(&Span, Range<usize>) -> Codec,
    ) -> Self {
        let mut of_rows = Vec::new();
        if codec.scale_kind().has_tensor_scale() {
            of_rows = vec![codec.for_tensor(0.0); spans.capacity];
            for span in &spans.spans {
                let rows = span.start..(span.start + span.len).min(spans.rows);
                of_rows[span.start..span.end.min(spans.capacity)].fill(of_span(span, rows));
            }
        }
        Self { codec, of_rows, met: None, random, spans, transposed: None }
    }

    /// The codec for the values of a row.
    pub fn codec(&self, row: usize) -> Codec {
        self.of_rows.get(row).copied().unwrap_or(self.codec)
    }

    /// Sixteen random bits of an element; 0 without a random stream. Stochastic roundings are accepted only with a stream.
    fn bits(&self, row: usize, col: usize, cols: usize) -> u16 {
        let Some(drawn) = self.random else { return 0 };
        let element = match self.transposed {
            Some(rows) => ((row / rows * cols + col) * rows + row % rows) as u64,
            None => self.spans.row_index(row) * cols as u64 + col as u64,
        };
        drawn.u16_at(element)
    }

    /// Writes the measurements of delayed scaling.
    fn put_found(&self, found: &mut Option<Found<Cpu>>) {
        if let (Some(met), Some(found)) = (&self.met, found) {
            met.put_found(found);
        }
    }

    /// Writes the tensor scale of each row.
    pub fn put_tensor_scale(&self, out: &mut BlockScaled<Cpu>, codec: impl Fn(usize) -> Codec) {
        if let Some(scales) = &mut out.tensor_scale {
            for (row, scale) in scales.as_mut_slice().iter_mut().enumerate() {
                *scale = codec(row).tensor_scale();
            }
        }
    }
}

fn count(tally: &mut Tally, codec: Codec, codes: &[u8], nonfinite: bool) {
    tally[Counts::<Cpu>::NON_ZERO] += u64::from(codes.iter().any(|&code| !codec.element().is_zero(code)));
    tally[Counts::<Cpu>::NON_FINITE] += u64::from(nonfinite);
}

/// Writes a matrix in the requested form.
pub(crate) fn emit(
    cpu: &Cpu,
    x: &Matrix,
    (emit, mut made): (Emit, Emitted<Cpu>),
    spans: &Spans,
    random: Option<Drawn>,
) -> Result<Emitted<Cpu>> {
    match (emit, &mut made.rows) {
        (Emit::Block { codec, .. }, _) => {
            Ok(quantized(cpu, x, &Casting::new(codec, random, spans, x, Known::default()), made))
        }
        (Emit::Plain(_), Some(Operand::Plain(out))) => {
            plain(x, out);
            Ok(made)
        }
        (Emit::Plain(dtype), _) => Err(Error::shape("emit", "the result", "not plain", dtype)),
    }
}

/// Writes a matrix in row blocks, in column blocks, or both.
pub(crate) fn quantized(cpu: &Cpu, x: &Matrix, casting: &Casting, mut made: Emitted<Cpu>) -> Emitted<Cpu> {
    let rows = plane(&mut made.rows).map(|out| lines(cpu, x, casting, out));
    let cols = plane(&mut made.cols).map(|out| lines(cpu, x, casting, out));
    put_counts(&mut made.counts, rows.or(cols).unwrap_or_default());
    casting.put_found(&mut made.found);
    made
}

/// Writes a matrix as a plain tensor.
pub(crate) fn plain(x: &Matrix, out: &mut Tensor<Cpu>) {
    match &mut out.data {
        Data::F32(out) => out.as_mut_slice().copy_from_slice(&x.values),
        Data::Bf16(out) => {
            let values = out.as_mut_slice().iter_mut().zip(&x.values);
            values.for_each(|(out, &x)| *out = bf16::from_f32(x));
        }
    }
}

/// A range of values in a row or column that share one scale, and the number of values per stored scale record.
pub(super) struct Block {
    pub values: Range<usize>,
    pub each: usize,
}

impl Block {
    pub fn records(&self) -> Range<usize> {
        self.values.start / self.each..self.values.end.div_ceil(self.each)
    }
}

/// The blocks of a row or column of `len` values. Blocks have the format's block length; if a whole column has one scale, the blocks are
/// the row spans.
pub(super) fn blocks(format: Format, axis: BlockAxis, spans: &Spans, len: usize) -> Vec<Block> {
    let (block, each) = (format.spec().block, format.record_len(axis).min(len.max(1)));
    if axis == BlockAxis::Col && block == WHOLE_LINE {
        return spans.spans.iter().map(|span| Block { values: span.start..span.end, each }).collect();
    }
    (0..len).step_by(each).map(|first| Block { values: first..len.min(first + each), each }).collect()
}

/// Writes row blocks, or column blocks that are stored transposed. Threads divide the rows or columns; within one, blocks are processed in
/// order.
fn lines(cpu: &Cpu, x: &Matrix, casting: &Casting, out: &mut BlockScaled<Cpu>) -> Tally {
    let (Casting { codec, spans, .. }, axis) = (casting, out.axis);
    let down = axis == BlockAxis::Col;
    let len = if down { spans.capacity } else { x.cols };
    casting.put_tensor_scale(out, |row| casting.codec(row));
    let (format, kind) = (codec.format(), codec.scale_kind());
    let (line_bytes, scale_bytes) = (format.row_code_bytes(len), out.shape_of_scales().1 * kind.bytes());
    let (padding, blocks) = (spans.padding(), blocks(format, axis, spans, len));
    let mut scales = out.scales.as_mut_slice();
    let lines: Vec<_> = out
        .codes
        .as_mut_slice()
        .chunks_mut(line_bytes.max(1))
        .map(|codes| {
            let (of_line, rest) = std::mem::take(&mut scales).split_at_mut(scale_bytes);
            scales = rest;
            (codes, ScalePlaneMut { kind, bytes: of_line })
        })
        .collect();
    let one = |(line, (plane, mut scales)): (usize, (&mut [u8], ScalePlaneMut<'_>))| {
        // Rows past the end of the matrix count as zero, because `quantize_block` extends a short block.
        let values: Vec<f32> = match axis {
            BlockAxis::Col => (0..spans.rows).map(|row| x.values[row * x.cols + line]).collect(),
            BlockAxis::Row | BlockAxis::Tile => x.values[line * x.cols..][..x.cols].to_vec(),
        };
        let mut codes = vec![0; len];
        let mut tally = Tally::default();
        for block in &blocks {
            let place = |i| if down { (i, line) } else { (line, i) };
            let of = |record: usize| record * block.each..block.values.end.min((record + 1) * block.each);
            // A transform leaves nonzero values in rows after a group's last valid row.
            let is_padding = |i| padding[place(i).0] && values.get(i).is_none_or(|v| *v == 0.0);
            let least = |record: &usize| of(*record).all(is_padding);
            block.records().filter(least).for_each(|record| scales.set(record, kind.least()));
            if block.values.clone().all(is_padding) {
                continue;
            }
            let (first, codec) = (block.values.start, casting.codec(place(block.values.start).0));
            let random = |i| casting.bits(place(first + i).0, place(first + i).1, x.cols);
            let values = &values[first.min(values.len())..block.values.end.min(values.len())];
            let codes = &mut codes[block.values.clone()];
            let (scale, nonfinite) = codec.quantize_block(values, random, codes);
            block.records().filter(|record| !least(record)).for_each(|record| scales.set(record, scale));
            count(&mut tally, codec, codes, nonfinite);
        }
        pack_codes(format.spec().code_bits, &codes, plane)
            .unwrap_or_else(|e| unreachable!("cut to that length: {e}"));
        tally
    };
    cpu.pool().install(|| lines.into_par_iter().enumerate().map(one).reduce(Tally::default, sum))
}

/// The sum of two block counts.
pub(super) fn sum(a: Tally, b: Tally) -> Tally {
    std::array::from_fn(|i| a[i] + b[i])
}

/// Writes 2-D blocks of `stack` matrices, as they are and transposed. Each 2-D block has one scale record, or one per row and per column.
pub(crate) fn tiles(
    x: &Matrix,
    stack: usize,
    casting: &Casting,
    mut made: Emitted<Cpu>,
) -> Result<Emitted<Cpu>> {
    let Casting { codec, spans, .. } = *casting;
    let (n, k) = (spans.rows / stack, x.cols);
    let [rows, cols] = both("quantize", &mut made)?;
    casting.put_tensor_scale(rows, |row| casting.codec(row));
    casting.put_tensor_scale(cols, |row| casting.codec(row / k.max(1) * n));
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
        let codec = casting.codec(place(0).0);
        let is_square = codec.scaling().is_square();
        let scales = if is_square {
            codec.quantize_square((&tile, width), random, &mut codes)
        } else {
            let (scale, is_nan) = codec.quantize_block(&tile, random, &mut codes);
            SquareScales { rows: vec![scale], cols: vec![scale], is_nan }
        };
        for (i, line) in codes.chunks(width).enumerate() {
            put_codes(&mut rows.codes, format, (matrix * n + n0 + i, k), k0, line);
        }
        for i in 0..width {
            let line: Vec<u8> = codes.iter().skip(i).step_by(width).copied().collect();
            put_codes(&mut cols.codes, format, (matrix * k + k0 + i, n), n0, &line);
        }
        let lines = if is_square {
            [matrix * n + n0, matrix * k + k0]
        } else {
            [matrix * tiles_n + tile_n, matrix * tiles_k + tile_k]
        };
        for (i, scale) in scales.rows.iter().enumerate() {
            put_scale(rows, (lines[0] + i) * tiles_k + tile_k, *scale);
        }
        for (i, scale) in scales.cols.iter().enumerate() {
            put_scale(cols, (lines[1] + i) * tiles_n + tile_n, *scale);
        }
        for codes in codes.chunks(if is_square { width } else { codes.len() }) {
            count(&mut tally, codec, codes, scales.is_nan);
        }
    }
    put_counts(&mut made.counts, tally);
    casting.put_found(&mut made.found);
    Ok(made)
}

/// Writes `stack` matrices in row blocks, both as they are and transposed.
pub(crate) fn row_weights(
    cpu: &Cpu,
    x: &Matrix,
    (stack, codec, random): (usize, Codec, Option<Drawn>),
    known: Known,
    mut made: Emitted<Cpu>,
) -> Result<Emitted<Cpu>> {
    let (n, k) = (x.values.len() / x.cols.max(1) / stack.max(1), x.cols);
    let [upright, across] = both("quantize", &mut made)?;
    let plane = |x: &Matrix, rows: usize, transposed, out| {
        let spans = Spans::stacked(stack, rows);
        let casting = Casting::new(codec, random, &spans, x, known);
        lines(cpu, x, &Casting { transposed, ..casting }, out)
    };
    let turned = (0..stack * k).flat_map(|i| (0..n).map(move |row| (i / k * n + row) * k + i % k));
    let turned = Matrix { values: turned.map(|at| x.values[at]).collect(), cols: n };
    let tally = plane(x, n, None, upright);
    plane(&turned, k, Some(k), across);
    put_counts(&mut made.counts, tally);
    Ok(made)
}

/// Matrix index, tile row and tile column of all tiles of a stack.
pub(crate) fn tile_indices(
    stack: usize,
    tiles_n: usize,
    tiles_k: usize,
) -> impl Iterator<Item = (usize, usize, usize)> {
    (0..stack * tiles_n * tiles_k).map(move |i| (i / tiles_k / tiles_n, i / tiles_k % tiles_n, i % tiles_k))
}

/// Reads the elements of a quantized tensor one by one.
pub(crate) struct Decoder<'a> {
    x: &'a BlockScaled<Cpu>,
    scales: ScalePlane<'a>,
    codec: Codec,
    block: usize,
}

impl<'a> Decoder<'a> {
    /// # Errors
    /// If the format does not support the rule.
    pub fn of(x: &'a BlockScaled<Cpu>) -> Result<Self> {
        let codec = Codec::new(x.format, x.rule, Rounding::NearestEven)?;
        Ok(Self { x, scales: scales_of(x), codec, block: x.format.record_len(x.axis) })
    }

    /// The value of element (row, col) of the logical matrix.
    pub fn value(&self, row: usize, col: usize) -> f32 {
        let (code, i, record) = self.at(row, col);
        self.of_row(row).decode(code, i, record)
    }

    /// The value, multiplied only by the scales that `with` selects; [`beside`](Self::beside) gives the product of the others.
    pub fn number(&self, with: Scales, row: usize, col: usize) -> f32 {
        let (code, i, record) = self.at(row, col);
        match with {
            Scales::All => self.value(row, col),
            Scales::Exact if self.x.scale_kind() == ScaleKind::F32 => self.codec.element().decode(code),
            Scales::Exact | Scales::OfBlocks => self.codec.under(1.0).decode(code, i, record),
        }
    }

    /// The product of the F32 scales that `with` does not select: the block scale, if it is F32 and not selected, times the tensor scale.
    pub fn beside(&self, with: Scales, row: usize, col: usize) -> f32 {
        let of_block = match with {
            Scales::Exact if self.x.scale_kind() == ScaleKind::F32 => {
                f32::from_bits(self.at(row, col).2.0 as u32)
            }
            _ => 1.0,
        };
        let of_tensor = if with == Scales::All { 1.0 } else { self.of_row(row).tensor_scale() };
        of_block * of_tensor
    }

    /// The codec with a row's tensor scale.
    fn of_row(&self, row: usize) -> Codec {
        self.x.tensor_scale.as_ref().map_or(self.codec, |s| self.codec.under(s.as_slice()[row]))
    }

    /// The code of an element, the element's index in its block, and the block's scale record.
    fn at(&self, row: usize, col: usize) -> (u8, usize, Scale) {
        let (x, block) = (self.x, self.block);
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
        (code, i % block, self.scales.get(scale))
    }
}

/// Decodes the valid rows of a quantized tensor.
///
/// # Errors
/// The errors of [`Decoder::of`].
pub(crate) fn decode(cpu: &Cpu, x: &BlockScaled<Cpu>, valid: impl Iterator<Item = usize>) -> Result<Matrix> {
    let (decoder, cols) = (Decoder::of(x)?, x.cols);
    let mut values = vec![0.0; x.rows * cols];
    let mut rows: Vec<Option<&mut [f32]>> = values.chunks_mut(cols.max(1)).map(Some).collect();
    let valid: Vec<_> = valid.filter_map(|row| Some((row, rows.get_mut(row)?.take()?))).collect();
    cpu.pool().install(|| {
        valid.into_par_iter().for_each(|(row, out)| {
            out.iter_mut().enumerate().for_each(|(col, out)| *out = decoder.value(row, col));
        });
    });
    Ok(Matrix { values, cols })
}
