//! OLMoE (`OlmoeForCausalLM`): experts in every layer, queries and keys normed over all their heads together, scores not normalised. The ids of parts are
//! its names. `clip_qkv`, which some of its trainings used, is not here.

use super::shared::{DECODER, MIXTURE, read_balance, read_heads, read_rope, write_balance, write_rope};
use super::{ConfigJson, Family, Field, Named, as_they_are};
use crate::config::{ModelConfig, QkNorm};
use crate::error::Result;
use crate::spec::ModelSpec;
use serde_json::{Map, Value};

/// OLMoE.
#[derive(Debug, Clone, Copy)]
pub struct Olmoe;

impl Family for Olmoe {
    fn name(&self) -> &'static str {
        "olmoe"
    }

    fn architecture(&self) -> &'static str {
        "OlmoeForCausalLM"
    }

    fn fields(&self) -> Vec<Field> {
        let own = [
            Field::size("num_key_value_heads", |m| &mut m.kv_heads).or("0"),
            Field::size("intermediate_size", |m| &mut m.expert_ffn),
            Field::number("rms_norm_eps", |m| &mut m.norm_eps).or("1e-5"),
            Field::always("attention_bias", "false"),
            Field::always("clip_qkv", "null"),
        ];
        [&DECODER[..], &MIXTURE, &own].concat()
    }

    fn read_rest(&self, json: &ConfigJson, model: &mut ModelConfig) -> Result<()> {
        model.qk_norm = QkNorm::Width;
        // Heads are as wide as the model together.
        model.head_dim = 0;
        read_heads(json, model)?;
        read_balance(json, model)?;
        read_rope(json, model)
    }

    fn write_rest(&self, model: &ModelConfig, keys: &mut Map<String, Value>) {
        // Not said, they are those of its own tokenizer, and `transformers` gives the embedding of a token for padding no gradient.
        for token in ["pad_token_id", "eos_token_id"] {
            keys.insert(token.into(), Value::Null);
        }
        write_balance(model, keys);
        write_rope(model, keys);
    }

    fn tensors(&self, model: &ModelSpec) -> Vec<Named> {
        as_they_are(model)
    }
}
