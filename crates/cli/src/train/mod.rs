//! `nibble train`: runs training from a configuration to a checkpoint, metrics and a plot.

mod console;
mod introduction;
mod rank_log;

use crate::caching;
use crate::eval::{against, held_out_line};
use crate::signals::Signals;
use console::Console;
use nibble_command::changes::{self, Changes};
use nibble_command::console::thousands;
use nibble_command::device::{self, Device, On, Work};
use nibble_command::error::{Error, Result};
use nibble_command::joined::{self, Process, RendezvousArg};
use nibble_command::links;
use nibble_command::size::parse_size;
use nibble_command::{say, warn};
use nibble_core::{DeviceKind, Recipe};
use nibble_train::checks::checked_recipe;
use nibble_train::config::{Config, in_shell, preset};
use nibble_train::data::Dataset;
use nibble_train::plan::{self, Prediction};
use nibble_train::pretrained::is_folder;
use nibble_train::trainer::{self, CONFIG_FILE, Observer, Options, Outcome, Start, Summary};
use rank_log::RankLog;
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;

/// Trains a model, or resumes a run
///
/// Without arguments, trains a small mixture-of-experts model on text in a built-in synthetic language of known entropy.
#[derive(Debug, clap::Args)]
#[command(
    after_help = "A run writes checkpoints, metrics.jsonl, the same metrics for TensorBoard, layers.jsonl, config.toml, recipe.toml and \
    loss.svg to its directory. By default, the directory is runs/NAME (NAME is the configuration's name), or, if runs/NAME is taken, the next free \
    one of runs/NAME-2, runs/NAME-3 and so on. `nibble report` writes an HTML report of a run. A killed run loses at most the steps since \
    its last checkpoint; a run stopped by Ctrl-C, SIGTERM or SIGHUP loses no step. --resume continues a run; the final weights are \
    bit-identical to those of an uninterrupted run. A second signal more than 3 seconds after the first signal, or a third signal, ends \
    the run at once.\n\n\
    Examples:\n  \
    nibble train\n  \
    nibble train tiny --recipe bf16 --set train.steps=1000\n  \
    nibble train shakespeare --set data.source=book.txt.gz --set run.dir=runs/book\n  \
    nibble train s --device cuda:0\n  \
    nibble train my.toml --dry-run\n  \
    nibble train my.toml --dry-run=gpu\n  \
    nibble train my.toml --dry-run=gpu --fit 80GB\n  \
    nibble train my.toml --resume\n  \
    nibble train runs/my/config.toml --set seed=1\n  \
    nibble train my.toml --from Qwen3-0.6B\n  \
    nibble train my.toml --init-from runs/my\n  \
    nibble train runs/tiny --resume --set train.steps=600"
)]
pub struct Args {
    /// Configuration of the run: the name of a built-in configuration or the path of a TOML file; with --resume, also the directory of a
    /// run. Small built-in configurations are tiny, tiny-dense, shakespeare, tiny-vit (images of MNIST), and one configuration
    /// per model family, such as deepseek-v3-tiny. Built-in configurations for a GPU are s, olmoe, qwen30b-4l, dense1b, dsv2-lite-8l and dsv3-1l. Built-in
    /// configurations for --dry-run are the published models, such as deepseek-v2-lite. The error message for an unknown name lists all built-in
    /// configurations. If CONFIG is the config.toml of an earlier run, starts a new run with the same configuration.
    #[arg(value_name = "CONFIG", default_value = "tiny")]
    config: String,
    #[command(flatten)]
    changes: Changes,
    /// Starts training from the weights of a Hugging Face model. FOLDER contains the model's config.json and safetensors files. FOLDER sets
    /// the keys of `[model]`, except max_positions and the keys of auxiliary losses; CONFIG sets the configuration keys that FOLDER does
    /// not set. With --resume, resumes the run that was started from FOLDER.
    #[arg(long, value_name = "FOLDER", conflicts_with = "init_from")]
    from: Option<PathBuf>,
    /// Starts a new run, with a new optimizer state, from the weights of another run. RUN is the directory of one checkpoint, or of a run;
    /// for a run, Nibble uses the newest undamaged checkpoint. With --resume, resumes the run that was started from RUN.
    #[arg(long, value_name = "RUN")]
    init_from: Option<PathBuf>,
    /// Resumes the run in the directory CONFIG, or the latest run of the configuration CONFIG, from the run's newest undamaged checkpoint.
    /// Of the settings that affect results, only three may change: train.steps may grow, and train.combine and train.expert_shards may be
    /// set explicitly.
    #[arg(long)]
    resume: bool,
    /// Stops after step STEP and writes a checkpoint. The early stop does not change the learning-rate schedule, which depends on
    /// train.steps, not on STEP. --resume continues the run.
    #[arg(long, value_name = "STEP", conflicts_with = "dry_run", value_parser = clap::value_parser!(u64).range(1..))]
    until: Option<u64>,
    /// Prints the configuration, the parameter count and the predicted memory, and exits without allocating weights or writing files.
    /// --dry-run predicts the memory use for the device on which the run would train. --dry-run=gpu predicts the memory use for a GPU, even
    /// on a host without a GPU.
    #[arg(long, value_name = "WHERE", num_args = 0..=1, require_equals = true, default_missing_value = "device")]
    dry_run: Option<DryRunOn>,
    /// With --dry-run, finds the value of train.recompute that recomputes the least and whose predicted memory fits SIZE bytes per device,
    /// such as 80GB (10^9 bytes each) or 74.5GiB (2^30 bytes each); prints the value and its prediction.
    #[arg(long, value_name = "SIZE", requires = "dry_run", value_parser = parse_size)]
    fit: Option<usize>,
    /// Before the first step, measures bandwidth and latency between the run's ranks, and names slow links.
    #[arg(long, conflicts_with = "dry_run")]
    check_links: bool,
    /// Prints the SHA-256 of the weights after the last step; equal digests mean bit-identical weights.
    #[arg(long, conflicts_with = "dry_run")]
    digest: bool,
    #[command(flatten)]
    rendezvous: RendezvousArg,
}

impl Args {
    /// The options for initial weights, as overrides.
    fn initial(&self) -> Result<Vec<String>> {
        let path = match (&self.from, &self.init_from) {
            (None, None) => return Ok(Vec::new()),
            (Some(folder), _) if !is_folder(folder) => {
                let why = "is not a model folder, expected config.json and weights in safetensors; --init-from takes a run";
                return Err(Error::usage(format!("--from: {} {why}", folder.display())));
            }
            (None, Some(run)) if !run.is_dir() || is_folder(run) => {
                let why = "is neither a run nor a checkpoint; --from takes a model folder";
                return Err(Error::usage(format!("--init-from: {} {why}", run.display())));
            }
            (Some(path), _) | (_, Some(path)) => path,
        };
        Ok(vec![format!("train.init_from={}", path.display())])
    }
}

/// Checks that `nibble launch` can start ranks with these arguments.
pub fn require_launchable(args: &Args) -> Result<()> {
    match args.dry_run {
        None => Ok(()),
        Some(_) => {
            Err(Error::usage("--dry-run starts no ranks: run it without nibble launch, and set run.ranks"))
        }
    }
}

/// The device whose memory a dry run predicts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum DryRunOn {
    /// Predicts the memory use for the device on which the run would train; this device must exist.
    Device,
    /// Predicts the memory use for a GPU; the host need not have a GPU.
    Gpu,
}

pub fn run(args: Args) -> Result<()> {
    // The signal handlers are installed first. A dry run writes nothing, so a signal may end it at any time.
    let signals = args.dry_run.is_none().then(Signals::wait_for_steps).transpose()?;
    let initial = args.initial()?;
    let overrides = [args.changes.overrides(), initial].concat();
    let process = args.rendezvous.begin()?;
    let (mut config, named_by_user) = match process {
        Some(process) => load_for(process, (&args.config, args.resume), &overrides)?,
        None => load(&args.config, &overrides, args.resume)?,
    };
    match args.dry_run {
        Some(DryRunOn::Device) => {
            return device::run(&config.run, &DryRun { config: &config, fit: args.fit });
        }
        Some(DryRunOn::Gpu) => {
            say!("device: any GPU, none is opened");
            fitted(&mut config, DeviceKind::Gpu, args.fit)?;
            let (_, prediction) = introduce_dry_run(&config, DeviceKind::Gpu)?;
            say!("{}", introduction::gpus(&prediction));
            say!("dry run: nothing was written");
            return Ok(());
        }
        None => {}
    }
    if args.resume {
        let dir = trainer::latest_run_dir(&config, named_by_user)?;
        if !trainer::has_begun(&dir) {
            let why = format!(
                "--resume: there is no run in {} yet; leave --resume out to start one",
                dir.display()
            );
            return Err(Error::usage(why));
        }
        if joined::is_first() {
            say!("resuming the run in {}", dir.display());
        }
        config.run.dir = dir.to_string_lossy().into_owned();
    } else if named_by_user && joined::is_first() {
        // Rank 0 checks this for all ranks before a device is opened, and again when the directory is created.
        trainer::require_free(Path::new(&config.run.dir))?;
    }
    let stop = signals.as_ref().map(Signals::received);
    if let Err(error) = caching::prepare(&config, stop) {
        let signal = stop.map_or(0, |stop| stop.load(Ordering::Relaxed));
        signals.into_iter().for_each(Signals::wait_until_told);
        return Err(if signal == 0 { error } else { Error::Stopped(signal) });
    }
    let until = args.until.unwrap_or(0);
    if until > config.train.steps {
        let why =
            format!("--until: {until} is beyond the run's last step, train.steps = {}", config.train.steps);
        return Err(Error::usage(why));
    }
    let options = Options { resume: args.resume, numbered: !named_by_user, digest: args.digest, until, stop };
    let training = Training { config: &config, options, check_links: args.check_links };
    let Outcome { summary, stopped } = device::run(&config.run, &training)?;
    if let Some(summary) = summary {
        conclude(&config, &summary);
    }
    if stopped == 0 {
        return Ok(());
    }
    signals.into_iter().for_each(Signals::wait_until_told);
    Err(Error::Stopped(stopped.into()))
}

struct Training<'a> {
    config: &'a Config,
    options: Options,
    check_links: bool,
}

impl Work for Training<'_> {
    type Out = Outcome;

    fn run<B: Device>(&self, on: &On<'_, B>) -> Result<Outcome> {
        let Self { config, options, check_links } = *self;
        // The device is printed first, because a GPU may have to compile kernels before anything else is printed.
        on.announce();
        if check_links {
            links::check(on)?;
        }
        let mut observer: Box<dyn Observer> = match on.mesh.all.rank() {
            0 => Box::new(Console::new(config, on)),
            _ => Box::new(RankLog::new(on)),
        };
        Ok(trainer::run(on.b, on.mesh, config, options, &mut *observer)?)
    }

    fn agreed(&self) -> String {
        let Options { resume, digest, until, .. } = self.options;
        format!("resume = {resume}\ncheck_links = {}\ndigest = {digest}\nuntil = {until}", self.check_links)
    }
}

struct DryRun<'a> {
    config: &'a Config,
    /// The limit of `--fit`, in bytes.
    fit: Option<usize>,
}

impl Work for DryRun<'_> {
    type Out = ();

    fn run<B: Device>(&self, on: &On<'_, B>) -> Result<()> {
        if on.mesh.all.rank() != 0 {
            return Ok(());
        }
        on.announce();
        let mut config = self.config.clone();
        fitted(&mut config, on.b.kind(), self.fit)?;
        let (recipe, _) = introduce_dry_run(&config, on.b.kind())?;
        let config = &config.begun_on(on.b.kind(), &recipe);
        match plan::require_room(on.b, config.run.mesh(), config, &recipe) {
            Ok(_) => say!("it fits on the device"),
            Err(refusal) => say!("it would be refused: {refusal}"),
        }
        say!("dry run: nothing was written");
        Ok(())
    }
}

/// Sets the least recomputation that fits a limit, if there is a limit, and prints it.
fn fitted(config: &mut Config, kind: DeviceKind, limit: Option<usize>) -> Result<()> {
    let Some(limit) = limit else { return Ok(()) };
    config.validate_on(kind)?;
    let found = plan::least_recompute(kind, config.run.mesh(), config, limit)?;
    introduction::least(&found, &config.recipe, limit).iter().for_each(|line| say!("{line}"));
    config.train.recompute = found.fits.unwrap_or(found.smallest).recompute;
    Ok(())
}

/// Maximum number of kinds of ranks that are printed.
const MOST_KINDS: usize = 8;

/// Prints the predicted memory of a run on a device of this kind. Returns its recipe and the prediction.
fn introduce_dry_run(config: &Config, kind: DeviceKind) -> Result<(Recipe, Prediction)> {
    config.validate_on(kind)?;
    let recipe = checked_recipe(config)?;
    let config = &config.begun_on(kind, &recipe);
    // Only the built-in language has a known entropy; no data file is opened.
    let entropy = if config.is_synthetic() { Dataset::of(config)?.entropy() } else { None };
    let prediction = plan::predict(kind, config.run.mesh(), config, &recipe)?;
    let start = Start { step: 0, config, recipe: &recipe, prediction: &prediction, entropy };
    introduction::all(&start).iter().for_each(|line| say!("{line}"));
    let mesh = config.run.mesh();
    if mesh.ranks() > 1 {
        let taken = |ranks: Vec<usize>| {
            let of = plan::predict_rank(kind, mesh, ranks[0], config, &recipe)?;
            Ok((ranks, of.parts().iter().map(|(_, bytes)| bytes).sum()))
        };
        // With many ranks, nearly every rank differs from the others by one tile and is a separate kind.
        let kinds = plan::kinds_of_ranks(mesh, config)?.into_iter().take(MOST_KINDS);
        let kinds = kinds.map(taken).collect::<Result<Vec<_>>>()?;
        let sent = plan::sent_in_a_step(kind, mesh, prediction.rank, config, &recipe)?;
        introduction::sent(prediction.rank, &sent).iter().for_each(|line| say!("{line}"));
        introduction::ranks(&kinds).iter().for_each(|line| say!("{line}"));
    }
    Ok((recipe, prediction))
}

/// Calls [`load`] for ranks that are processes. The launcher sets the number of ranks; a resumed run may have had another number.
fn load_for(process: &Process, (name, resume): (&str, bool), overrides: &[String]) -> Result<(Config, bool)> {
    let ranks = process.ranks(overrides)?;
    load(name, &[overrides, &[ranks]].concat(), resume).or_else(|error| {
        // If the stored configuration is invalid by itself, the error with this number of ranks is reported.
        let stored = load(name, overrides, resume).ok().filter(|_| resume);
        let (mut config, named_by_user) = stored.ok_or(error)?;
        process.divide(&mut config.run);
        config.validate()?;
        Ok((config, named_by_user))
    })
}

/// The configuration with this name, path or run directory. Also returns whether the user chose `run.dir`; otherwise the name determines
/// it.
fn load(name: &str, overrides: &[String], resume: bool) -> Result<(Config, bool)> {
    let path = Path::new(name);
    let is_dir_set = changes::set_to(overrides, "run.dir").is_some();
    if let (None, Some(dir)) = (preset(name), dir_of_run(path).filter(|_| !is_folder(path))) {
        let shown = dir.display();
        if path.is_dir() && !resume {
            return Err(Error::usage(format!(
                "{name} is a directory: add --resume to resume the run in it; nibble train {} starts another like it",
                in_shell(&dir.join(CONFIG_FILE))
            )));
        }
        if !trainer::has_begun(&dir) {
            return Err(Error::usage(format!(
                "{shown}: there is no run there yet; nibble train CONFIG --set run.dir={shown} starts one"
            )));
        }
        let (mut config, other) = trainer::stored_config(&dir, overrides)?;
        other.iter().for_each(|other| warn!("warning: {other}"));
        if resume && is_dir_set && Path::new(&config.run.dir) != dir {
            return Err(Error::usage(format!(
                "`run.dir`: is set to {}, but the run of {name} is in {shown} and resumes there: leave run.dir out",
                config.run.dir
            )));
        }
        if !is_dir_set {
            config.run.dir = dir.to_string_lossy().into_owned();
        }
        return Ok((config, resume || is_dir_set));
    }
    let config = Config::load(name, overrides)?;
    let stem = path.file_stem().unwrap_or_default().to_string_lossy();
    let named_by_user = is_dir_set || config.run.dir != format!("runs/{stem}");
    Ok((config, named_by_user))
}

/// The run directory that a path names: the path itself, or the folder of a run's stored configuration.
fn dir_of_run(path: &Path) -> Option<PathBuf> {
    if path.is_dir() {
        return Some(path.to_owned());
    }
    let is_stored = path.file_name().is_some_and(|name| name == CONFIG_FILE);
    let dir = path.parent().filter(|_| is_stored)?;
    // The parent of a bare file name has no name.
    let dir = if dir.file_name().is_some() {
        dir.to_owned()
    } else {
        path.canonicalize().ok()?.parent()?.to_owned()
    };
    trainer::has_begun(&dir).then_some(dir)
}

/// Prints the summary of a finished or stopped run.
fn conclude(config: &Config, summary: &Summary) {
    let steps = thousands(summary.steps);
    if summary.is_whole {
        say!("done: {steps} steps");
        say!("{}", held_out_line(summary.valid_loss, config.unit()));
    } else {
        say!("stopped after {steps} of {} steps", thousands(config.train.steps));
    }
    if let (Some(entropy), Some(loss)) = (summary.entropy, summary.valid_loss) {
        say!("{}", against(entropy, loss));
    }
    if let Some(digest) = &summary.digest {
        say!("weights: SHA-256 {digest}");
    }
    match (&summary.checkpoint, summary.is_whole) {
        (Some(checkpoint), _) => say!("checkpoint: {}", checkpoint.display()),
        (None, false) => say!("no checkpoint: checkpoint.every = 0 and checkpoint.at_end = false"),
        (None, true) => {}
    }
    say!("metrics: {}", summary.dir.join("metrics.jsonl").display());
    if let Some(picture) = &summary.picture {
        say!("picture: {}", picture.display());
    }
    say!("report of the run: nibble report {}", in_shell(&summary.dir));
    if !summary.is_whole && summary.checkpoint.is_some() {
        say!("to resume: nibble train {} --resume", in_shell(&summary.dir));
    }
}
