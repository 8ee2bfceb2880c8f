//! What the command line changes in a configuration.

use crate::device::DeviceArg;

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

/// What the last of these overrides that sets a key sets it to.
pub fn set_to<'o>(overrides: &'o [String], key: &str) -> Option<&'o str> {
    let value =
        |set: &'o String| set.split_once('=').filter(|(name, _)| name.trim() == key).map(|(_, value)| value);
    overrides.iter().rev().find_map(value)
}
