//! The model of a run that begins with weights that are there: its sizes are theirs, whatever configuration the run has besides.

use super::ModelConfig;
use super::values::in_short;
use crate::error::{Error, Result};
use crate::pretrained::{Initial, resolved};
use std::path::Path;
use toml::{Table, Value};

/// Of `[model]` what such a run may choose: the losses that it is trained with, and how many positions it has.
const MAY_CHANGE: [&str; 4] = ["aux_loss_coef", "balance", "max_positions", "z_loss_coef"];

/// The table `[model]` of these sizes.
fn table(model: &ModelConfig) -> Result<Table> {
    Table::try_from(model).map_err(|e| Error::config("model", e.to_string()))
}

/// `train.init_from`, if it is said.
fn asked(merged: &Table) -> Option<String> {
    let path = merged.get("train")?.get("init_from")?.as_str()?;
    (!path.is_empty()).then(|| path.to_owned())
}

/// Puts the sizes of what `train.init_from` names into `[model]`, and where that is. `written`: whether a key is the user's own: then it may not say something
/// else. A built-in configuration's model gives way.
pub(super) fn fill_model(merged: &mut Table, written: &dyn Fn(&str) -> bool) -> Result<()> {
    let Some(path) = asked(merged) else { return Ok(()) };
    let path = resolved(Path::new(&path))?;
    let model = Initial::open(&path)?.model()?;
    // What is left out where it has its default is not said by the sizes, and may still be by the user.
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
            let why =
                format!("is {}, and that of {} is {theirs}: leave it out", in_short(&value), path.display());
            return Err(Error::config(key, why));
        }
    }
    merged.insert("model".into(), Value::Table(sizes));
    if let Some(Value::Table(train)) = merged.get_mut("train") {
        train.insert("init_from".into(), Value::String(path.to_string_lossy().into_owned()));
    }
    Ok(())
}
