//! The specification of the conversions, which calls the formats' own functions for each code.

use super::lift_of;
use crate::Cpu;
use crate::ops::convert::quantize::planes::{get_code, put_codes, put_scale, scales_of};
use crate::ops::convert::quantize::spans::Spans;
use crate::ops::convert::quantize::spec::{Decoder, Tally, tile_indices};
use nibble_core::ops::Counts;
use nibble_core::{BlockScaled, Result};
use nibble_formats::{Codec, Element, Format, Lift, Scale, e8m0, shift_code, shift_target};

/// Scale byte of a row's block; callers check that the scales are powers of two.
fn scale_byte(x: &BlockScaled<Cpu>, row: usize, block: usize) -> u8 {
    let per_row = x.format.scales_per_row(x.cols);
    scales_of(x).get(row * per_row + block).0 as u8
}

/// Counts one source block: whether any of its codes is nonzero, whether any changed, and whether the block is NaN.
fn count(tally: &mut Tally, format: Format, codes: impl Iterator<Item = u8>, inexact: bool, nan: bool) {
    let element = format.spec().element.unwrap_or(Element::E4M3);
    let non_zero = codes.filter(|&code| !element.is_zero(code)).count();
    tally[Counts::<Cpu>::NON_ZERO] += u64::from(non_zero > 0);
    tally[Counts::<Cpu>::INEXACT] += u64::from(inexact);
    tally[Counts::<Cpu>::NON_FINITE] += u64::from(nan);
}

/// Whether a code alone makes its source block NaN.
fn is_nan_code(format: Format, code: u8) -> bool {
    format == Format::E4m3 && Element::E4M3.decode(code).is_nan()
}

/// E4M3 codes of block b of a row (the last block may be short) for a target scale. The function also counts the block.
fn lift_block(
    lift: Lift,
    x: &BlockScaled<Cpu>,
    (row, b): (usize, usize),
    target: u8,
    tally: &mut Tally,
) -> Vec<u8> {
    let (block, source) = (x.format.spec().block, scale_byte(x, row, b));
    let code = |i| get_code(x.codes.as_slice(), x.format, (row, x.cols), i);
    let codes: Vec<u8> = (b * block..x.cols.min((b + 1) * block)).map(code).collect();
    let lifted: Vec<_> = codes.iter().map(|&code| lift.code(code, source, target)).collect();
    count(tally, x.format, codes.into_iter(), lifted.iter().any(|l| l.1), source == e8m0::NAN);
    lifted.into_iter().map(|l| l.0).collect()
}

/// Converts row blocks of a lifted format to E4M3 row blocks. Each 128 values share one scale: their largest source scale, divided by the
/// element's headroom.
pub(super) fn lift_rows(x: &BlockScaled<Cpu>, spans: &Spans, out: &mut BlockScaled<Cpu>) -> Result<Tally> {
    let (mut tally, lift) = (Tally::default(), lift_of(x)?);
    let mut valid = vec![false; x.rows];
    spans.valid().for_each(|row| valid[row] = true);
    let (from, to) = (x.format.spec().block, out.format.spec().block);
    for (row, &valid) in valid.iter().enumerate() {
        for (target_block, first) in (0..x.cols).step_by(to).enumerate() {
            let width = to.min(x.cols - first);
            let sources = first / from..(first + width).div_ceil(from);
            let scale_idx = row * x.cols.div_ceil(to) + target_block;
            if !valid {
                put_codes(&mut out.codes, out.format, (row, x.cols), first, &vec![0; width]);
                put_scale(out, scale_idx, Scale::byte(0));
                continue;
            }
            let target = lift.target(sources.clone().map(|b| scale_byte(x, row, b)));
            for b in sources {
                let codes = lift_block(lift, x, (row, b), target, &mut tally);
                put_codes(&mut out.codes, out.format, (row, x.cols), b * from, &codes);
            }
            put_scale(out, scale_idx, Scale::byte(target));
        }
    }
    Ok(tally)
}

/// Counts the blocks of rows that a lift changes. 128 values of a row share a scale; if `matrices` is given, 128 rows of one of these
/// matrices share it, too.
pub(super) fn count_lift(
    x: &BlockScaled<Cpu>,
    matrices: Option<usize>,
    is_counted: impl Fn(usize) -> bool,
) -> Result<Tally> {
    let (mut tally, lift) = (Tally::default(), lift_of(x)?);
    let (from, to) = (x.format.spec().block, Format::LIFTED.0.spec().block);
    let n = x.rows / matrices.unwrap_or(1).max(1);
    let beside = |row: usize| match matrices {
        None => row..row + 1,
        Some(_) => {
            let first = row - row % n % to;
            first..(first + to).min(row - row % n + n)
        }
    };
    for row in (0..x.rows).filter(|row| is_counted(*row)) {
        for first in (0..x.cols).step_by(to) {
            let blocks = first / from..x.cols.min(first + to).div_ceil(from);
            let shared = beside(row).flat_map(|row| blocks.clone().map(move |b| (row, b)));
            let target = lift.target(shared.map(|(row, b)| scale_byte(x, row, b)));
            blocks.for_each(|b| drop(lift_block(lift, x, (row, b), target, &mut tally)));
        }
    }
    Ok(tally)
}

/// Converts row blocks of a lifted format to E4M3 in 2-D blocks, and also transposed if `transposed` is given. Each 128 × 128 block has one
/// scale: its largest source scale, divided by the element's headroom.
pub(super) fn lift_tiles(
    lift: Lift,
    x: &BlockScaled<Cpu>,
    (out, mut transposed): (&mut BlockScaled<Cpu>, Option<&mut BlockScaled<Cpu>>),
) -> Tally {
    let mut tally = Tally::default();
    let (n, k) = (x.rows / out.stack.max(1), x.cols);
    let (from, to) = (x.format.spec().block, out.format.spec().block);
    let (tiles_n, tiles_k) = (n.div_ceil(to), k.div_ceil(to));
    for (matrix, tile_n, tile_k) in tile_indices(out.stack, tiles_n, tiles_k) {
        let rows = tile_n * to..n.min((tile_n + 1) * to);
        let blocks = tile_k * to / from..k.min((tile_k + 1) * to).div_ceil(from);
        let places = || rows.clone().flat_map(|row| blocks.clone().map(move |b| (row, b)));
        let target = lift.target(places().map(|(row, b)| scale_byte(x, matrix * n + row, b)));
        for (row, b) in places() {
            let codes = lift_block(lift, x, (matrix * n + row, b), target, &mut tally);
            put_codes(&mut out.codes, out.format, (matrix * n + row, k), b * from, &codes);
            for (i, code) in codes.into_iter().enumerate() {
                let line = matrix * k + b * from + i;
                if let Some(transposed) = &mut transposed {
                    put_codes(&mut transposed.codes, out.format, (line, n), row, &[code]);
                }
            }
        }
        let scale = Scale::byte(target);
        put_scale(out, (matrix * tiles_n + tile_n) * tiles_k + tile_k, scale);
        if let Some(transposed) = &mut transposed {
            put_scale(transposed, (matrix * tiles_k + tile_k) * tiles_n + tile_n, scale);
        }
    }
    tally
}

/// Converts MXFP4 or E4M3 row blocks to E4M3 column blocks, in which 128 rows of one block of columns share a scale.
pub(super) fn to_cols(x: &BlockScaled<Cpu>, spans: &Spans, out: &mut BlockScaled<Cpu>) -> Tally {
    let mut tally = Tally::default();
    let (from, to) = (x.format.spec().block, out.format.spec().block);
    let mut valid = vec![false; spans.capacity];
    spans.valid().for_each(|row| valid[row] = true);
    let source_code = |row, col| get_code(x.codes.as_slice(), x.format, (row, x.cols), col);
    for first_row in (0..spans.capacity).step_by(to) {
        let all = first_row..spans.capacity.min(first_row + to);
        let rows: Vec<usize> = all.clone().filter(|&row| valid[row]).collect();
        for (b, first_col) in (0..x.cols).step_by(from).enumerate() {
            let cols = first_col..x.cols.min(first_col + from);
            let bytes = rows.iter().map(|&row| scale_byte(x, row, b));
            let target =
                if x.format == Format::Mxfp4 { Lift::E2M1.target(bytes) } else { shift_target(bytes) };
            let convert = |row, col| match x.format {
                Format::Mxfp4 => Lift::E2M1.code(source_code(row, col), scale_byte(x, row, b), target),
                _ => shift_code(source_code(row, col), scale_byte(x, row, b), target),
            };
            for col in cols.clone() {
                let column: Vec<u8> =
                    all.clone().map(|row| if valid[row] { convert(row, col).0 } else { 0 }).collect();
                put_codes(&mut out.codes, out.format, (col, spans.capacity), first_row, &column);
                let scale_idx = col * spans.capacity.div_ceil(to) + first_row / to;
                put_scale(out, scale_idx, Scale::byte(target));
            }
            for &row in &rows {
                let inexact = cols.clone().any(|col| convert(row, col).1);
                let nan = scale_byte(x, row, b) == e8m0::NAN
                    || cols.clone().any(|col| is_nan_code(x.format, source_code(row, col)));
                count(&mut tally, x.format, cols.clone().map(|col| source_code(row, col)), inexact, nan);
            }
        }
    }
    tally
}

/// Converts E4M3 row blocks to MXFP4 row blocks by quantizing the decoded values. Counts blocks of the source.
pub(super) fn requantize_rows(
    x: &BlockScaled<Cpu>,
    codec: Codec,
    spans: &Spans,
    out: &mut BlockScaled<Cpu>,
) -> Result<Tally> {
    let (mut tally, decoder) = (Tally::default(), Decoder::of(x)?);
    let mut valid = vec![false; x.rows];
    spans.valid().for_each(|row| valid[row] = true);
    let (from, to) = (x.format.spec().block, codec.format().spec().block);
    for (row, &valid) in valid.iter().enumerate() {
        for first in (0..x.cols).step_by(from) {
            let cols = first..x.cols.min(first + from);
            let (mut inexact, mut nan) = (false, false);
            for block in cols.clone().step_by(to) {
                let value = |col| if valid { decoder.value(row, col) } else { 0.0 };
                let values: Vec<f32> = (block..cols.end.min(block + to)).map(value).collect();
                let mut codes = vec![0; values.len()];
                let (scale, nonfinite) = codec.quantize_block(&values, |_| 0, &mut codes);
                put_codes(&mut out.codes, out.format, (row, x.cols), block, &codes);
                put_scale(out, row * x.cols.div_ceil(to) + block / to, scale);
                nan |= nonfinite;
                let changed = |(&code, &value)| codec.decode(code, 0, scale) != value;
                inexact |= !nonfinite && codes.iter().zip(&values).any(changed);
            }
            if valid {
                let codes = cols.map(|col| get_code(x.codes.as_slice(), x.format, (row, x.cols), col));
                count(&mut tally, x.format, codes, inexact, nan);
            }
        }
    }
    Ok(tally)
}
