//! Checks the inputs that must be equal on every rank: data (by SHA-256), tasks, recipe, and all settings except paths and hardware. Ranks
//! that are processes have each read their own inputs. A difference is an error that names the input, on all ranks, before the first step.

use crate::config::Config;
use crate::data::Dataset;
use crate::error::{Error, Result};
use crate::trainer::ranks::of_all_ranks;
use nibble_core::{Comm, Kernels, Recipe};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};

/// Settings that may differ between ranks: paths and hardware. Data and tasks at these paths are compared by SHA-256.
const OWN: [&str; 7] =
    ["data.source", "data.mixture", "data.cache_dir", "eval.tasks", "run.dir", "run.device", "run.threads"];

/// The inputs of a rank that must be equal on all ranks.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
struct Inputs {
    data_sha256: String,
    settings: BTreeMap<String, String>,
    recipe: String,
}

/// Checks that all ranks train one model, on the same data, with the same recipe, and evaluate the same tasks. Every rank must call this
/// function, and all ranks get the same answer.
///
/// # Errors
/// Returns [`Error::Config`] naming the first rank that differs from rank 0, and the difference, and passes on errors of the backend and of
/// other ranks.
pub(in crate::trainer) fn require_alike<B: Kernels>(
    b: &B,
    comm: &dyn Comm<B>,
    (config, recipe, data): (&Config, &Recipe, &Dataset),
    tasks_sha256: &str,
) -> Result<()> {
    if comm.world() == 1 {
        return Ok(());
    }
    let mine = || {
        let mut settings = config.settings()?;
        settings.retain(|key, _| !OWN.contains(&&**key));
        settings.insert("the SHA-256 of eval.tasks".into(), tasks_sha256.into());
        let inputs = Inputs { data_sha256: data.sha256(), settings, recipe: recipe.to_toml() };
        serde_json::to_vec(&inputs).map_err(misread)
    };
    let all = of_all_ranks(b, comm, mine())?;
    let all: Vec<Inputs> =
        all.iter().map(|said| serde_json::from_slice(said).map_err(misread)).collect::<Result<_>>()?;
    let others = all.iter().enumerate().skip(1);
    let found = others.into_iter().try_for_each(|(rank, inputs)| inputs.require_same_as(&all[0], rank));
    if found.is_err() {
        // No rank ends before all ranks know the reason, because the other ranks would otherwise report a follow-up error. A rank that
        // waits at this barrier knows the reason.
        let _ = comm.barrier();
    }
    found
}

/// The error for inputs that cannot be parsed, because their rank runs another version of the program.
fn misread(error: serde_json::Error) -> Error {
    let why = format!(
        "what a rank says of its data, configuration and recipe cannot be read ({error}): start the same program on all ranks"
    );
    Error::config("configuration", why)
}

impl Inputs {
    fn require_same_as(&self, first: &Self, rank: usize) -> Result<()> {
        if self.data_sha256 != first.data_sha256 {
            let [other, first] =
                [self, first].map(|inputs| inputs.data_sha256.chars().take(12).collect::<String>());
            let why = format!(
                "rank {rank} has other data: SHA-256 {other}…, rank 0's is {first}…; give all ranks the same data"
            );
            return Err(Error::config("data.source", why));
        }
        let keys: BTreeSet<&String> = self.settings.keys().chain(first.settings.keys()).collect();
        let differences = keys.into_iter().filter_map(|key| {
            let [other, first] =
                [self, first].map(|inputs| inputs.settings.get(key).map_or("the default", |value| value));
            (other != first).then(|| format!("{key} is {other}, rank 0's is {first}"))
        });
        let differences = differences.collect::<Vec<_>>().join("; ");
        if !differences.is_empty() {
            let why = format!(
                "rank {rank} has another one: {differences}; start all ranks with the same configuration"
            );
            return Err(Error::config("configuration", why));
        }
        if self.recipe != first.recipe {
            let mut lines = self.recipe.lines().zip(first.recipe.lines());
            let (other, first) = lines
                .find(|(other, first)| other != first)
                .unwrap_or(("more or fewer lines", "none of them"));
            let why = format!(
                "rank {rank} has another one: `{other}`, rank 0's has `{first}`; give all ranks the same recipe"
            );
            return Err(Error::config("recipe", why));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_differs_is_named() {
        let inputs = |sha: &str, lr: &str, recipe: &str| Inputs {
            data_sha256: sha.into(),
            settings: [("train.lr".to_owned(), lr.to_owned())].into(),
            recipe: recipe.into(),
        };
        let first = inputs("0123456789abcdef", "0.5", "a = 1\nb = 2");
        inputs("0123456789abcdef", "0.5", "a = 1\nb = 2").require_same_as(&first, 2).unwrap();
        for (other, part) in [
            (inputs("ff", "0.5", ""), "rank 2 has other data: SHA-256 ff…, rank 0's is 0123456789ab…"),
            (
                inputs("0123456789abcdef", "0.25", ""),
                "rank 2 has another one: train.lr is 0.25, rank 0's is 0.5",
            ),
            (
                inputs("0123456789abcdef", "0.5", "a = 1\nb = 3"),
                "rank 2 has another one: `b = 3`, rank 0's has `b = 2`",
            ),
            (inputs("0123456789abcdef", "0.5", "a = 1"), "rank 2 has another one: `more or fewer lines`"),
        ] {
            let error = other.require_same_as(&first, 2).unwrap_err().to_string();
            assert!(error.contains(part), "no {part:?} in {error}");
        }
    }
}
