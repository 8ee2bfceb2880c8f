//! `quantize`, `dequantize` and `transcode`: the conversions of the command `nibble quantize`, on tensors.

use crate::dlpack::{self, Foreign};
use crate::element::Element;
use crate::errors::or_raised;
use crate::home::Home;
use crate::on;
use crate::place::{Tensors, exported, matrix, plain};
use nibble_core::ops::{Counts, Dequantize, Planes, Quantize, Taken, Transcode};
use nibble_core::{BlockScaled, Result};
use nibble_formats::layout::mn_major_stride;
use nibble_formats::{BlockAxis, Codec, Format, Purpose, Rounding, ScaleLayout, ScaleRule, Stream, fnv1a32};
use pyo3::exceptions::{PyNotImplementedError, PyValueError};
use pyo3::prelude::*;
use std::str::FromStr;

/// A quantized tensor as Python has it: codes, scales, tensor scale, the name of its scale rule, counts of blocks.
type Parts = (Py<PyAny>, Py<PyAny>, Option<Py<PyAny>>, &'static str, Py<PyAny>);

/// The names of the block formats.
#[pyfunction]
pub fn formats() -> Vec<&'static str> {
    Format::ALL.into_iter().filter(|format| format.is_block()).map(Format::name).collect()
}

/// Reads a name that Nibble knows.
pub fn named<T: FromStr<Err: ToString>>(name: &str) -> PyResult<T> {
    name.parse().map_err(|error: T::Err| PyValueError::new_err(error.to_string()))
}

fn block_format(name: &str) -> PyResult<Format> {
    let format: Format = named(name)?;
    if !format.is_block() {
        return Err(PyValueError::new_err(format!(
            "`{name}` has no blocks; the block formats are {}",
            formats().join(", ")
        )));
    }
    Ok(format)
}

/// The scale rule of a format: the named one, or the format's default.
fn rule(format: Format, name: Option<&str>) -> PyResult<ScaleRule> {
    match name {
        Some(name) => named(name),
        // A block format has a default rule.
        None => Ok(format.spec().default_rule().unwrap_or(ScaleRule::Amax)),
    }
}

/// The sizes of a stack of matrices: rows of all matrices together, columns, and matrices.
#[derive(Debug, Clone, Copy)]
struct Sizes {
    rows: usize,
    cols: usize,
    stack: usize,
}

impl Sizes {
    fn of(shape: &[i64], argument: &str) -> PyResult<Self> {
        match *shape {
            [rows, cols] => Ok(Self { rows: rows as usize, cols: cols as usize, stack: 1 }),
            [stack, rows, cols] => {
                Ok(Self { rows: (stack * rows) as usize, cols: cols as usize, stack: stack as usize })
            }
            _ => Err(PyValueError::new_err(format!(
                "`{argument}` has shape {shape:?}, expected [rows, cols] or [matrices, rows, cols]"
            ))),
        }
    }

    /// A shape of PyTorch for these sizes.
    fn shape(self) -> Vec<usize> {
        match self.stack {
            1 => vec![self.rows, self.cols],
            stack => vec![stack, self.rows / stack, self.cols],
        }
    }
}

/// Quantizes a matrix `[rows, cols]`, or a stack `[matrices, rows, cols]`, of float32 or bfloat16. Returns codes and scales as bytes in
/// Nibble's layout, the tensor scales (one per row) or `None`, the scale rule, and three counts of blocks: with a non-zero code, inexact among these, and
/// with a NaN or an infinity.
#[pyfunction]
#[pyo3(signature = (x, format, axis="row", scale=None, rounding=None, seed=0, step=0, name="x"))]
#[expect(clippy::too_many_arguments, reason = "the arguments of the Python function")]
pub fn quantize(
    py: Python<'_>,
    x: &Bound<'_, PyAny>,
    format: &str,
    axis: &str,
    scale: Option<&str>,
    rounding: Option<&str>,
    seed: u64,
    step: u32,
    name: &str,
) -> PyResult<Parts> {
    let (format, axis): (_, BlockAxis) = (block_format(format)?, named(axis)?);
    if axis == BlockAxis::Tile && !format.spec().tiles {
        let square: Vec<_> =
            Format::ALL.into_iter().filter(|format| format.spec().tiles).map(Format::name).collect();
        let why = format!("{format} has no square blocks (axis `tile`); {} have them", square.join(", "));
        return Err(PyNotImplementedError::new_err(why));
    }
    let rule = rule(format, scale)?;
    let rounding = rounding.map_or(Ok(format.rounding(rule)), named::<Rounding>)?;
    let codec =
        Codec::new(format, rule, rounding).map_err(|error| PyValueError::new_err(error.to_string()))?;
    let x = Foreign::of(x, "x")?;
    let sizes = Sizes::of(x.shape(), "x")?;
    let (tensors, place) = Tensors::beside(py, &x)?;
    let element = tensors.take(&x, "x", &[Element::F32, Element::Bf16])?;
    let stream = codec.draws().then(|| Stream::new(seed, Purpose::Rounding, fnv1a32(name), step));
    on!(place, b => {
        let made = py.detach(|| {
            let x = matrix(&b, x, element, (sizes.rows, sizes.cols))?;
            quantized(&b, Quantize {
                stack: sizes.stack,
                random: stream.map(Into::into),
                ..Quantize::new(&x, codec, planes(axis))
            })
        });
        let (x, counts) = or_raised(made)?;
        parts(py, &b, x, counts)
    })
}

fn planes(axis: BlockAxis) -> Planes {
    match axis {
        BlockAxis::Row => Planes::Rows,
        BlockAxis::Col => Planes::Cols,
        BlockAxis::Tile => Planes::Tiles,
    }
}

/// The one tensor that a quantization was asked for, and its counts.
fn quantized<B: Home>(b: &B, op: Quantize<'_, B>) -> Result<(BlockScaled<B>, Counts<B>)> {
    let by_column = op.planes == Planes::Cols;
    let made = op.run(b)?;
    let operand = if by_column { made.take_cols("quantize")? } else { made.take_rows("quantize")? };
    let counts = made.counts.map_or_else(|| Counts::zeros(b), Ok)?;
    Ok((operand.block("quantize")?.clone(), counts))
}

/// A quantized tensor as tensors of PyTorch. Scales that lie block by block and not line by line have three dimensions: line, block, byte.
fn parts<B: Home>(py: Python<'_>, b: &B, x: BlockScaled<B>, counts: Counts<B>) -> PyResult<Parts> {
    let by_line = |bytes: usize, lines: usize| match bytes.checked_div(lines) {
        Some(each) if each * lines == bytes => vec![lines, each],
        _ => vec![bytes],
    };
    let lines = if x.axis == BlockAxis::Col { x.cols } else { x.rows };
    let codes = by_line(B::len(&x.codes), lines);
    let (scale_lines, blocks) = x.shape_of_scales();
    let each = x.scale_kind().bytes();
    let (scales, strides) = match x.scale_layout {
        ScaleLayout::MnMajor => {
            let stride = mn_major_stride(scale_lines, each) * each;
            (vec![scale_lines, blocks, each], Some(vec![each, stride, 1]))
        }
        _ => (by_line(B::len(&x.scales), scale_lines), None),
    };
    let of_tensor = x.tensor_scale.map(|scales| {
        let len = B::len(&scales);
        dlpack::export::<B, f32>(py, (b, scales), Element::F32, &[len])
    });
    Ok((
        dlpack::export::<B, u8>(py, (b, x.codes), Element::U8, &codes)?,
        dlpack::export_strided::<B, u8>(py, (b, x.scales), Element::U8, (&scales, strides.as_deref()))?,
        of_tensor.transpose()?,
        x.rule.name(),
        dlpack::export::<B, u64>(py, (b, counts.0), Element::I64, &[3])?,
    ))
}

/// The tensors of a quantized matrix, as Python gives them.
struct Given {
    codes: Foreign,
    scales: Foreign,
    of_tensor: Option<Foreign>,
    format: Format,
    rule: ScaleRule,
    axis: BlockAxis,
    sizes: Sizes,
}

impl Given {
    fn check(&self, tensors: &Tensors) -> PyResult<()> {
        tensors.take(&self.codes, "codes", &[Element::U8])?;
        tensors.take(&self.scales, "scales", &[Element::U8])?;
        let of_tensor = self.of_tensor.as_ref().map(|x| tensors.take(x, "tensor_scale", &[Element::F32]));
        of_tensor.transpose().map(drop)
    }

    fn borrowed<B: Home>(self, b: &B) -> Result<BlockScaled<B>> {
        let Self { codes, scales, of_tensor, format, rule, axis, sizes: Sizes { rows, cols, stack } } = self;
        Ok(BlockScaled {
            format,
            axis,
            rule,
            rows: if axis == BlockAxis::Col { rows.next_multiple_of(format.column_step()) } else { rows },
            cols,
            stack,
            codes: b.borrow(codes.lent())?,
            scales: b.borrow(scales.lent())?,
            tensor_scale: of_tensor.map(|x| b.borrow(x.lent())).transpose()?,
            scale_layout: ScaleLayout::RowMajor,
            shared_cols: 1,
            taken: Taken::AsIs,
        })
    }
}

/// Dequantizes codes and scales, as `quantize` returns them, to float32 or bfloat16. `shape` is that of the plain tensor.
#[pyfunction]
#[pyo3(signature = (codes, scales, tensor_scale, shape, format, axis="row", scale=None, dtype="float32"))]
#[expect(clippy::too_many_arguments, reason = "the arguments of the Python function")]
pub fn dequantize(
    py: Python<'_>,
    codes: &Bound<'_, PyAny>,
    scales: &Bound<'_, PyAny>,
    tensor_scale: Option<&Bound<'_, PyAny>>,
    shape: Vec<i64>,
    format: &str,
    axis: &str,
    scale: Option<&str>,
    dtype: &str,
) -> PyResult<Py<PyAny>> {
    let dtype = match dtype {
        "float32" => Element::F32,
        "bfloat16" => Element::Bf16,
        other => {
            return Err(PyValueError::new_err(format!("`dtype` is {other}, expected float32 or bfloat16")));
        }
    };
    let given = given((codes, scales, tensor_scale), &shape, (format, axis, scale))?;
    let (tensors, place) = Tensors::beside(py, &given.codes)?;
    given.check(&tensors)?;
    let sizes = given.sizes;
    on!(place, b => {
        let made = py.detach(|| {
            let x = given.borrowed(&b)?;
            let plain = Dequantize { x: &x, dtype: plain(dtype) }.run(&b)?;
            // Column blocks are padded to whole blocks of rows.
            if plain.rows == sizes.rows { Ok(plain) } else { first_rows(&b, &plain, sizes.rows) }
        });
        exported(py, &b, or_raised(made)?, &sizes.shape())
    })
}

/// A copy of the first rows.
fn first_rows<B: Home>(b: &B, x: &nibble_core::Tensor<B>, rows: usize) -> Result<nibble_core::Tensor<B>> {
    let mut some = nibble_core::Tensor::unwritten(b, x.dtype(), rows, x.cols)?;
    match (&x.data, &mut some.data) {
        (nibble_core::Data::F32(from), nibble_core::Data::F32(to)) => {
            b.copy(from, 0..rows * x.cols, to, 0)?
        }
        (nibble_core::Data::Bf16(from), nibble_core::Data::Bf16(to)) => {
            b.copy(from, 0..rows * x.cols, to, 0)?
        }
        _ => {}
    }
    Ok(some)
}

/// The codes, scales and tensor scale of Python.
type Three<'a, 'py> = (&'a Bound<'py, PyAny>, &'a Bound<'py, PyAny>, Option<&'a Bound<'py, PyAny>>);

fn given(
    (codes, scales, of_tensor): Three<'_, '_>,
    shape: &[i64],
    (format, axis, scale): (&str, &str, Option<&str>),
) -> PyResult<Given> {
    let format = block_format(format)?;
    Ok(Given {
        codes: Foreign::of(codes, "codes")?,
        scales: Foreign::of(scales, "scales")?,
        of_tensor: of_tensor.map(|x| Foreign::of(x, "tensor_scale")).transpose()?,
        format,
        rule: rule(format, scale)?,
        axis: named(axis)?,
        sizes: Sizes::of(shape, "shape")?,
    })
}

/// Converts codes and scales of row blocks to another format without a plain tensor in between, such as MXFP4 to E4M3 (the lift). Returns
/// what `quantize` returns.
#[pyfunction]
#[pyo3(signature = (codes, scales, tensor_scale, shape, format, to, axis="row", scale=None, to_scale=None))]
#[expect(clippy::too_many_arguments, reason = "the arguments of the Python function")]
pub fn transcode(
    py: Python<'_>,
    codes: &Bound<'_, PyAny>,
    scales: &Bound<'_, PyAny>,
    tensor_scale: Option<&Bound<'_, PyAny>>,
    shape: Vec<i64>,
    format: &str,
    to: &str,
    axis: &str,
    scale: Option<&str>,
    to_scale: Option<&str>,
) -> PyResult<Parts> {
    let (to, axis) = (block_format(to)?, named(axis)?);
    let to_rule = rule(to, to_scale)?;
    let given = given((codes, scales, tensor_scale), &shape, (format, "row", scale))?;
    let (tensors, place) = Tensors::beside(py, &given.codes)?;
    given.check(&tensors)?;
    on!(place, b => {
        let made = py.detach(|| {
            let x = given.borrowed(&b)?;
            Transcode { x: &x, to, axis, rule: to_rule, groups: None }.run(&b)
        });
        let made = or_raised(made)?;
        parts(py, &b, made.out, made.counts)
    })
}
