//! Parameters under the names Hugging Face's `transformers` gives them: stacked experts one by one.

use super::Decoder;
use crate::param::{Param, Placement};
use nibble_core::Kernels;

/// A tensor of a checkpoint: rows `first_row .. first_row + rows` of the whole (all ranks') parameter.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Named {
    /// `model.layers.0.mlp.experts.3.up_proj.weight`.
    pub name: String,
    /// First row in the parameter.
    pub first_row: usize,
    /// Its shape; norms have one dimension.
    pub shape: Vec<usize>,
}

impl Named {
    /// Where its first value lies in the whole parameter.
    pub fn first_value(&self) -> usize {
        match self.shape.as_slice() {
            [] | [_] => self.first_row,
            [.., cols] => self.first_row * cols,
        }
    }
}

/// The tensors one parameter is written as. `experts` counts them over all ranks.
fn tensors<B: Kernels>(param: &Param<B>, experts: usize) -> Vec<Named> {
    let (rows, cols) = param.master.shape();
    if let Placement::Experts(local) = param.placement {
        let each = rows / local.max(1);
        let (layer, part) = param.name.rsplit_once('.').unwrap_or(("", &param.name));
        let parts: &[&str] = if part == "gate_up_proj" { &["gate_proj", "up_proj"] } else { &["down_proj"] };
        let part_rows = each / parts.len();
        return (0..experts)
            .flat_map(|e| {
                parts.iter().enumerate().map(move |(i, part)| Named {
                    name: format!("{layer}.{e}.{part}.weight"),
                    first_row: e * each + i * part_rows,
                    shape: vec![part_rows, cols],
                })
            })
            .collect();
    }
    if let Some(layer) = param.name.strip_suffix(".gate_up_proj.weight") {
        return ["gate_proj", "up_proj"]
            .iter()
            .enumerate()
            .map(|(i, part)| Named {
                name: format!("{layer}.{part}.weight"),
                first_row: i * rows / 2,
                shape: vec![rows / 2, cols],
            })
            .collect();
    }
    let shape = if param.decays { vec![rows, cols] } else { vec![cols] };
    vec![Named { name: param.name.clone(), first_row: 0, shape }]
}

impl<B: Kernels> Decoder<B> {
    /// For each parameter in canonical order, the tensors a checkpoint holds of it.
    pub fn named_tensors(&mut self) -> Vec<Vec<Named>> {
        let experts = self.config.experts;
        self.params().into_iter().map(|p| tensors(p, experts)).collect()
    }
}
