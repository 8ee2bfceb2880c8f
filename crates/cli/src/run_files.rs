//! The files in a run's directory.

use nibble_command::error::{Error, Result};
use nibble_command::warn;
use nibble_core::Recipe;
use nibble_train::checks::{for_run, load_recipe};
use nibble_train::config::Config;
use nibble_train::data::Dataset;
use nibble_train::files;
use nibble_train::metrics::{LossCurve, Metrics, read_metrics};
use nibble_train::trainer::{
    CONFIG_FILE, LAYERS_FILE, MEMORY_FILE, METRICS_FILE, RANKS_FILE, RECIPE_FILE, stored_config,
};
use std::path::{Path, PathBuf};

/// A run's configuration, recipe and metrics.
pub struct RunFiles {
    pub dir: PathBuf,
    pub config: Config,
    pub recipe_name: String,
    /// The recipe with which the run started, or the reason why the recipe is unknown.
    pub recipe: std::result::Result<Recipe, String>,
    /// The metrics of all steps and evaluations.
    pub metrics: Vec<Metrics>,
    /// Descriptions of problems in the files, one sentence each.
    pub faults: Vec<String>,
}

/// The files in a run's directory that a report or plot reads.
pub fn paths(dir: &Path) -> [PathBuf; 6] {
    [CONFIG_FILE, RECIPE_FILE, METRICS_FILE, LAYERS_FILE, MEMORY_FILE, RANKS_FILE].map(|name| dir.join(name))
}

impl RunFiles {
    /// Reads the files of the run in a directory. Problems in the run's files are also printed as warnings on standard error.
    ///
    /// # Errors
    /// Returns an error if the directory has no run, or the run has done no step.
    pub fn read(dir: &Path) -> Result<Self> {
        let path = dir.join(METRICS_FILE);
        if !path.exists() {
            return Err(Error::usage(format!(
                "{}: no such file; a run's directory holds one",
                path.display()
            )));
        }
        let (config, other_config) = stored_config(dir, &[])?;
        let recipe = stored_recipe(dir, &config).map(|recipe| for_run(&config, recipe));
        // If the recipe cannot be read, the configuration's name for it is used.
        let recipe_name =
            recipe.as_ref().map_or_else(|_| config.recipe.clone(), |recipe| recipe.name.clone());
        let file = read_metrics(&path)?;
        let faults = [Vec::from_iter(other_config), file.faults(&path, "is no metrics")].concat();
        faults.iter().for_each(|fault| warn!("warning: {fault}"));
        let metrics = file.metrics;
        Ok(Self { dir: dir.to_owned(), config, recipe_name, recipe, metrics, faults })
    }

    /// The run's loss curves, with the title `title`.
    ///
    /// # Errors
    /// Returns an error if the run has no loss yet.
    pub fn curve(&self, title: &str) -> Result<LossCurve> {
        let is_synthetic = self.config.is_synthetic();
        let entropy = if is_synthetic { Dataset::of(&self.config)?.entropy() } else { None };
        let mut curve = LossCurve::new(title, entropy, self.config.unit());
        self.metrics.iter().for_each(|metrics| curve.add(metrics));
        if curve.train.is_empty() && curve.valid.is_empty() {
            let path = self.dir.join(METRICS_FILE);
            return Err(Error::usage(format!("{}: holds no loss yet", path.display())));
        }
        Ok(curve)
    }
}

/// The recipe stored with the run; for a run of an older version, the recipe that the run's configuration names.
pub fn stored_recipe(dir: &Path, config: &Config) -> std::result::Result<Recipe, String> {
    let path = dir.join(RECIPE_FILE);
    match files::read_text(&path, files::MOST_TEXT) {
        Ok(text) => {
            let stem = Path::new(&config.recipe).file_stem().unwrap_or_default();
            Recipe::parse(&stem.to_string_lossy(), &text).map_err(|e| format!("{}: {e}", path.display()))
        }
        Err(e) if e.kind() != std::io::ErrorKind::NotFound => Err(format!("{}: {e}", path.display())),
        Err(_) => load_recipe(&config.recipe).map_err(|e| e.to_string()),
    }
}
