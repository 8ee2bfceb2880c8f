//! `nibble plot`: draws the losses of runs from the runs' metrics.

use crate::run_files::{self, RunFiles};
use nibble_command::error::{Error, Result};
use nibble_command::output::{Force, Mark, Outputs};
use nibble_command::say;
use nibble_train::metrics::{LOSSES_BY, LossCurve, PICTURE, Shown, losses_svg};
use nibble_train::trainer::{PICTURE_FILE, heading};
use std::path::{Path, PathBuf};

/// Draws the losses of runs into an SVG file
///
/// Draws the training and held-out losses of one or several runs in one chart. With more than six runs, the chart shows only the held-out
/// losses, and the legend is a column beside the chart.
#[derive(Debug, clap::Args)]
#[command(
    after_help = "The runs may still be in progress. `nibble train` draws the loss.svg of its run again at every evaluation.\n\n\
    Examples:\n  \
    nibble plot runs/tiny\n  \
    nibble plot runs/tiny runs/tiny-2 --output both.svg"
)]
pub struct Args {
    /// Directories of the runs to draw.
    #[arg(value_name = "RUN", required = true)]
    runs: Vec<PathBuf>,
    /// SVG file to write. Default: for one run, loss.svg in the run's directory; for several runs, losses.svg in the current directory.
    #[arg(long, value_name = "OUT")]
    output: Option<PathBuf>,
    #[command(flatten)]
    force: Force,
}

const MARK: Mark = Mark::Picture(LOSSES_BY);

pub fn run(args: Args) -> Result<()> {
    let alone = args.runs.len() == 1;
    let mut outputs = Outputs::new(args.force, args.runs.iter().flat_map(|run| run_files::paths(run)));
    let output = match &args.output {
        Some(output) => outputs.named(output, &MARK)?,
        None if alone => outputs.of_run(&args.runs[0].join(PICTURE_FILE))?,
        None => outputs.named(Path::new("losses.svg"), &MARK)?,
    };
    let curves = args.runs.iter().map(|run| curve(run, alone)).collect::<Result<Vec<_>>>()?;
    let picture = losses_svg(&curves, PICTURE, Shown::Tail).map_err(Error::usage)?;
    let told = output.path().display().to_string();
    output.write(picture)?;
    say!("picture: {told}");
    Ok(())
}

/// The loss curve of the run in a directory.
fn curve(dir: &Path, alone: bool) -> Result<LossCurve> {
    let run = RunFiles::read(dir)?;
    let title = if alone { heading(dir, &run.recipe_name) } else { dir.display().to_string() };
    run.curve(&title)
}
