//! Qwen2 and Qwen2.5 (`Qwen2ForCausalLM`): dense layers without QK norm. The QKV projections have biases, which `config.json` does not
//! mention. Tensor names equal the parameters' ids.

use super::shared::{DECODER, DENSE, GROUPED_QUERY, read_dense, write_rope};
use super::windows::{Windowed, read_windows, write_windows};
use super::{ConfigJson, Family, Field};
use crate::config::{ModelConfig, QkNorm};
use crate::error::Result;
use serde_json::{Map, Value};

/// Qwen2 and Qwen2.5 models.
#[derive(Debug, Clone, Copy)]
pub struct Qwen2;

impl Family for Qwen2 {
    fn name(&self) -> &'static str {
        "qwen2"
    }

    fn architecture(&self) -> &'static str {
        "Qwen2ForCausalLM"
    }

    fn fields(&self) -> Vec<Field> {
        [&DECODER[..], &GROUPED_QUERY, &DENSE, &[Field::always("use_mrope", "false")]].concat()
    }

    fn absent(&self) -> &'static [(&'static str, &'static str)] {
        &[("num_key_value_heads", "32"), ("sliding_window", "4096")]
    }

    fn read_rest(&self, json: &ConfigJson, model: &mut ModelConfig) -> Result<()> {
        model.qkv_bias = true;
        // This key has no effect in this family.
        json.pass_over(&["attention_bias"]);
        read_windows(json, model, Windowed::Named)?;
        read_dense(json, model, QkNorm::None)
    }

    fn write_rest(&self, model: &ModelConfig, keys: &mut Map<String, Value>) {
        write_windows(model, keys, Windowed::Named);
        write_rope(model, keys);
    }
}
