//! Llama (`LlamaForCausalLM`): dense layers without QK norm. Tensor names equal the parameters' ids.

use super::shared::{DECODER, DENSE, GROUPED_QUERY, NO_BIAS, read_dense, write_rope};
use super::{ConfigJson, Family, Field};
use crate::config::{ModelConfig, QkNorm};
use crate::error::Result;
use serde_json::{Map, Value};

/// Llama 2 and Llama 3 models.
#[derive(Debug, Clone, Copy)]
pub struct Llama;

impl Family for Llama {
    fn name(&self) -> &'static str {
        "llama"
    }

    fn architecture(&self) -> &'static str {
        "LlamaForCausalLM"
    }

    fn fields(&self) -> Vec<Field> {
        [&DECODER[..], &GROUPED_QUERY, &DENSE, &[NO_BIAS, Field::always("mlp_bias", "false")]].concat()
    }

    fn read_rest(&self, json: &ConfigJson, model: &mut ModelConfig) -> Result<()> {
        read_dense(json, model, QkNorm::None)
    }

    fn write_rest(&self, model: &ModelConfig, keys: &mut Map<String, Value>) {
        write_rope(model, keys);
    }
}
