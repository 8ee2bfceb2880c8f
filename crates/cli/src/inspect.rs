//! `nibble inspect`: one training step laid open in a file, for comparison with another implementation.

use nibble_command::changes::Changes;
use nibble_command::console::bytes;
use nibble_command::device::{self, Device, On, Work};
use nibble_command::error::{Error, Result};
use nibble_command::say;
use nibble_train::config::Config;
use nibble_train::trainer::Trainer;
use std::path::{Path, PathBuf};

/// Writes one forward and backward pass to a file
///
/// Weights, tokens, chosen experts, logits, gradients.
#[derive(Debug, clap::Args)]
#[command(
    after_help = "All tensors are F32; weights have the names of a checkpoint, gradients `grad.` before them. Beside FILE goes\n\
    FILE with the ending .json: the model's sizes. `benchmarks/peers/parity.py` holds both to plain PyTorch.\n\n\
    Examples:\n  \
    nibble inspect tiny --recipe f32 --out step.safetensors\n  \
    python3 benchmarks/peers/parity.py step.safetensors --model step.json"
)]
pub struct Args {
    /// A built-in configuration or the path of a TOML file.
    #[arg(value_name = "CONFIG", default_value = "tiny")]
    config: String,
    #[command(flatten)]
    changes: Changes,
    /// The file to write, in the safetensors format.
    #[arg(long, value_name = "FILE")]
    out: PathBuf,
}

pub fn run(args: Args) -> Result<()> {
    let config = Config::load(&args.config, &args.changes.overrides())?;
    device::run(&config.run, &Inspect { config: &config, out: &args.out })
}

struct Inspect<'a> {
    config: &'a Config,
    out: &'a Path,
}

impl Work for Inspect<'_> {
    type Out = ();

    fn run<B: Device>(&self, on: &On<'_, B>) -> Result<()> {
        on.announce();
        let trainer = Trainer::new(on.b, on.comm, self.config)?;
        let model = trainer.config_json();
        let seen = trainer.inspect()?;
        seen.write(self.out)?;
        let beside = self.out.with_extension("json");
        std::fs::write(&beside, model).map_err(Error::io(&beside))?;
        let size = seen.shapes().map(|(_, shape)| 4 * shape.iter().product::<usize>() as u64).sum();
        say!("{}: {} tensors, {}", self.out.display(), seen.shapes().count(), bytes(size));
        say!("{}: the model's sizes", beside.display());
        Ok(())
    }
}
