//! `nibble train`: a run from its configuration to its checkpoint, metrics and picture.

use crate::eval::{against, evaluating_line};
use crate::signals::Signals;
use crate::tensor_cores;
use indicatif::{ProgressBar, ProgressStyle};
use nibble_command::changes::Changes;
use nibble_command::console::{bits, bytes, thousands};
use nibble_command::device::{self, Device, On, Work};
use nibble_command::error::{Error, Result};
use nibble_command::say;
use nibble_core::{DeviceKind, Recipe};
use nibble_cuda::power::Meter;
use nibble_train::checks::checked_recipe;
use nibble_train::config::{Config, preset};
use nibble_train::data::{Dataset, Entropy};
use nibble_train::metrics::Metrics;
use nibble_train::plan::{self, Prediction};
use nibble_train::trainer::{self, MEMORY_FILE, Observer, Options, Start, Summary};
use std::io::IsTerminal;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Trains a model. Without arguments: a small mixture of experts on the built-in language, whose entropy is known.
#[derive(Debug, clap::Args)]
#[command(
    after_help = "A run leaves checkpoints, metrics.jsonl, the same for TensorBoard, layers.jsonl, config.toml, recipe.toml and loss.svg \
    in its directory, runs/NAME, or the next free runs/NAME-2, runs/NAME-3 ... `nibble report` makes a page of them. A kill at any moment costs \
    at most the steps since the last checkpoint, and Ctrl-C, SIGTERM or SIGHUP none: --resume goes on, and ends with the very \
    same weights.\n\n\
    Examples:\n  \
    nibble train\n  \
    nibble train tiny --recipe bf16 --set train.steps=1000\n  \
    nibble train shakespeare --set data.source=book.txt.gz --set run.dir=runs/book\n  \
    nibble train s --device cuda:0\n  \
    nibble train my.toml --dry-run\n  \
    nibble train my.toml --dry-run=gpu\n  \
    nibble train my.toml --resume\n  \
    nibble train runs/tiny --resume --set train.steps=600"
)]
pub struct Args {
    /// A built-in configuration (tiny, tiny-dense, shakespeare; for a GPU s, olmoe, qwen30b-4l, dense1b, dsv3-1l; for --dry-run
    /// qwen235b) or the path of a TOML file. With --resume also the directory of a run.
    #[arg(value_name = "CONFIG", default_value = "tiny")]
    config: String,
    #[command(flatten)]
    changes: Changes,
    /// Goes on from the newest whole checkpoint of the latest run of this configuration, or of the run in the directory CONFIG. Of what
    /// decides the numbers only train.steps may change, to more.
    #[arg(long)]
    resume: bool,
    /// Prints configuration, number of parameters and the memory that a run takes, and stops: no weight is made, and nothing written.
    /// On the device that the run would be on; =gpu: on a GPU, wherever this is.
    #[arg(long, value_name = "WHERE", num_args = 0..=1, require_equals = true, default_missing_value = "device")]
    dry_run: Option<DryRunOn>,
}

/// Whose memory a dry run predicts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum DryRunOn {
    /// That of the device that the run would be on, which must be there.
    Device,
    /// A GPU's, which need not be there.
    Gpu,
}

pub fn run(args: Args) -> Result<()> {
    let overrides = args.changes.overrides();
    let (mut config, named_by_user) = load(&args.config, &overrides, args.resume)?;
    match args.dry_run {
        Some(DryRunOn::Device) => return device::run(&config.run, &DryRun { config: &config }),
        Some(DryRunOn::Gpu) => {
            say!("device: a GPU, by its kind alone");
            introduce_dry_run(&config, DeviceKind::Gpu)?;
            say!("dry run: nothing was written");
            return Ok(());
        }
        None => {}
    }
    let dir = PathBuf::from(&config.run.dir);
    if args.resume {
        let dir = trainer::latest_run_dir(&dir, named_by_user)?;
        if !trainer::has_begun(&dir) {
            let why = format!("--resume: no run has begun in {}; without it, one begins", dir.display());
            return Err(Error::usage(why));
        }
        say!("resuming the run in {}", dir.display());
        config.run.dir = dir.to_string_lossy().into_owned();
    } else if named_by_user {
        // Before a device is opened, and again when the directory is taken.
        trainer::require_free(&dir)?;
    }
    let signals = Signals::wait_for_steps()?;
    let options = Options { resume: args.resume, numbered: !named_by_user, stop: Some(signals.received()) };
    if let Some(summary) = device::run(&config.run, &Training { config: &config, options })? {
        conclude(&config, &summary);
        if summary.valid_loss.is_none() {
            return Err(Error::Stopped(signals.told()));
        }
    }
    Ok(())
}

struct Training<'a> {
    config: &'a Config,
    options: Options,
}

impl Work for Training<'_> {
    type Out = Option<Summary>;

    fn run<B: Device>(&self, on: &On<'_, B>) -> Result<Option<Summary>> {
        let Self { config, options } = *self;
        // First of all: a GPU may have kernels to compile before there is more to say.
        on.announce();
        let mut observer: Box<dyn Observer> = match on.comm.rank() {
            0 => Box::new(Console::new(config, on)),
            _ => Box::new(Silent),
        };
        Ok(trainer::run(on.b, on.comm, config, options, &mut *observer)?)
    }
}

struct DryRun<'a> {
    config: &'a Config,
}

impl Work for DryRun<'_> {
    type Out = ();

    fn run<B: Device>(&self, on: &On<'_, B>) -> Result<()> {
        if on.comm.rank() != 0 {
            return Ok(());
        }
        on.announce();
        let recipe = introduce_dry_run(self.config, on.b.kind())?;
        match plan::require_room(on.b, self.config.run.ranks, self.config, &recipe) {
            Ok(_) => say!("the device has room for it"),
            Err(refusal) => say!("it would be refused: {refusal}"),
        }
        say!("dry run: nothing was written");
        Ok(())
    }
}

/// Says what a run takes on a device of this kind. Returns its recipe.
fn introduce_dry_run(config: &Config, kind: DeviceKind) -> Result<Recipe> {
    let recipe = checked_recipe(config)?;
    // No file is opened for it: a text has none.
    let entropy = if config.is_synthetic() { Dataset::of(config)?.entropy() } else { None };
    let prediction = plan::predict(kind, config.run.ranks, config, &recipe)?;
    introduce(&Start { step: 0, config, recipe: &recipe, prediction: &prediction, entropy }, true);
    Ok(recipe)
}

/// The configuration of this name, path or run's directory, and whether `run.dir` is the user's choice and not made of its name.
fn load(name: &str, overrides: &[String], resume: bool) -> Result<(Config, bool)> {
    let path = Path::new(name);
    if preset(name).is_none() && path.is_dir() {
        let file = path.join("config.toml");
        if !resume {
            return Err(Error::usage(format!(
                "{name} is a directory: with --resume the run in it goes on; {} begins another like it",
                file.display()
            )));
        }
        let mut config = Config::stored(&file, overrides)?;
        config.run.dir = name.to_owned();
        return Ok((config, true));
    }
    let config = Config::load(name, overrides)?;
    let stem = path.file_stem().unwrap_or_default().to_string_lossy();
    let is_set = |o: &String| o.split('=').next().is_some_and(|key| key.trim() == "run.dir");
    let named_by_user = overrides.iter().any(is_set) || config.run.dir != format!("runs/{stem}");
    Ok((config, named_by_user))
}

/// What is known before the first step. `whole`: the table of what is kept, line by line.
fn introduce(start: &Start<'_>, whole: bool) {
    say!("config:");
    print_config(start.config);
    say!("recipe: {}: {}", start.recipe.name, start.recipe.description);
    let prediction = start.prediction;
    say!("parameters: {}", thousands(prediction.parameters as u64));
    if let Some(Entropy { rate, unigram }) = start.entropy {
        say!("data: entropy H {rate:.4} nats a token (the floor), {unigram:.4} for frequencies alone (U)");
    }
    if whole {
        memory_lines(prediction).iter().for_each(|line| say!("{line}"));
    } else {
        let (all, kept) = (prediction.device_bytes() as u64, prediction.ledger.bytes() as u64);
        let whose = whose(prediction.kind, start.config.run.ranks);
        say!(
            "memory, as predicted: {} {whose} (each part: {})",
            bytes(all),
            Path::new(&start.config.run.dir).join(MEMORY_FILE).display()
        );
        say!("a forward pass keeps {} for its backward pass", bytes(kept));
    }
    if prediction.kind == DeviceKind::Gpu {
        for why in tensor_cores::missed(start.config, start.recipe) {
            say!("off the tensor cores: {why}");
        }
    }
    let arithmetic = start.config.flops_per_token();
    say!("arithmetic of a token, forward and backward: {:.2} Mflop", arithmetic / 1e6);
    if start.step > 0 {
        say!("continuing after step {}", start.step);
    }
}

/// On what the memory is.
fn whose(kind: DeviceKind, ranks: usize) -> &'static str {
    match (kind, ranks) {
        (DeviceKind::Gpu, 2..) => "of each GPU",
        (DeviceKind::Gpu, _) => "of the GPU",
        (DeviceKind::Host, _) => "of the host",
    }
}

/// The memory of a run, part by part and tensor by tensor.
fn memory_lines(prediction: &Prediction) -> Vec<String> {
    let of = if prediction.ranks > 1 { ", first rank" } else { "" };
    let ledger = &prediction.ledger;
    let mut lines =
        vec![format!("kept by a forward pass for its backward pass{of}: {}", bytes(ledger.bytes() as u64))];
    lines.extend(ledger.table().lines().map(|line| format!("  {line}")));
    lines.push(format!("memory{of}, as predicted:"));
    for (part, size) in prediction.parts().into_iter().chain([prediction.allowance()]) {
        lines.push(format!("  {part:<34} {:>10}", bytes(size as u64)));
    }
    let all = format!("in all, {}", whose(prediction.kind, prediction.ranks));
    lines.push(format!("  {all:<34} {:>10}", bytes(prediction.device_bytes() as u64)));
    lines
}

/// Leaves the table of the memory in the run's directory.
fn write_memory(start: &Start<'_>) {
    let path = Path::new(&start.config.run.dir).join(MEMORY_FILE);
    let text = memory_lines(start.prediction).join("\n") + "\n";
    // Only for people: a run does not end for it.
    if let Err(error) = std::fs::write(&path, text) {
        say!("{}: {error}", path.display());
    }
}

/// Every key of the configuration, a table a line, broken where lines get long.
fn print_config(config: &Config) {
    const WIDTH: usize = 79;
    // A configuration that was loaded has a TOML form.
    let Ok(toml::Value::Table(table)) = toml::Value::try_from(config) else { return };
    let (tables, top): (Vec<_>, Vec<_>) = table.iter().partition(|(_, value)| value.is_table());
    let sections =
        tables.iter().filter_map(|(name, value)| Some((name.as_str(), value.as_table()?.iter().collect())));
    for (name, values) in std::iter::once(("", top)).chain(sections) {
        let mut line = format!("  {name:<10}");
        for (key, value) in values {
            let item = format!(" {key}={value}");
            if line.len() + item.len() > WIDTH {
                say!("{line}");
                line = format!("  {:<10}", "");
            }
            line += &item;
        }
        say!("{line}");
    }
}

/// What is known after the last step, planned or not.
fn conclude(config: &Config, summary: &Summary) {
    let unit = config.unit();
    match summary.valid_loss {
        Some(loss) => {
            say!("done: {} steps", thousands(summary.steps));
            say!("held-out loss: {loss:.4} nats a {unit}, {:.4} bits a {unit}", bits(loss));
            if let Some(entropy) = summary.entropy {
                say!("{}", against(entropy, loss));
            }
        }
        None => say!("stopped after {} of {} steps", thousands(summary.steps), thousands(config.train.steps)),
    }
    match (&summary.checkpoint, summary.valid_loss) {
        (Some(checkpoint), _) => say!("checkpoint: {}", checkpoint.display()),
        (None, None) => say!("no checkpoint: checkpoint.every = 0 and checkpoint.at_end = false"),
        (None, Some(_)) => {}
    }
    say!("metrics: {}", summary.dir.join("metrics.jsonl").display());
    say!("picture: {}", summary.picture.display());
    say!("all of it on a page: nibble report {}", summary.dir.display());
    if summary.valid_loss.is_none() && summary.checkpoint.is_some() {
        say!("to go on: nibble train {} --resume", summary.dir.display());
    }
}

/// Tells people how the run goes: a bar where they watch, plain lines where a file does.
struct Console {
    /// The directory that the configuration asks for.
    dir: String,
    bar: Option<ProgressBar>,
    log_every: u64,
    steps: u64,
    entropy: Option<Entropy>,
    /// The device's dense BF16 rate in flops a second, where it is known.
    peak_flops: Option<f64>,
    power: Power,
}

impl Console {
    fn new<B: Device>(config: &Config, on: &On<'_, B>) -> Self {
        let watched = std::io::stdout().is_terminal() && std::io::stderr().is_terminal();
        let bar = watched.then(|| {
            // No wider than the terminal: a line that wraps is not taken away again.
            let style = ProgressStyle::with_template("{bar:20} {pos}/{len} [{elapsed}<{eta}] {wide_msg}");
            // The template is a constant; the default bar serves should it ever be wrong.
            ProgressBar::new(config.train.steps)
                .with_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()))
        });
        let (log_every, steps) = (config.run.log_every.max(1), config.train.steps);
        let (peak_flops, power) = (on.b.peak_flops(), Power::new(on.b.meter()));
        let dir = config.run.dir.clone();
        Self { dir, bar, log_every, steps, entropy: None, peak_flops, power }
    }

    fn say(&self, text: &str) {
        match &self.bar {
            Some(bar) => bar.suspend(|| say!("{text}")),
            None => say!("{text}"),
        }
    }
}

impl Observer for Console {
    fn start(&mut self, start: &Start<'_>) {
        self.entropy = start.entropy;
        let tell = || {
            let (asked, dir) = (&self.dir, &start.config.run.dir);
            if asked != dir {
                say!("{asked} holds an earlier run; this one goes to {dir}");
            }
            introduce(start, false);
            write_memory(start);
        };
        match &self.bar {
            Some(bar) => bar.suspend(tell),
            None => tell(),
        }
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
            bar.set_message(metrics.loss.map(|loss| format!("loss: {loss:.4}")).unwrap_or_default());
        }
        let is_told = metrics.step.is_multiple_of(self.log_every);
        if is_told || metrics.step == self.steps || metrics.step == 1 {
            self.say(&format!("step: {}  {}", metrics.step, step_line(metrics)));
        }
    }

    fn evaluating(&mut self, done: usize, of: usize) {
        match &self.bar {
            Some(bar) => bar.set_message(format!("held-out loss: batch {done} of {of}")),
            None => evaluating_line(done, of),
        }
    }

    fn evaluation(&mut self, step: u64, valid_loss: f64) {
        let above = self.entropy.map(|e| format!("  bits_above_floor: {:.3}", bits(valid_loss - e.rate)));
        self.say(&format!("step: {step}  held-out loss: {valid_loss:.4}{}", above.unwrap_or_default()));
    }

    fn checkpoint(&mut self, path: &Path) {
        self.say(&format!("checkpoint: {}", path.display()));
    }
}

/// Watts, looked for a few times a second at most.
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

/// The metrics of a step under torchtitan's short names. What a device's rate is, and what it draws, is known of GPUs.
fn step_line(metrics: &Metrics) -> String {
    let figures = [
        metrics.loss.map(|x| format!("loss: {x:.4}")),
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

/// The observer of ranks other than the first, who are told nothing anyway.
struct Silent;

impl Observer for Silent {
    fn start(&mut self, _: &Start<'_>) {}
    fn rejected(&mut self, _: &Path, _: &nibble_train::Error) {}
    fn step(&mut self, _: &Metrics) {}
    fn evaluation(&mut self, _: u64, _: f64) {}
    fn checkpoint(&mut self, _: &Path) {}
}
