//! Runs a cell of a study as a process of `nibble train` in a separate folder, and reads the cell's row from the files of the run.

use super::settings;
#[cfg(target_os = "linux")]
use crate::launch::children::end_with_parent;
use crate::processes::Process;
use crate::run_files::RunFiles;
use nibble_command::error::{Error, Result};
use nibble_command::{say, warn};
use nibble_study::{
    Cell, Claim, Curve, Kind, Outcome, Provenance, Queue, Row, Schedule, diverged_at, last_tenth, read_row,
    row_file,
};
use nibble_train::checkpoint::latest_valid;
use nibble_train::config::Config;
use nibble_train::metrics::Metrics;
use nibble_train::trainer;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

/// Interval at which a run is polled.
const POLL: Duration = Duration::from_millis(50);

/// Time between two looks at what other processes of a study do.
const PAUSE: Duration = Duration::from_secs(1);

/// Waits for a while before the caller checks again what other processes of the study do.
pub fn pause() {
    std::thread::sleep(PAUSE);
}

/// The time at which work ends; without a given time, work never ends.
#[derive(Debug, Clone, Copy)]
pub struct Deadline(Option<Instant>);

impl Deadline {
    /// A deadline this long from now.
    pub fn after(time: Option<Duration>) -> Self {
        Self(time.and_then(|time| Instant::now().checked_add(time)))
    }

    /// Whether the deadline has passed already.
    pub fn is_over(self) -> bool {
        self.0.is_some_and(|end| Instant::now() >= end)
    }
}

/// Runs the cells (the single runs) of a study.
#[derive(Debug)]
pub struct Runner<'a> {
    dir: &'a Path,
    device: Option<&'a str>,
    commit: &'a str,
    deadline: Deadline,
}

impl<'a> Runner<'a> {
    /// A runner in the folder of a study, on this device. `commit` is the commit of Nibble that is written to the rows.
    pub const fn new(dir: &'a Path, device: Option<&'a str>, commit: &'a str, deadline: Deadline) -> Self {
        Self { dir, device, commit, deadline }
    }

    /// Trains a cell; if the cell was interrupted before, training continues from its last checkpoint. The result is `None` if the cell was
    /// interrupted again.
    ///
    /// # Errors
    /// Returns an error if no process can be started, or the folder cannot be written.
    pub fn run(&self, queue: &Queue, claim: &Claim, from: Option<&Path>) -> Result<Option<Row>> {
        let cell = claim.cell();
        let folder = self.folder(cell);
        std::fs::create_dir_all(&folder).map_err(Error::io(&folder))?;
        let log = folder.join("study.log");
        let resumes = trainer::has_begun(&folder) && has_checkpoints(&folder)?;
        if !resumes {
            // The folder belongs to the study: it holds a run that was stopped before its first checkpoint, or a trunk whose checkpoint is gone.
            std::fs::remove_dir_all(&folder)
                .and_then(|()| std::fs::create_dir_all(&folder))
                .map_err(Error::io(&folder))?;
        }
        say!("{}: {}", cell.id, if resumes { "resumes" } else { "starts" });
        let (mut is_alone, mut looked) = (true, None);
        let status = self.wait(self.start(cell, (&folder, from), resumes, &log)?, &mut || {
            if is_alone && looked.is_none_or(|looked: Instant| looked.elapsed() >= PAUSE) {
                looked = Some(Instant::now());
                // If other runs cannot be looked up, speed and energy are not recorded; the run itself goes on.
                is_alone = queue.shares_device(claim).is_ok_and(|shares| !shares);
            }
        })?;
        let Some(status) = status else { return Ok(None) };
        if was_stopped(status) {
            return Ok(None);
        }
        let mut row = row(cell, (&folder, &log), status, self.commit)?;
        if !is_alone {
            (row.tokens_per_second, row.joules_per_token) = (None, None);
        }
        Ok(Some(row))
    }

    /// Returns the last checkpoint of a trunk (a run that several branches share) whose row is written. If this machine does not have the
    /// checkpoint, for example because another machine wrote the row, the trunk is trained again. Its weights depend only on its seed,
    /// configuration and recipe. The result is `None` if training was interrupted.
    ///
    /// # Errors
    /// Returns the errors of [`Runner::run`], and an error if the trunk's new run does not finish well.
    pub fn trunk(&self, queue: &Queue, trunk: &Cell) -> Result<Option<PathBuf>> {
        let folder = self.folder(trunk);
        while !self.deadline.is_over() {
            let latest = latest_valid(&folder)?.checkpoint;
            if let Some(checkpoint) = latest.filter(|checkpoint| checkpoint.position().step == trunk.steps) {
                return Ok(Some(checkpoint.path().to_owned()));
            }
            let Some(claim) = queue.claim(trunk).map_err(super::wrong)? else {
                // Another process trains it.
                pause();
                continue;
            };
            let Some(row) = self.run(queue, &claim, None)? else { return Ok(None) };
            if row.outcome != Outcome::Done {
                let why = super::told(trunk, &row);
                return Err(Error::Failed(format!("the trunk was trained again for its branches: {why}")));
            }
            let before = read_row(&row_file(self.dir, &trunk.id)).map_err(super::wrong)?;
            if before.curve != row.curve {
                let (then, now) = (before.provenance.device, row.provenance.device);
                warn!(
                    "warning: {}: trained again, its losses differ from its row's ({then} then, {now} now): branches of this trunk do not start from \
                     the same weights",
                    trunk.id
                );
            }
        }
        Ok(None)
    }

    /// The folder of a cell's run.
    fn folder(&self, cell: &Cell) -> PathBuf {
        self.dir.join("runs").join(&cell.id)
    }

    /// Removes the checkpoints of a run whose row is written, because the row has what the study needs and weights take gigabytes.
    ///
    /// # Errors
    /// Returns an error if the checkpoints cannot be removed.
    pub fn drop_checkpoints(&self, cell: &str) -> Result<()> {
        let folder = self.dir.join("runs").join(cell).join("checkpoints");
        match std::fs::remove_dir_all(&folder) {
            Err(why) if why.kind() != std::io::ErrorKind::NotFound => Err(Error::io(&folder)(why)),
            _ => Ok(()),
        }
    }

    fn start(
        &self,
        cell: &Cell,
        (folder, from): (&Path, Option<&Path>),
        resumes: bool,
        log: &Path,
    ) -> Result<Child> {
        let program = std::env::current_exe().map_err(|why| Error::Failed(format!("this program: {why}")))?;
        let mut process = Command::new(program);
        process.arg("train");
        if resumes {
            process.arg(folder).arg("--resume");
        } else {
            let config = Config::load(&cell.config, &cell.settings)?;
            process.arg(&cell.config).args(["--recipe", &cell.recipe]);
            for change in settings(cell, config.train.lr, from) {
                process.args(["--set", &change]);
            }
            process.arg("--set").arg(format!("run.dir={}", folder.display()));
        }
        if cell.kind == Kind::Trunk {
            process.args(["--until", &cell.steps.to_string()]);
        }
        process.args(self.device.iter().flat_map(|device| ["--device", device]));
        let file = std::fs::OpenOptions::new().create(true).append(true).open(log).map_err(Error::io(log))?;
        let copy = file.try_clone().map_err(Error::io(log))?;
        process.stdin(Stdio::null()).stdout(file).stderr(copy);
        // Without this, the run would continue after the study has ended, in a folder that the next process of the study uses.
        #[cfg(target_os = "linux")]
        end_with_parent(&mut process);
        process.spawn().map_err(|why| Error::Failed(format!("{}: its process: {why}", cell.id)))
    }

    /// Waits for a run, and interrupts it when the time is over.
    fn wait(&self, mut child: Child, look: &mut dyn FnMut()) -> Result<Option<ExitStatus>> {
        let failed = |why: std::io::Error| Error::Failed(format!("a run's process: {why}"));
        let mut stopped = false;
        loop {
            if let Some(status) = child.try_wait().map_err(failed)? {
                return Ok((!stopped || status.success()).then_some(status));
            }
            look();
            if !stopped && self.deadline.is_over() {
                interrupt(&child);
                stopped = true;
            }
            std::thread::sleep(POLL);
        }
    }
}

/// Whether an interrupted run has checkpoints, complete or damaged. For damaged checkpoints, `nibble train --resume` reports the problem.
fn has_checkpoints(folder: &Path) -> Result<bool> {
    let latest = latest_valid(folder)?;
    Ok(latest.checkpoint.is_some() || !latest.rejected.is_empty())
}

/// Whether a signal ended a run. A signal says nothing about the run itself, which is resumed another time.
#[cfg(unix)]
fn was_stopped(status: ExitStatus) -> bool {
    use std::os::unix::process::ExitStatusExt;
    const STOPS: [i32; 4] = [libc::SIGHUP, libc::SIGINT, libc::SIGTERM, libc::SIGKILL];
    let signal = status.signal().or_else(|| status.code().map(|code| code - 128));
    signal.is_some_and(|signal| STOPS.contains(&signal))
}

/// Exit codes identify signals only on Unix.
#[cfg(not(unix))]
fn was_stopped(_: ExitStatus) -> bool {
    false
}

/// Asks a run to save a checkpoint and end.
#[cfg(unix)]
fn interrupt(child: &Child) {
    let Ok(id) = i32::try_from(child.id()) else { return };
    // SAFETY: the signal goes to a process that this process has started and has not yet waited for.
    unsafe { libc::kill(id, libc::SIGINT) };
}

/// On systems without signals, a run continues to its end.
#[cfg(not(unix))]
fn interrupt(_: &Child) {}

/// The row of a run that has ended.
fn row(cell: &Cell, (folder, log): (&Path, &Path), status: ExitStatus, commit: &str) -> Result<Row> {
    let run = RunFiles::read(folder).ok();
    let metrics = run.as_ref().map_or(&[][..], |run| &run.metrics);
    let losses: Vec<(u64, f64)> = metrics.iter().filter_map(|m| Some((m.step, m.loss?))).collect();
    let untrained = run.as_ref().map_or(f64::INFINITY, |run| (run.config.model.vocab_size as f64).ln());
    let text = std::fs::read_to_string(log).unwrap_or_default();
    // The log also has the lines of earlier processes of this run.
    let error = text.lines().rev().find(|line| line.starts_with("error: "));
    // A run that ends because of a non-finite value reports this; its recipe has diverged.
    let non_finite = error.is_some_and(|line| line.contains(" is not finite "));
    let outcome = match (status.success(), non_finite) {
        (true, _) => diverged_at(&losses, untrained).map_or(Outcome::Done, |step| Outcome::Diverged { step }),
        (false, true) => Outcome::Diverged { step: losses.last().map_or(1, |(step, _)| step + 1) },
        (false, false) => Outcome::Failed { why: error.map_or_else(|| status.to_string(), str::to_owned) },
    };
    let mut row = Row::of(cell, provenance(folder, commit), outcome);
    row.seconds = metrics.iter().filter_map(|m| m.seconds).sum();
    // A branch that keeps its trunk's schedule counts on from the trunk's tokens.
    let before = match (&cell.kind, &run) {
        (&Kind::Branch { trunk_steps, schedule: Schedule::Kept, .. }, Some(run)) => {
            trunk_steps.saturating_mul(run.config.tokens_per_step())
        }
        _ => 0,
    };
    let seen = metrics.iter().filter_map(|m| m.n_tokens_seen).max().unwrap_or(0);
    row.tokens = seen.saturating_sub(before);
    row.tokens_per_second = median(metrics.iter().filter_map(|m| m.tps));
    row.joules_per_token = joules(metrics, row.tokens);
    row.last_tenth = last_tenth(&losses);
    row.held_out = held_out(metrics);
    row.curve = Curve::of(&losses);
    Ok(row.rounded())
}

/// The held-out losses; if a step has several, the last is used.
fn held_out(metrics: &[Metrics]) -> Vec<(u64, f64)> {
    let losses: BTreeMap<u64, f64> = metrics.iter().filter_map(|m| Some((m.step, m.valid_loss?))).collect();
    losses.into_iter().collect()
}

/// Joules per token: the sum over steps of power times seconds. `None` if any step has no power value.
fn joules(metrics: &[Metrics], tokens: u64) -> Option<f64> {
    let steps: Vec<_> = metrics.iter().filter(|m| m.seconds.is_some()).collect();
    let sum = steps.iter().map(|m| Some(m.watts? * m.seconds?)).sum::<Option<f64>>()?;
    (tokens > 0 && sum > 0.0).then(|| sum / tokens as f64)
}

fn median(values: impl Iterator<Item = f64>) -> Option<f64> {
    let mut values: Vec<f64> = values.collect();
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied()
}

/// The hardware and software of the last process that worked on a run.
fn provenance(folder: &Path, commit: &str) -> Provenance {
    let process = Process::of_run(folder).pop();
    let version = process.as_ref().map_or_else(String::new, |process| process.version.clone());
    let (machine, device) = process.map(|process| (process.processor, process.device)).unwrap_or_default();
    let versions =
        [("nibble".to_owned(), version)].into_iter().filter(|(_, version)| !version.is_empty()).collect();
    Provenance { machine, device, commit: commit.to_owned(), versions }
}
