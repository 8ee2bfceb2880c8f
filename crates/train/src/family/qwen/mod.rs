//! Qwen3, Qwen3-MoE and Llama, as Hugging Face's `transformers` writes them: the ids of parts are their names.
//!
//! Differences: gate and up projection of an MLP lie in one matrix here and in two tensors there; experts are a stack here and one by one
//! there. A model that `transformers` does not have is written with the same names, under an architecture that it does not know
//! (`NibbleForCausalLM`), so that it is not taken for another.

mod config;

use super::{Family, Named, as_they_are};
use crate::config::ModelConfig;
use crate::spec::ModelSpec;

/// Qwen3, Qwen3-MoE, Llama, and what Nibble has beyond them.
#[derive(Debug, Clone, Copy)]
pub struct Qwen;

impl Family for Qwen {
    fn name(&self) -> &'static str {
        "Qwen3 and Llama"
    }

    fn has(&self, _: &ModelConfig) -> bool {
        true
    }

    fn tensors(&self, model: &ModelSpec) -> Vec<Named> {
        as_they_are(model)
    }

    fn config_json(&self, model: &ModelConfig, seq_len: usize) -> serde_json::Value {
        config::config_json(model, seq_len)
    }
}
