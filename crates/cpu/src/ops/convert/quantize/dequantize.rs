//! Decoding of a quantized tensor.

use super::emit::{STRIP_ROWS, Sink, SinkWork, TILE_COLS, for_strips};
use super::encode::Tile;
use super::source::{Lines, Scales, ValueSource};
use super::spans::Spans;
use super::spec;
use crate::{CodePath, Cpu};
use nibble_core::ops::{Dequantize, Emit, Emitted};
use nibble_core::{Backend, BlockScaled, Error, Result, Tensor};
use nibble_formats::{BlockAxis, ScaleLayout};

/// Decodes a tensor; see [`Dequantize`].
pub(crate) fn dequantize(cpu: &Cpu, op: Dequantize<'_, Cpu>) -> Result<Tensor<Cpu>> {
    const OP: &str = "dequantize";
    let x = op.x;
    decodable(OP, x)?;
    let mut out = op.result(cpu)?;
    if cpu.path() == CodePath::Scalar {
        spec::plain(&spec::decode(cpu, x, 0..x.rows)?, &mut out);
        return Ok(out);
    }
    let (isa, lines) = (cpu.isa(), ValueSource::Lines(Lines::of(x, Scales::All)?));
    let spans = Spans::new(OP, x.rows, None, 1)?;
    let sink = Sink::new(&spans, x.cols, (Emit::Plain(op.dtype), Emitted::plain(out)), None);
    let scratch = || (vec![0.0; STRIP_ROWS * TILE_COLS], vec![0.0; STRIP_ROWS]);
    for_strips(cpu, &spans, (STRIP_ROWS, x.cols), scratch, |(values, line), strip| {
        for col in (0..x.cols).step_by(TILE_COLS) {
            let width = TILE_COLS.min(x.cols - col);
            match x.axis {
                BlockAxis::Row | BlockAxis::Tile => {
                    for (i, out) in values.chunks_exact_mut(width).take(strip.rows).enumerate() {
                        lines.load(isa, strip.row + i, col, out);
                    }
                }
                BlockAxis::Col => {
                    for i in 0..width {
                        let line = &mut line[..strip.rows];
                        lines.load(isa, col + i, strip.row, line);
                        for (out, value) in values[i..].iter_mut().step_by(width).zip(line) {
                            *out = *value;
                        }
                    }
                }
            }
            let tile = Tile { values, rows: strip.rows, width, stride: width };
            sink.write(isa, &mut SinkWork::default(), strip, tile, col);
        }
    });
    Ok(sink.finish(cpu)?.take_rows(OP)?.plain(OP)?.clone())
}

/// Checks that a tensor's scales can be decoded, and that the code and scale buffers have the lengths that the tensor's shape requires.
///
/// # Errors
/// [`Error::Unsupported`] for a plain format or another scale layout, [`Error::Shape`] for buffers of other lengths.
pub(crate) fn decodable(op: &'static str, x: &BlockScaled<Cpu>) -> Result<()> {
    if !x.format.is_block() {
        return Err(Error::unsupported(op, x.format, "it has no block scales to decode by"));
    }
    if x.stack == 0 || !x.rows.is_multiple_of(x.stack) {
        return Err(Error::shape(op, "stack", x.stack, format!("a divisor of the {} rows", x.rows)));
    }
    if x.scale_layout != ScaleLayout::RowMajor {
        let why = format!("its scales are {}; row-major here", x.scale_layout);
        return Err(Error::unsupported(op, x.format, why));
    }
    let got = (Cpu::len(&x.codes), Cpu::len(&x.scales));
    let expected = (BlockScaled::<Cpu>::code_bytes(x.format, x.axis, x.rows, x.cols), x.scale_bytes());
    if got != expected {
        let say = |(codes, scales)| format!("{codes} bytes of codes and {scales} of scales");
        return Err(Error::shape(op, "planes", say(got), say(expected)));
    }
    let of_tensor = x.tensor_scale.as_ref().map(Cpu::len);
    let expected = x.scale_kind().has_tensor_scale().then_some(x.rows);
    if of_tensor != expected {
        let say =
            |rows: Option<usize>| rows.map_or("none".into(), |rows| format!("one for each of {rows} rows"));
        return Err(Error::shape(op, "tensor_scale", say(of_tensor), say(expected)));
    }
    Ok(())
}
