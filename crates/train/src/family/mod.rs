//! Families of models: what their tensors and sizes are called outside of Nibble.
//!
//! A parameter's id decides its initial values, its random bits and its place in a run; the name under which a checkpoint has it, and how its rows
//! lie in tensors there, is its family's choice. So a family changes no weight, and the same model can be written as any family that has
//! names for its parts. No family computes: what it cannot say in names and orders of rows is a choice of the decoder.
//!
//! A family is a folder here and a place in [`FAMILIES`]: names and layouts of tensors, what `config.json` says, both ways, and in its first comment
//! which models those are and where they differ from what loads them. No setting chooses one: the sizes of the model do. Where a family takes models that
//! another one had, checkpoints that were written before are not found under the new names.

mod names;
mod qwen;

pub use names::{Named, Rows, as_they_are};
pub use qwen::Qwen;

use crate::config::ModelConfig;
use crate::spec::ModelSpec;
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

    /// The tensors that a checkpoint holds of a model, whose rows are all rows of all parameters, each once. A model is written as they say, and read
    /// by the same list. A gated projection is one parameter, the gate's rows before the up projection's.
    fn tensors(&self, model: &ModelSpec) -> Vec<Named>;

    /// What `config.json` says of a model, for others: nothing here reads it. `seq_len` is that of training.
    fn config_json(&self, model: &ModelConfig, seq_len: usize) -> serde_json::Value;
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Config;
    use std::collections::BTreeSet;

    /// What is written can be read: the tensors' rows are all rows of all parameters, each once, and no two tensors have one name.
    #[test]
    fn tensors_are_the_parameters_and_no_name_stands_twice() {
        let shapes: [&[&str]; 4] = [
            &[],
            &["model.shared_ffn=32", "model.tie_embeddings=false", "model.value_head_dim=8"],
            &["model.layers=3", "model.dense_layers=1", "model.ffn=96"],
            &["model.experts=1", "model.top_k=1"],
        ];
        for family in FAMILIES {
            for changes in shapes {
                let changes: Vec<String> = changes.iter().map(ToString::to_string).collect();
                let model = ModelSpec::new(&Config::load("tiny", &changes).unwrap().model);
                let params: Vec<_> = model.params().collect();
                let mut left: Vec<BTreeSet<usize>> =
                    params.iter().map(|param| (0..param.stack() * param.shape().0).collect()).collect();
                let mut names = BTreeSet::new();
                for tensor in family.tensors(&model) {
                    assert!(names.insert(tensor.name.clone()), "{}: {}", family.name(), tensor.name);
                    let cols = tensor.shape.last().unwrap();
                    let rows: usize = tensor.rows.iter().map(|rows| rows.range.len()).sum();
                    assert_eq!(rows * cols, tensor.num_values(), "{}: {tensor:?}", family.name());
                    for Rows { param, range } in tensor.rows {
                        assert_eq!(params[param].shape().1, *cols, "{}: {}", family.name(), tensor.name);
                        for row in range {
                            assert!(
                                left[param].remove(&row),
                                "{}: row {row} of {}",
                                family.name(),
                                tensor.name
                            );
                        }
                    }
                }
                assert!(left.iter().all(BTreeSet::is_empty), "{}: {left:?}", family.name());
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
