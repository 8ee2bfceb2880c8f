//! The meaning of names. This crate knows no recipes and no configurations, and asks its caller for them.

/// A configuration after the settings of a study were applied to it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Settled {
    /// Everything in the configuration that determines the bits of a run, as text. If this text changes, the cell becomes another cell, and
    /// the rows of the old cell are not used. The text excludes the seed, the recipe, and the run's name and folder; the text includes a
    /// hash of the training data.
    pub text: String,
    /// Number of optimizer steps of a run.
    pub steps: u64,
}

/// Finds recipes and configurations by their names.
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
