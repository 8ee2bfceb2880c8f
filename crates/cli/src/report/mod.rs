//! `nibble report`: all that a run has left, as one page that any browser opens without a network.

mod charts;
mod page;
mod precision;
mod ranks;
mod series;

use crate::processes::Process;
use crate::run_files::{self, RunFiles};
use nibble_command::console::bytes;
use nibble_command::error::{Error, Result};
use nibble_command::output::{Force, Mark, Outputs};
use nibble_command::{say, warn};
use nibble_core::DeviceKind;
use nibble_train::files;
use nibble_train::ledger::Ledger;
use nibble_train::metrics::{LayerMetrics, RankTimes, Watchdog, read_layers, read_rank_times};
use nibble_train::plan;
use nibble_train::trainer::{LAYERS_FILE, MEMORY_FILE, RANKS_FILE};
use std::path::{Path, PathBuf};

/// Writes a run's report, one HTML file
///
/// Its losses, speed, expert load, memory, precisions and warnings.
#[derive(Debug, clap::Args)]
#[command(after_help = "The file needs no network and no other file. A run need not be at its end.\n\n\
    Examples:\n  \
    nibble report runs/tiny\n  \
    nibble report runs/tiny --out tiny.html")]
pub struct Args {
    /// Directory of the run.
    #[arg(value_name = "RUN")]
    dir: PathBuf,
    /// The file to write. Left out: report.html in the run's directory. A file that is no report, or with --out no report of this
    /// run, is not replaced.
    #[arg(long, value_name = "OUT")]
    out: Option<PathBuf>,
    #[command(flatten)]
    force: Force,
}

pub fn run(args: Args) -> Result<()> {
    let run = Recorded::read(&args.dir)?;
    let mut outputs = Outputs::new(args.force, run_files::paths(&args.dir));
    let out = match &args.out {
        Some(out) => {
            outputs.named(out, &Mark::Page { beginning: beginning(&run), what: "report of this run" })?
        }
        None => {
            // In the run's own folder, whatever that was called when the page was written.
            let mark = Mark::Page { beginning: GENERATOR.to_owned(), what: "report" };
            outputs.named(&args.dir.join("report.html"), &mark)?
        }
    };
    let page = page::render(&run)?;
    let told = out.path().display().to_string();
    out.write(&page)?;
    say!("report: {told} ({})", bytes(page.len() as u64));
    Ok(())
}

/// What a report is made of.
struct Recorded {
    files: RunFiles,
    /// Where the run's directory is, whatever it was called by.
    place: PathBuf,
    layers: Vec<LayerMetrics>,
    /// Times of each rank, of a run with several.
    ranks: Vec<RankTimes>,
    /// What kept tensors take, by shape, or why that is not known.
    ledger: std::result::Result<Ledger, String>,
    /// Trainable numbers, where that is known.
    parameters: Option<usize>,
    /// The processes that have worked on the run.
    processes: Vec<Process>,
    /// The prediction that the run began with, as it was told then.
    memory: std::result::Result<String, String>,
    /// What the watchdog said.
    findings: Vec<String>,
}

impl Recorded {
    fn read(dir: &Path) -> Result<Self> {
        let mut files = RunFiles::read(dir)?;
        let place = dir.canonicalize().map_err(Error::io(dir))?;
        let path = dir.join(LAYERS_FILE);
        let layers = read_layers(&path)?;
        if !path.exists() {
            files
                .faults
                .push(format!("{}: no such file; expert load and numerics are not known", path.display()));
        }
        let mut broken = layers.faults(&path, "cannot be read");
        let path = dir.join(RANKS_FILE);
        let ranks = read_rank_times(&path)?;
        broken.extend(ranks.faults(&path, "cannot be read"));
        broken.iter().for_each(|fault| warn!("warning: {fault}"));
        files.faults.extend(broken);
        let path = dir.join(MEMORY_FILE);
        let memory =
            files::read_text(&path, files::MOST_TEXT).map_err(|e| format!("{}: {e}", path.display()));
        // Of both kinds of device the kept tensors are the same.
        let predicted =
            |recipe| plan::predict(DeviceKind::Host, files.config.run.mesh(), &files.config, recipe);
        let predicted = match &files.recipe {
            Ok(recipe) => predicted(recipe).map_err(|e| e.to_string()),
            Err(why) => Err(why.clone()),
        };
        let parameters = predicted.as_ref().ok().map(|p| p.parameters);
        let ledger = predicted.map(|p| p.ledger);
        // The metrics hold all that it looks at; a run that was resumed began to look anew.
        let mut watchdog = Watchdog::default();
        let steps = files.metrics.iter().filter(|metrics| !metrics.is_evaluation());
        let findings = steps.flat_map(|metrics| watchdog.step(metrics)).collect();
        let processes = Process::of_run(dir);
        Ok(Self {
            files,
            place,
            layers: layers.metrics,
            ranks: ranks.metrics,
            ledger,
            parameters,
            processes,
            memory,
            findings,
        })
    }
}

/// The beginning of every report.
const GENERATOR: &str = "<!DOCTYPE html>\n<html lang=\"en\"><head><meta charset=\"utf-8\"><meta name=\"generator\" content=\"nibble report\">";

/// The beginning of every report of a run, by which it is known.
fn beginning(run: &Recorded) -> String {
    let whose = maud::html! { meta name="run" content=(run.place.display()); };
    format!("{GENERATOR}{}", whose.into_string())
}
