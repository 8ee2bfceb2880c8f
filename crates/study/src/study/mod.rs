//! A study: the recipes and the baseline that it compares, and the configurations and seeds of its runs.

mod keys;
#[cfg(test)]
mod tests;

use crate::catalog::Catalog;
use crate::error::{Error, Result};
use keys::Keys;
use sha2::{Digest, Sha256};
use std::path::Path;

/// The keys of a study file.
const KEYS: [&str; 8] = ["name", "baseline", "recipes", "configs", "seeds", "set", "floor", "branch"];

/// A recipe of a study.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Recipe {
    /// Name of the recipe, or its file, as written in the study.
    pub name: String,
    /// SHA-256 of the recipe's text, in hexadecimal.
    pub sha256: String,
}

/// A configuration of a study.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Config {
    /// Name of the configuration, or its file, as written in the study.
    pub name: String,
    /// SHA-256 of [`Settled::text`](crate::Settled::text), in hexadecimal.
    pub sha256: String,
    /// Number of optimizer steps of a run.
    pub steps: u64,
}

/// The learning-rate schedule of a branch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Schedule {
    /// The trunk's schedule continues: trunk and branch together train the configuration's steps.
    Kept,
    /// A new schedule starts, including warm-up: the branch trains the configuration's steps.
    New,
}

impl Schedule {
    /// The name in a study file.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Kept => "kept",
            Self::New => "new",
        }
    }
}

/// Branches: runs that start from the weights of one shared run, the trunk. The trunk trains with the configuration's learning-rate
/// schedule and stops after `steps` steps.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Branch {
    /// The recipe of the trunk.
    pub trunk: String,
    /// Number of optimizer steps of the trunk.
    pub steps: u64,
    /// The recipes of the branches, the baseline first.
    pub recipes: Vec<String>,
    /// The learning-rate schedule of the branches.
    pub schedule: Schedule,
}

/// A group of cells that are compared with each other.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Group {
    /// Runs that train from initial weights.
    Runs,
    /// The branches of [`Study::branches`] at this index.
    Branch(usize),
}

/// A study, read from its file and checked.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Study {
    /// The study's name, which is the heading of its tables.
    pub name: String,
    /// The recipe with which all others are compared.
    pub baseline: String,
    /// The recipes of runs from initial weights, the baseline first. The list is empty if the study has only branches.
    pub recipes: Vec<String>,
    /// All recipes that the study names, each once.
    pub known: Vec<Recipe>,
    /// The configurations.
    pub configs: Vec<Config>,
    /// The seeds, in the order in which they are run.
    pub seeds: Vec<u64>,
    /// Settings that apply to all runs, each written as `key=value`.
    pub set: Vec<String>,
    /// For each seed, the number of additional, slightly perturbed runs of the baseline, which show the effect of chaos alone.
    pub floor: u64,
    /// The runs that start from a shared trunk.
    pub branches: Vec<Branch>,
}

impl Study {
    /// Reads a study from a file; `catalog` finds the recipes and configurations that the file names.
    ///
    /// # Errors
    /// Returns [`Error::Io`] if the file cannot be read, and passes on the errors of [`Study::parse`].
    pub fn load(file: &Path, catalog: &dyn Catalog) -> Result<Self> {
        let text = std::fs::read_to_string(file).map_err(Error::io(file))?;
        Self::parse(&text, file, catalog)
    }

    /// Reads a study from its text. Errors name `file`.
    ///
    /// # Errors
    /// Returns [`Error::Study`] with the key, for unknown keys, names that `catalog` does not know, names or recipes that are listed twice,
    /// empty lists, or a baseline that is not among the recipes.
    pub fn parse(text: &str, file: &Path, catalog: &dyn Catalog) -> Result<Self> {
        let table: toml::Table = text.parse().map_err(|error: toml::de::Error| Error::Study {
            file: file.to_owned(),
            key: String::new(),
            why: error.to_string().trim_end().to_owned(),
            suggestion: None,
        })?;
        let keys = Keys::of(file, String::new(), &table, &KEYS)?;
        let (name, baseline) = (keys.text("name")?, keys.text("baseline")?);
        let set = settings(&keys)?;
        let branch_keys = keys.tables("branch", &["trunk", "recipes", "schedule"])?;
        let recipes = match (keys.texts("recipes")?, branch_keys.is_empty()) {
            (None, false) => Vec::new(),
            _ => keys.names("recipes")?,
        };
        let mut known = Known { catalog, recipes: Vec::new() };
        known.add_all(&keys, "recipes", &recipes)?;
        let recipes = match recipes.is_empty() {
            true => recipes,
            false => baseline_first(&keys, "baseline", &baseline, recipes)?,
        };
        let seeds = keys.seeds("seeds")?;
        let configs = configs(&keys, &set, catalog)?;
        let floor = keys.number("floor", 0, 100)?.unwrap_or(0);
        let mut branches: Vec<Branch> = Vec::new();
        for keys in branch_keys {
            let branch = branch(&keys, &baseline, &configs, &mut known)?;
            if branches.contains(&branch) {
                return Err(keys.wrong("trunk", "the same branches are listed twice"));
            }
            branches.push(branch);
        }
        Ok(Self { name, baseline, recipes, known: known.recipes, configs, seeds, set, floor, branches })
    }

    /// The groups of runs that are compared: first the runs from initial weights, if there are any, then each of [`Study::branches`].
    #[must_use]
    pub fn groups(&self) -> Vec<Group> {
        let runs = (!self.recipes.is_empty()).then_some(Group::Runs);
        runs.into_iter().chain((0..self.branches.len()).map(Group::Branch)).collect()
    }

    /// The recipes of a group, the baseline first; empty for a branch that does not exist in the study.
    #[must_use]
    pub fn recipes_of(&self, group: Group) -> &[String] {
        match group {
            Group::Runs => &self.recipes,
            Group::Branch(i) => self.branches.get(i).map_or(&[], |branch| &branch.recipes),
        }
    }

    /// The name of a group in tables: `runs`, or for example `branches of bf16 at step 1000, schedule kept`.
    #[must_use]
    pub fn group_name(&self, group: Group) -> String {
        match group {
            Group::Runs => "runs".into(),
            Group::Branch(i) => self.branches.get(i).map_or_else(String::new, |branch| {
                let Branch { trunk, steps, schedule, .. } = branch;
                format!("branches of {trunk} at step {steps}, schedule {}", schedule.name())
            }),
        }
    }

    /// Number of comparisons with the baseline that the study plans within a configuration; this is the family size of Holm's correction.
    #[must_use]
    pub fn comparisons(&self) -> usize {
        self.groups().into_iter().map(|group| self.recipes_of(group).len().saturating_sub(1)).sum()
    }

    /// The SHA-256 of a recipe's text; empty if the study does not name the recipe.
    #[must_use]
    pub fn recipe_sha256(&self, name: &str) -> &str {
        self.known.iter().find(|recipe| recipe.name == name).map_or("", |recipe| &recipe.sha256)
    }
}

/// The recipes that were already looked up.
struct Known<'a> {
    catalog: &'a dyn Catalog,
    recipes: Vec<Recipe>,
}

impl Known<'_> {
    fn add_all(&mut self, keys: &Keys<'_>, key: &str, names: &[String]) -> Result<()> {
        names.iter().enumerate().try_for_each(|(i, name)| self.add(keys, &format!("{key}[{i}]"), name))
    }

    fn add(&mut self, keys: &Keys<'_>, key: &str, name: &str) -> Result<()> {
        if self.recipes.iter().any(|recipe| recipe.name == name) {
            return Ok(());
        }
        let text = self.catalog.recipe(name).map_err(|why| {
            keys.unknown(key, why, name, self.catalog.recipe_names().iter().map(String::as_str))
        })?;
        let sha256 = sha256(text.as_bytes());
        if let Some(same) = self.recipes.iter().find(|recipe| recipe.sha256 == sha256) {
            return Err(keys.wrong(key, format!("{name:?} is the same recipe as {:?}", same.name)));
        }
        self.recipes.push(Recipe { name: name.to_owned(), sha256 });
        Ok(())
    }
}

/// Settings of all runs; they must not set the recipe or the seed, which the study determines.
fn settings(keys: &Keys<'_>) -> Result<Vec<String>> {
    let set = keys.texts("set")?.unwrap_or_default();
    let mut seen: Vec<&str> = Vec::new();
    for (i, setting) in set.iter().enumerate() {
        let at = format!("set[{i}]");
        let Some((key, _)) = setting.split_once('=') else {
            return Err(keys.wrong(&at, format!("{setting:?} is no key=value")));
        };
        let key = key.trim();
        if ["seed", "recipe"].contains(&key) {
            return Err(keys.wrong(&at, format!("`{key}` is what the study varies: see `{key}s`")));
        }
        if seen.contains(&key) {
            return Err(keys.wrong(&at, format!("`{key}` is set twice")));
        }
        seen.push(key);
    }
    Ok(set)
}

fn configs(keys: &Keys<'_>, set: &[String], catalog: &dyn Catalog) -> Result<Vec<Config>> {
    let mut configs: Vec<Config> = Vec::new();
    for (i, name) in keys.names("configs")?.into_iter().enumerate() {
        let key = format!("configs[{i}]");
        let settled = catalog.config(&name, set).map_err(|why| {
            keys.unknown(&key, why, &name, catalog.config_names().iter().map(String::as_str))
        })?;
        if settled.steps == 0 {
            return Err(keys.wrong(&key, format!("{name:?} trains 0 steps, expected at least 1")));
        }
        let sha256 = sha256(settled.text.as_bytes());
        if let Some(same) = configs.iter().find(|config| config.sha256 == sha256) {
            return Err(keys.wrong(&key, format!("{name:?} is the same configuration as {:?}", same.name)));
        }
        configs.push(Config { name, sha256, steps: settled.steps });
    }
    Ok(configs)
}

/// Moves the baseline to the front of the recipes, so that an interrupted study has as many pairs as possible.
fn baseline_first(
    keys: &Keys<'_>,
    key: &str,
    baseline: &str,
    mut recipes: Vec<String>,
) -> Result<Vec<String>> {
    let Some(at) = recipes.iter().position(|recipe| recipe == baseline) else {
        let why = format!("{baseline:?} is not among the recipes: {}", recipes.join(", "));
        return Err(keys.unknown(key, why, baseline, recipes.iter().map(String::as_str)));
    };
    recipes[..=at].rotate_right(1);
    Ok(recipes)
}

fn branch(keys: &Keys<'_>, baseline: &str, configs: &[Config], known: &mut Known<'_>) -> Result<Branch> {
    let trunk_keys = keys.table("trunk", &["recipe", "steps"])?;
    let trunk = trunk_keys.text("recipe")?;
    known.add(&trunk_keys, "recipe", &trunk)?;
    let Some(steps) = trunk_keys.number("steps", 1, u64::from(u32::MAX))? else {
        return Err(trunk_keys.wrong("steps", "is missing"));
    };
    let recipes = keys.names("recipes")?;
    known.add_all(keys, "recipes", &recipes)?;
    let recipes = baseline_first(keys, "recipes", baseline, recipes)?;
    let schedule = match keys.text("schedule")?.as_str() {
        "kept" => Schedule::Kept,
        "new" => Schedule::New,
        other => {
            let why = format!("is {other:?}, expected \"kept\" or \"new\"");
            return Err(keys.unknown("schedule", why, other, ["kept", "new"]));
        }
    };
    // The trunk trains with the configuration's schedule, which ends with the configuration's steps.
    if let Some(config) = configs.iter().find(|config| steps >= config.steps) {
        let why = format!("is {steps}, expected fewer than the {} steps of {}", config.steps, config.name);
        return Err(trunk_keys.wrong("steps", why));
    }
    Ok(Branch { trunk, steps, recipes, schedule })
}

/// SHA-256 in hexadecimal.
pub(crate) fn sha256(bytes: &[u8]) -> String {
    Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect()
}
