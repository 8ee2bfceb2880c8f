//! What names mean: this crate knows no recipe and no configuration, and asks whoever uses it.

/// What a configuration is, with the settings of a study.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Settled {
    /// Everything of the configuration that decides the bits of a run, as text. Another text is another cell, whose rows are not used. The seed, the recipe, the run's name and
    /// its folder do not belong here; a hash of the training data does.
    pub text: String,
    /// Optimizer steps of a run.
    pub steps: u64,
}

/// What names of recipes and configurations mean.
pub trait Catalog {
    /// The text of the recipe of this name, or in this file.
    ///
    /// # Errors
    /// Why there is none, or why it cannot be read.
    fn recipe(&self, name: &str) -> Result<String, String>;

    /// The configuration of this name, or in this file, with these settings (`key=value`).
    ///
    /// # Errors
    /// Why there is none, or why it cannot be used with these settings.
    fn config(&self, name: &str, set: &[String]) -> Result<Settled, String>;

    /// The names of built-in recipes, of which errors suggest the nearest.
    fn recipe_names(&self) -> Vec<String>;

    /// The names of built-in configurations.
    fn config_names(&self) -> Vec<String>;
}
