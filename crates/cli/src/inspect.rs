//! `nibble inspect`: one training step laid open in a file, for comparison with another implementation.

use crate::console::{bytes, say};
use crate::env::Env;
use crate::error::{Error, Result};
use crate::ranks;
use crate::train::RecipeArg;
use nibble_core::{Comm, Kernels};
use nibble_train::config::Config;
use nibble_train::trainer::Trainer;
use std::path::{Path, PathBuf};

/// Writes one forward and backward pass to a file: weights, tokens, chosen experts, logits, gradients.
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
    /// Changes a value of the configuration; may be given many times.
    #[arg(long = "set", value_name = "KEY=VALUE")]
    overrides: Vec<String>,
    #[command(flatten)]
    recipe: RecipeArg,
    /// The file to write, in the safetensors format.
    #[arg(long, value_name = "FILE")]
    out: PathBuf,
}

pub fn run(args: Args) -> Result<()> {
    let env = Env::read()?;
    let config = Config::load(&args.config, &args.recipe.after(args.overrides))?;
    ranks::on_ranks(&env, &config.run, |b, comm| inspect(b, comm, &config, &args.out))
}

fn inspect<B: Kernels>(b: &B, comm: &dyn Comm<B>, config: &Config, out: &Path) -> Result<()> {
    let trainer = Trainer::new(b, comm, config)?;
    let model = trainer.config_json();
    let seen = trainer.inspect()?;
    seen.write(out)?;
    let beside = out.with_extension("json");
    std::fs::write(&beside, model).map_err(Error::io(&beside))?;
    let size = seen.shapes().map(|(_, shape)| 4 * shape.iter().product::<usize>() as u64).sum();
    say!("{}: {} tensors, {}", out.display(), seen.shapes().count(), bytes(size));
    say!("{}: the model's sizes", beside.display());
    Ok(())
}
