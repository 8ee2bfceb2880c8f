//! What a checkpoint says of its model in `config.json`.

use crate::config::{Balance, ModelConfig};
use serde_json::{Map, Value, json};

/// The architecture by which `transformers` loads a model, and its type. Where it has none, a name that it does not know: a model
/// must not be taken for another.
fn architecture(m: &ModelConfig) -> (&'static str, &'static str) {
    // It has no model whose values are not as wide as keys.
    if m.value_head_dim() != m.head_dim {
        return match m.experts {
            0 => ("NibbleForCausalLM", "nibble"),
            _ => ("NibbleMoeForCausalLM", "nibble_moe"),
        };
    }
    match (m.experts, m.shared_ffn, m.qk_norm) {
        (0, _, true) => ("Qwen3ForCausalLM", "qwen3"),
        (0, _, false) => ("LlamaForCausalLM", "llama"),
        (_, 0, true) => ("Qwen3MoeForCausalLM", "qwen3_moe"),
        // Qwen3-MoE has no shared expert, and always norms of queries and keys.
        _ => ("NibbleMoeForCausalLM", "nibble_moe"),
    }
}

/// The factor under which the load-balancing loss of `transformers` is as strong as ours.
///
/// E experts, k of which each of a layer's T tokens is sent to; n_le tokens of layer l reach expert e, whose mean probability there is P_le. Ours
/// is added up over the L layers that have experts, each of which is 1 where it is balanced:
///
/// ```text
/// ours   = Σ_l E · Σ_e n_le / (k · T) · P_le
/// theirs = E · Σ_e F_e · P_e,   F_e = Σ_l n_le / (L · T),   P_e = Σ_l P_le / L
/// ```
///
/// Theirs (`load_balancing_loss_func` of Qwen3-MoE and Mixtral) takes the layers as one, and its shares F_e sum to k. Where n and P are the same in
/// every layer, F_e = n_e / T and P_e = P_le, so theirs = k · (ours / L): our factor times L / k is theirs, for the loss and so for its gradient. Where
/// layers differ the losses do too: one expert's surplus in a layer makes up for its lack in another in theirs, and in ours does not; nor does
/// ours take the shards of a step together. Under `balance = "batch"` the loss is theirs, and so is its factor.
fn their_aux_loss_coef(m: &ModelConfig) -> f64 {
    if m.balance == Balance::Batch {
        return m.aux_loss_coef;
    }
    m.aux_loss_coef * m.num_routed() as f64 / m.top_k as f64
}

/// The model's sizes under the names of its architecture. `seq_len` is that of training.
pub(super) fn config_json(m: &ModelConfig, seq_len: usize) -> Value {
    let (architecture, model_type) = architecture(m);
    let mut config = Map::new();
    let mut add = |key: &str, value: Value| config.insert(key.to_owned(), value);
    add("architectures", json!([architecture]));
    add("model_type", model_type.into());
    add("vocab_size", m.vocab_size.into());
    add("hidden_size", m.d_model.into());
    add("num_hidden_layers", m.layers.into());
    add("num_attention_heads", m.heads.into());
    add("num_key_value_heads", m.kv_heads.into());
    add("head_dim", m.head_dim.into());
    add("attention_bias", false.into());
    add("rope_theta", m.rope_theta.into());
    add("rms_norm_eps", m.norm_eps.into());
    add("tie_word_embeddings", m.tie_embeddings.into());
    add("max_position_embeddings", seq_len.into());
    add("hidden_act", "silu".into());
    add("torch_dtype", "float32".into());
    if m.num_dense() > 0 {
        add("intermediate_size", m.ffn.into());
    }
    if m.experts == 0 {
        add("mlp_bias", false.into());
    } else {
        add("num_experts", m.experts.into());
        add("num_experts_per_tok", m.top_k.into());
        add("moe_intermediate_size", m.expert_ffn.into());
        add("shared_expert_intermediate_size", m.shared_ffn.into());
        add("norm_topk_prob", m.norm_topk_prob.into());
        add("router_aux_loss_coef", their_aux_loss_coef(m).into());
        if m.balance == Balance::Batch {
            add("nibble_balance", "batch".into());
        }
        add("router_z_loss_coef", m.z_loss_coef.into());
        add("decoder_sparse_step", 1.into());
        add("mlp_only_layers", json!((0..m.num_dense()).collect::<Vec<_>>()));
    }
    if architecture.starts_with("Nibble") {
        add("qk_norm", m.qk_norm.into());
        add("v_head_dim", m.value_head_dim().into());
    }
    Value::Object(config)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Config;

    #[test]
    fn each_shape_has_the_architecture_that_loads_it() {
        const DENSE: [&str; 6] = [
            "model.experts=0",
            "model.ffn=96",
            "model.top_k=0",
            "model.expert_ffn=0",
            "model.norm_topk_prob=false",
            "model.aux_loss_coef=0",
        ];
        let of = |changes: &[&str]| -> Value {
            let changes: Vec<String> = changes.iter().map(ToString::to_string).collect();
            let model = Config::load("tiny", &changes).unwrap().model;
            config_json(&model, 128)
        };
        let named = |changes: &[&str]| of(changes)["architectures"][0].as_str().unwrap().to_owned();
        assert_eq!(named(&[]), "Qwen3MoeForCausalLM");
        assert_eq!(named(&DENSE), "Qwen3ForCausalLM");
        assert_eq!(named(&[&DENSE[..], &["model.qk_norm=false"]].concat()), "LlamaForCausalLM");
        assert_eq!(named(&["model.shared_ffn=32"]), "NibbleMoeForCausalLM");
        assert_eq!(named(&["model.qk_norm=false"]), "NibbleMoeForCausalLM");
        assert_eq!(named(&["model.value_head_dim=16"]), "Qwen3MoeForCausalLM");
        assert_eq!(named(&[&DENSE[..], &["model.value_head_dim=8"]].concat()), "NibbleForCausalLM");
        let wide = of(&["model.value_head_dim=32"]);
        assert_eq!(wide["model_type"], "nibble_moe");
        assert_eq!((&wide["head_dim"], &wide["v_head_dim"]), (&json!(16), &json!(32)));
        let mixed = of(&["model.layers=4", "model.dense_layers=2", "model.ffn=96"]);
        assert_eq!(mixed["architectures"][0], "Qwen3MoeForCausalLM");
        assert_eq!((&mixed["mlp_only_layers"], &mixed["intermediate_size"]), (&json!([0, 1]), &json!(96)));
        let dense = of(&DENSE);
        assert!(dense.get("num_experts").is_none() && dense.get("mlp_only_layers").is_none(), "{dense}");
    }
}
