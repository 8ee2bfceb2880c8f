//! See `nibble_core::ops::{Quantize, Dequantize}`, and the writing of results in block formats that every fused op
//! shares.

mod dequantize;
pub(crate) mod planes;
pub(crate) mod spans;
pub(crate) mod spec;
#[cfg(test)]
mod tests;

pub(crate) use dequantize::{dequantize, element_of};

use crate::Cpu;
use nibble_core::ops::{Emit, Emitted, Planes, Quantize};
use nibble_core::{Error, Groups, Result};
use nibble_formats::{Codec, Stream};
use spans::Spans;
use spec::{Casting, Matrix};

/// See [`Quantize`].
pub(crate) fn quantize(cpu: &Cpu, op: Quantize<'_, Cpu>) -> Result<Emitted<Cpu>> {
    const OP: &str = "quantize";
    check_random(OP, op.codec, op.random)?;
    let emit = Emit::Block { codec: op.codec, planes: op.planes };
    let spans = Spans::new(OP, op.x.rows, op.groups, column_block(OP, &[emit], op.x.rows, op.groups)?)?;
    let x = Matrix::of(op.x, &spans);
    if op.planes == Planes::Tiles {
        let casting = Casting { codec: op.codec, random: op.random, spans: &spans };
        return spec::tiles(cpu, &x, op.stack, &casting);
    }
    spec::emit(cpu, &x, emit, &spans, op.random)
}

/// Random roundings need a stream.
fn check_random(op: &'static str, codec: Codec, random: Option<Stream>) -> Result<()> {
    if codec.rounding().is_random() && random.is_none() {
        let expected = format!("a stream: rounding is {}", codec.rounding());
        return Err(Error::shape(op, "random", "none", expected));
    }
    Ok(())
}

/// Checks the forms of a fused op's results, which have no stream of random bits, and returns [`column_block`].
pub(crate) fn check_emits(
    op: &'static str,
    emits: &[Emit],
    rows: usize,
    groups: Option<&Groups<Cpu>>,
) -> Result<usize> {
    for emit in emits {
        if let Emit::Block { codec, .. } = emit {
            check_random(op, *codec, None)?;
        }
    }
    column_block(op, emits, rows, groups)
}

/// Rows of the longest column block written, 1 where no columns are: what every group's start must be a multiple of.
fn column_block(op: &'static str, emits: &[Emit], rows: usize, groups: Option<&Groups<Cpu>>) -> Result<usize> {
    let mut longest = 1;
    for emit in emits {
        if let Emit::Block { codec, planes: Planes::Cols | Planes::Both } = emit {
            codec.format().check_contraction("rows", rows)?;
            let block = codec.format().spec().block;
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
