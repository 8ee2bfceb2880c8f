//! `nibble plot`: the losses of runs, from their metrics.

use nibble_command::error::{Error, Result};
use nibble_command::say;
use nibble_train::config::Config;
use nibble_train::data::Dataset;
use nibble_train::metrics::{LossCurve, draw_losses, read_metrics};
use nibble_train::trainer::{heading, load_recipe};
use std::path::{Path, PathBuf};

/// Draws training and held-out losses of one run, or of several beside one another, into an SVG file.
#[derive(Debug, clap::Args)]
#[command(after_help = "A run need not be at its end: its own loss.svg is drawn at every evaluation.\n\n\
    Examples:\n  \
    nibble plot runs/tiny\n  \
    nibble plot runs/tiny runs/tiny-2 --output both.svg")]
pub struct Args {
    /// Directories of runs.
    #[arg(value_name = "RUN", required = true)]
    runs: Vec<PathBuf>,
    /// The file to draw. Left out: loss.svg in the directory of a run alone, losses.svg here for several.
    #[arg(long, value_name = "FILE")]
    output: Option<PathBuf>,
}

pub fn run(args: Args) -> Result<()> {
    let alone = args.runs.len() == 1;
    let curves = args.runs.iter().map(|run| curve(run, alone)).collect::<Result<Vec<_>>>()?;
    let own = || if alone { args.runs[0].join("loss.svg") } else { PathBuf::from("losses.svg") };
    let output = args.output.clone().unwrap_or_else(own);
    draw_losses(&curves, &output)?;
    say!("picture: {}", output.display());
    Ok(())
}

/// The losses of the run in a directory.
fn curve(run: &Path, alone: bool) -> Result<LossCurve> {
    let path = run.join("metrics.jsonl");
    if !path.exists() {
        return Err(Error::usage(format!("{}: no such file; a run's directory holds one", path.display())));
    }
    let config = Config::load(&run.join("config.toml").to_string_lossy(), &[])?;
    let entropy = if config.is_synthetic() { Dataset::of(&config)?.entropy() } else { None };
    // A recipe that is no longer there has the name that the configuration gives it.
    let recipe = load_recipe(&config.recipe).map_or_else(|_| config.recipe.clone(), |recipe| recipe.name);
    let title = if alone { heading(run, &recipe) } else { run.display().to_string() };
    let mut curve = LossCurve::new(&title, entropy, config.unit());
    let file = read_metrics(&path)?;
    file.metrics.iter().for_each(|metrics| curve.add(metrics));
    for line in file.unreadable {
        eprintln!("warning: {}: line {line} is no metrics", path.display());
    }
    if curve.train.is_empty() && curve.valid.is_empty() {
        return Err(Error::usage(format!("{}: holds no loss yet", path.display())));
    }
    Ok(curve)
}
