//! `nibble study`: trains recipes over seeds and compares their losses. Runs are processes of `nibble train`. Each run has a folder, from
//! which an interrupted run is resumed. A run's stored result is a row (`nibble_study::Row`), a few kilobytes that can be kept.

mod catalog;
mod runs;

use catalog::Names;
use nibble_command::error::{Error, Result};
use nibble_command::output::{Force, Outputs};
use nibble_command::{joined, say, warn};
use nibble_study::{Cell, Claim, Kind, Next, Plan, Queue, Results, Rows, Schedule, Study};
use runs::{Deadline, Runner, pause};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Trains models with several recipes and seeds; compares the losses
///
/// Compares the loss of each recipe with the loss of a baseline recipe under the same seed, and reports the differences with 95 %
/// confidence intervals. Each finished run writes one row, a JSON file, to DIR/rows. A study may be stopped at any time and continued by
/// another call; several processes or GPUs may work on one study at the same time. Interruptions do not change the tables.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:\n  \
    nibble study formats.toml --plan\n  \
    nibble study formats.toml --for 12m\n  \
    nibble study formats.toml --device cuda:1\n  \
    nibble study formats.toml --tables")]
pub struct Args {
    /// TOML file that describes the study: recipes, the baseline recipe, configurations and seeds.
    #[arg(value_name = "FILE")]
    file: PathBuf,
    /// Folder to which the study's rows and tables are written. Default: the path FILE without its extension.
    #[arg(long, value_name = "DIR")]
    dir: Option<PathBuf>,
    /// Ends after TIME (such as 90s, 12m or 2h): stops the current run and starts no other run. The next call resumes the stopped run.
    #[arg(long = "for", value_name = "TIME", value_parser = duration)]
    time: Option<Duration>,
    /// Device on which the runs train: a value of the configuration key `run.device`, such as cuda:0.
    #[arg(long, value_name = "DEVICE")]
    device: Option<String>,
    /// Only prints the number of runs, their expected time, and the smallest loss difference that the study can detect with its number of
    /// seeds; trains nothing.
    #[arg(long, conflicts_with_all = ["time", "tables", "retry"])]
    plan: bool,
    /// Only writes the tables, from the rows of finished runs; trains nothing.
    #[arg(long, conflicts_with_all = ["time", "retry"])]
    tables: bool,
    /// Repeats failed runs. A run whose loss diverged counts as a result, and is not repeated.
    #[arg(long)]
    retry: bool,
    /// Git commit of this program, which the study records in each row.
    #[arg(long, value_name = "COMMIT", default_value = "")]
    commit: String,
    /// Standard deviation, over the seeds of a pilot study, of the loss difference 100 · (loss of the recipe / loss of the baseline − 1),
    /// in per cent. --plan uses SD until the rows of the study itself give a standard deviation.
    #[arg(long, value_name = "SD")]
    pilot_sd: Option<f64>,
    #[command(flatten)]
    force: Force,
}

pub fn run(args: Args) -> Result<()> {
    let study = Study::load(&args.file, &Names).map_err(wrong)?;
    let dir = args.dir.clone().unwrap_or_else(|| args.file.with_extension(""));
    let rows = Rows::read(&dir, &study.cells()).map_err(wrong)?;
    for stale in rows.stale() {
        warn!("warning: {} is not used: {}", stale.file.display(), stale.why);
    }
    say!("{}", Plan::of(&study, &rows, &|_| None, args.pilot_sd).to_string().trim_end());
    if args.plan {
        return Ok(());
    }
    if !args.tables {
        work(&args, &study, &dir)?;
    }
    tables(&args, &study, &dir)
}

/// Runs cells until none is left or the time limit is reached.
fn work(args: &Args, study: &Study, dir: &Path) -> Result<()> {
    let queue = Queue::open(dir, study.cells(), &joined::host()).map_err(wrong)?;
    let queue = queue.on_device(args.device.as_deref().unwrap_or_default());
    if args.retry {
        let again = queue.forget_failed().map_err(wrong)?;
        again.iter().for_each(|cell| say!("runs again: {cell}"));
    }
    let deadline = Deadline::after(args.time);
    let runner = Runner::new(dir, args.device.as_deref(), &args.commit, deadline);
    while !deadline.is_over() {
        match queue.next().map_err(wrong)? {
            Next::Cell(claim) => {
                let id = claim.cell().id.clone();
                if !run_cell(&runner, &queue, claim)? {
                    say!("{id}: stopped; the next call resumes it");
                    break;
                }
            }
            Next::Wait { branches: 1.., .. } => pause(),
            Next::Wait { running, .. } => {
                say!("{} runs are under way elsewhere, and none is left to start", running.len());
                break;
            }
            Next::Done { blocked } => {
                blocked
                    .iter()
                    .for_each(|cell| warn!("warning: {} cannot run: its trunk diverged or failed", cell.id));
                break;
            }
        }
    }
    Ok(())
}

/// Runs a cell and writes its row; false if the run was stopped. Checkpoints of finished runs are removed: those of a trunk with its last
/// branch.
fn run_cell(runner: &Runner<'_>, queue: &Queue, claim: Claim) -> Result<bool> {
    let cell = claim.cell().clone();
    let from = match cell.trunk().and_then(|trunk| queue.cell(trunk)) {
        None => None,
        Some(trunk) => match runner.trunk(queue, trunk)? {
            Some(checkpoint) => Some(checkpoint),
            None => return Ok(false),
        },
    };
    let Some(row) = runner.run(queue, &claim, from.as_deref())? else { return Ok(false) };
    say!("{}", told(&cell, &row));
    claim.finish(&row).map_err(wrong)?;
    if row.outcome == nibble_study::Outcome::Done && queue.branches_left(&cell.id).next().is_none() {
        runner.drop_checkpoints(&cell.id)?;
    }
    match cell.trunk() {
        Some(trunk) if queue.branches_left(trunk).next().is_none() => runner.drop_checkpoints(trunk)?,
        _ => {}
    }
    Ok(true)
}

/// One line for a finished run.
fn told(cell: &Cell, row: &nibble_study::Row) -> String {
    let loss =
        row.last_tenth.map_or_else(String::new, |loss| format!(", {loss:.4} nats over the last tenth"));
    let outcome = match &row.outcome {
        nibble_study::Outcome::Done => "done".to_owned(),
        nibble_study::Outcome::Diverged { step } => format!("diverged at step {step}"),
        nibble_study::Outcome::Failed { why } => format!("failed: {why}"),
    };
    format!("{}: {outcome}{loss}, {:.0} s", cell.id, row.seconds)
}

/// Writes the tables, and prints the Markdown table.
fn tables(args: &Args, study: &Study, dir: &Path) -> Result<()> {
    let rows = Rows::read(dir, &study.cells()).map_err(wrong)?;
    let results = Results::of(study, &rows);
    let page = nibble_study::html(study, &rows).map_err(wrong)?;
    let markdown = nibble_study::markdown(&results);
    let mut outputs = Outputs::new(args.force, [args.file.clone()]);
    let files = [
        ("table.md", markdown.clone()),
        ("table.csv", nibble_study::csv(&results)),
        ("table.json", nibble_study::json(&results)),
        ("study.html", page),
    ];
    for (name, text) in files {
        outputs.of_run(&dir.join(name))?.write(text)?;
    }
    say!("{}", markdown.trim_end());
    say!("tables: {} (table.md, table.csv, table.json, study.html)", dir.display());
    Ok(())
}

/// Converts a study's error: it is caused either by the user's input or by a file.
fn wrong(error: nibble_study::Error) -> Error {
    Error::usage(error)
}

/// Parses a duration such as `90s`, `12m` or `2h`.
fn duration(text: &str) -> std::result::Result<Duration, String> {
    let (number, unit) = text.split_at(text.len() - text.chars().next_back().map_or(0, char::len_utf8));
    let seconds = match unit {
        "s" => 1.0,
        "m" => 60.0,
        "h" => 3600.0,
        _ => return Err("invalid time, expected a number with s, m or h, such as 12m".into()),
    };
    let number: f64 = number
        .parse()
        .map_err(|_| "invalid time, expected a number with s, m or h, such as 12m".to_owned())?;
    Duration::try_from_secs_f64(number * seconds).map_err(|_| "time out of range".into())
}

/// The settings of a cell's run: those of the study, the seed, the perturbed learning rate of a noise-floor run, and for a branch the
/// checkpoint of its trunk.
fn settings(cell: &Cell, lr: f64, from: Option<&Path>) -> Vec<String> {
    let mut settings = cell.settings.clone();
    settings.push(format!("seed={}", cell.seed));
    if cell.repeat > 0 {
        settings.push(format!("train.lr={:?}", lr * cell.lr_factor()));
    }
    if let (Kind::Branch { schedule, .. }, Some(from)) = (&cell.kind, from) {
        settings.push(format!("train.init_from={}", from.display()));
        if *schedule == Schedule::Kept {
            settings.push("train.init_state=all".into());
        }
    }
    settings
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_have_a_unit() {
        assert_eq!(duration("12m"), Ok(Duration::from_secs(720)));
        assert_eq!(duration("1.5h"), Ok(Duration::from_secs(5400)));
        for wrong in ["12", "", "m", "-1s", "xs", "1é"] {
            assert!(duration(wrong).is_err(), "{wrong}");
        }
    }
}
