//! The meaning of a study's names: recipes and configurations as `nibble train` reads them.

use nibble_core::Recipe;
use nibble_study::{Catalog, Settled};
use nibble_train::checks::load_recipe;
use nibble_train::config::{Config, preset_names};
use nibble_train::data::Dataset;

/// Recipes and configurations by name or file.
pub struct Names;

impl Catalog for Names {
    fn recipe(&self, name: &str) -> Result<String, String> {
        // The recipe in full: a change in a recipe that it extends is a change of it.
        load_recipe(name).map(|recipe| recipe.to_toml()).map_err(|why| why.to_string())
    }

    fn config(&self, name: &str, set: &[String]) -> Result<Settled, String> {
        let why = |error: nibble_train::Error| error.to_string();
        let config = Config::load(name, set).map_err(why)?;
        let data = Dataset::of(&config).map_err(why)?;
        let steps = config.train.steps;
        // What a cell sets itself decides no bit by the configuration.
        let mut neutral = config;
        (neutral.seed, neutral.recipe, neutral.run) = (0, String::new(), Default::default());
        let text = neutral.resolved_toml().map_err(why)?;
        Ok(Settled { text: format!("data {}\n{text}", data.sha256()), steps })
    }

    fn recipe_names(&self) -> Vec<String> {
        Recipe::all_names().map(str::to_owned).collect()
    }

    fn config_names(&self) -> Vec<String> {
        preset_names().map(str::to_owned).collect()
    }
}
