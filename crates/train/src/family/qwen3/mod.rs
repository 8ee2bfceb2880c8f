//! Qwen3 (`Qwen3ForCausalLM`): dense layers, each head of queries and keys normed. The ids of parts are its names.

use super::shared::{DECODER, DENSE, GROUPED_QUERY, read_dense, write_rope};
use super::{ConfigJson, Family, Field, Named, as_they_are};
use crate::config::{ModelConfig, QkNorm};
use crate::error::Result;
use crate::spec::ModelSpec;
use serde_json::{Map, Value};

/// Qwen3's dense models.
#[derive(Debug, Clone, Copy)]
pub struct Qwen3;

impl Family for Qwen3 {
    fn name(&self) -> &'static str {
        "qwen3"
    }

    fn architecture(&self) -> &'static str {
        "Qwen3ForCausalLM"
    }

    fn fields(&self) -> Vec<Field> {
        [&DECODER[..], &GROUPED_QUERY, &DENSE, &[Field::always("use_sliding_window", "false")]].concat()
    }

    fn read_rest(&self, json: &ConfigJson, model: &mut ModelConfig) -> Result<()> {
        read_dense(json, model, QkNorm::Heads)
    }

    fn write_rest(&self, model: &ModelConfig, keys: &mut Map<String, Value>) {
        write_rope(model, keys);
    }

    fn tensors(&self, model: &ModelSpec) -> Vec<Named> {
        as_they_are(model)
    }
}
