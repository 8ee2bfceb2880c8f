//! DeepSeek-V2 and V2-Lite (`DeepseekV2ForCausalLM`): latent attention, and softmax scores without normalization. V2 selects experts from
//! groups. `transformers` has no load-balancing loss for this family; `aux_loss_alpha` is a key of the original implementation.

use super::latent::{GROUPS, LATENT, TOP_GROUPS, experts, read, read_groups, tensors, write, write_groups};
use super::shared::DECODER;
use super::{ConfigJson, Family, Field, Named};
use crate::config::{GroupScore, ModelConfig};
use crate::error::Result;
use crate::spec::ModelSpec;
use nibble_core::shortened;
use serde_json::{Map, Value};

/// The models DeepSeek-V2 and DeepSeek-V2-Lite. In V2-Lite, queries have no latent.
#[derive(Debug, Clone, Copy)]
pub struct DeepseekV2;

/// The key that says how experts are selected: from all experts, or from the experts of the best groups.
const METHOD: &str = "topk_method";
const OF_ALL: &str = "greedy";
const OF_GROUPS: &str = "group_limited_greedy";

impl Family for DeepseekV2 {
    fn name(&self) -> &'static str {
        "deepseek_v2"
    }

    fn architecture(&self) -> &'static str {
        "DeepseekV2ForCausalLM"
    }

    fn fields(&self) -> Vec<Field> {
        let own = [
            experts("num_experts"),
            Field::always("scoring_func", "\"softmax\""),
            Field::always("norm_topk_prob", "false").or_null("false"),
            Field::always("mlp_bias", "false"),
        ];
        [&DECODER[..], &LATENT, &own].concat()
    }

    fn absent(&self) -> &'static [(&'static str, &'static str)] {
        &[
            ("first_k_dense_replace", "0"),
            ("n_shared_experts", "2"),
            ("q_lora_rank", "1536"),
            ("routed_scaling_factor", "1.0"),
            ("v_head_dim", "128"),
        ]
    }

    fn read_rest(&self, json: &ConfigJson, model: &mut ModelConfig) -> Result<()> {
        match json.word(METHOD)?.unwrap_or(OF_ALL) {
            // The keys of groups have no effect with this method.
            OF_ALL => json.pass_over(&[GROUPS, TOP_GROUPS]),
            OF_GROUPS => read_groups(json, model, GroupScore::Max)?,
            other => {
                let other = shortened(other);
                let why = format!("is \"{other}\", expected \"{OF_ALL}\" or \"{OF_GROUPS}\"");
                return Err(json.error(METHOD, why));
            }
        }
        read(json, model)
    }

    fn write_rest(&self, model: &ModelConfig, keys: &mut Map<String, Value>) {
        let method = if model.groups > 0 { OF_GROUPS } else { OF_ALL };
        keys.insert(METHOD.into(), method.into());
        write_groups(model, keys);
        write(model, keys);
    }

    fn tensors(&self, model: &ModelSpec) -> Vec<Named> {
        tensors(model)
    }
}
