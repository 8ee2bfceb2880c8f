//! Decoding a quantized tensor.

use super::spec;
use crate::Cpu;
use nibble_core::ops::Dequantize;
use nibble_core::{Error, Result, Tensor};
use nibble_formats::{Element, Format};

/// See [`Dequantize`].
pub(crate) fn dequantize(cpu: &Cpu, op: Dequantize<'_, Cpu>) -> Result<Tensor<Cpu>> {
    let x = op.x;
    let element = element_of("dequantize", x.format)?;
    spec::plain(cpu, &spec::decode(x, element, 0..x.rows), op.dtype, x.rows)
}

/// The element of a block format.
///
/// # Errors
/// [`Error::Unsupported`] for a plain one.
pub(crate) fn element_of(op: &'static str, format: Format) -> Result<Element> {
    format.spec().element.ok_or_else(|| Error::unsupported(op, format, "it has no block scales to decode by"))
}
