//! Vectorised quantization to any format, one row or column at a time. The results have the bits of `spec`.
//!
//! A line is a row, or a column that was transposed into a buffer together with its neighbours. The format's own code only computes a
//! block's scale and scales the block's values. All formats share the code for the largest magnitude, the rounding and the packing. Threads
//! divide lines.

use super::drawn::Drawn;
use super::encode::{amax_bits, transpose};
use super::planes::{both, plane, put_counts};
use super::round::{Facts, Nearest, OneByOne, Round, Threshold, fixed_bits, reads_bits, with_rounding};
use super::source::ValueSource;
use super::spans::{Span, Spans};
use super::spec::{Block, Casting, Known, Tally, blocks, sum};
use crate::Cpu;
use crate::gemm::Isa;
use crate::simd::per_isa;
use nibble_core::ops::{Counts, Emitted};
use nibble_core::{BlockScaled, Result};
use nibble_formats::{
    BlockAxis, BlockScale, Codec, Rounding, ScalePlaneMut, Square, SquareScales, pack_codes,
};
use rayon::prelude::*;
use std::ops::Range;

/// Number of values below which waking another thread costs more than it saves.
pub(super) const WORTH_A_THREAD: usize = 16_384;

/// Number of columns that are read, transposed and quantized together.
const PANEL: usize = 32;
/// Number of rows of a panel, unless a block is longer.
const PANEL_ROWS: usize = 128;

/// Consecutive whole blocks of a line (a row or column).
struct Part<'a> {
    /// The blocks; their value and record indices are relative to the beginning of the line.
    blocks: &'a [Block],
    /// One codec for the line, or one codec per value of this part.
    codecs: &'a [Codec],
    /// For each value, whether it is padding; empty if no value is padding.
    padding: &'a [bool],
    /// The values, followed by zeros.
    x: &'a mut [f32],
    /// Sixteen random bits per value, if the rounding or a corrected scale reads them.
    bits: &'a [u16],
    /// The codes, one per byte.
    codes: &'a mut [u8],
    scales: ScalePlaneMut<'a>,
}

/// Encodes one block, zero-extended. Returns its scale and the OR of its codes, which is zero if all codes are zero.
#[inline(always)]
fn block_as(
    round: impl Round,
    (facts, codec): (&Facts, &Codec),
    (x, bits): (&mut [f32], &[u16]),
    codes: &mut [u8],
) -> (BlockScale, u8) {
    let amax = f32::from_bits(amax_bits(x));
    let scale = codec.block_scale(x, amax.is_finite().then_some(amax));
    if scale.is_nan() {
        codes.fill(0);
        return (scale, 0);
    }
    // A corrected scale uses the random bits of the first element.
    let scale = codec.corrected(x, scale, bits.first().copied().unwrap_or(0));
    codec.format().spec().codec.scale_values(codec.params(), x, scale);
    let any = encode_values(round, facts, x, bits, codes);
    codes[x.len()..].fill(0);
    (scale, any)
}

#[inline(always)]
fn encode_values<R: Round>(round: R, facts: &Facts, x: &[f32], bits: &[u16], codes: &mut [u8]) -> u8 {
    let facts = *facts;
    let code = |x: f32, bits| {
        let code = round.encode(&facts, x, bits);
        if x.is_nan() { facts.nan_code } else { code }
    };
    if R::READS_BITS {
        codes.iter_mut().zip(x).zip(bits).for_each(|((out, &x), &bits)| *out = code(x, bits));
    } else {
        codes.iter_mut().zip(x).for_each(|(out, &x)| *out = code(x, 0));
    }
    codes[..x.len()].iter().fold(0, |any, code| any | code)
}

#[inline(always)]
fn line_as<R: Round>(round: R, part: &mut Part, tally: &mut Tally) {
    let Part { blocks, codecs, padding, x, bits, codes, scales } = part;
    let Some(first) = blocks.first() else { return };
    let (facts, first, first_record) =
        (Facts::of(codecs[0].element()), first.values.start, first.records().start);
    for block in *blocks {
        let place = block.values.start - first..block.values.end - first;
        let (codes, records) = (&mut codes[place.clone()], block.records());
        let is_padding =
            |values: &Range<usize>| padding.get(values.clone()).is_some_and(|p| p.iter().all(|p| *p));
        if is_padding(&place) {
            codes.fill(0);
            records.for_each(|record| scales.set(record - first_record, scales.kind.least()));
            continue;
        }
        let values = place.start.min(x.len())..place.end.min(x.len());
        let bits = bits.get(values.clone()).unwrap_or(&[]);
        let codec = &codecs[place.start.min(codecs.len() - 1)];
        let (scale, any) = block_as(round, (&facts, codec), (&mut x[values], bits), codes);
        for record in records {
            let of = record * block.each - first..block.values.end.min((record + 1) * block.each) - first;
            let pads = of.len() < place.len() && is_padding(&of);
            scales.set(record - first_record, if pads { scales.kind.least() } else { scale.record });
        }
        tally[Counts::<Cpu>::NON_ZERO] += u64::from(any & facts.magnitude != 0);
        tally[Counts::<Cpu>::NON_FINITE] += u64::from(scale.is_nan());
    }
}

#[inline(always)]
fn encode_line_body(part: &mut Part, tally: &mut Tally) {
    with_rounding!(part.codecs[0].rounding(), line_as(part, tally));
}

per_isa! {
    // Encodes a part of a line: writes codes and scales.
    fn encode_line = encode_line_body; (part: &mut Part, tally: &mut Tally)
}

#[inline(always)]
fn encode_tile_body(codec: &Codec, x: &mut [f32], bits: &[u16], codes: &mut [u8]) -> (BlockScale, u8) {
    let facts = Facts::of(codec.element());
    with_rounding!(codec.rounding(), block_as((&facts, codec), (x, bits), codes))
}

per_isa! {
    // Encodes one 2-D block: writes codes and its scale.
    fn encode_tile = encode_tile_body;
    (codec: &Codec, x: &mut [f32], bits: &[u16], codes: &mut [u8]) -> (BlockScale, u8)
}

/// Codes of values under a scale that is known, and the OR of the codes.
#[inline(always)]
fn scaled_as(
    round: impl Round,
    (codec, scale): (&Codec, BlockScale),
    (x, bits): (&mut [f32], &[u16]),
    codes: &mut [u8],
) -> u8 {
    codec.format().spec().codec.scale_values(codec.params(), x, scale);
    encode_values(round, &Facts::of(codec.element()), x, bits, codes)
}

#[inline(always)]
fn encode_scaled_body(codec: &Codec, scale: BlockScale, x: &mut [f32], bits: &[u16], codes: &mut [u8]) -> u8 {
    with_rounding!(codec.rounding(), scaled_as((codec, scale), (x, bits), codes))
}

per_isa! {
    // Codes of a line under its scale, and the OR of the codes.
    fn encode_scaled = encode_scaled_body;
    (codec: &Codec, scale: BlockScale, x: &mut [f32], bits: &[u16], codes: &mut [u8]) -> u8
}

/// Codes and scales of a 2-D block of `width` columns: one scale, or one scale per row and per column.
fn encode_block(isa: Isa, codec: &Codec, memory: &mut Memory, width: usize) -> (SquareScales, Tally) {
    let Memory { x, bits, codes, .. } = memory;
    let magnitude = Facts::of(codec.element()).magnitude;
    let mut tally = Tally::default();
    let mut count = |any: u8, is_nan: bool| {
        tally[Counts::<Cpu>::NON_ZERO] += u64::from(any & magnitude != 0);
        tally[Counts::<Cpu>::NON_FINITE] += u64::from(is_nan);
    };
    if !codec.scaling().is_square() {
        let (scale, any) = encode_tile(isa, codec, x, bits, codes);
        count(any, scale.is_nan());
        let (rows, cols, is_nan) = (vec![scale.record], vec![scale.record], scale.is_nan());
        return (SquareScales { rows, cols, is_nan }, tally);
    }
    let square = Square::new(x, width);
    let (of_rows, of_cols) = (codec.square_scales(square), codec.square_scales(square.turned()));
    let is_nan = of_rows.first().is_some_and(|scale| scale.is_nan());
    let lines = x.chunks_exact_mut(width).zip(codes.chunks_exact_mut(width)).zip(&of_rows).enumerate();
    for (i, ((x, codes), scale)) in lines {
        let bits = bits.get(i * width..(i + 1) * width).unwrap_or(&[]);
        let any = if is_nan { 0 } else { encode_scaled(isa, codec, *scale, x, bits, codes) };
        if is_nan {
            codes.fill(0);
        }
        count(any, is_nan);
    }
    let records = |scales: Vec<BlockScale>| scales.into_iter().map(|scale| scale.record).collect();
    (SquareScales { rows: records(of_rows), cols: records(of_cols), is_nan }, tally)
}

#[inline(always)]
fn turn_body<T: Copy>(from: &[T], width: usize, to: &mut [T]) {
    let rows = from.len() / width.max(1);
    for (col, line) in to.chunks_exact_mut(rows.max(1)).enumerate() {
        for (out, x) in line.iter_mut().zip(from[col..].iter().step_by(width)) {
            *out = *x;
        }
    }
}

per_isa! {
    // Transposes `[rows][width]` to `[width][rows]`.
    fn turn<T: Copy> = turn_body; (from: &[T], width: usize, to: &mut [T])
}

/// A matrix to quantize, and the parameters of its quantization.
pub(super) struct Job<'a> {
    x: ValueSource<'a>,
    cols: usize,
    /// Sixteen random bits per value `[rows, cols]`, if they are not the bits for the value's position.
    bits: Option<&'a [u16]>,
    casting: Casting<'a>,
}

impl<'a> Job<'a> {
    /// Measures the values if the tensor has a tensor scale and its largest magnitude is unknown.
    pub fn new(
        cpu: &Cpu,
        (x, cols): (ValueSource<'a>, usize),
        codec: Codec,
        random: Option<Drawn>,
        spans: &'a Spans<'a>,
        known: Known<'_>,
    ) -> Self {
        let amax =
            |span: &Span, rows| known.amax(span).unwrap_or_else(|| tensor_amax(cpu, (&x, cols), codec, rows));
        let casting = Casting::measured(codec, random, spans, amax);
        Self { x, cols, bits: None, casting }
    }

    /// Loads the values of a row, starting at column `col`; writes zeros if the row is padding.
    fn load(&self, isa: Isa, padding: &[bool], (row, col): (usize, usize), out: &mut [f32]) {
        if padding[row] { out.fill(0.0) } else { self.x.load(isa, row, col, out) }
    }

    /// Writes the random bits of a row's values, starting at column `col`.
    fn fill_bits(&self, isa: Isa, (row, col): (usize, usize), bits: &mut [u16]) {
        if let Some(stored) = self.bits {
            bits.copy_from_slice(&stored[row * self.cols + col..][..bits.len()]);
        } else if let Some(drawn) = self.casting.random {
            let first = self.casting.spans.row_index(row) * self.cols as u64 + col as u64;
            drawn.fill(isa, first, bits);
        }
    }
}

/// The largest magnitude of some rows, as [`Codec::tensor_amax`] defines it.
pub(super) fn tensor_amax(
    cpu: &Cpu,
    (x, cols): (&ValueSource, usize),
    codec: Codec,
    rows: Range<usize>,
) -> f32 {
    let isa = cpu.isa();
    let of_row = |line: &mut Vec<f32>, row: usize| {
        line.resize(cols, 0.0);
        x.load(isa, row, 0, line);
        finite_amax(isa, line)
    };
    let larger = |(a, bad): (f32, bool), (b, worse)| (f32::max(a, b), bad | worse);
    let (amax, bad) = cpu
        .pool()
        .install(|| rows.into_par_iter().map_init(Vec::new, of_row).reduce(|| (0.0, false), larger));
    codec.tensor_amax([amax, if bad { f32::NAN } else { 0.0 }].into_iter())
}

#[inline(always)]
fn finite_amax_body(x: &[f32]) -> (f32, bool) {
    let finite = |bits: u32| if bits < 0x7F80_0000 { bits } else { 0 };
    let largest = x.iter().fold(0, |amax, x| amax.max(finite(x.to_bits() & 0x7FFF_FFFF)));
    (f32::from_bits(largest), amax_bits(x) >= 0x7F80_0000)
}

per_isa! {
    // The largest finite magnitude, and whether at least one value is not finite.
    fn finite_amax = finite_amax_body; (x: &[f32]) -> (f32, bool)
}

/// Writes a matrix in the requested row, column or 2-D blocks.
pub(super) fn emit(cpu: &Cpu, job: &Job, mut made: Emitted<Cpu>) -> Emitted<Cpu> {
    let rows = plane(&mut made.rows).map(|out| rows(cpu, job, out));
    let cols = plane(&mut made.cols).map(|out| columns(cpu, job, out));
    put_counts(&mut made.counts, rows.or(cols).unwrap_or_default());
    made
}

/// Splits the codes and scales of a tensor into pieces of `lines` lines (rows or columns) each.
fn pieces(
    out: &mut BlockScaled<Cpu>,
    lines: usize,
    (line_bytes, scale_bytes): (usize, usize),
) -> Vec<(&mut [u8], &mut [u8])> {
    let codes = out.codes.as_mut_slice().chunks_mut((lines * line_bytes).max(1));
    let mut scales = out.scales.as_mut_slice();
    codes
        .map(|codes| {
            let len = (lines * scale_bytes).min(scales.len());
            let (piece, rest) = std::mem::take(&mut scales).split_at_mut(len);
            scales = rest;
            (codes, piece)
        })
        .collect()
}

fn pack(codec: &Codec, codes: &[u8], out: &mut [u8]) {
    pack_codes(codec.format().spec().code_bits, codes, out)
        .unwrap_or_else(|e| unreachable!("cut to that length: {e}"));
}

/// Scratch memory of a thread, reused for each piece.
#[derive(Default)]
struct Memory {
    x: Vec<f32>,
    turned: Vec<f32>,
    bits: Vec<u16>,
    turned_bits: Vec<u16>,
    codes: Vec<u8>,
}

/// Writes every piece, multi-threaded if there are enough values, and sums the counts.
fn counted<P: Send>(
    cpu: &Cpu,
    job: &Job,
    pieces: Vec<P>,
    one: impl Fn(&mut Memory, (usize, P)) -> Tally + Send + Sync,
) -> Tally {
    let values = job.casting.spans.rows * job.cols;
    if cpu.pool().current_num_threads() == 1 || values < WORTH_A_THREAD {
        let mut memory = Memory::default();
        return pieces.into_iter().enumerate().map(|piece| one(&mut memory, piece)).fold([0; 3], sum);
    }
    let pieces = pieces.into_par_iter().enumerate();
    cpu.pool().install(|| pieces.map_init(Memory::default, one).reduce(Tally::default, sum))
}

/// Writes the row blocks.
fn rows(cpu: &Cpu, job: &Job, out: &mut BlockScaled<Cpu>) -> Tally {
    let Job { cols, casting: Casting { codec, spans, .. }, .. } = job;
    let (isa, cols) = (cpu.isa(), *cols);
    job.casting.put_tensor_scale(out, |row| job.casting.codec(row));
    let (format, kind) = (codec.format(), codec.scale_kind());
    let bytes = (format.row_code_bytes(cols), out.shape_of_scales().1 * kind.bytes());
    let blocks = blocks(format, BlockAxis::Row, spans, cols);
    let padding = spans.padding();
    let reads = codec.draws() || reads_bits(codec.rounding());
    let one = |memory: &mut Memory, (row, (plane, scales)): (usize, (&mut [u8], &mut [u8]))| {
        let mut tally = Tally::default();
        let mut scales = ScalePlaneMut { kind, bytes: scales };
        if padding[row] {
            plane.fill(0);
            scales.fill(kind.least());
            return tally;
        }
        memory.x.resize(cols, 0.0);
        job.x.load(isa, row, 0, &mut memory.x);
        memory.bits.resize(if reads { cols } else { 0 }, fixed_bits(codec.rounding()).unwrap_or(0));
        if codec.draws() {
            job.fill_bits(isa, (row, 0), &mut memory.bits);
        }
        let whole_bytes = format.spec().code_bits == 8;
        memory.codes.resize(if whole_bytes { 0 } else { cols }, 0);
        let codes = if whole_bytes { &mut *plane } else { &mut memory.codes[..] };
        let (x, bits) = (&mut memory.x[..], &memory.bits[..]);
        let mut part =
            Part { blocks: &blocks, codecs: &[job.casting.codec(row)], padding: &[], x, bits, codes, scales };
        encode_line(isa, &mut part, &mut tally);
        if !whole_bytes {
            pack(codec, &memory.codes, plane);
        }
        tally
    };
    counted(cpu, job, pieces(out, 1, bytes), one)
}

/// Writes the column blocks, stored transposed.
fn columns(cpu: &Cpu, job: &Job, out: &mut BlockScaled<Cpu>) -> Tally {
    let Job { cols, casting: Casting { codec, spans, .. }, .. } = job;
    let cols = *cols;
    job.casting.put_tensor_scale(out, |row| job.casting.codec(row));
    let (format, kind) = (codec.format(), codec.scale_kind());
    let len = spans.capacity;
    let bytes = (format.row_code_bytes(len), out.shape_of_scales().1 * kind.bytes());
    let blocks = blocks(format, BlockAxis::Col, spans, len);
    let padding = spans.padding();
    let one = |memory: &mut Memory, (panel, (codes, scales)): (usize, (&mut [u8], &mut [u8]))| {
        let (col, blocks, padding) = (panel * PANEL, &blocks[..], &padding[..]);
        let panel = Panel { job, blocks, padding, col, width: PANEL.min(cols - col), bytes };
        panel.write(cpu.isa(), memory, codes, scales)
    };
    counted(cpu, job, pieces(out, PANEL, bytes), one)
}

/// Columns that are read, transposed and quantized together.
struct Panel<'a> {
    job: &'a Job<'a>,
    blocks: &'a [Block],
    padding: &'a [bool],
    col: usize,
    width: usize,
    /// Number of bytes of a column's codes, and of its scales.
    bytes: (usize, usize),
}

impl Panel<'_> {
    fn write(&self, isa: Isa, memory: &mut Memory, codes: &mut [u8], scales: &mut [u8]) -> Tally {
        let (mut tally, mut rest) = (Tally::default(), self.blocks);
        while let Some(first) = rest.first() {
            let end = first.values.start + PANEL_ROWS;
            let count = rest.iter().take_while(|block| block.values.end <= end).count().max(1);
            let (part, after) = rest.split_at(count);
            self.part(isa, memory, part, (&mut *codes, &mut *scales), &mut tally);
            rest = after;
        }
        tally
    }

    /// Writes several whole blocks of rows of the panel.
    fn part(
        &self,
        isa: Isa,
        memory: &mut Memory,
        blocks: &[Block],
        (codes, scales): (&mut [u8], &mut [u8]),
        tally: &mut Tally,
    ) {
        let Self { job, padding, col, width, bytes, .. } = *self;
        let (Some(first), Some(last)) = (blocks.first(), blocks.last()) else { return };
        let rows = first.values.start..last.values.end;
        let records = first.records().start..last.records().end;
        let Casting { codec, spans, .. } = &job.casting;
        let (format, kind) = (codec.format(), codec.scale_kind());
        // Rows past the end of the matrix count as zero.
        let height = rows.end.min(spans.rows).saturating_sub(rows.start);
        memory.x.resize(height * width, 0.0);
        memory.turned.resize(height * width, 0.0);
        for (i, out) in memory.x.chunks_exact_mut(width).enumerate() {
            job.load(isa, padding, (rows.start + i, col), out);
        }
        turn(isa, &memory.x, width, &mut memory.turned);
        let fixed = fixed_bits(codec.rounding()).unwrap_or(0);
        let read = if codec.draws() || reads_bits(codec.rounding()) { height * width } else { 0 };
        memory.turned_bits.resize(read, fixed);
        if codec.draws() {
            memory.bits.resize(read, 0);
            for (i, bits) in memory.bits.chunks_exact_mut(width).enumerate() {
                job.fill_bits(isa, (rows.start + i, col), bits);
            }
            turn(isa, &memory.bits, width, &mut memory.turned_bits);
        }
        memory.codes.resize(rows.len(), 0);
        let codecs = match &job.casting.of_rows[..] {
            [] => std::slice::from_ref(codec),
            of_rows => &of_rows[rows.clone()],
        };
        for i in 0..width {
            let line = i * height..(i + 1) * height;
            let scales =
                &mut scales[i * bytes.1 + records.start * kind.bytes()..][..records.len() * kind.bytes()];
            let mut part = Part {
                blocks,
                codecs,
                padding: &padding[rows.clone()],
                bits: if read > 0 { &memory.turned_bits[line.clone()] } else { &[] },
                x: &mut memory.turned[line],
                codes: &mut memory.codes,
                scales: ScalePlaneMut { kind, bytes: scales },
            };
            encode_line(isa, &mut part, tally);
            let start = i * bytes.0 + format.row_code_bytes(rows.start);
            pack(codec, &memory.codes, &mut codes[start..][..format.row_code_bytes(rows.len())]);
        }
    }
}

/// Writes 2-D blocks of `stack` matrices, as they are and transposed. Each 2-D block has one scale record, or one per row and per column.
pub(super) fn tiles(cpu: &Cpu, job: &Job, stack: usize, mut made: Emitted<Cpu>) -> Result<Emitted<Cpu>> {
    let Job { cols: k, casting: Casting { codec, spans, .. }, .. } = job;
    let (n, k, isa) = (spans.rows / stack.max(1), *k, cpu.isa());
    let format = codec.format();
    let (block, kind, is_square) = (format.spec().block, codec.scale_kind(), codec.scaling().is_square());
    let [upright, turned] = both("quantize", &mut made)?;
    job.casting.put_tensor_scale(upright, |row| job.casting.codec(row));
    job.casting.put_tensor_scale(turned, |row| job.casting.codec(row / k.max(1) * n));
    let (tiles_n, tiles_k) = (n.div_ceil(block), k.div_ceil(block));
    // The codes take one byte each; a band is one row of 2-D blocks.
    let mut codes = vec![0; stack * n * k];
    let mut bands = Vec::new();
    let mut rest = &mut codes[..];
    for (matrix, tile_n) in (0..stack * tiles_n).map(|i| (i / tiles_n, i % tiles_n)) {
        let (band, below) = std::mem::take(&mut rest).split_at_mut(block.min(n - tile_n * block) * k);
        bands.push((matrix * n + tile_n * block, band));
        rest = below;
    }
    let band = |memory: &mut Memory, (row, band): (usize, &mut [u8])| {
        let mut tally = Tally::default();
        let mut records = Vec::with_capacity(tiles_k);
        for col in (0..k).step_by(block) {
            let width = block.min(k - col);
            let size = band.len() / k * width;
            memory.x.resize(size, 0.0);
            memory.codes.resize(size, 0);
            let read = if reads_bits(codec.rounding()) { size } else { 0 };
            memory.bits.resize(read, fixed_bits(codec.rounding()).unwrap_or(0));
            for (i, out) in memory.x.chunks_exact_mut(width).enumerate() {
                job.x.load(isa, row + i, col, out);
            }
            if codec.rounding().is_random() {
                let bits = memory.bits.chunks_exact_mut(width).enumerate();
                bits.for_each(|(i, bits)| job.fill_bits(isa, (row + i, col), bits));
            }
            let (scales, of_block) = encode_block(isa, &job.casting.codec(row), memory, width);
            records.push(scales);
            tally = sum(tally, of_block);
            for (out, codes) in band.chunks_exact_mut(k).zip(memory.codes.chunks_exact(width)) {
                out[col..col + width].copy_from_slice(codes);
            }
        }
        (records, tally)
    };
    let of_bands: Vec<_> =
        cpu.pool().install(|| bands.into_par_iter().map_init(Memory::default, band).collect());
    let mut tally = Tally::default();
    let mut planes =
        [&mut *upright, &mut *turned].map(|out| ScalePlaneMut { kind, bytes: out.scales.as_mut_slice() });
    for (i, (records, of_band)) in of_bands.into_iter().enumerate() {
        let (matrix, tile_n) = (i / tiles_n, i % tiles_n);
        for (tile_k, scales) in records.into_iter().enumerate() {
            let lines = match is_square {
                true => [matrix * n + tile_n * block, matrix * k + tile_k * block],
                false => [i, matrix * tiles_k + tile_k],
            };
            for (line, record) in (lines[0]..).zip(scales.rows) {
                planes[0].set(line * tiles_k + tile_k, record);
            }
            for (line, record) in (lines[1]..).zip(scales.cols) {
                planes[1].set(line * tiles_n + tile_n, record);
            }
        }
        tally = sum(tally, of_band);
    }
    if n * k > 0 {
        pack_lines(cpu, codec, &codes, k, upright);
        let mut across = Vec::with_capacity(codes.len());
        let mut one = Vec::new();
        for matrix in codes.chunks_exact(n * k) {
            transpose(isa, matrix, n, k, &mut one);
            across.extend_from_slice(&one);
        }
        pack_lines(cpu, codec, &across, n, turned);
    }
    put_counts(&mut made.counts, tally);
    Ok(made)
}

/// Packs the codes of rows or columns, `len` codes each.
fn pack_lines(cpu: &Cpu, codec: &Codec, codes: &[u8], len: usize, out: &mut BlockScaled<Cpu>) {
    let lines = out.codes.as_mut_slice().par_chunks_mut(codec.format().row_code_bytes(len));
    cpu.pool().install(|| lines.zip(codes.par_chunks(len)).for_each(|(out, codes)| pack(codec, codes, out)));
}

/// Writes `stack` matrices in row blocks, both as they are and transposed. An element has the same random bits in both.
pub(super) fn row_weights(
    cpu: &Cpu,
    (x, k): (ValueSource, usize),
    (rows_all, stack): (usize, usize),
    (codec, random): (Codec, Option<Drawn>),
    known: Known,
    mut made: Emitted<Cpu>,
) -> Result<Emitted<Cpu>> {
    let [upright, across_plane] = both("quantize", &mut made)?;
    let (n, isa) = (rows_all / stack.max(1), cpu.isa());
    let spans = Spans::stacked(stack, n);
    let tally = rows(cpu, &Job::new(cpu, (x, k), codec, random, &spans, known), upright);
    let across: Vec<f32> = turned(cpu, (stack, n, k), |row, col, out| x.load(isa, row, col, out));
    let random = random.filter(|_| codec.draws());
    let bits: Option<Vec<u16>> = random.map(|drawn| {
        let fill = |row: usize, col: usize, out: &mut [u16]| drawn.fill(isa, (row * k + col) as u64, out);
        turned(cpu, (stack, n, k), fill)
    });
    let spans = Spans::stacked(stack, k);
    let job = Job {
        bits: bits.as_deref(),
        ..Job::new(cpu, (ValueSource::F32(&across, n), n), codec, random, &spans, known)
    };
    rows(cpu, &job, across_plane);
    put_counts(&mut made.counts, tally);
    Ok(made)
}

/// Transposes `stack` matrices [n, k]. `load(row, col, out)` reads `out.len()` values of a row from column `col` on; `row` counts from the
/// start of the stack.
fn turned<T: Copy + Default + Send>(
    cpu: &Cpu,
    (stack, n, k): (usize, usize, usize),
    load: impl Fn(usize, usize, &mut [T]) + Sync,
) -> Vec<T> {
    let mut all = vec![T::default(); stack * n * k];
    let panel = |matrix: usize, panel: usize, values: &mut Vec<T>, out: &mut [T]| {
        let width = out.len() / n;
        values.resize(n * width, T::default());
        for (row, values) in values.chunks_exact_mut(width).enumerate() {
            load(matrix * n + row, panel * PANEL, values);
        }
        turn(cpu.isa(), values, width, out);
    };
    cpu.pool().install(|| {
        all.par_chunks_mut((n * k).max(1)).enumerate().for_each(|(matrix, out)| {
            let panels = out.par_chunks_mut(PANEL * n).enumerate();
            panels.for_each_init(Vec::new, |values, (i, out)| panel(matrix, i, values, out));
        });
    });
    all
}
