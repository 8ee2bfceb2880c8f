//! The conversions, vectorised and multi-threaded by strips of rows.

use super::lift::{Column, LiftTable, Targets, lift_column, lift_row, lift_row_by_table, lifts, shift_block};
use super::lift_of;
use crate::Cpu;
use crate::gemm::Isa;
use crate::ops::convert::quantize::emit::{
    STRIP_ROWS, SquareTarget, Strip, TILE_COLS, Target, add_tally, counted, for_strips, strip_rows,
};
use crate::ops::convert::quantize::encode::{encode_row, fast, transpose};
use crate::ops::convert::quantize::source::{Coded, Lines, Scales, decode_row};
use crate::ops::convert::quantize::spans::Spans;
use crate::ops::convert::quantize::spec::Tally;
use nibble_core::ops::{Counts, Transcoded};
use nibble_core::{BlockScaled, Error, Result};
use nibble_formats::{Codec, Format, LIFTED_BLOCK, Lift, Scale, ScalePlane, shift_target};
use rayon::prelude::*;
use std::sync::atomic::AtomicU64;

/// A source in row blocks with E8M0 scales.
struct PowerScaledRows<'a> {
    format: Format,
    codes: &'a [u8],
    scales: &'a [u8],
    cols: usize,
}

impl<'a> PowerScaledRows<'a> {
    fn of(x: &'a BlockScaled<Cpu>) -> Result<Self> {
        let scales = x.e8m0_scales("transcode")?.as_slice();
        Ok(Self { format: x.format, codes: x.codes.as_slice(), scales, cols: x.cols })
    }

    /// Codes of `width` columns, starting at `col`; `col` starts a block.
    fn codes(&self, row: usize, col: usize, width: usize) -> &'a [u8] {
        let start = row * self.format.row_code_bytes(self.cols) + self.format.row_code_bytes(col);
        &self.codes[start..][..self.format.row_code_bytes(width)]
    }

    /// The scales of `width` columns, starting at `col`.
    fn scales(&self, row: usize, col: usize, width: usize) -> &'a [u8] {
        let start = row * self.format.scales_per_row(self.cols) + self.format.scales_per_row(col);
        &self.scales[start..][..self.format.scales_per_row(width)]
    }

    /// The block of columns that starts at `col`, in a strip's valid rows; it is short at the end of a row.
    fn column(&self, strip: Strip, col: usize) -> Column<'a> {
        let code_stride = self.format.row_code_bytes(self.cols);
        let scale_stride = self.format.scales_per_row(self.cols);
        let from = |plane: &'a [u8], start: usize| plane.get(start..).unwrap_or(&[]);
        Column {
            scales: from(self.scales, strip.row * scale_stride + self.format.scales_per_row(col)),
            scale_stride,
            codes: from(self.codes, strip.row * code_stride + self.format.row_code_bytes(col)),
            code_stride,
            rows: strip.rows,
            width: self.format.spec().block.min(self.cols - col),
        }
    }
}

/// The lift of row blocks to E4M3.
struct RowLift {
    isa: Isa,
    lift: Lift,
    /// The lookup table; `None` for MXFP4, which has specialised tables.
    table: Option<LiftTable>,
}

impl RowLift {
    fn of(cpu: &Cpu, x: &BlockScaled<Cpu>) -> Result<Self> {
        let (lift, is_mxfp4) = (lift_of(x)?, x.format == Format::Mxfp4);
        let table = (!is_mxfp4).then(|| LiftTable::new(lift, x.format.spec().block));
        Ok(Self { isa: cpu.isa(), lift, table })
    }

    /// Lifts the scales and codes of one row.
    fn row(&self, from: (&[u8], &[u8]), to: (Targets<'_>, &mut [u8]), tally: &mut Tally) {
        match &self.table {
            None => lift_row(self.isa, lifts(), from, to, tally),
            Some(table) => lift_row_by_table(self.isa, table, from, to, tally),
        }
    }
}

/// Converts row blocks of a lifted format to E4M3 row blocks.
pub(super) fn lift_rows(
    cpu: &Cpu,
    x: &BlockScaled<Cpu>,
    spans: &Spans,
    made: Transcoded<Cpu>,
) -> Result<Transcoded<Cpu>> {
    let (rows, out, by) = (PowerScaledRows::of(x)?, Target::new(made.out), RowLift::of(cpu, x)?);
    let sum: [AtomicU64; 3] = Default::default();
    let height = strip_rows(false, x.cols);
    for_strips(
        cpu,
        spans,
        (height, x.cols),
        || (),
        |(), strip| {
            let mut tally = Tally::default();
            for row in strip.row..strip.row + strip.rows {
                let from = (rows.scales(row, 0, x.cols), rows.codes(row, 0, x.cols));
                // SAFETY: strips have disjoint rows.
                let (codes, scales) =
                    unsafe { (out.row_codes(row, 0, x.cols), out.row_scales(row, 0, x.cols)) };
                // Lifted scales have one byte each, because the rule is the source's rule.
                by.row(from, (Targets::Found(scales.bytes), codes), &mut tally);
            }
            clear_padding(&out, strip, x.cols);
            add_tally(&sum, tally);
        },
    );
    Ok(written(out.finish(), None, (made.counts, &sum)))
}

/// The 2-D blocks of [`LIFTED_BLOCK`] × [`LIFTED_BLOCK`] values of stacked matrices.
#[derive(Clone, Copy)]
struct Squares {
    /// Rows of each matrix, at least 1, and columns.
    shape: (usize, usize),
    /// Blocks below each other in a matrix, and blocks beside each other, at least 1.
    tiles: (usize, usize),
}

impl Squares {
    fn of(x: &BlockScaled<Cpu>, matrices: usize) -> Self {
        let shape = ((x.rows / matrices.max(1)).max(1), x.cols);
        Self { shape, tiles: (shape.0.div_ceil(LIFTED_BLOCK), shape.1.div_ceil(LIFTED_BLOCK).max(1)) }
    }

    /// Writes the scale of each 2-D block after the lift.
    fn find(self, lift: Lift, rows: &PowerScaledRows<'_>, targets: &mut [u8]) {
        let ((n, k), (down, across)) = (self.shape, self.tiles);
        targets.par_chunks_mut(across).enumerate().for_each(|(strip, targets)| {
            let first = strip / down * n + strip % down * LIFTED_BLOCK;
            let last = (first + LIFTED_BLOCK).min((strip / down + 1) * n);
            for (tile, target) in targets.iter_mut().enumerate() {
                let (col, width) = (tile * LIFTED_BLOCK, LIFTED_BLOCK.min(k - tile * LIFTED_BLOCK));
                *target = lift.target((first..last).flat_map(|row| rows.scales(row, col, width)).copied());
            }
        });
    }

    /// The scales of the 2-D blocks that contain a row.
    fn of_row(self, targets: &[u8], row: usize) -> &[u8] {
        let ((n, _), (down, across)) = (self.shape, self.tiles);
        &targets[(row / n * down + row % n / LIFTED_BLOCK) * across..][..across]
    }
}

/// Converts row blocks of a lifted format to E4M3 in 2-D blocks of each of `out`'s matrices, without counts.
pub(super) fn lift_squares(cpu: &Cpu, x: &BlockScaled<Cpu>, out: &mut BlockScaled<Cpu>) -> Result<()> {
    let (rows, by, squares) = (PowerScaledRows::of(x)?, RowLift::of(cpu, x)?, Squares::of(x, out.stack));
    let (scales, codes) = (out.scales.as_mut_slice(), out.codes.as_mut_slice());
    cpu.pool().install(|| {
        squares.find(by.lift, &rows, scales);
        codes.par_chunks_mut(x.cols.max(1)).enumerate().for_each(|(row, codes)| {
            let from = (rows.scales(row, 0, x.cols), rows.codes(row, 0, x.cols));
            by.row(from, (Targets::Given(squares.of_row(scales, row)), codes), &mut Tally::default());
        });
    });
    Ok(())
}

/// Counts the blocks of rows that a lift changes, as [`super::spec::count_lift`] does.
pub(super) fn count_lift(
    cpu: &Cpu,
    x: &BlockScaled<Cpu>,
    matrices: Option<usize>,
    is_counted: impl Fn(usize) -> bool + Sync,
) -> Result<Tally> {
    let (rows, by) = (PowerScaledRows::of(x)?, RowLift::of(cpu, x)?);
    let squares = matrices.map(|matrices| (Squares::of(x, matrices), matrices));
    let targets = squares.map(|(squares, matrices)| {
        let mut targets = vec![0; matrices * squares.tiles.0 * squares.tiles.1];
        cpu.pool().install(|| squares.find(by.lift, &rows, &mut targets));
        (squares, targets)
    });
    let of_row = |(scales, codes): &mut (Vec<u8>, Vec<u8>), row: usize| {
        let mut tally = Tally::default();
        let to = match &targets {
            Some((squares, targets)) => Targets::Given(squares.of_row(targets, row)),
            None => Targets::Found(scales),
        };
        by.row((rows.scales(row, 0, x.cols), rows.codes(row, 0, x.cols)), (to, codes), &mut tally);
        tally
    };
    let scratch = || (vec![0; x.cols.div_ceil(LIFTED_BLOCK)], vec![0; x.cols]);
    let sum = |a: Tally, b: Tally| std::array::from_fn(|i| a[i] + b[i]);
    let counted = (0..x.rows).into_par_iter().filter(|row| is_counted(*row)).map_init(scratch, of_row);
    Ok(cpu.pool().install(|| counted.reduce(Tally::default, sum)))
}

/// The result, together with its counts.
fn written(
    out: BlockScaled<Cpu>,
    transposed: Option<BlockScaled<Cpu>>,
    (mut counts, sum): (Counts<Cpu>, &[AtomicU64; 3]),
) -> Transcoded<Cpu> {
    counts.0.as_mut_slice().copy_from_slice(&counted(sum));
    Transcoded { out, transposed, counts }
}

/// Writes zeros to a strip's padding.
fn clear_padding(out: &Target, strip: Strip, cols: usize) {
    for row in strip.row + strip.rows..strip.row + strip.out_rows {
        // SAFETY: strips have disjoint rows, and padding is written only here.
        unsafe { out.clear_row(row, 0, cols) };
    }
}

/// Reusable scratch memory of [`to_cols`].
#[derive(Default)]
struct Turn {
    codes: Vec<u8>,
    turned: Vec<u8>,
    scales: Vec<Scale>,
}

/// Converts MXFP4 or E4M3 row blocks to E4M3 column blocks.
pub(super) fn to_cols(
    cpu: &Cpu,
    x: &BlockScaled<Cpu>,
    spans: &Spans,
    made: Transcoded<Cpu>,
) -> Result<Transcoded<Cpu>> {
    let (isa, lifts, rows, out) = (cpu.isa(), lifts(), PowerScaledRows::of(x)?, Target::new(made.out));
    let sum: [AtomicU64; 3] = Default::default();
    for_strips(cpu, spans, (STRIP_ROWS, x.cols), Turn::default, |memory, strip| {
        let Turn { codes, turned, scales } = memory;
        let mut tally = Tally::default();
        for col in (0..x.cols).step_by(TILE_COLS) {
            let width = TILE_COLS.min(x.cols - col);
            codes.clear();
            codes.resize(strip.out_rows * width, 0);
            scales.clear();
            let block = x.format.spec().block;
            for first in (0..width).step_by(block) {
                let block = block.min(width - first);
                let of_row = |i: usize| rows.scales(strip.row + i, col + first, block)[0];
                let bytes = (0..strip.rows).map(of_row);
                let target =
                    if x.format == Format::Mxfp4 { Lift::E2M1.target(bytes) } else { shift_target(bytes) };
                scales.resize(first + block, Scale::byte(target));
                if x.format == Format::Mxfp4 {
                    let from = rows.column(strip, col + first);
                    lift_column(isa, lifts, from, target, (&mut codes[first..], width), &mut tally);
                    continue;
                }
                for i in 0..strip.rows {
                    let row = strip.row + i;
                    let source = rows.scales(row, col + first, block)[0];
                    let to = &mut codes[i * width + first..][..block];
                    shift_block(source, target, rows.codes(row, col + first, block), to, &mut tally);
                }
            }
            transpose(isa, codes, strip.out_rows, width, turned);
            let place = (strip.row, col, width);
            // SAFETY: strips have disjoint rows, and each of their columns is written once.
            unsafe {
                out.put_columns(place, turned);
                out.put_column_scales(place, scales);
            }
        }
        add_tally(&sum, tally);
    });
    Ok(written(out.finish(), None, (made.counts, &sum)))
}

/// Converts MXFP4 row blocks to E4M3 2-D blocks.
pub(super) fn lift_tiles(cpu: &Cpu, x: &BlockScaled<Cpu>, made: Transcoded<Cpu>) -> Result<Transcoded<Cpu>> {
    let (n, k) = (x.rows / x.stack.max(1), x.cols);
    let (isa, lifts, rows) = (cpu.isa(), lifts(), PowerScaledRows::of(x)?);
    let Some(transposed) = made.transposed else { return Err(super::one_plane()) };
    let out = SquareTarget::new([made.out, transposed], (n, k));
    let sum: [AtomicU64; 3] = Default::default();
    let scratch = || (vec![0; STRIP_ROWS * TILE_COLS], Vec::new());
    for_strips(cpu, &Spans::stacked(x.stack, n), (STRIP_ROWS, k), scratch, |(codes, turned), strip| {
        let mut tally = Tally::default();
        for col in (0..k).step_by(TILE_COLS) {
            let width = TILE_COLS.min(k - col);
            let codes = &mut codes[..strip.rows * width];
            let of_row = |row| rows.scales(row, col, width).iter().copied();
            let target = Lift::E2M1.target((strip.row..strip.row + strip.rows).flat_map(of_row));
            for first in (0..width).step_by(x.format.spec().block) {
                let from = rows.column(strip, col + first);
                lift_column(isa, lifts, from, target, (&mut codes[first..], width), &mut tally);
            }
            transpose(isa, codes, strip.rows, width, turned);
            // SAFETY: each tile is written once.
            unsafe {
                out.put((strip.row, col), (strip.rows, width), [codes, turned], Scale::byte(target));
            }
        }
        add_tally(&sum, tally);
    });
    let [out, transposed] = out.finish();
    Ok(written(out, Some(transposed), (made.counts, &sum)))
}

/// Converts E4M3 row blocks to MXFP4 row blocks.
pub(super) fn requantize_rows(
    cpu: &Cpu,
    x: &BlockScaled<Cpu>,
    codec: Codec,
    spans: &Spans,
    made: Transcoded<Cpu>,
) -> Result<Transcoded<Cpu>> {
    let (isa, lines, out) = (cpu.isa(), Lines::of(x, Scales::All)?, Target::new(made.out));
    let Some(fast) = fast(codec.format()) else {
        return Err(Error::unsupported("transcode", codec.format(), "it has no vectorised code"));
    };
    let sum: [AtomicU64; 3] = Default::default();
    let height = strip_rows(false, x.cols);
    for_strips(
        cpu,
        spans,
        (height, x.cols),
        || (),
        |(), strip| {
            let mut tally = Tally::default();
            for row in strip.row..strip.row + strip.rows {
                for col in (0..x.cols).step_by(TILE_COLS) {
                    let width = TILE_COLS.min(x.cols - col);
                    let (mut values, mut again) = ([0.0; TILE_COLS], [0.0; TILE_COLS]);
                    let (values, again) = (&mut values[..width], &mut again[..width]);
                    lines.load(isa, row, col, values);
                    // SAFETY: strips have disjoint rows, and each of their columns is written once.
                    let (codes, mut scales) =
                        unsafe { (out.row_codes(row, col, width), out.row_scales(row, col, width)) };
                    let mut blocks = Tally::default();
                    encode_row(isa, codec, values, &[], codes, &mut scales, &mut blocks);
                    let scales = ScalePlane { kind: scales.kind, bytes: scales.bytes };
                    let coded = Coded { fast, codes, scales, first_scale: 0 };
                    decode_row(isa, coded, again);
                    let source = lines.codes(row, col, width);
                    let non_zero = source.iter().any(|code| code & 0x7F != 0);
                    // A NaN in `again` means that the block has a NaN scale, which is counted as such.
                    let inexact = values.iter().zip(&*again).any(|(x, y)| x != y && !y.is_nan());
                    tally[Counts::<Cpu>::NON_ZERO] += u64::from(non_zero);
                    tally[Counts::<Cpu>::INEXACT] += u64::from(inexact);
                    tally[Counts::<Cpu>::NON_FINITE] += u64::from(blocks[Counts::<Cpu>::NON_FINITE] != 0);
                }
            }
            clear_padding(&out, strip, x.cols);
            add_tally(&sum, tally);
        },
    );
    Ok(written(out.finish(), None, (made.counts, &sum)))
}
