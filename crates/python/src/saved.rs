//! The activations that a layer saves, as a list of tensors that autograd keeps, and back.
//!
//! A quantized operand is up to three tensors: codes, scales, tensor scales. What else describes it ([`Shape`]) follows from the recipe and
//! the sizes of the layer, and is computed by the layer's own code on a backend without memory. So a saved list needs no other data, and may
//! be offloaded, recomputed or moved by whoever hooks into autograd.

use crate::dlpack::{self, Foreign};
use crate::element::Element;
use crate::errors::or_raised;
use crate::home::Home;
use crate::place::{Tensors, exported, matrix};
use nibble_core::ops::Taken;
use nibble_core::{Backend, BlockScaled, DType, Operand, Result};
use nibble_formats::{BlockAxis, Format, ScaleLayout, ScaleRule};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

/// Everything about an operand but its buffers.
#[derive(Debug, Clone)]
pub enum Shape {
    /// The layer's input itself, which needs no tensor of its own.
    Input,
    /// A plain matrix.
    Plain { dtype: DType, rows: usize, cols: usize },
    /// A quantized matrix, with the lengths of its buffers.
    Block {
        format: Format,
        axis: BlockAxis,
        rule: ScaleRule,
        sizes: (usize, usize, usize),
        layout: ScaleLayout,
        shared_cols: usize,
        bytes: [usize; 2],
        tensor_scales: Option<usize>,
    },
}

impl Shape {
    /// The shape of an operand. `input` is the id of the layer's input.
    pub fn of<B: Backend>(x: &Operand<B>, input: u64) -> Self {
        match x {
            Operand::Plain(x) if x.buffer_id() == input => Self::Input,
            Operand::Plain(x) => Self::Plain { dtype: x.dtype(), rows: x.rows, cols: x.cols },
            Operand::Block(x) => Self::Block {
                format: x.format,
                axis: x.axis,
                rule: x.rule,
                sizes: (x.rows, x.cols, x.stack),
                layout: x.scale_layout,
                shared_cols: x.shared_cols,
                bytes: [B::len(&x.codes), B::len(&x.scales)],
                tensor_scales: x.tensor_scale.as_ref().map(B::len::<f32>),
            },
        }
    }

    /// The name, element type and shape of each of the operand's tensors.
    pub fn tensors(&self) -> Vec<(String, &'static str, Vec<usize>)> {
        match self {
            Self::Input => vec![],
            Self::Plain { dtype, rows, cols } => {
                vec![("values".into(), Element::from(*dtype).name(), vec![*rows, *cols])]
            }
            Self::Block { format, bytes: [codes, scales], tensor_scales, .. } => {
                let of_tensor =
                    tensor_scales.map(|len| (format!("{format} tensor scales"), "float32", vec![len]));
                let block = |what, len: usize| (format!("{format} {what}"), "uint8", vec![len]);
                [block("codes", *codes), block("scales", *scales)].into_iter().chain(of_tensor).collect()
            }
        }
    }

    /// The operand, from the next of these tensors. `input` is the layer's input, in case it is the operand.
    ///
    /// # Errors
    /// `ValueError` if a tensor is missing or has another length, and the errors of [`Tensors::take`].
    pub fn operand<B: Home>(
        &self,
        (b, call): (&B, &Tensors),
        tensors: &mut dyn Iterator<Item = Foreign>,
        input: &mut Option<Operand<B>>,
    ) -> PyResult<Operand<B>> {
        let missing = || PyValueError::new_err("`saved` has fewer tensors than the layer saves");
        if let Self::Input = self {
            return input.take().ok_or_else(missing);
        }
        let mut next = |element: Element, len: usize| -> PyResult<Foreign> {
            let tensor = tensors.next().ok_or_else(missing)?;
            call.take(&tensor, "saved", &[element])?;
            if tensor.len() != len {
                let why = format!("a tensor of `saved` has {} elements, expected {len}", tensor.len());
                return Err(PyValueError::new_err(why));
            }
            Ok(tensor)
        };
        match self {
            Self::Input => Err(missing()),
            Self::Plain { dtype, rows, cols } => {
                let element = Element::from(*dtype);
                let x = next(element, rows * cols)?;
                or_raised(matrix(b, x, element, (*rows, *cols))).map(Operand::Plain)
            }
            Self::Block { format, axis, rule, sizes, layout, shared_cols, bytes, tensor_scales } => {
                let codes = next(Element::U8, bytes[0])?;
                let scales = next(Element::U8, bytes[1])?;
                let of_tensor = tensor_scales.map(|len| next(Element::F32, len)).transpose()?;
                let made = || -> Result<BlockScaled<B>> {
                    Ok(BlockScaled {
                        format: *format,
                        axis: *axis,
                        rule: *rule,
                        rows: sizes.0,
                        cols: sizes.1,
                        stack: sizes.2,
                        codes: b.borrow(codes.lent())?,
                        scales: b.borrow(scales.lent())?,
                        tensor_scale: of_tensor.map(|x| b.borrow(x.lent())).transpose()?,
                        scale_layout: *layout,
                        shared_cols: *shared_cols,
                        taken: Taken::AsIs,
                    })
                };
                or_raised(made()).map(Operand::Block)
            }
        }
    }
}

/// Adds the tensors of an operand to a list, unless it is the layer's input.
///
/// # Errors
/// The error that PyTorch raised.
pub fn export<B: Home>(
    py: Python<'_>,
    b: &B,
    (x, input): (Operand<B>, u64),
    list: &mut Vec<Py<PyAny>>,
) -> PyResult<()> {
    match x {
        Operand::Plain(x) if x.buffer_id() == input => {}
        Operand::Plain(x) => {
            let shape = [x.rows, x.cols];
            list.push(exported(py, b, x, &shape)?);
        }
        Operand::Block(x) => {
            for bytes in [x.codes, x.scales] {
                let len = B::len(&bytes);
                list.push(dlpack::export::<B, u8>(py, (b, bytes), Element::U8, &[len])?);
            }
            if let Some(scales) = x.tensor_scale {
                let len = B::len(&scales);
                list.push(dlpack::export::<B, f32>(py, (b, scales), Element::F32, &[len])?);
            }
        }
    }
    Ok(())
}
