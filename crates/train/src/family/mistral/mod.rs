//! Mistral 7B and its successors (`MistralForCausalLM`): Llama with a sliding window in all layers, or in none. Tensor names equal
//! the parameters' ids.

use super::windows::{Windowed, read_windows, write_windows};
use super::{ConfigJson, Family, Field, Llama};
use crate::config::ModelConfig;
use crate::error::Result;
use serde_json::{Map, Value};

/// Mistral 7B.
#[derive(Debug, Clone, Copy)]
pub struct Mistral;

impl Family for Mistral {
    fn name(&self) -> &'static str {
        "mistral"
    }

    fn architecture(&self) -> &'static str {
        "MistralForCausalLM"
    }

    fn fields(&self) -> Vec<Field> {
        Llama.fields()
    }

    fn absent(&self) -> &'static [(&'static str, &'static str)] {
        &[("num_key_value_heads", "8"), ("sliding_window", "4096")]
    }

    fn read_rest(&self, json: &ConfigJson, model: &mut ModelConfig) -> Result<()> {
        read_windows(json, model, Windowed::Always)?;
        Llama.read_rest(json, model)
    }

    fn write_rest(&self, model: &ModelConfig, keys: &mut Map<String, Value>) {
        write_windows(model, keys, Windowed::Always);
        Llama.write_rest(model, keys);
    }
}
