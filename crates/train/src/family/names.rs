//! Tensors of parameters: their rows, the order of the rows, and the names that most families use.

use crate::spec::{ModelSpec, ParamSpec};
use std::ops::Range;

/// Rows of a parameter, by its index in canonical order. The matrices of experts follow one another.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rows {
    /// Index of the parameter.
    pub param: usize,
    /// Range of its rows.
    pub range: Range<usize>,
}

/// A tensor of a checkpoint: a concatenation of rows of parameters.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Named {
    /// `model.layers.0.mlp.experts.3.up_proj.weight`.
    pub name: String,
    /// Its shape; the last dimension is a row's.
    pub shape: Vec<usize>,
    /// The rows that it consists of.
    pub rows: Vec<Rows>,
}

impl Named {
    /// Consecutive rows of one parameter.
    #[must_use]
    pub fn of(name: String, shape: Vec<usize>, param: usize, range: Range<usize>) -> Self {
        Self { name, shape, rows: vec![Rows { param, range }] }
    }

    /// Number of values.
    #[must_use]
    pub fn num_values(&self) -> usize {
        self.shape.iter().product()
    }

    /// Contiguous runs of values: a parameter's index, and the range of its values.
    pub fn runs(&self) -> impl Iterator<Item = (usize, Range<usize>)> + '_ {
        let cols = self.shape.last().copied().unwrap_or(0);
        self.rows.iter().map(move |rows| (rows.param, rows.range.start * cols..rows.range.end * cols))
    }
}

/// The halves of a gated projection.
const HALVES: [&str; 2] = ["gate_proj", "up_proj"];

/// The tensors of every parameter in canonical order, named by their ids: gated projections are split in halves, stacked experts one by
/// one, and everything else is unchanged. Each row appears exactly once.
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

/// Tensors with equal numbers of consecutive rows of a parameter, from row `first` on.
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
