//! The tensors of parameters: their rows, the order of the rows, and the names that most families use.

use crate::spec::{ModelSpec, ParamSpec};
use std::ops::Range;

/// A range of rows of one parameter. The parameter is identified by its index in the model's canonical order of parameters. In a parameter
/// that contains all experts of a layer, the experts' matrices are stacked along the rows.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rows {
    /// Index of the parameter.
    pub param: usize,
    /// The range of rows within the parameter.
    pub range: Range<usize>,
}

/// A tensor of a checkpoint, composed of rows of one or more parameters.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Named {
    /// The tensor's name: `model.layers.0.mlp.experts.3.up_proj.weight`.
    pub name: String,
    /// The tensor's shape. The shape of the tensor; the last dimension is the length of a row.
    pub shape: Vec<usize>,
    /// The rows of parameters that are concatenated to form the tensor.
    pub rows: Vec<Rows>,
}

impl Named {
    /// A tensor that consists of consecutive rows of one parameter.
    #[must_use]
    pub fn of(name: String, shape: Vec<usize>, param: usize, range: Range<usize>) -> Self {
        Self { name, shape, rows: vec![Rows { param, range }] }
    }

    /// Number of values of the tensor.
    #[must_use]
    pub fn num_values(&self) -> usize {
        self.shape.iter().product()
    }

    /// The contiguous ranges of values that form the tensor. Each item is the index of a parameter and a range of the parameter's values.
    pub fn runs(&self) -> impl Iterator<Item = (usize, Range<usize>)> + '_ {
        let cols = self.shape.last().copied().unwrap_or(0);
        self.rows.iter().map(move |rows| (rows.param, rows.range.start * cols..rows.range.end * cols))
    }
}

/// The names of the two halves of a gated projection.
const HALVES: [&str; 2] = ["gate_proj", "up_proj"];

/// The tensors of all parameters, in canonical order. Each tensor is named by the id of its parameter. A gated projection becomes two
/// tensors, stacked experts become one tensor each, and every other parameter becomes one tensor. Each row of each parameter appears in
/// exactly one tensor.
#[must_use]
pub fn as_they_are(model: &ModelSpec) -> Vec<Named> {
    model.params().enumerate().flat_map(|(number, param)| of_param(number, &param)).collect()
}

/// The tensors of one parameter.
fn of_param(number: usize, param: &ParamSpec) -> Vec<Named> {
    let (rows, cols) = param.shape();
    if let Some(experts) = param.experts {
        let (layer, part) = param.id.rsplit_once('.').unwrap_or(("", &param.id));
        let parts: &[&str] = if part == "gate_up_proj" { &HALVES } else { &[part] };
        let expert =
            |e: usize| side_by_side((number, &format!("{layer}.{e}")), parts, (rows, cols), e * rows);
        return (0..experts.value).flat_map(expert).collect();
    }
    if let Some(layer) = param.id.strip_suffix(".gate_up_proj.weight") {
        return side_by_side((number, layer), &HALVES, (rows, cols), 0);
    }
    let shape = if param.is_vector() { vec![cols] } else { vec![rows, cols] };
    vec![Named::of(param.id.clone(), shape, number, 0..rows)]
}

/// Tensors with equal numbers of rows. The rows are consecutive rows of a parameter, starting with row `first`.
fn side_by_side(
    (number, layer): (usize, &str),
    parts: &[&str],
    (rows, cols): (usize, usize),
    first: usize,
) -> Vec<Named> {
    let each = rows / parts.len().max(1);
    let named = |(i, part): (usize, &&str)| {
        let begins = first + i * each;
        Named::of(format!("{layer}.{part}.weight"), vec![each, cols], number, begins..begins + each)
    };
    parts.iter().enumerate().map(named).collect()
}
