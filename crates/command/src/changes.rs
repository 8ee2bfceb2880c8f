//! What the command line changes in a configuration.

use nibble_train::config::DeviceChoice;

/// `--set`, and the two keys that have an option of their own.
#[derive(Debug, clap::Args)]
pub struct Changes {
    /// Changes a value of the configuration; may be given many times.
    #[arg(long = "set", value_name = "KEY=VALUE")]
    overrides: Vec<String>,
    /// Precision recipe: a built-in one (see `nibble recipe`) or the path of a TOML file.
    #[arg(long, value_name = "RECIPE")]
    recipe: Option<String>,
    #[command(flatten)]
    device: DeviceArg,
}

impl Changes {
    /// All of them as overrides, those with options of their own last.
    pub fn overrides(self) -> Vec<String> {
        let mut overrides = self.overrides;
        overrides.extend(self.recipe.map(|name| format!("recipe={name}")));
        self.device.after(overrides)
    }
}

/// `--device`, short for `--set run.device=...`.
#[derive(Debug, Clone, Default, clap::Args)]
pub struct DeviceArg {
    /// Where to compute: auto (a Hopper GPU for each rank if there are so many to use, else the CPU), cpu, cuda, or cuda:N.
    #[arg(long, value_name = "DEVICE")]
    pub device: Option<DeviceChoice>,
}

impl DeviceArg {
    /// The overrides, this one last.
    pub fn after(&self, mut overrides: Vec<String>) -> Vec<String> {
        overrides.extend(self.device.map(|device| format!("run.device={device}")));
        overrides
    }
}

/// What the last of these overrides that sets a key sets it to.
pub fn set_to<'o>(overrides: &'o [String], key: &str) -> Option<&'o str> {
    let value =
        |set: &'o String| set.split_once('=').filter(|(name, _)| name.trim() == key).map(|(_, value)| value);
    overrides.iter().rev().find_map(value)
}
