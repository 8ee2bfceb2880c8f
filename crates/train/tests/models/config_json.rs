//! What is read of a `config.json` is what the configuration classes of `transformers` make of it, or an error that names a key: each key of each family
//! removed, `null`, changed, and under two names ([`make.py`](config_json/make.py) wrote the cases).

use nibble_train::config::{GroupScore, ModelConfig, QkNorm, RopeScalingKind, Scores};
use nibble_train::family::{self, ConfigJson};
use serde_json::{Map, Value, json};
use std::path::Path;

/// What a model computes, in the words of the cases.
fn computes(family: &str, m: &ModelConfig) -> Value {
    let s = &m.rope_scaling;
    let mut rope = json!({"kind": "default", "theta": m.rope_theta});
    if s.kind != RopeScalingKind::None {
        rope = json!({"kind": s.kind.name(), "theta": m.rope_theta, "factor": s.factor, "original": s.original_positions});
    }
    match s.kind {
        RopeScalingKind::None => {}
        RopeScalingKind::Llama3 => {
            (rope["low"], rope["high"]) = (s.low_freq_factor.into(), s.high_freq_factor.into());
        }
        RopeScalingKind::Yarn => {
            (rope["fast"], rope["slow"]) = (s.beta_fast.into(), s.beta_slow.into());
            (rope["mscale"], rope["mscale_all_dim"]) = (s.mscale.into(), s.mscale_all_dim.into());
        }
    }
    let windows: Vec<Option<usize>> = (0..m.layers).map(|layer| m.window_of(layer)).collect();
    let mut is = json!({
        "vocab_size": m.vocab_size, "d_model": m.d_model, "layers": m.layers, "heads": m.heads, "kv_heads": m.kv_heads,
        "positions": m.max_positions, "act": "silu", "eps": m.norm_eps, "tied": m.tie_embeddings, "rope": rope,
        "windows": windows, "dropout": 0.0, "bias": false,
    });
    let mut add = |key: &str, value: Value| is[key] = value;
    if m.kv_rank > 0 {
        let groups = if m.groups > 1 { [m.groups, m.top_groups] } else { [1, 1] };
        add("kv_rank", m.kv_rank.into());
        add("q_rank", if m.q_rank > 0 { m.q_rank.into() } else { Value::Null });
        add("nope", (m.head_dim - m.rope_dim).into());
        add("rope_dim", m.rope_dim.into());
        add("v", m.value_head_dim().into());
        add("groups", groups.to_vec().into());
        add("dense", m.dense_layers.into());
        add("shared", m.shared_ffn.into());
        add("scale", m.route_scale.into());
        add("interleaved", true.into());
        add("mlp_bias", false.into());
        let v3 = (Scores::Sigmoid, true);
        assert_eq!((m.scores, m.router_bias) == v3, family == "deepseek_v3");
        assert!(m.groups < 2 || (m.group_score == GroupScore::Top2) == (family == "deepseek_v3"));
    } else {
        add("head_dim", m.head_dim.into());
    }
    if ["llama", "smollm3", "internlm3", "iquestcoder"].contains(&family) {
        add("mlp_bias", false.into());
    }
    if family == "smollm3" {
        add("turned", true.into());
    }
    if family == "olmoe" {
        add("clip", Value::Null);
    }
    if family == "qwen3_moe" {
        add("dense_layers", (0..m.dense_layers).collect::<Vec<_>>().into());
    }
    if m.experts > 0 {
        add("experts", m.experts.into());
        add("top_k", m.top_k.into());
        add("norm", m.norm_topk_prob.into());
        add("expert_ffn", m.expert_ffn.into());
        if m.kv_rank == 0 {
            add("aux", m.aux_loss_coef.into());
        }
    }
    if m.ffn > 0 {
        add("ffn", m.ffn.into());
    }
    let norm = match family {
        "qwen3" | "qwen3_moe" => QkNorm::Heads,
        "olmoe" => QkNorm::Width,
        _ => QkNorm::None,
    };
    assert_eq!((m.qk_norm, m.qkv_bias), (norm, family == "qwen2"));
    is
}

/// The same numbers, whole or not.
fn same(a: &Value, b: &Value) -> bool {
    match (a, b) {
        (Value::Object(a), Value::Object(b)) => {
            a.len() == b.len()
                && a.iter().all(|(key, value)| b.get(key).is_some_and(|other| same(value, other)))
        }
        (Value::Array(a), Value::Array(b)) => a.len() == b.len() && a.iter().zip(b).all(|(a, b)| same(a, b)),
        _ => a == b || a.is_number() && a.as_f64() == b.as_f64(),
    }
}

fn read(keys: &Map<String, Value>) -> Result<ModelConfig, String> {
    let text = Value::Object(keys.clone()).to_string();
    let mut json = ConfigJson::parse(Path::new("config.json"), &text).unwrap();
    family::read(&mut json).map(|(_, model)| model).map_err(|error| error.to_string())
}

#[test]
fn each_key_means_what_it_means_to_transformers_or_is_refused_by_name() {
    let cases: Value = serde_json::from_str(include_str!("../config_json/cases.json")).unwrap();
    let mut wrong = Vec::new();
    for (family, table) in cases["families"].as_object().unwrap() {
        let base = table["base"].as_object().unwrap();
        let is_base = table["is"].as_object().unwrap();
        let first = computes(family, &read(base).unwrap());
        for (key, value) in is_base {
            // Widths that no layer has are not kept.
            let is = first.get(key).cloned().unwrap_or_default();
            assert!(same(&is, value), "{family}: {key} is {is}, and {value} to transformers");
        }
        let (mut taken, mut meant) = (0, 0);
        for case in table["cases"].as_array().unwrap() {
            let mut keys = base.clone();
            keys.extend(case["set"].as_object().unwrap().clone());
            let without = case["without"].as_array().cloned().unwrap_or_default();
            let without: Vec<&str> = without.iter().map(|key| key.as_str().unwrap()).collect();
            without.iter().for_each(|key| drop(keys.remove(*key)));
            let mut expected = Value::Object(is_base.clone());
            for (key, value) in case["is"].as_object().into_iter().flatten() {
                expected[key] = value.clone();
            }
            meant += usize::from(!case["is"].is_null());
            let what = format!("{family}: {} without {without:?}", case["set"]);
            match read(&keys) {
                // A type that is refused, whatever it says: `null` is as if nothing were said, or as many as heads; whole numbers are numbers.
                Ok(model) if case["is"].is_null() => {
                    let (key, value) = case["set"].as_object().unwrap().iter().next().unwrap();
                    let mut left_out = keys.clone();
                    left_out.remove(key);
                    let null = || value.is_null() && Ok(&model) == read(&left_out).as_ref();
                    let heads =
                        || key == "num_key_value_heads" && value.is_null() && model.kv_heads == model.heads;
                    // Of what transformers checks and no model of the family reads.
                    let unread = || match key.as_str() {
                        "layer_types" => !["qwen2", "qwen3", "qwen3_moe", "mistral", "ministral", "smollm3"]
                            .contains(&family.as_str()),
                        "hidden_size" => {
                            ["llama", "deepseek_v2", "internlm3", "iquestcoder"].contains(&family.as_str())
                        }
                        _ => false,
                    };
                    if !(null() || heads() || unread() || value.is_u64() && base[key].is_f64()) {
                        wrong.push(format!("{what}: taken, and refused by transformers"));
                    }
                }
                Ok(model) => {
                    taken += 1;
                    let is = computes(family, &model);
                    for (key, value) in expected.as_object().unwrap() {
                        let is = is.get(key).cloned().unwrap_or_default();
                        if !same(&is, value) {
                            wrong.push(format!("{what}: {key} is {is}, and {value} to transformers"));
                        }
                    }
                }
                Err(error) => {
                    let set = case["set"].as_object().unwrap().keys().map(String::as_str);
                    if !set.chain(without).any(|key| error.contains(key)) {
                        wrong.push(format!("{what}: {error}"));
                    }
                }
            }
        }
        println!(
            "{family}: {} cases, {meant} that transformers takes, {taken} taken",
            table["cases"].as_array().unwrap().len()
        );
    }
    assert!(wrong.is_empty(), "{} of them:\n{}", wrong.len(), wrong.join("\n"));
}
