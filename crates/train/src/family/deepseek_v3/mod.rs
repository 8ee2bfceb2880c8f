//! DeepSeek-V3 (`DeepseekV3ForCausalLM`): latent attention, sigmoid scores, and per-expert biases for selection only. Published checkpoints
//! have multi-token-prediction layers after the decoder layers (`model.layers.61.*` in V3). Nibble ignores these layers.

use super::latent::{LATENT, experts, read, read_groups, tensors, write, write_groups};
use super::shared::DECODER;
use super::{ConfigJson, Family, Field, Named};
use crate::config::{GroupScore, ModelConfig, Scores};
use crate::error::Result;
use crate::spec::ModelSpec;
use serde_json::{Map, Value};

/// DeepSeek-V3 models.
#[derive(Debug, Clone, Copy)]
pub struct DeepseekV3;

/// The key for the number of multi-token-prediction layers.
const MORE_LAYERS: &str = "num_nextn_predict_layers";

impl Family for DeepseekV3 {
    fn name(&self) -> &'static str {
        "deepseek_v3"
    }

    fn architecture(&self) -> &'static str {
        "DeepseekV3ForCausalLM"
    }

    fn fields(&self) -> Vec<Field> {
        let own = [
            experts("num_local_experts"),
            Field::always("scoring_func", "\"sigmoid\""),
            Field::always("topk_method", "\"noaux_tc\""),
            Field::switch("norm_topk_prob", |m| &mut m.norm_topk_prob).or("true").or_null("false"),
        ];
        [&DECODER[..], &LATENT, &own].concat()
    }

    fn absent(&self) -> &'static [(&'static str, &'static str)] {
        &[
            ("first_k_dense_replace", "3"),
            ("n_group", "8"),
            ("n_shared_experts", "1"),
            ("num_experts_per_tok", "8"),
            ("num_key_value_heads", "128"),
            ("q_lora_rank", "1536"),
            ("routed_scaling_factor", "2.5"),
            ("topk_group", "4"),
            ("v_head_dim", "128"),
        ]
    }

    fn read_rest(&self, json: &ConfigJson, model: &mut ModelConfig) -> Result<()> {
        (model.scores, model.router_bias) = (Scores::Sigmoid, true);
        read_groups(json, model, GroupScore::Top2)?;
        // The number is not used, because multi-token-prediction layers are recognized by the names of their tensors.
        json.count(MORE_LAYERS)?;
        // The layers of this family have no bias, whatever the values of these keys are.
        json.pass_over(&["mlp_bias", "num_mtp_layers"]);
        read(json, model)
    }

    fn write_rest(&self, model: &ModelConfig, keys: &mut Map<String, Value>) {
        keys.insert(MORE_LAYERS.into(), 0.into());
        write_groups(model, keys);
        write(model, keys);
    }

    fn tensors(&self, model: &ModelSpec) -> Vec<Named> {
        tensors(model)
    }

    fn passes_over(&self, name: &str, model: &ModelConfig) -> bool {
        let layer = name.strip_prefix("model.layers.").and_then(|rest| rest.split('.').next());
        layer.and_then(|layer| layer.parse::<usize>().ok()).is_some_and(|layer| layer >= model.layers)
    }
}
