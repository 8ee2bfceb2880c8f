//! Models that compute like a family but have another name: their `config.json` has another `model_type` and other defaults, and their
//! tensors have the same names. Such a model is written as a model of the family.

use super::windows::{Windowed, read_windows};
use super::{ConfigJson, Family, Llama, config_json};
use crate::config::ModelConfig;
use crate::error::Result;
use nibble_core::shortened;
use serde_json::Value;

/// A `model_type` of which all or some models are handled as models of another family, because they compute in the same way.
#[derive(Debug)]
pub struct Alias {
    /// The value of `model_type`.
    pub name: &'static str,
    /// The family to which the models belong.
    pub of: &'static dyn Family,
    /// Defaults of the alias's configuration class, as in [`Family::absent`].
    absent: &'static [(&'static str, &'static str)],
    /// Default base of the RoPE frequencies.
    theta: f64,
    /// Reads what the family does not have, or refuses it.
    read_rest: fn(&ConfigJson, &mut ModelConfig) -> Result<()>,
}

/// All aliases.
pub const ALIASES: [Alias; 3] = [
    Alias {
        name: "smollm3",
        absent: &[("num_key_value_heads", "4"), ("tie_word_embeddings", "true")],
        theta: 2e6,
        read_rest: read_turned,
        ..LLAMA
    },
    Alias {
        name: "internlm3",
        absent: &[("num_key_value_heads", "2"), ("head_dim", "128"), ("rms_norm_eps", "1e-5")],
        read_rest: |json, _| ["qkv_bias", "bias"].into_iter().try_for_each(|key| check_off(json, key)),
        ..LLAMA
    },
    Alias {
        name: "iquestcoder",
        absent: &[("num_key_value_heads", "8"), ("head_dim", "128"), ("rms_norm_eps", "1e-5")],
        read_rest: |json, _| {
            check_off(json, "use_sliding_window")?;
            json.get("clip_qkv").map_or(Ok(()), |_| Err(json.error("clip_qkv", "is set, and is not here")))
        },
        ..LLAMA
    },
];

/// The base of the aliases above: Llama without differences.
const LLAMA: Alias = Alias { name: "llama", of: &Llama, absent: &[], theta: 1e4, read_rest: |_, _| Ok(()) };

impl Alias {
    /// Reads the configuration of a model from a `config.json`.
    ///
    /// # Errors
    /// Returns [`crate::Error::Config`], which names a key with an unsupported value.
    pub fn read(&self, json: &mut ConfigJson) -> Result<ModelConfig> {
        json.fill(self.absent);
        json.usual_theta = self.theta;
        let mut model = config_json::read(self.of, json)?;
        (self.read_rest)(json, &mut model)?;
        Ok(model)
    }
}

/// Checks that a switch is false or missing.
fn check_off(json: &ConfigJson, key: &str) -> Result<()> {
    match json.switch(key)? {
        Some(true) => Err(json.error(key, "is true, which the decoder does not have: it has false alone")),
        _ => Ok(()),
    }
}

/// Checks that RoPE applies in all layers, and reads sliding windows. Unless layers are listed, only those without RoPE slide.
fn read_turned(json: &ConfigJson, model: &mut ModelConfig) -> Result<()> {
    const LAYERS: &str = "no_rope_layers";
    const INTERVAL: &str = "no_rope_layer_interval";
    const USUAL: usize = 4;
    let every = "the decoder turns queries and keys in every layer";
    let interval = json.size(INTERVAL)?.unwrap_or(USUAL);
    match json.get(LAYERS) {
        None => {
            if interval <= model.layers {
                let why = format!("is {interval}, of {} layers: {every}", model.layers);
                return Err(json.error(INTERVAL, why));
            }
        }
        Some(Value::Array(turned)) if turned.len() >= model.layers && turned.iter().all(|on| *on == 1) => {}
        Some(turned) => {
            let turned = shortened(&turned.to_string()).into_owned();
            let why = format!("is {turned}, of num_hidden_layers = {}: {every}", model.layers);
            return Err(json.error(LAYERS, why));
        }
    }
    read_windows(json, model, Windowed::OnlyListed)
}
