//! `nibble report`: all that a run has left, as one page that any browser opens without a network.

mod charts;
mod page;
mod precision;
mod series;

use crate::run_files::RunFiles;
use nibble_command::console::bytes;
use nibble_command::error::{Error, Result};
use nibble_command::say;
use nibble_core::DeviceKind;
use nibble_train::ledger::Ledger;
use nibble_train::metrics::{LayerMetrics, Watchdog, read_layers};
use nibble_train::plan;
use nibble_train::trainer::{LAYERS_FILE, MEMORY_FILE};
use std::path::{Path, PathBuf};

/// Writes a run's report: one HTML file with its losses, speed, expert load, memory, precisions and warnings.
#[derive(Debug, clap::Args)]
#[command(after_help = "The file needs no network and no other file. A run need not be at its end.\n\n\
    Examples:\n  \
    nibble report runs/tiny\n  \
    nibble report runs/tiny --out tiny.html")]
pub struct Args {
    /// Directory of the run.
    #[arg(value_name = "RUN")]
    dir: PathBuf,
    /// The file to write. Left out: report.html in the run's directory. A file that is no report of this run is not replaced.
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
}

pub fn run(args: Args) -> Result<()> {
    let out = args.out.unwrap_or_else(|| args.dir.join("report.html"));
    let run = Recorded::read(&args.dir)?;
    require_own(&out, &run.files)?;
    let page = page::render(&run)?;
    let tmp = out.with_extension("html.tmp");
    std::fs::write(&tmp, &page).map_err(Error::io(&tmp))?;
    std::fs::rename(&tmp, &out).map_err(Error::io(&out))?;
    say!("report: {} ({})", out.display(), bytes(page.len() as u64));
    Ok(())
}

/// What a report is made of.
struct Recorded {
    files: RunFiles,
    layers: Vec<LayerMetrics>,
    /// What kept tensors take, by shape, or why that is not known.
    ledger: std::result::Result<Ledger, String>,
    /// The prediction that the run began with, as it was told then.
    memory: std::result::Result<String, String>,
    /// What the watchdog said.
    findings: Vec<String>,
}

impl Recorded {
    fn read(dir: &Path) -> Result<Self> {
        let mut files = RunFiles::read(dir)?;
        let path = dir.join(LAYERS_FILE);
        let layers = read_layers(&path)?;
        if !path.exists() {
            files
                .faults
                .push(format!("{}: no such file; expert load and numerics are not known", path.display()));
        }
        let broken = layers.unreadable.iter();
        let broken = broken.map(|line| format!("{}: line {line} cannot be read", path.display()));
        files.faults.extend(broken);
        let path = dir.join(MEMORY_FILE);
        let memory = std::fs::read_to_string(&path).map_err(|e| format!("{}: {e}", path.display()));
        // Of both kinds of device the kept tensors are the same.
        let predicted =
            |recipe| plan::predict(DeviceKind::Host, files.config.run.ranks, &files.config, recipe);
        let ledger = match &files.recipe {
            Ok(recipe) => predicted(recipe).map(|p| p.ledger).map_err(|e| e.to_string()),
            Err(why) => Err(why.clone()),
        };
        // The metrics hold all that it looks at; a run that was resumed began to look anew.
        let mut watchdog = Watchdog::default();
        let steps = files.metrics.iter().filter(|metrics| metrics.valid_loss.is_none());
        let findings = steps.flat_map(|metrics| watchdog.step(metrics)).collect();
        Ok(Self { files, layers: layers.metrics, ledger, memory, findings })
    }
}

/// The beginning of every report of a run, by which it is known.
fn beginning(run: &RunFiles) -> String {
    let whose = maud::html! { meta name="generator" content="nibble report"; meta name="run" content=(run.config.run.dir); };
    format!("<!DOCTYPE html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">{}", whose.into_string())
}

/// Checks that a report would replace nothing but an earlier one of the same run.
fn require_own(out: &Path, run: &RunFiles) -> Result<()> {
    match std::fs::read(out) {
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(()),
        Ok(there) if there.starts_with(beginning(run).as_bytes()) => Ok(()),
        Ok(_) => Err(Error::usage(format!(
            "{} is there already and is no report of this run; name another file",
            out.display()
        ))),
        Err(e) => Err(Error::io(out)(e)),
    }
}
