//! Tensors of parameters, both ways: MLPs' first projections by halves, stacked experts one by one.

use crate::family::Named;
use crate::spec::ParamSpec;

/// The halves of a gated projection.
const HALVES: [&str; 2] = ["gate_proj", "up_proj"];

/// The tensors that one parameter is written as.
pub(super) fn tensors(param: &ParamSpec) -> Vec<Named> {
    let (rows, cols) = param.shape();
    if let Some(experts) = param.experts {
        let (layer, part) = param.id.rsplit_once('.').unwrap_or(("", &param.id));
        let parts: &[&str] = if part == "gate_up_proj" { &HALVES } else { &[part] };
        let expert = |e: usize| side_by_side(&format!("{layer}.{e}"), parts, (rows, cols), e * rows);
        return (0..experts.value).flat_map(expert).collect();
    }
    if let Some(layer) = param.id.strip_suffix(".gate_up_proj.weight") {
        return side_by_side(layer, &HALVES, (rows, cols), 0);
    }
    let shape = if rows > 1 { vec![rows, cols] } else { vec![cols] };
    vec![Named { name: param.id.clone(), first_row: 0, shape }]
}

/// Tensors of as many rows each, one after the other, that are rows of a parameter from `first` on.
fn side_by_side(layer: &str, parts: &[&str], (rows, cols): (usize, usize), first: usize) -> Vec<Named> {
    let each = rows / parts.len().max(1);
    let named = |(i, part): (usize, &&str)| Named {
        name: format!("{layer}.{part}.weight"),
        first_row: first + i * each,
        shape: vec![each, cols],
    };
    parts.iter().enumerate().map(named).collect()
}
