//! Overrides of a configuration from the command line.

use nibble_train::config::DeviceChoice;

/// The options `--set`, `--recipe` and `--device`, which override a configuration.
#[derive(Debug, clap::Args)]
pub struct Changes {
    /// Sets a configuration key. This option may be repeated.
    #[arg(long = "set", value_name = "KEY=VALUE")]
    overrides: Vec<String>,
    /// Recipe, which sets number formats: a built-in recipe (see `nibble recipe`) or the path of a TOML
    /// file.
    #[arg(long, value_name = "RECIPE")]
    recipe: Option<String>,
    #[command(flatten)]
    device: DeviceArg,
}

impl Changes {
    /// All of them as overrides; keys with their own options come last.
    pub fn overrides(self) -> Vec<String> {
        let mut overrides = self.overrides;
        overrides.extend(self.recipe.map(|name| format!("recipe={name}")));
        self.device.after(overrides)
    }
}

/// `--device`, short for `--set run.device=...`.
#[derive(Debug, Clone, Default, clap::Args)]
pub struct DeviceArg {
    /// Device: cpu, cuda, cuda:N, or auto (one Hopper GPU per rank if enough GPUs are usable, otherwise
    /// the CPU).
    #[arg(long, value_name = "DEVICE")]
    pub device: Option<DeviceChoice>,
}

impl DeviceArg {
    /// Appends this override to `overrides`.
    pub fn after(&self, mut overrides: Vec<String>) -> Vec<String> {
        overrides.extend(self.device.map(|device| format!("run.device={device}")));
        overrides
    }
}

/// The value of a key by the last override that sets it.
pub fn set_to<'o>(overrides: &'o [String], key: &str) -> Option<&'o str> {
    let value =
        |set: &'o String| set.split_once('=').filter(|(name, _)| name.trim() == key).map(|(_, value)| value);
    overrides.iter().rev().find_map(value)
}
