//! Qwen3 (`Qwen3ForCausalLM`): dense layers with a QK norm per head. Tensor names equal the parameters' ids.

use super::shared::{DECODER, DENSE, GROUPED_QUERY, NO_BIAS, read_dense, write_rope};
use super::windows::{Windowed, read_windows, write_windows};
use super::{ConfigJson, Family, Field};
use crate::config::{ModelConfig, QkNorm};
use crate::error::Result;
use serde_json::{Map, Value};

/// The dense models of Qwen3, which have no experts.
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
        [&DECODER[..], &GROUPED_QUERY, &DENSE, &[NO_BIAS]].concat()
    }

    fn absent(&self) -> &'static [(&'static str, &'static str)] {
        &[("num_key_value_heads", "32"), ("head_dim", "128"), ("sliding_window", "4096")]
    }

    fn read_rest(&self, json: &ConfigJson, model: &mut ModelConfig) -> Result<()> {
        const HEAD: &str = "head_dim";
        if json.is_null(HEAD) {
            return Err(json.error(
                HEAD,
                "is null, expected a width: of this family not what the model's width leaves to each head",
            ));
        }
        read_windows(json, model, Windowed::Named)?;
        read_dense(json, model, QkNorm::Heads)
    }

    fn write_rest(&self, model: &ModelConfig, keys: &mut Map<String, Value>) {
        write_windows(model, keys, Windowed::Named);
        write_rope(model, keys);
    }
}
