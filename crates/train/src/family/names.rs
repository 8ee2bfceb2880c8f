//! Tensors of parameters: whose rows they are, in which order, and under which name most families have them.

use crate::spec::{ModelSpec, ParamSpec};
use std::ops::Range;

/// Rows of a parameter: its number in canonical order, and which of all ranks' rows. Experts' matrices lie one after the other.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rows {
    /// Number of the parameter.
    pub param: usize,
    /// Which of its rows.
    pub range: Range<usize>,
}

/// A tensor of a checkpoint: rows of parameters, one after the other.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Named {
    /// `model.layers.0.mlp.experts.3.up_proj.weight`.
    pub name: String,
    /// Its shape; the last dimension is a row's.
    pub shape: Vec<usize>,
    /// The rows of parameters that are its own.
    pub rows: Vec<Rows>,
}

impl Named {
    /// Rows of one parameter, in their order.
    #[must_use]
    pub fn of(name: String, shape: Vec<usize>, param: usize, range: Range<usize>) -> Self {
        Self { name, shape, rows: vec![Rows { param, range }] }
    }

    /// How many values it has.
    #[must_use]
    pub fn num_values(&self) -> usize {
        self.shape.iter().product()
    }

    /// Runs of values one after the other: a parameter's number, and which of its values.
    pub fn runs(&self) -> impl Iterator<Item = (usize, Range<usize>)> + '_ {
        let cols = self.shape.last().copied().unwrap_or(0);
        self.rows.iter().map(move |rows| (rows.param, rows.range.start * cols..rows.range.end * cols))
    }
}

/// The halves of a gated projection.
const HALVES: [&str; 2] = ["gate_proj", "up_proj"];

/// The tensors of every parameter in canonical order, by their ids: MLPs' first projections by halves, stacked experts one by one, and everything else
/// as it is. No row is anywhere else.
#[must_use]
pub fn as_they_are(model: &ModelSpec) -> Vec<Named> {
    model.params().enumerate().flat_map(|(number, param)| of_param(number, &param)).collect()
}

/// The tensors that one parameter is written as.
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

/// Tensors of as many rows each, one after the other, that are rows of a parameter from `first` on.
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
