//! The meaning of names. This crate knows no recipes and no configurations, and asks its caller for them.

/// A configuration together with the settings of a study.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Settled {
    /// Everything of the configuration that determines the bits of a run, as text. If the text changes, the cell changes, and rows of the old cell are not used. The text excludes
    /// the seed, the recipe, the run's name and its folder; it includes a hash of the training data.
    pub text: String,
    /// Number of optimizer steps of a run.
    pub steps: u64,
}

/// Resolves names of recipes and configurations.
pub trait Catalog {
    /// The text of the recipe with this name, or in this file.
    ///
    /// # Errors
    /// Returns the reason why the recipe does not exist or cannot be read.
    fn recipe(&self, name: &str) -> Result<String, String>;

    /// The configuration with this name, or in this file, changed by these settings (`key=value`).
    ///
    /// # Errors
    /// Returns the reason why the configuration does not exist, or cannot be used with these settings.
    fn config(&self, name: &str, set: &[String]) -> Result<Settled, String>;

    /// The names of built-in recipes; errors suggest the most similar name.
    fn recipe_names(&self) -> Vec<String>;

    /// The names of built-in configurations.
    fn config_names(&self) -> Vec<String>;
}
