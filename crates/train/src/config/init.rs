//! The model of a run that begins with weights that are there: its sizes are theirs, whatever configuration the run has besides.

use super::load::in_short;
use super::{Config, ModelConfig};
use crate::error::{Error, Result};
use crate::pretrained::{Initial, OwnTokenizer, resolved};
use crate::tokenizer::Tokenizer;
use std::path::Path;
use toml::{Table, Value};

/// Of `[model]` what such a run may choose: the losses that it is trained with, and how many positions it has.
const MAY_CHANGE: [&str; 4] = ["aux_loss_coef", "balance", "max_positions", "z_loss_coef"];

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
    let unsaid = |e: &dyn std::fmt::Display| Error::config("model", e.to_string());
    let Value::Table(mut sizes) = Value::try_from(&model).map_err(|e| unsaid(&e))? else {
        return Err(unsaid(&"is no table"));
    };
    // What is left out where it has its default is not said by the sizes, and may still be by the user.
    let Value::Table(all) = Value::try_from(ModelConfig::default()).map_err(|e| unsaid(&e))? else {
        return Err(unsaid(&"is no table"));
    };
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

/// Checks that the data's tokens are those of the model that a run begins with.
pub(super) fn check_tokens(config: &Config) -> Result<()> {
    if config.train.init_from.is_empty() {
        return Ok(());
    }
    let path = Path::new(&config.train.init_from);
    let Initial::Folder(folder) = Initial::open(path)? else { return Ok(()) };
    let now = match () {
        () if config.is_text() => Tokenizer::Bytes,
        () if config.is_synthetic() => Tokenizer::Synthetic,
        () => return Ok(()),
    };
    let of = |tokenizer: Tokenizer| match tokenizer {
        Tokenizer::Bytes => "bytes",
        Tokenizer::Synthetic => "symbols of the built-in language",
    };
    let (theirs, other) = match folder.tokenizer()? {
        None => return Ok(()),
        Some(OwnTokenizer::Own(own)) => (of(own), own != now),
        Some(OwnTokenizer::Another) => ("those of its tokenizer.json, which is not read yet", true),
    };
    match other {
        false => Ok(()),
        true => {
            let why = format!(
                "is \"{}\", whose tokens are {}, and the tokens of {} are {theirs}",
                config.data.source,
                of(now),
                path.display()
            );
            Err(Error::config("data.source", why))
        }
    }
}
