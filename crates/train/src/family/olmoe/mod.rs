//! OLMoE (`OlmoeForCausalLM`): experts in every layer, a QK norm over all heads together, and scores without normalization. Tensor names
//! equal the parameters' ids. `clip_qkv`, which was used to train some OLMoE models, is not supported.

use super::shared::{
    AUX, DECODER, GROUPED_QUERY, MIXTURE, NO_BIAS, read_balance, read_heads, read_rope, write_balance,
    write_rope,
};
use super::{ConfigJson, Family, Field};
use crate::config::{ModelConfig, QkNorm};
use crate::error::Result;
use serde_json::{Map, Value};

/// OLMoE models.
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
            Field::size("intermediate_size", |m| &mut m.expert_ffn),
            Field::number("rms_norm_eps", |m| &mut m.norm_eps).or("1e-5"),
            NO_BIAS,
            Field::always("clip_qkv", "null").or_null("null"),
        ];
        [&DECODER[..], &GROUPED_QUERY, &MIXTURE, &own].concat()
    }

    fn absent(&self) -> &'static [(&'static str, &'static str)] {
        &[(AUX, "0.01"), ("num_experts_per_tok", "8")]
    }

    fn read_rest(&self, json: &ConfigJson, model: &mut ModelConfig) -> Result<()> {
        model.qk_norm = QkNorm::Width;
        read_heads(json, model)?;
        if model.heads * model.head_dim != model.d_model {
            let (heads, d_model) = (model.heads, model.d_model);
            let why = format!(
                "is {}; num_attention_heads = {heads} of them are as wide as hidden_size = {d_model} here",
                model.head_dim
            );
            return Err(json.error("head_dim", why));
        }
        read_balance(json, model)?;
        read_rope(json, model)
    }

    fn write_rest(&self, model: &ModelConfig, keys: &mut Map<String, Value>) {
        // If these keys were missing, `transformers` would use the ids of OLMoE's tokenizer, and would give the padding token's embedding
        // no gradient.
        for token in ["pad_token_id", "eos_token_id"] {
            keys.insert(token.into(), Value::Null);
        }
        write_balance(model, keys);
        write_rope(model, keys);
    }
}
