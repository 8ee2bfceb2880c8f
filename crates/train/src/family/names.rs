//! The tensors of parameters: their rows, the order of the rows, and the names that most families use.

use crate::spec::{ModelSpec, ParamSpec};
use std::ops::Range;

/// Rows of a parameter, which is given by its index in canonical order. In an experts' parameter, the experts' matrices are stacked by
/// rows.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rows {
    /// Index of the parameter.
    pub param: usize,
    /// Range of the parameter's rows.
    pub range: Range<usize>,
}

/// A tensor of a checkpoint, which is a concatenation of rows of parameters.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Named {
    /// The tensor's name: `model.layers.0.mlp.experts.3.up_proj.weight`.
    pub name: String,
    /// The tensor's shape. The last dimension is the length of a row.
    pub shape: Vec<usize>,
    /// The rows of which the tensor consists.
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

    /// Contiguous runs of values: the index of a parameter, and a range of the parameter's values.
    pub fn runs(&self) -> impl Iterator<Item = (usize, Range<usize>)> + '_ {
        let cols = self.shape.last().copied().unwrap_or(0);
        self.rows.iter().map(move |rows| (rows.param, rows.range.start * cols..rows.range.end * cols))
    }
}

/// The names of the two halves of a gated projection.
const HALVES: [&str; 2] = ["gate_proj", "up_proj"];

/// The tensors of every parameter in canonical order, named by the parameters' ids. A gated projection is split into its halves, stacked
/// experts are separate tensors, and all other parameters are unchanged. Each row appears exactly once.
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
