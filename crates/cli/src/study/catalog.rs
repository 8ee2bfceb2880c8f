//! Resolves the names in a study: recipes and configurations, as `nibble train` reads them.

use nibble_core::Recipe;
use nibble_study::{Catalog, Settled};
use nibble_train::checks::load_recipe;
use nibble_train::config::{Config, preset_names};
use nibble_train::data::Dataset;

/// A catalog that finds recipes and configurations by name or by file.
pub struct Names;

impl Catalog for Names {
    fn recipe(&self, name: &str) -> Result<String, String> {
        // The text is the full recipe, so that a change in a recipe that it extends also changes the text.
        load_recipe(name).map(|recipe| recipe.to_toml()).map_err(|why| why.to_string())
    }

    fn config(&self, name: &str, set: &[String]) -> Result<Settled, String> {
        let why = |error: nibble_train::Error| error.to_string();
        let config = Config::load(name, set).map_err(why)?;
        let data = Dataset::of(&config).map_err(why)?;
        let steps = config.train.steps;
        // Each cell sets the seed, the recipe and the run section, so their values in the configuration do not determine bits.
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
