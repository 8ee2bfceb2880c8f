//! Qwen3-MoE (`Qwen3MoeForCausalLM`): experts, and a QK norm per head. Tensor names equal the parameters' ids. Experts are stacked in
//! Nibble, and separate tensors in Qwen3-MoE. Dense layers must be the first layers: `mlp_only_layers` may not list other layers.

use super::shared::{
    AUX, DECODER, GROUPED_QUERY, MIXTURE, NO_BIAS, read_balance, read_heads, read_rope, write_balance,
    write_rope,
};
use super::windows::{Windowed, read_windows, write_windows};
use super::{ConfigJson, Family, Field};
use crate::config::{ModelConfig, QkNorm};
use crate::error::Result;
use nibble_core::shortened;
use serde_json::{Map, Value};

/// The mixture-of-experts models of Qwen3.
#[derive(Debug, Clone, Copy)]
pub struct Qwen3Moe;

/// The key with the indices of the layers without experts.
const DENSE: &str = "mlp_only_layers";
/// The key with the width of the MLPs in dense layers. The key also appears in files of models without dense layers.
const FFN: &str = "intermediate_size";

impl Family for Qwen3Moe {
    fn name(&self) -> &'static str {
        "qwen3_moe"
    }

    fn architecture(&self) -> &'static str {
        "Qwen3MoeForCausalLM"
    }

    fn fields(&self) -> Vec<Field> {
        let own = [
            Field::size("moe_intermediate_size", |m| &mut m.expert_ffn),
            Field::number("rms_norm_eps", |m| &mut m.norm_eps).or("1e-6"),
            NO_BIAS,
            Field::always("decoder_sparse_step", "1"),
        ];
        [&DECODER[..], &GROUPED_QUERY, &MIXTURE, &own].concat()
    }

    fn absent(&self) -> &'static [(&'static str, &'static str)] {
        &[
            ("num_key_value_heads", "4"),
            (AUX, "0.001"),
            ("num_experts_per_tok", "8"),
            ("sliding_window", "4096"),
        ]
    }

    fn read_rest(&self, json: &ConfigJson, model: &mut ModelConfig) -> Result<()> {
        model.qk_norm = QkNorm::Heads;
        read_windows(json, model, Windowed::All)?;
        if let Some(dense) = json.get(DENSE) {
            let numbers = dense.as_array().map(Vec::as_slice).unwrap_or_default();
            let is_first = |(i, layer): (usize, &Value)| layer.as_u64() == Some(i as u64);
            if !dense.is_array() || !numbers.iter().enumerate().all(is_first) || numbers.len() >= model.layers
            {
                let why = format!(
                    "is {}; the decoder has dense layers before all others: [0, 1, ...], or none",
                    shortened(&dense.to_string())
                );
                return Err(json.error(DENSE, why));
            }
            model.dense_layers = numbers.len();
        }
        let ffn = json.count(FFN)?;
        model.ffn = if model.dense_layers > 0 { ffn.ok_or_else(|| json.missing(FFN))? } else { 0 };
        read_heads(json, model)?;
        read_balance(json, model)?;
        read_rope(json, model)
    }

    fn write_rest(&self, model: &ModelConfig, keys: &mut Map<String, Value>) {
        keys.insert(DENSE.into(), (0..model.num_dense()).collect::<Vec<_>>().into());
        if model.num_dense() > 0 {
            keys.insert(FFN.into(), model.ffn.into());
        }
        write_windows(model, keys, Windowed::All);
        write_balance(model, keys);
        write_rope(model, keys);
    }
}
