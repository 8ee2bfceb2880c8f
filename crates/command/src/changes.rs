//! Options on the command line that override keys of a configuration.

use nibble_train::config::DeviceChoice;

/// The options `--set`, `--recipe` and `--device`.
#[derive(Debug, clap::Args)]
pub struct Changes {
    /// Sets the configuration key KEY to VALUE. This option may be repeated.
    #[arg(long = "set", value_name = "KEY=VALUE")]
    overrides: Vec<String>,
    /// Recipe, which sets the number formats: the name of a built-in recipe (`nibble recipe` lists the names) or the path of a TOML file.
    #[arg(long, value_name = "RECIPE")]
    recipe: Option<String>,
    #[command(flatten)]
    device: DeviceArg,
}

impl Changes {
    /// All of these options in the form of overrides; options that set a single key come last.
    pub fn overrides(self) -> Vec<String> {
        let mut overrides = self.overrides;
        overrides.extend(self.recipe.map(|name| format!("recipe={name}")));
        self.device.after(overrides)
    }
}

/// The option `--device`, which is short for `--set run.device=...`.
#[derive(Debug, Clone, Default, clap::Args)]
pub struct DeviceArg {
    /// Device to compute on: cpu, cuda, cuda:N (the GPU with index N), or auto (one Hopper GPU per rank if enough GPUs are usable,
    /// otherwise the CPU).
    #[arg(long, value_name = "DEVICE")]
    pub device: Option<DeviceChoice>,
}

impl DeviceArg {
    /// Appends the override that this option stands for to `overrides`.
    pub fn after(&self, mut overrides: Vec<String>) -> Vec<String> {
        overrides.extend(self.device.map(|device| format!("run.device={device}")));
        overrides
    }
}

/// The value that the last override of this key sets.
pub fn set_to<'o>(overrides: &'o [String], key: &str) -> Option<&'o str> {
    let value =
        |set: &'o String| set.split_once('=').filter(|(name, _)| name.trim() == key).map(|(_, value)| value);
    overrides.iter().rev().find_map(value)
}
