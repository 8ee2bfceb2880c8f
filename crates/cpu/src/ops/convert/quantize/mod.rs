//! The CPU code of `nibble_core::ops::{Quantize, Dequantize}`, and the writing of quantized results, which all fused ops share.

mod delayed;
mod dequantize;
mod drawn;
pub(crate) mod emit;
pub(crate) mod encode;
#[cfg(test)]
pub(crate) mod fixture;
mod general;
mod hadamard;
pub(crate) mod planes;
mod round;
pub(crate) mod shared;
pub(crate) mod source;
pub(crate) mod spans;
pub(crate) mod spec;
#[cfg(test)]
mod tests;

pub(crate) use dequantize::{decodable, dequantize};

use crate::{Buf, CodePath, Cpu};
use drawn::Drawn;
use emit::{STRIP_ROWS, Sink, SinkWork, SquareSink, TILE_COLS, for_strips, has_cols, strip_rows};
use encode::Tile;
use general::Job;
use nibble_core::ops::{Emit, Emitted, MeasureAmax, Planes, Quantize, check_random};
use nibble_core::{Error, Groups, Result};
use nibble_formats::Format;
use source::ValueSource;
use spans::Spans;
use spec::{Casting, Known, Matrix};

/// Whether a format has specialised code. Other formats use the general code, which is also vectorised.
pub fn has_own_code(format: Format) -> bool {
    !format.is_block() || encode::fast(format).is_some()
}

/// Number of columns of a tile if the result has no column blocks.
const ROW_COLS: usize = 1024;

/// Quantizes a tensor; see [`Quantize`].
pub(crate) fn quantize(cpu: &Cpu, op: Quantize<'_, Cpu>) -> Result<Emitted<Cpu>> {
    const OP: &str = "quantize";
    let random = op.random.map(|random| Drawn::of(random, op.codec)).transpose()?;
    if op.planes == Planes::Tiles && op.groups.is_some() {
        return Err(Error::shape(OP, "groups", "given", "none: square tiles are for weights"));
    }
    let emit = Emit::block(op.codec, op.planes);
    let (block, made) = (column_block(OP, &[emit], op.groups)?, op.result(cpu)?);
    if let Some(transform) = op.hadamard {
        let block = if op.planes == Planes::Cols { block.max(transform.len) } else { block };
        let spans = spans(&op, block)?;
        let (x, spans) = hadamard::transform(cpu, op.x, op.planes, transform, &spans)?;
        return encode(cpu, &Quantize { x: &x, hadamard: None, ..op }, random, (emit, made), &spans);
    }
    encode(cpu, &op, random, (emit, made), &spans(&op, block)?)
}

/// The spans of valid rows: one per group, or one per matrix for row blocks of a stack.
fn spans<'a>(op: &Quantize<'a, Cpu>, block: usize) -> Result<Spans<'a>> {
    match op.planes {
        Planes::Rows if op.stack > 1 => Ok(Spans::stacked(op.stack, op.x.rows / op.stack)),
        _ => Spans::new("quantize", op.x.rows, op.groups, block),
    }
}

/// Measures the largest magnitude; see [`MeasureAmax`].
pub(crate) fn measure_amax(cpu: &Cpu, op: MeasureAmax<'_, Cpu>) -> Result<Buf<f32>> {
    let (mut out, cols, each) = (op.result(cpu)?, op.x.cols, op.x.rows / op.stack.max(1));
    let x = ValueSource::plain(op.x);
    for (matrix, out) in out.as_mut_slice().iter_mut().enumerate() {
        let rows = matrix * each..(matrix + 1) * each;
        *out = match cpu.path() {
            CodePath::Scalar => {
                op.codec.tensor_amax((rows.start * cols..rows.end * cols).map(|i| spec::value(op.x, i)))
            }
            CodePath::Simd => general::tensor_amax(cpu, (&x, cols), op.codec, rows),
        };
    }
    Ok(out)
}

/// Quantizes values without a Hadamard transform.
fn encode(
    cpu: &Cpu,
    op: &Quantize<'_, Cpu>,
    random: Option<Drawn>,
    (emit, made): (Emit, Emitted<Cpu>),
    spans: &Spans,
) -> Result<Emitted<Cpu>> {
    let format = op.codec.format();
    // Weights in blocks along the rows, for formats without 2-D blocks.
    let is_square = op.codec.scaling().is_square();
    let row_weights = op.planes == Planes::Tiles && !format.spec().tiles && !is_square;
    let each = || Spans::stacked(op.stack, op.x.rows / op.stack.max(1));
    let delayed = op.delayed.map(|delayed| (delayed, op.spans()));
    let known = Known { delayed, amax: op.amax.map(|amax| amax.as_slice()) };
    // Delayed scaling has only the specification's code, which is multi-threaded.
    if cpu.path() == CodePath::Scalar || op.delayed.is_some() {
        let x = Matrix::of(op.x, spans);
        return match op.planes {
            _ if row_weights => spec::row_weights(cpu, &x, (op.stack, op.codec, random), known, made),
            Planes::Tiles => {
                let spans = each();
                spec::tiles(&x, op.stack, &Casting::new(op.codec, random, &spans, &x, known), made)
            }
            _ => Ok(spec::quantized(cpu, &x, &Casting::new(op.codec, random, spans, &x, known), made)),
        };
    }
    let x = (ValueSource::plain(op.x), op.x.cols);
    match (encode::fast(format), op.planes) {
        _ if row_weights => {
            general::row_weights(cpu, x, (op.x.rows, op.stack), (op.codec, random), known, made)
        }
        (Some(_), Planes::Tiles) if !is_square => square_tiles(cpu, op, random, made),
        (Some(_), Planes::Rows | Planes::Cols | Planes::Both) => strips(cpu, op, random, (emit, made), spans),
        (_, Planes::Tiles) => {
            general::tiles(cpu, &Job::new(cpu, x, op.codec, random, &each(), known), op.stack, made)
        }
        (None, _) => Ok(general::emit(cpu, &Job::new(cpu, x, op.codec, random, spans, known), made)),
    }
}

/// Writes row blocks, column blocks or both with vectorised code.
fn strips(
    cpu: &Cpu,
    op: &Quantize<'_, Cpu>,
    random: Option<Drawn>,
    (emit, made): (Emit, Emitted<Cpu>),
    spans: &Spans,
) -> Result<Emitted<Cpu>> {
    let (isa, cols, x) = (cpu.isa(), op.x.cols, ValueSource::plain(op.x));
    let sink = Sink::new(spans, cols, (emit, made), random);
    let tile_cols = if has_cols(emit) { TILE_COLS } else { ROW_COLS };
    let height = strip_rows(has_cols(emit), cols.min(tile_cols));
    let scratch = || (vec![0.0; height * tile_cols.min(cols)], SinkWork::default());
    for_strips(cpu, spans, (height, cols), scratch, |(values, memory), strip| {
        for col in (0..cols).step_by(tile_cols) {
            let width = tile_cols.min(cols - col);
            for (i, out) in values.chunks_exact_mut(width).take(strip.rows).enumerate() {
                x.load(isa, strip.row + i, col, out);
            }
            let tile = Tile { values, rows: strip.rows, width, stride: width };
            sink.write(isa, memory, strip, tile, col);
        }
    });
    sink.finish(cpu)
}

/// Writes 2-D blocks of stacked matrices with vectorised code.
fn square_tiles(
    cpu: &Cpu,
    op: &Quantize<'_, Cpu>,
    random: Option<Drawn>,
    made: Emitted<Cpu>,
) -> Result<Emitted<Cpu>> {
    let (isa, k, x) = (cpu.isa(), op.x.cols, ValueSource::plain(op.x));
    let n = op.x.rows / op.stack.max(1);
    let spans = Spans::stacked(op.stack, n);
    let sink = SquareSink::new(made, &spans, (n, k), op.codec, random)?;
    let scratch = || (vec![0.0; STRIP_ROWS * TILE_COLS], SinkWork::default());
    for_strips(cpu, &spans, (STRIP_ROWS, k), scratch, |(values, memory), strip| {
        for col in (0..k).step_by(TILE_COLS) {
            let width = TILE_COLS.min(k - col);
            for (i, out) in values.chunks_exact_mut(width).take(strip.rows).enumerate() {
                x.load(isa, strip.row + i, col, out);
            }
            let tile = Tile { values, rows: strip.rows, width, stride: width };
            sink.write(isa, memory, strip.row, tile, col);
        }
    });
    Ok(sink.finish())
}

/// Checks the formats of a fused op's results, which have no random stream, and returns [`column_block`].
pub(crate) fn check_emits(op: &'static str, emits: &[Emit], groups: Option<&Groups<Cpu>>) -> Result<usize> {
    for emit in emits {
        if let Emit::Block { codec, .. } = emit {
            check_random(op, *codec, false)?;
        }
    }
    column_block(op, emits, groups)
}

/// Number of rows of the longest column block among the results; 1 without column blocks. Every group must start at a multiple of this
/// number.
fn column_block(op: &'static str, emits: &[Emit], groups: Option<&Groups<Cpu>>) -> Result<usize> {
    let mut longest = 1;
    for emit in emits {
        if let Emit::Block { codec, planes: Planes::Cols | Planes::Both, .. } = emit {
            let block = codec.format().column_step();
            match groups {
                Some(g) if g.align % block != 0 => {
                    return Err(Error::shape(op, "groups.align", g.align, format!("a multiple of {block}")));
                }
                _ => longest = longest.max(block),
            }
        }
    }
    Ok(longest)
}
