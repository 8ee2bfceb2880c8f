//! Reports a run's progress: as a bar on a terminal, as plain lines elsewhere, and in full in the run's log.

use super::introduction;
use crate::eval::NO_TARGET;
use crate::processes::Process;
use indicatif::{ProgressBar, ProgressStyle};
use nibble_command::console::{bits, thousands};
use nibble_command::device::{Device, On};
use nibble_command::{joined, say};
use nibble_core::visible;
use nibble_cuda::measure::power::Meter;
use nibble_train::config::Config;
use nibble_train::data::Entropy;
use nibble_train::evaluation::Scored;
use nibble_train::files::write_whole;
use nibble_train::metrics::Metrics;
use nibble_train::trainer::{LOG_FILE, MEMORY_FILE, Observer, PROCESSES_FILE, Start};
use std::fs::File;
use std::io::{IsTerminal, Write};
use std::path::Path;
use std::time::{Duration, Instant};

/// Writes the messages of a run to the console and to the run's log.
pub struct Console {
    /// The run's directory, as the configuration names it.
    dir: String,
    device: String,
    /// The log file, which is opened when the run starts.
    log: Option<File>,
    bar: Option<ProgressBar>,
    log_every: u64,
    steps: u64,
    entropy: Option<Entropy>,
    /// Dense BF16 rate of all ranks' devices together, in flops per second, if it is known.
    peak_flops: Option<f64>,
    power: Power,
    pace: Pace,
}

impl Console {
    pub fn new<B: Device>(config: &Config, on: &On<'_, B>) -> Self {
        let watched = std::io::stdout().is_terminal() && std::io::stderr().is_terminal();
        let bar = watched.then(|| {
            // The bar must not be wider than the terminal, because a wrapped line would not be erased.
            let style = ProgressStyle::with_template("{bar:20} {pos}/{len} [{elapsed}<{eta}] {wide_msg}");
            // The template is a constant; if it were invalid, the default bar would be used.
            ProgressBar::new(config.train.steps)
                .with_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()))
        });
        let (log_every, steps) = (config.run.log_every.max(1), config.train.steps);
        let ranks = on.mesh.all.world() as f64;
        let (peak_flops, power) = (on.b.peak_flops().map(|each| ranks * each), Power::new(on.b.meter()));
        let (dir, device) = (config.run.dir.clone(), on.describe());
        Self {
            dir,
            device,
            log: None,
            bar,
            log_every,
            steps,
            entropy: None,
            peak_flops,
            power,
            pace: Pace::default(),
        }
    }

    fn say(&mut self, text: &str) {
        match &self.bar {
            Some(bar) => bar.suspend(|| say!("{text}")),
            None => say!("{text}"),
        }
        self.log(text);
    }

    /// Writes a line to the log only. Errors are ignored, because a run must not fail because of its log.
    fn log(&mut self, text: &str) {
        if let Some(log) = &mut self.log {
            let _ = log.write_all(visible(format_args!("{text}\n")).as_bytes());
        }
    }

    /// Opens the log and writes the memory table to a file in the run's directory.
    fn begin_log(&mut self, start: &Start<'_>) {
        let dir = Path::new(&start.config.run.dir);
        let log = dir.join(LOG_FILE);
        let memory = dir.join(MEMORY_FILE);
        let opened = File::options().create(true).append(true).open(&log);
        let opened = opened.map(|file| self.log = Some(file)).map_err(|error| (log, error));
        let lines = introduction::memory(start.prediction).join("\n") + "\n";
        let written = write_whole(&memory, lines).map_err(|error| (memory, error));
        let noted =
            Process::now(start.step, &self.device).note(dir).map_err(|e| (dir.join(PROCESSES_FILE), e));
        for (path, error) in [opened, written, noted].into_iter().filter_map(Result::err) {
            self.say(&format!("{}: {error}", path.display()));
        }
        let device = format!("device: {}", self.device);
        self.log(&device);
        introduction::all(start).iter().for_each(|line| self.log(line));
    }
}

impl Observer for Console {
    fn claimed(&mut self, dir: &str) {
        joined::leave_run(dir);
    }

    fn start(&mut self, start: &Start<'_>) {
        self.entropy = start.entropy;
        self.begin_log(start);
        let dir = &start.config.run.dir;
        if start.step == 0 {
            let which = match self.dir == *dir {
                true => format!("run: {dir}"),
                false => format!("{} holds an earlier run; this one goes to {dir}", self.dir),
            };
            self.say(&format!("{which} (every setting: {})", Path::new(dir).join(LOG_FILE).display()));
        }
        introduction::short(start).iter().for_each(|line| self.say(line));
        if let Some(bar) = &self.bar {
            bar.set_position(start.step);
            bar.reset_eta();
        }
    }

    fn note(&mut self, text: &str) {
        self.say(text);
    }

    fn rejected(&mut self, _: &Path, why: &nibble_train::Error) {
        self.say(&format!("passed over: {why}"));
    }

    fn measure(&mut self, metrics: &mut Metrics) {
        let share = |peak: f64| metrics.tflops.map(|tflops| 100.0 * 1e12 * tflops / peak);
        metrics.mfu = self.peak_flops.and_then(share);
        metrics.watts = self.power.watts();
    }

    fn step(&mut self, metrics: &Metrics) {
        if let Some(bar) = &self.bar {
            bar.set_position(metrics.step);
            bar.set_message(loss_of(metrics).unwrap_or_default());
        }
        self.pace.add(metrics);
        let is_told = metrics.step.is_multiple_of(self.log_every);
        if is_told || metrics.step == self.steps || metrics.step == 1 {
            let line = step_line(&std::mem::take(&mut self.pace).over(metrics));
            self.say(&format!("step: {}  {line}", metrics.step));
        }
    }

    fn evaluating(&mut self, done: usize, of: usize) {
        match &self.bar {
            Some(bar) => bar.set_message(format!("evaluation: batch {done} of {of}")),
            None if is_worth_a_line(done, of) => {
                say!("evaluation: batch {} of {}", thousands(done as u64), thousands(of as u64));
            }
            None => {}
        }
    }

    fn evaluation(&mut self, step: u64, valid_loss: Option<f64>) {
        let told = match (valid_loss, self.entropy) {
            (None, _) => NO_TARGET.into(),
            (Some(loss), None) => format!("{loss:.4}"),
            (Some(loss), Some(e)) => format!("{loss:.4}  bits_above_floor: {:.3}", bits(loss - e.rate)),
        };
        self.say(&format!("step: {step}  held-out loss: {told}"));
    }

    fn accuracy(&mut self, step: u64, right: u64, share: f64) {
        self.say(&format!(
            "step: {step}  held-out accuracy: {:.2} % ({} images)",
            100.0 * share,
            thousands(right)
        ));
    }

    fn task(&mut self, step: u64, name: &str, scored: &Scored) {
        self.say(&format!("step: {step}  task {name}: {scored}"));
    }

    fn checkpoint(&mut self, path: &Path) {
        self.say(&format!("checkpoint: {}", path.display()));
    }
}

/// Whether an evaluation's progress should be printed where there is no bar: for long evaluations, at each quarter except the last.
fn is_worth_a_line(done: usize, of: usize) -> bool {
    const LONG: usize = 1000;
    of >= LONG && done < of && 4 * done / of != 4 * (done - 1) / of
}

/// Number of tokens and seconds of the steps since the last line.
#[derive(Default)]
struct Pace {
    tokens: f64,
    seconds: f64,
}

impl Pace {
    fn add(&mut self, metrics: &Metrics) {
        if let (Some(tps), Some(seconds)) = (metrics.tps, metrics.seconds) {
            self.tokens += tps * seconds;
            self.seconds += seconds;
        }
    }

    /// A step's metrics, with rates averaged over the steps since the last line.
    fn over(self, metrics: &Metrics) -> Metrics {
        let mean = self.tokens / self.seconds;
        let Some(of_step) = metrics.tps.filter(|tps| *tps > 0.0 && mean.is_finite()) else {
            return metrics.clone();
        };
        let scaled = |rate: Option<f64>| rate.map(|rate| rate * mean / of_step);
        Metrics {
            tps: Some(mean),
            tflops: scaled(metrics.tflops),
            mfu: scaled(metrics.mfu),
            ..metrics.clone()
        }
    }
}

/// Power in watts, read at most a few times per second.
struct Power {
    meter: Option<Meter>,
    seen: Option<(Instant, f64)>,
}

impl Power {
    const PERIOD: Duration = Duration::from_millis(250);

    fn new(meter: Option<Meter>) -> Self {
        Self { meter, seen: None }
    }

    fn watts(&mut self) -> Option<f64> {
        let meter = self.meter.as_ref()?;
        if self.seen.is_none_or(|(when, _)| when.elapsed() >= Self::PERIOD) {
            self.seen = meter.look().map(|draw| (Instant::now(), f64::from(draw.watts)));
        }
        self.seen.map(|(_, watts)| watts)
    }
}

/// The loss of a step, or a note that it has no target.
fn loss_of(metrics: &Metrics) -> Option<String> {
    let nothing = (metrics.target_fraction == Some(0.0)).then(|| format!("loss: {NO_TARGET}"));
    metrics.loss.map(|loss| format!("loss: {loss:.4}")).or(nothing)
}

/// The metrics of a step with torchtitan's short names. Utilization and power are known only for GPUs.
fn step_line(metrics: &Metrics) -> String {
    let figures = [
        loss_of(metrics),
        metrics.grad_norm.map(|x| format!("grad_norm: {x:.4}")),
        metrics.lr.map(|x| format!("lr: {x:.2e}")),
        metrics.tps.map(|x| format!("tps: {}", thousands(x as u64))),
        metrics.mfu.and(metrics.tflops).map(|x| format!("tflops: {x:.1}")),
        metrics.mfu.map(|x| format!("mfu: {x:.2}%")),
        metrics.mfu.or(metrics.watts).and(metrics.memory_gib).map(|x| format!("memory: {x:.2}GiB")),
        metrics.watts.map(|x| format!("power: {x:.0}W")),
    ];
    figures.into_iter().flatten().collect::<Vec<_>>().join("  ")
}

#[cfg(test)]
mod tests {
    use super::*;

    /// By hand: three steps of 100 tokens in 1 s, 4 s and 5 s give 30 tokens per second; the last step alone gives 20.
    #[test]
    fn rates_are_those_of_the_interval() {
        let step = |seconds: f64| {
            let tps = 100.0 / seconds;
            let (tps, tflops, mfu) = (Some(tps), Some(tps / 10.0), Some(tps / 100.0));
            Metrics { tps, tflops, mfu, seconds: Some(seconds), loss: Some(2.0), ..Metrics::default() }
        };
        let mut pace = Pace::default();
        [1.0, 4.0, 5.0].iter().for_each(|seconds| pace.add(&step(*seconds)));
        let told = pace.over(&step(5.0));
        let near = |got: Option<f64>, want: f64| assert!((got.unwrap() - want).abs() < 1e-9, "{got:?}");
        near(told.tps, 30.0);
        near(told.tflops, 3.0);
        near(told.mfu, 0.3);
        assert_eq!((told.loss, told.seconds), (Some(2.0), Some(5.0)), "of the step");
        let without = Metrics { loss: Some(1.0), ..Metrics::default() };
        assert_eq!(Pace::default().over(&without), without);
    }

    #[test]
    fn few_lines_tell_of_an_evaluation() {
        let lines = |of: usize| (1..=of).filter(|done| is_worth_a_line(*done, of)).collect::<Vec<_>>();
        assert_eq!((lines(128), lines(999)), (vec![], vec![]));
        assert_eq!(lines(1000), [250, 500, 750]);
        assert_eq!(lines(4001).len(), 3);
    }
}
