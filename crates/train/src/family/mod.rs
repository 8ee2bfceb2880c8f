//! Families of models: the names of tensors and sizes in other programs.
//!
//! A parameter's id determines its initial values, its random bits and its place in a run. The model's family determines the parameter's
//! name in a checkpoint, and the layout of the parameter's rows in the checkpoint's tensors. So a family changes no weight, and the same
//! model can be written as any family that has names for the model's parts. A family does no arithmetic. A difference that names and orders
//! of rows cannot express needs an option of the decoder.
//!
//! A family consists of a folder here and an entry of [`FAMILIES`]: names and layouts of tensors, and a mapping to and from `config.json`.
//! The first comment in the folder says which models the family covers and how they differ from the models of other programs. No setting
//! names a family. A model is written as the first family whose `config.json`, when read, gives the same model; a test may choose another
//! family. If a new family takes over models of another family, older checkpoints of these models have the old names and cannot be loaded.
//!
//! One table of [`Field`]s reads and writes most of `config.json`; two functions handle the settings that no field expresses. A key with an
//! unsupported value is refused by name.
//!
//! A tensor of a checkpoint is a concatenation of rows of parameters ([`Named`]). So a family can split a parameter, join two parameters,
//! and reorder rows, as DeepSeek's rotated rows require. A family cannot transpose a parameter. `train/tests/models/spec.rs` has an
//! invented family, with which a trained model is written and read back bit for bit.
//!
//! Checkpoints of a run also use the family's names and order of rows, in F32. So a run's checkpoint, an export and a published folder
//! differ only in the type of their values, and one reader (`checkpoint::Tensors`) reads all of them.

mod alias;
mod config_json;
mod deepseek_v2;
mod deepseek_v3;
mod latent;
mod llama;
mod ministral;
mod mistral;
mod names;
mod nibble;
mod olmoe;
mod qwen2;
mod qwen3;
mod qwen3_moe;
mod shared;
mod windows;

pub use config_json::{ConfigJson, Field};
pub use deepseek_v2::DeepseekV2;
pub use deepseek_v3::DeepseekV3;
pub use llama::Llama;
pub use ministral::Ministral;
pub use mistral::Mistral;
pub use names::{Named, Rows, as_they_are};
pub use nibble::Nibble;
pub use olmoe::Olmoe;
pub use qwen2::Qwen2;
pub use qwen3::Qwen3;
pub use qwen3_moe::Qwen3Moe;

use crate::config::{Balance, ModelConfig};
use crate::error::Result;
use crate::spec::ModelSpec;
use alias::ALIASES;
use nibble_core::shortened;
use serde_json::{Map, Value};
use std::fmt;

/// Every family. An exported model belongs to the first family in this list that supports the model. The last family in this list supports
/// every model.
pub const FAMILIES: [&dyn Family; 10] =
    [&Qwen3Moe, &Qwen3, &Llama, &Mistral, &Ministral, &Qwen2, &Olmoe, &DeepseekV2, &DeepseekV3, &Nibble];

/// The family as which a model is exported: the first family whose `config.json` describes the model completely.
#[must_use]
pub fn of(model: &ModelConfig) -> &'static dyn Family {
    FAMILIES.into_iter().find(|family| has(*family, model)).unwrap_or(&Nibble)
}

/// Whether a family's `config.json` describes a model completely: reading the file gives the same model, except for positions and training
/// losses.
fn has(family: &dyn Family, model: &ModelConfig) -> bool {
    let alike = |model: &ModelConfig| {
        let mut model = ModelConfig {
            // 0 and `head_dim` mean the same width.
            value_head_dim: model.value_head_dim(),
            max_positions: 0,
            aux_loss_coef: 0.0,
            balance: Balance::Shard,
            z_loss_coef: 0.0,
            ..model.clone()
        };
        // Several patterns mean the same layers.
        model.set_windows(model.sliding_window, &model.layer_attentions());
        model
    };
    let Value::Object(keys) = config_json(family, model, 1) else { return false };
    config_json::read(family, &mut ConfigJson::of(keys)).is_ok_and(|read| alike(&read) == alike(model))
}

/// The `config.json` of a model of this family. Other tools and [`read`] can read the result. `positions` is the largest number of tokens
/// of a sequence of the model.
#[must_use]
pub fn config_json(family: &dyn Family, model: &ModelConfig, positions: usize) -> Value {
    config_json::written(family, &ModelConfig { max_positions: positions, ..model.clone() })
}

/// Reads a model's configuration from a `config.json`, and determines the model's family.
///
/// # Errors
/// Returns [`crate::Error::Config`], which names a key with an unsupported value.
pub fn read(json: &mut ConfigJson) -> Result<(&'static dyn Family, ModelConfig)> {
    const KIND: &str = "model_type";
    let kind = json.word(KIND)?.ok_or_else(|| json.missing(KIND))?;
    if let Some(family) = FAMILIES.into_iter().find(|family| family.name() == kind) {
        return Ok((family, config_json::read(family, json)?));
    }
    if let Some(alias) = ALIASES.iter().find(|alias| alias.name == kind) {
        return Ok((alias.of, alias.read(json)?));
    }
    let names = FAMILIES.iter().map(|family| family.name()).chain(ALIASES.iter().map(|alias| alias.name));
    let known: Vec<&str> = names.collect();
    Err(json.error(KIND, format!("is \"{}\", expected one of {}", shortened(kind), known.join(", "))))
}

/// A model family (such as Llama) and the names that other programs use for its settings and tensors.
pub trait Family: fmt::Debug + Sync {
    /// The family's `model_type` in `config.json`.
    fn name(&self) -> &'static str;

    /// The family's entry of `architectures` in `config.json`.
    fn architecture(&self) -> &'static str;

    /// The keys of `config.json` that correspond to one size each, or that have only one supported value.
    fn fields(&self) -> Vec<Field>;

    /// Defaults, as JSON, of the family's configuration class in `transformers`, for keys whose field has no default. Keys that determine
    /// the shapes of tensors never have a default here, because a file must contain such keys.
    fn absent(&self) -> &'static [(&'static str, &'static str)] {
        &[]
    }

    /// Reads all settings that no field covers. `model` has the values of the fields, and otherwise the defaults of a dense Qwen3.
    ///
    /// # Errors
    /// [`crate::Error::Config`] naming a key with an unsupported value.
    fn read_rest(&self, json: &ConfigJson, model: &mut ModelConfig) -> Result<()>;

    /// Writes all settings that no field covers.
    fn write_rest(&self, model: &ModelConfig, keys: &mut Map<String, Value>);

    /// The tensors of a model's checkpoint, which contain each row of each parameter exactly once. The same list is used for writing and
    /// for reading. A gated projection is one parameter, in which the gate's rows precede the rows of the up projection.
    fn tensors(&self, model: &ModelSpec) -> Vec<Named> {
        as_they_are(model)
    }

    /// Whether a tensor of a published checkpoint is ignored because it is not part of the model.
    fn passes_over(&self, _name: &str, _model: &ModelConfig) -> bool {
        false
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Config;
    use std::collections::BTreeSet;

    /// The order of rotated rows in DeepSeek's tensors. DeepSeek rotates elements 2i and 2i + 1 together; Nibble rotates i and i + r/2. The
    /// expected values were computed by hand.
    #[test]
    fn rows_that_turn_lie_beside_their_partners_in_deepseeks_tensors() {
        let changes = [
            "model.kv_rank=32",
            "model.rope_dim=4",
            "model.kv_heads=4",
            "model.qk_norm=false",
            "model.heads=2",
            "model.kv_heads=2",
        ];
        let model = ModelSpec::new(&model(&changes));
        let tensors = DeepseekV2.tensors(&model);
        let order = |name: &str| -> Vec<(usize, usize)> {
            let tensor = tensors.iter().find(|tensor| tensor.name.ends_with(name)).unwrap();
            tensor.rows.iter().flat_map(|rows| rows.range.clone().map(|row| (rows.param, row))).collect()
        };
        let ids: Vec<String> = model.params().map(|param| param.id).collect();
        let number = |part: &str| ids.iter().position(|id| id.ends_with(part)).unwrap();
        // There are two heads; each has 12 elements without RoPE and 4 elements with RoPE.
        let q = number("layers.0.self_attn.q_proj.weight");
        let head = |first: usize| (first..first + 12).chain([12, 14, 13, 15].map(|row| first + row));
        let expected: Vec<_> = head(0).chain(head(16)).map(|row| (q, row)).collect();
        assert_eq!(order("layers.0.self_attn.q_proj.weight"), expected);
        let [kv, k] =
            ["kv_a_proj", "k_rope_proj"].map(|part| number(&format!("layers.1.self_attn.{part}.weight")));
        let expected: Vec<_> = (0..32).map(|row| (kv, row)).chain([0, 2, 1, 3].map(|row| (k, row))).collect();
        assert_eq!(order("layers.1.self_attn.kv_a_proj_with_mqa.weight"), expected);
    }

    #[test]
    fn layers_after_a_published_decoders_own_are_passed_over() {
        let model = ModelConfig { layers: 61, ..ModelConfig::default() };
        let passed = |name: &str| DeepseekV3.passes_over(name, &model);
        assert!(passed("model.layers.61.eh_proj.weight") && passed("model.layers.62.mlp.gate.weight"));
        assert!(
            !passed("model.layers.60.mlp.gate.weight")
                && !passed("model.norm.weight")
                && !passed("lm_head.weight")
        );
        assert!(!DeepseekV2.passes_over("model.layers.61.eh_proj.weight", &model));
    }

    #[test]
    fn every_model_has_a_family() {
        let odd = ModelConfig { shared_ffn: 7, value_head_dim: 3, ..ModelConfig::default() };
        assert!(has(*FAMILIES.last().unwrap(), &odd));
        let names: BTreeSet<&str> = FAMILIES.iter().map(|family| family.name()).collect();
        assert_eq!(names.len(), FAMILIES.len());
    }

    const DENSE: [&str; 6] = [
        "model.experts=0",
        "model.ffn=96",
        "model.top_k=0",
        "model.expert_ffn=0",
        "model.norm_topk_prob=false",
        "model.aux_loss_coef=0",
    ];

    const BIASES: [&str; 2] = ["model.qk_norm=false", "model.qkv_bias=true"];

    fn model(changes: &[&str]) -> ModelConfig {
        let changes: Vec<String> = changes.iter().map(ToString::to_string).collect();
        Config::load("tiny", &changes).unwrap().model
    }

    #[test]
    fn each_shape_has_the_family_that_loads_it_and_comes_back_from_it() {
        let olmoe = ["model.qk_norm=width", "model.norm_topk_prob=false", "model.kv_heads=4"];
        let latent = ["model.kv_rank=32", "model.rope_dim=8", "model.kv_heads=4", "model.qk_norm=false"];
        let latent =
            [&latent[..], &["model.value_head_dim=12", "model.shared_ffn=128", "model.balance=sequence"]]
                .concat();
        let v2 = [&latent[..], &["model.norm_topk_prob=false"]].concat();
        let lite = [&v2[..], &["model.layers=3", "model.dense_layers=1", "model.ffn=96"]].concat();
        let yarn = [
            "model.q_rank=24",
            "model.groups=4",
            "model.top_groups=2",
            "model.route_scale=16",
            "model.rope_scaling.kind=yarn",
            "model.rope_scaling.factor=40.0",
            "model.rope_scaling.original_positions=64",
            "model.rope_scaling.mscale=0.7",
            "model.rope_scaling.mscale_all_dim=0.9",
        ];
        let v3 = ["model.scores=sigmoid", "model.router_bias=true", "model.group_score=top2"];
        let llama3 = [
            "model.qk_norm=false",
            "model.rope_scaling.kind=llama3",
            "model.rope_scaling.factor=8.0",
            "model.rope_scaling.original_positions=64",
        ];
        const SLIDING: &str = "model.sliding_window=24";
        let pattern = |kinds: &str| format!("model.sliding_window_layers=[{kinds}]");
        let even = pattern("\"sliding\",\"full\"");
        let (last, twice) =
            (pattern("\"full\",\"sliding\""), pattern("\"sliding\",\"full\",\"sliding\",\"full\""));
        let llama = [&DENSE[..], &["model.qk_norm=false"]].concat();
        let shapes: [(&str, Vec<&str>); 32] = [
            ("deepseek_v2", lite.clone()),
            ("deepseek_v2", [&v2[..], &yarn].concat()),
            ("deepseek_v3", [&latent[..], &yarn, &v3].concat()),
            ("nibble", [&latent[..], &yarn].concat()),
            ("nibble", [&lite[..], &["model.shared_ffn=100"]].concat()),
            ("llama", [&DENSE[..], &llama3].concat()),
            ("qwen3_moe", vec![]),
            ("qwen3_moe", vec!["model.value_head_dim=16", "model.tie_embeddings=false"]),
            ("qwen3_moe", vec!["model.layers=4", "model.dense_layers=2", "model.ffn=96"]),
            ("qwen3", DENSE.to_vec()),
            ("llama", [&DENSE[..], &["model.qk_norm=false", "model.rope_theta=5e5"]].concat()),
            ("qwen2", [&DENSE[..], &BIASES].concat()),
            ("nibble", BIASES.to_vec()),
            ("olmoe", olmoe.to_vec()),
            ("nibble", [&olmoe[..], &["model.head_dim=32"]].concat()),
            ("nibble", vec!["model.shared_ffn=32"]),
            ("nibble", vec!["model.qk_norm=false"]),
            ("nibble", [&DENSE[..], &["model.attention_sinks=true"]].concat()),
            ("nibble", vec!["model.norm=layer", "model.o_bias=true"]),
            ("nibble", [&DENSE[..], &["model.activation=gelu", "model.mlp_bias=true"]].concat()),
            ("nibble", [&DENSE[..], &["model.value_head_dim=8"]].concat()),
            ("mistral", [&llama[..], &[SLIDING]].concat()),
            ("mistral", [&llama[..], &["model.sliding_window=4096"]].concat()),
            ("ministral", [&llama[..], &[SLIDING, &even]].concat()),
            ("ministral", [&llama[..], &[SLIDING, &twice, "model.layers=4"]].concat()),
            ("qwen2", [&DENSE[..], &BIASES, &[SLIDING]].concat()),
            ("qwen2", [&DENSE[..], &BIASES, &[SLIDING, &last]].concat()),
            ("qwen3", [&DENSE[..], &[SLIDING, &even]].concat()),
            ("qwen3_moe", vec![SLIDING]),
            ("nibble", vec![SLIDING, &even]),
            ("nibble", [&olmoe[..], &[SLIDING]].concat()),
            ("nibble", [&latent[..], &yarn, &v3, &[SLIDING]].concat()),
        ];
        for (name, changes) in shapes {
            let model = model(&changes);
            let family = of(&model);
            assert_eq!(family.name(), name, "{changes:?}");
            let Value::Object(keys) = config_json(family, &model, 77) else { panic!("{changes:?}") };
            assert_eq!(keys["architectures"][0], family.architecture());
            let mut json = ConfigJson::of(keys);
            let (again, read) = read(&mut json).unwrap();
            assert_eq!((again.name(), read.max_positions), (name, 77), "{changes:?}");
            assert!(has(family, &read), "{changes:?}");
            assert_eq!(read.sliding_window, model.sliding_window, "{changes:?}");
            assert_eq!(read.layer_attentions(), model.layer_attentions(), "{changes:?}");
            assert_eq!(
                ModelSpec::new(&read).parameters(),
                ModelSpec::new(&model).parameters(),
                "{changes:?}"
            );
        }
    }

    #[test]
    fn what_the_decoder_does_not_have_is_refused_by_its_key() {
        let Value::Object(keys) = config_json(&Qwen3Moe, &model(&[]), 128) else { panic!() };
        let read_with = |key: &str, value: Value| {
            let mut keys = keys.clone();
            keys.insert(key.into(), value);
            read(&mut ConfigJson::of(keys)).map(|(_, model)| model)
        };
        for (key, value, why) in [
            ("decoder_sparse_step", Value::from(2), "is 2, which the decoder does not have: it has 1 alone"),
            (
                "hidden_act",
                "gelu".into(),
                "is \"gelu\", which the decoder does not have: it has \"silu\" alone",
            ),
            ("mlp_only_layers", vec![1].into(), "is [1]; the decoder has dense layers before all others"),
            ("hidden_size", "wide".into(), "is \"wide\", expected a whole number from 1 to 2147483647"),
            ("hidden_size", Value::Null, "is null, which it may not be"),
            ("attention_dropout", 0.1.into(), "is 0.1, which the decoder does not have: it has 0.0 alone"),
            ("model_type", "gpt2".into(), "is \"gpt2\", expected one of qwen3_moe"),
            ("num_attention_heads", Value::Null, "is null"),
        ] {
            let error = read_with(key, value).unwrap_err().to_string();
            assert!(error.contains(key) && error.contains(why), "{error}");
        }
        // Integers are accepted as numbers, and missing keys have their defaults.
        assert_eq!(
            read_with("attention_dropout", 0.into()).unwrap(),
            read_with("use_cache", true.into()).unwrap()
        );
        assert_eq!(read_with("num_key_value_heads", Value::Null).unwrap().kv_heads, 4);
    }

    /// The `config.json` of each family for a model that uses all of its features.
    fn of_each_family() -> Vec<(&'static str, Map<String, Value>)> {
        let latent = ["model.kv_rank=32", "model.rope_dim=8", "model.kv_heads=4", "model.qk_norm=false"];
        let latent = [
            &latent[..],
            &["model.value_head_dim=12", "model.shared_ffn=128", "model.balance=sequence", "model.q_rank=24"],
            &[
                "model.layers=3",
                "model.dense_layers=1",
                "model.ffn=96",
                "model.groups=4",
                "model.top_groups=2",
            ],
            &["model.rope_scaling.kind=yarn", "model.rope_scaling.factor=40.0"],
            &["model.rope_scaling.original_positions=64", "model.rope_scaling.mscale=0.7"],
            &["model.rope_scaling.mscale_all_dim=0.9"],
        ]
        .concat();
        let v3 = ["model.scores=sigmoid", "model.router_bias=true", "model.group_score=top2"];
        let llama3 = [
            "model.qk_norm=false",
            "model.rope_scaling.kind=llama3",
            "model.rope_scaling.factor=8.0",
            "model.rope_scaling.original_positions=64",
        ];
        let olmoe = ["model.qk_norm=width", "model.norm_topk_prob=false", "model.kv_heads=4"];
        let shapes: [(&dyn Family, Vec<&str>); 10] = [
            (&Qwen3Moe, vec!["model.layers=4", "model.dense_layers=2", "model.ffn=96"]),
            (&Qwen3, DENSE.to_vec()),
            (&Llama, [&DENSE[..], &llama3].concat()),
            (&Qwen2, [&DENSE[..], &BIASES].concat()),
            (&Olmoe, olmoe.to_vec()),
            (&DeepseekV2, [&latent[..], &["model.norm_topk_prob=false"]].concat()),
            (&DeepseekV3, [&latent[..], &v3].concat()),
            (&Nibble, vec![]),
            (&Mistral, [&DENSE[..], &["model.qk_norm=false", "model.sliding_window=24"]].concat()),
            (&Ministral, [&DENSE[..], &["model.qk_norm=false", "model.sliding_window=24"]].concat()),
        ];
        let keys = |(family, changes): (&dyn Family, Vec<&str>)| {
            let Value::Object(keys) = config_json(family, &model(&changes), 128) else { panic!() };
            (family.name(), keys)
        };
        shapes.into_iter().map(keys).collect()
    }

    /// Reads these keys after a change of one key. A dot separates the name of a table from a key in this table.
    fn read_changed(keys: &Map<String, Value>, key: &str, value: &Value) -> Result<ModelConfig> {
        let mut keys = keys.clone();
        match key.split_once('.') {
            Some((table, name)) => keys[table][name] = value.clone(),
            None => drop(keys.insert(key.into(), value.clone())),
        }
        read(&mut ConfigJson::of(keys)).map(|(_, model)| model)
    }

    #[test]
    fn every_key_that_is_read_has_its_type_or_is_refused_by_name() {
        let huge = serde_json::json!(1u64 << 63);
        let wrong = serde_json::json!(["x", [], {}, -1, true, 5, 1e300]);
        for (family, keys) in of_each_family() {
            read(&mut ConfigJson::of(keys.clone())).unwrap();
            let of_rope = keys.get("rope_scaling").and_then(Value::as_object).into_iter().flatten();
            let inner = of_rope.map(|(name, value)| (format!("rope_scaling.{name}"), value));
            let outer = keys.iter().map(|(key, value)| (key.clone(), value));
            for (key, is) in outer.chain(inner) {
                if crate::words::has(config_json::OF_NO_INTEREST, &key) && key != "model_type" {
                    continue;
                }
                for value in wrong.as_array().unwrap().iter().chain([&huge]) {
                    // A value of the right type may be accepted, but impossible sizes must be refused too.
                    let (whole, number) = (is.is_u64(), is.is_f64());
                    let may = value.is_boolean() && is.is_boolean()
                        || value == 5 && (whole || number)
                        || *value == huge && number && *value != *is
                        || key == "num_nextn_predict_layers" && value == 5
                        || value.is_array() && is.is_array()
                        || key == "q_lora_rank" && value == 5
                        || ["rope_scaling", "model"].contains(&key.as_str())
                            && value.as_object().is_some_and(Map::is_empty);
                    match read_changed(&keys, &key, value) {
                        Ok(_) => assert!(may, "{family}: {key} = {value} is taken"),
                        Err(error) => {
                            let error = error.to_string();
                            let last = key.rsplit('.').next().unwrap();
                            assert!(error.contains(last) || may, "{family}: {key} = {value}: {error}");
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn sizes_and_numbers_of_nothing_are_refused_by_name() {
        let zero = Value::from(0);
        for (family, keys) in of_each_family() {
            for (key, is) in keys.iter().filter(|(_, is)| is.is_number()) {
                // These keys may be 0, or are not read.
                let may = [
                    "num_nextn_predict_layers",
                    "first_k_dense_replace",
                    "n_shared_experts",
                    "router_aux_loss_coef",
                    "router_z_loss_coef",
                    "aux_loss_alpha",
                    "attention_dropout",
                ];
                match read_changed(&keys, key, &zero) {
                    Ok(_) => assert!(may.contains(&key.as_str()), "{family}: {key} = 0 for {is} is taken"),
                    Err(error) => assert!(
                        error.to_string().contains(key.as_str()) || key == "intermediate_size",
                        "{error}"
                    ),
                }
            }
        }
    }

    #[test]
    fn tables_of_rope_that_say_no_rule_or_two_are_refused() {
        use serde_json::json;
        let (_, keys) = of_each_family().swap_remove(2);
        let yarn = json!({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64});
        for (value, why) in [
            (json!({"factor": 2.0}), "`rope_scaling.rope_type`: is not there"),
            (json!({"rope_type": 5}), "`rope_scaling.rope_type`: is 5, expected a text"),
            (json!({"rope_type": "linear", "factor": 2.0}), "is \"linear\", which the decoder does not have"),
            (json!({"rope_type": "yarn", "type": "llama3"}), "`rope_scaling.type`: is \"llama3\", and"),
            (json!({"rope_type": "llama3", "factor": 2.0}), "low_freq_factor`: is not there"),
            (
                json!({"rope_type": "yarn", "partial_rotary_factor": 0.5}),
                "partial_rotary_factor`: is 0.5, which the decoder does not have",
            ),
            (json!({"full_attention": {"rope_type": "yarn"}}), "`rope_scaling.full_attention`: is an object"),
            (
                json!({"rope_type": "yarn", "factor": 0.5, "original_max_position_embeddings": 9}),
                "factor`: is 0.5",
            ),
            (
                json!({"rope_type": "default", "rope_theta": 7.0}),
                "`rope_theta`: is 10000.0, and rope_scaling",
            ),
        ] {
            let error = read_changed(&keys, "rope_scaling", &value).unwrap_err().to_string();
            assert!(error.contains(why), "{value}: {error}");
        }
        let read = read_changed(&keys, "rope_scaling", &yarn).unwrap().rope_scaling;
        assert_eq!((read.factor, read.original_positions), (4.0, 64));
        // `rope_scaling` takes precedence, as in transformers. A base of the frequencies that would be lost is an error.
        let former = super::read(&mut ConfigJson::of(keys.clone())).unwrap().1;
        assert_eq!(read_changed(&keys, "rope_parameters", &yarn).unwrap(), former);
        let mut others = keys.clone();
        others.remove("rope_theta");
        let error =
            read_changed(&others, "rope_parameters", &json!({"rope_theta": 7.0})).unwrap_err().to_string();
        assert!(
            error.contains("`rope_scaling.rope_theta`: is not there, and rope_parameters.rope_theta is 7.0"),
            "{error}"
        );
        // A key that is not read is reported.
        let mut keys = keys;
        keys["rope_scaling"]["finetuned"] = json!(true);
        let mut json = ConfigJson::of(keys);
        super::read(&mut json).unwrap();
        assert_eq!(json.passed_over(), ["rope_scaling.finetuned"]);
    }

    #[test]
    fn groups_and_shared_experts_are_counted() {
        let (_, keys) = of_each_family().swap_remove(6);
        for (key, value, why) in [
            ("n_group", Value::from(0), "is 0, expected a whole number from 1 to"),
            ("topk_group", 0.into(), "is 0, expected a whole number from 1 to"),
            ("topk_group", 9.into(), "is 9, more than n_group = 4"),
            ("n_shared_experts", i32::MAX.into(), "expected at most 2^31 - 1"),
            ("seq_aux", 1.into(), "is 1, expected true or false"),
            ("num_experts_per_tok", 9.into(), "`num_experts_per_tok`: is 9, more than n_routed_experts = 8"),
            ("first_k_dense_replace", 3.into(), "`first_k_dense_replace`: is 3"),
        ] {
            let error = read_changed(&keys, key, &value).unwrap_err().to_string();
            assert!(error.contains(why), "{key}: {error}");
        }
    }

    #[test]
    fn keys_that_nobody_reads_are_told() {
        let Value::Object(mut keys) =
            config_json(&Llama, &model(&[&DENSE[..], &["model.qk_norm=false"]].concat()), 128)
        else {
            panic!()
        };
        keys.insert("sliding_attention_rows".into(), 4.into());
        keys.insert("use_cache".into(), true.into());
        keys.insert("logit_softcap".into(), Value::Null);
        let mut json = ConfigJson::of(keys);
        read(&mut json).unwrap();
        assert_eq!(json.passed_over(), ["sliding_attention_rows"]);
    }

    /// The JSON of every field is valid.
    #[test]
    fn tables_are_json() {
        for family in FAMILIES {
            let fields = family.fields();
            assert!(fields.iter().all(Field::is_json), "{}", family.name());
            let keys: BTreeSet<&str> = fields.iter().map(Field::key).collect();
            assert_eq!(keys.len(), fields.len(), "{}", family.name());
        }
    }
}
