//! `nibble report`: writes a run's data as one HTML page that needs no network.

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

/// Writes a report of a run as one HTML file
///
/// The report shows the run's losses, speed, expert load, memory, precisions and warnings.
#[derive(Debug, clap::Args)]
#[command(
    after_help = "A browser shows the HTML file without a network connection and without other files. The run may still be in progress.\n\n\
    Examples:\n  \
    nibble report runs/tiny\n  \
    nibble report runs/tiny --out tiny.html"
)]
pub struct Args {
    /// Directory of the run to report.
    #[arg(value_name = "RUN")]
    dir: PathBuf,
    /// HTML file to write. Default: report.html in the run's directory; an existing report.html is replaced. With --out but without
    /// --force, an existing file is replaced only if the file is a report of the same run.
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
            // In the run's own folder, any report may be replaced, because the folder may have been renamed.
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

/// The data of a report.
struct Recorded {
    files: RunFiles,
    /// Canonical path of the run's directory.
    place: PathBuf,
    layers: Vec<LayerMetrics>,
    /// Step times of each rank, for a run with several ranks.
    ranks: Vec<RankTimes>,
    /// Saved activations by shape, or the reason why they are unknown.
    ledger: std::result::Result<Ledger, String>,
    /// Number of parameters, if known.
    parameters: Option<usize>,
    /// The processes that have worked on the run.
    processes: Vec<Process>,
    /// The memory prediction printed at the start of the run.
    memory: std::result::Result<String, String>,
    /// The warnings of the training watchdog.
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
        // The saved activations are the same on a CPU and on a GPU.
        let predicted =
            |recipe| plan::predict(DeviceKind::Host, files.config.run.mesh(), &files.config, recipe);
        let predicted = match &files.recipe {
            Ok(recipe) => predicted(recipe).map_err(|e| e.to_string()),
            Err(why) => Err(why.clone()),
        };
        let parameters = predicted.as_ref().ok().map(|p| p.parameters);
        let ledger = predicted.map(|p| p.ledger);
        // The watchdog needs nothing but the metrics and the counts. (In the run itself, each resume started a new watchdog.)
        let mut watchdog = Watchdog::default();
        let mut findings = Vec::new();
        let mut counted = layers.metrics.iter().peekable();
        for metrics in files.metrics.iter().filter(|metrics| !metrics.is_evaluation()) {
            while let Some(layers) = counted.next_if(|layers| layers.step <= metrics.step) {
                findings.extend(watchdog.layers(layers));
            }
            findings.extend(watchdog.step(metrics));
        }
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

/// The first bytes of every report.
const GENERATOR: &str = "<!DOCTYPE html>\n<html lang=\"en\"><head><meta charset=\"utf-8\"><meta name=\"generator\" content=\"nibble report\">";

/// The first bytes of every report of this run. These bytes identify the run.
fn beginning(run: &Recorded) -> String {
    let whose = maud::html! { meta name="run" content=(run.place.display()); };
    format!("{GENERATOR}{}", whose.into_string())
}
