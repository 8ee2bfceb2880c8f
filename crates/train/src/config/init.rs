//! The model of a run that starts from existing weights. The sizes of this model override the sizes in the run's built-in configuration.

use super::ModelConfig;
use super::values::in_short;
use crate::error::{Error, Result};
use crate::pretrained::{Initial, resolved};
use std::path::Path;
use toml::{Table, Value};

/// The keys of `[model]` that a run may set when it starts from existing weights: losses, and the number of positions.
const MAY_CHANGE: [&str; 4] = ["aux_loss_coef", "balance", "max_positions", "z_loss_coef"];

/// The table `[model]` of this model.
fn table(model: &ModelConfig) -> Result<Table> {
    Table::try_from(model).map_err(|e| Error::config("model", e.to_string()))
}

/// The value of `train.init_from`, if the key is set.
fn asked(merged: &Table) -> Option<String> {
    let path = merged.get("train")?.get("init_from")?.as_str()?;
    (!path.is_empty()).then(|| path.to_owned())
}

/// Puts the sizes and the resolved path of the model in `train.init_from` into the configuration. `written` is true for keys that the user
/// has written, which may not contradict the model. The model's values replace those of a built-in configuration.
pub(super) fn fill_model(merged: &mut Table, written: &dyn Fn(&str) -> bool) -> Result<()> {
    let Some(path) = asked(merged) else { return Ok(()) };
    let path = resolved(Path::new(&path))?;
    let model = Initial::open(&path)?.model()?;
    // The model's table omits keys with default values, but the user may have set these keys.
    let (mut sizes, all) = (table(&model)?, table(&ModelConfig::default())?);
    let own = match merged.get("model") {
        Some(Value::Table(own)) => own.clone(),
        _ => Table::new(),
    };
    for (name, value) in own {
        let key = format!("model.{name}");
        if !written(&key) {
            continue;
        }
        let theirs = sizes.get(&name).or_else(|| all.get(&name));
        if MAY_CHANGE.contains(&name.as_str()) {
            sizes.insert(name, value);
        } else if theirs.is_some_and(|theirs| *theirs != value) {
            let theirs = theirs.map(in_short).unwrap_or_default();
            let why = format!(
                "is {}, but the model in {} has {theirs}: leave it out",
                in_short(&value),
                path.display()
            );
            return Err(Error::config(key, why));
        }
    }
    merged.insert("model".into(), Value::Table(sizes));
    if let Some(Value::Table(train)) = merged.get_mut("train") {
        train.insert("init_from".into(), Value::String(path.to_string_lossy().into_owned()));
    }
    Ok(())
}
