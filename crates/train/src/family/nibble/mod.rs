//! Models that no other program supports. Tensor names equal the parameters' ids. `config.json` has its own architecture
//! (`NibbleForCausalLM`), so that no program mistakes the model for another. `config.json` contains the table `[model]` of the
//! configuration.

use super::{ConfigJson, Family, Field};
use crate::config::ModelConfig;
use crate::error::Result;
use nibble_core::shortened;
use serde_json::{Map, Value};

/// The family of models that no other family in Nibble supports. The family `Nibble` supports every model.
#[derive(Debug, Clone, Copy)]
pub struct Nibble;

/// The key under which `config.json` contains the configuration's table.
const MODEL: &str = "model";

impl Family for Nibble {
    fn name(&self) -> &'static str {
        "nibble"
    }

    fn architecture(&self) -> &'static str {
        "NibbleForCausalLM"
    }

    fn fields(&self) -> Vec<Field> {
        Vec::new()
    }

    fn read_rest(&self, json: &ConfigJson, model: &mut ModelConfig) -> Result<()> {
        let table = json.table(MODEL)?.ok_or_else(|| json.missing(MODEL))?;
        // Serde would accept a list as the fields of a table, in order. One key is a list.
        let is_list = |(key, value): &(&String, &Value)| value.is_array() && *key != "sliding_window_layers";
        if let Some((key, list)) = table.iter().find(is_list) {
            return Err(json.error(
                &format!("{MODEL}.{key}"),
                format!("is {}, expected no list", shortened(&list.to_string())),
            ));
        }
        let table = Value::Object(table.clone());
        *model = serde_json::from_value(table).map_err(|e| json.error(MODEL, e.to_string()))?;
        Ok(())
    }

    fn write_rest(&self, model: &ModelConfig, keys: &mut Map<String, Value>) {
        // The conversion cannot fail, because a table of numbers and strings has a JSON form.
        keys.insert(MODEL.into(), serde_json::to_value(model).unwrap_or_default());
    }
}
