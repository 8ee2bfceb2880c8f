//! Families of models: what their tensors and sizes are called outside of Nibble.
//!
//! A parameter's id decides its initial values, its random bits and its place in a run; the name under which a checkpoint has it, and how it is
//! cut into tensors there, is its family's choice. So a family changes no weight, and the same model can be written as any family that has
//! names for its parts.
//!
//! A family is a folder here and a place in [`FAMILIES`]: names and layouts of tensors, what `config.json` says, and in its first comment
//! which models those are and where they differ from what loads them. No setting chooses one: the sizes of the model do. Where a family takes models that
//! another one had, checkpoints that were written before are not found under the new names.

mod qwen;

pub use qwen::Qwen;

use crate::config::ModelConfig;
use crate::spec::{ModelSpec, ParamSpec};
use std::fmt;

/// Every family; the first that has a model is the one it is written as. The last has all of them.
pub const FAMILIES: [&dyn Family; 1] = [&Qwen];

/// The family that a model is written as.
#[must_use]
pub fn of(model: &ModelConfig) -> &'static dyn Family {
    FAMILIES.into_iter().find(|family| family.has(model)).unwrap_or(&Qwen)
}

/// The names of models outside of Nibble.
pub trait Family: fmt::Debug + Sync {
    /// Its name, for people.
    fn name(&self) -> &'static str;

    /// Whether models of these sizes are written as of this family.
    fn has(&self, model: &ModelConfig) -> bool;

    /// The tensors that a checkpoint holds of a parameter. Together they are all of its rows, over all ranks, each once and in their order: a
    /// parameter is written as they say, and read by the same list. None is transposed, reordered, or rows of two parameters. A gated projection
    /// is one parameter, the gate's rows before the up projection's.
    fn tensors(&self, param: &ParamSpec) -> Vec<Named>;

    /// What `config.json` says of a model, for others: nothing here reads it. `seq_len` is that of training.
    fn config_json(&self, model: &ModelConfig, seq_len: usize) -> serde_json::Value;
}

/// A tensor of a checkpoint: rows `first_row .. first_row + rows` of the whole (all ranks') parameter.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Named {
    /// `model.layers.0.mlp.experts.3.up_proj.weight`.
    pub name: String,
    /// First row in the parameter.
    pub first_row: usize,
    /// Its shape; the last dimension is a row's.
    pub shape: Vec<usize>,
}

impl Named {
    /// Where its first value lies in the whole parameter.
    #[must_use]
    pub fn first_value(&self) -> usize {
        self.first_row * self.shape.last().copied().unwrap_or(0)
    }

    /// How many values it has.
    #[must_use]
    pub fn num_values(&self) -> usize {
        self.shape.iter().product()
    }
}

/// For each parameter in canonical order, the tensors that a checkpoint holds of it.
#[must_use]
pub fn tensors(family: &dyn Family, model: &ModelSpec) -> Vec<Vec<Named>> {
    model.params().map(|param| family.tensors(&param)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Config;
    use std::collections::BTreeSet;

    /// What is written can be read: the tensors of a parameter are all of it, in order, and no two have one name.
    #[test]
    fn tensors_are_their_parameters_and_no_name_stands_twice() {
        let shapes: [&[&str]; 4] = [
            &[],
            &["model.shared_ffn=32", "model.tie_embeddings=false", "model.value_head_dim=8"],
            &["model.layers=3", "model.dense_layers=1", "model.ffn=96"],
            &["model.experts=1", "model.top_k=1"],
        ];
        for family in FAMILIES {
            for changes in shapes {
                let changes: Vec<String> = changes.iter().map(ToString::to_string).collect();
                let model = Config::load("tiny", &changes).unwrap().model;
                let mut names = BTreeSet::new();
                for param in ModelSpec::new(&model).params() {
                    let mut end = 0;
                    for tensor in family.tensors(&param) {
                        assert_eq!(tensor.first_value(), end, "{}: {tensor:?}", family.name());
                        end += tensor.num_values();
                        assert!(names.insert(tensor.name.clone()), "{}: {}", family.name(), tensor.name);
                    }
                    assert_eq!(Some(end as u128), param.count(), "{}: {}", family.name(), param.id);
                }
            }
        }
    }

    #[test]
    fn every_model_has_a_family() {
        assert!(FAMILIES.last().unwrap().has(&ModelConfig::default()));
        let names: BTreeSet<&str> = FAMILIES.iter().map(|family| family.name()).collect();
        assert_eq!(names.len(), FAMILIES.len());
    }
}
