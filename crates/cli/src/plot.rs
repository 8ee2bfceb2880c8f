//! `nibble plot`: the losses of runs, from their metrics.

use crate::run_files::RunFiles;
use nibble_command::error::Result;
use nibble_command::say;
use nibble_train::metrics::{LossCurve, draw_losses};
use nibble_train::trainer::{PICTURE_FILE, heading};
use std::path::{Path, PathBuf};

/// Draws the losses of runs into an SVG file
///
/// Training and held-out losses of one run, or of several beside one another.
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
    let own = || if alone { args.runs[0].join(PICTURE_FILE) } else { PathBuf::from("losses.svg") };
    let output = args.output.clone().unwrap_or_else(own);
    draw_losses(&curves, &output)?;
    say!("picture: {}", output.display());
    Ok(())
}

/// The losses of the run in a directory.
fn curve(dir: &Path, alone: bool) -> Result<LossCurve> {
    let run = RunFiles::read(dir)?;
    let title = if alone { heading(dir, &run.recipe_name) } else { dir.display().to_string() };
    run.curve(&title)
}
