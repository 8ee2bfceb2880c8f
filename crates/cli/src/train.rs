//! `nibble train`: a run from its configuration to its checkpoint, metrics and picture.

use crate::console::{bits, bytes, say, thousands};
use crate::env::Env;
use crate::error::Result;
use crate::eval::{against, unit};
use crate::{ranks, run_dir};
use indicatif::{ProgressBar, ProgressStyle};
use nibble_core::{Backend, Comm};
use nibble_cpu::Cpu;
use nibble_train::config::Config;
use nibble_train::data::Entropy;
use nibble_train::metrics::Metrics;
use nibble_train::tokenizer::Tokenizer;
use nibble_train::trainer::{self, Observer, Options, Start, Summary, Trainer};
use std::io::IsTerminal;
use std::path::{Path, PathBuf};

/// Trains a model. Without arguments: a small mixture of experts on the built-in language, whose entropy is known.
#[derive(Debug, clap::Args)]
#[command(
    after_help = "A run leaves checkpoints, metrics.jsonl, the same for TensorBoard, config.toml and loss.svg in its directory,\n\
    runs/NAME, or the next free runs/NAME-2, runs/NAME-3 ... A kill at any moment costs at most the steps since the\n\
    last checkpoint: --resume goes on, and ends with the very same weights.\n\n\
    Examples:\n  \
    nibble train\n  \
    nibble train tiny --recipe bf16 --set train.steps=1000\n  \
    nibble train shakespeare --set data.source=book.txt.gz --set run.dir=runs/book\n  \
    nibble train my.toml --dry-run\n  \
    nibble train my.toml --resume"
)]
pub struct Args {
    /// A built-in configuration (tiny, shakespeare) or the path of a TOML file.
    #[arg(value_name = "CONFIG", default_value = "tiny")]
    config: String,
    /// Changes a value of the configuration; may be given many times.
    #[arg(long = "set", value_name = "KEY=VALUE")]
    overrides: Vec<String>,
    #[command(flatten)]
    recipe: RecipeArg,
    /// Goes on from the newest whole checkpoint of the latest run of this configuration.
    #[arg(long)]
    resume: bool,
    /// Prints configuration, number of parameters and memory ledger, and stops; writes nothing.
    #[arg(long)]
    dry_run: bool,
}

/// `--recipe`, short for `--set recipe=...`.
#[derive(Debug, clap::Args)]
pub struct RecipeArg {
    /// Precision recipe: a built-in one (see `nibble recipe`) or the path of a TOML file.
    #[arg(long, value_name = "RECIPE")]
    recipe: Option<String>,
}

impl RecipeArg {
    /// The overrides, this one last.
    pub fn after(self, mut overrides: Vec<String>) -> Vec<String> {
        overrides.extend(self.recipe.map(|name| format!("recipe={name}")));
        overrides
    }
}

pub fn run(args: Args) -> Result<()> {
    let env = Env::read()?;
    let overrides = args.recipe.after(args.overrides);
    let mut config = Config::load(&args.config, &overrides)?;
    if args.dry_run {
        return ranks::on_ranks(&env, &config.run, |cpu, comm| dry_run(cpu, comm, &config));
    }
    choose_dir(&args.config, &overrides, args.resume, &mut config)?;
    let options = Options { resume: args.resume };
    let summary = ranks::on_ranks(&env, &config.run, |cpu, comm| {
        let mut observer: Box<dyn Observer> = match comm.rank() {
            0 => Box::new(Console::new(&config)),
            _ => Box::new(Silent),
        };
        Ok(trainer::run(cpu, comm, &config, options, &mut *observer)?)
    })?;
    if let Some(summary) = summary {
        conclude(&config, &summary);
    }
    Ok(())
}

/// Settles `run.dir`, and says so where it is not the obvious one.
fn choose_dir(name: &str, overrides: &[String], resume: bool, config: &mut Config) -> Result<()> {
    let stem = Path::new(name).file_stem().unwrap_or_default().to_string_lossy();
    let is_set = |o: &String| o.split('=').next().is_some_and(|key| key.trim() == "run.dir");
    let named_by_user = overrides.iter().any(is_set) || config.run.dir != format!("runs/{stem}");
    let dir = PathBuf::from(&config.run.dir);
    let chosen = match resume {
        true => run_dir::latest(&dir, named_by_user)?,
        false => run_dir::fresh(&dir, named_by_user)?,
    };
    if resume {
        say!("resuming the run in {}", chosen.display());
    } else if chosen != dir {
        say!("{} holds an earlier run; this one goes to {}", dir.display(), chosen.display());
    }
    config.run.dir = chosen.to_string_lossy().into_owned();
    Ok(())
}

fn dry_run(cpu: &Cpu, comm: &dyn Comm<Cpu>, config: &Config) -> Result<()> {
    let mut trainer = Trainer::new(cpu, comm, config)?;
    let (ledger, _) = trainer.ledger()?;
    let parameters = trainer.parameters();
    if comm.rank() == 0 {
        introduce(&Start {
            step: 0,
            config: trainer.config(),
            recipe: trainer.recipe(),
            ledger: &ledger,
            parameters,
            entropy: trainer.data()?.entropy(),
            backend: cpu.name(),
        });
        say!("dry run: nothing was written");
    }
    Ok(())
}

/// What is known before the first step.
fn introduce(start: &Start<'_>) {
    say!("config:");
    print_config(start.config);
    let ranks = match start.config.run.ranks {
        1 => String::new(),
        n => format!(", {n} ranks of this kind"),
    };
    say!("backend: {}{ranks}", start.backend);
    say!("recipe: {}: {}", start.recipe.name, start.recipe.description);
    say!("parameters: {}", thousands(start.parameters as u64));
    if let Some(Entropy { rate, unigram }) = start.entropy {
        say!("data: entropy H {rate:.4} nats a token (the floor), {unigram:.4} for frequencies alone (U)");
    }
    let of = if start.config.run.ranks > 1 { ", first rank" } else { "" };
    say!("kept by a forward pass for its backward pass{of}: {}", bytes(start.ledger.bytes() as u64));
    for line in start.ledger.table().lines() {
        say!("  {line}");
    }
    if start.step > 0 {
        say!("continuing after step {}", start.step);
    }
}

/// Every key of the configuration, a table a line, broken where lines get long.
fn print_config(config: &Config) {
    const WIDTH: usize = 108;
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

/// What is known after the last step.
fn conclude(config: &Config, summary: &Summary) {
    let data = if config.is_synthetic() { Tokenizer::Synthetic } else { Tokenizer::Bytes };
    let (loss, unit) = (summary.valid_loss, unit(data));
    say!("done: {} steps", thousands(summary.steps));
    say!("held-out loss: {loss:.4} nats a {unit}, {:.4} bits a {unit}", bits(loss));
    if let Some(entropy) = summary.entropy {
        say!("{}", against(entropy, loss));
    }
    say!("checkpoint: {}", summary.checkpoint.display());
    say!("metrics: {}", Path::new(&config.run.dir).join("metrics.jsonl").display());
    say!("picture: {}", summary.picture.display());
}

/// Tells people how the run goes: a bar where they watch, plain lines where a file does.
struct Console {
    bar: Option<ProgressBar>,
    log_every: u64,
    steps: u64,
    entropy: Option<Entropy>,
}

impl Console {
    fn new(config: &Config) -> Self {
        let watched = std::io::stdout().is_terminal() && std::io::stderr().is_terminal();
        let bar = watched.then(|| {
            let style = ProgressStyle::with_template("{bar:32} {pos}/{len} [{elapsed}<{eta}] {msg}");
            // The template is a constant; the default bar serves should it ever be wrong.
            ProgressBar::new(config.train.steps)
                .with_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()))
        });
        Self { bar, log_every: config.run.log_every.max(1), steps: config.train.steps, entropy: None }
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
        let tell = || introduce(start);
        match &self.bar {
            Some(bar) => bar.suspend(tell),
            None => tell(),
        }
        if let Some(bar) = &self.bar {
            bar.set_position(start.step);
            bar.reset_eta();
        }
    }

    fn rejected(&mut self, _: &Path, why: &nibble_train::Error) {
        self.say(&format!("passed over: {why}"));
    }

    fn step(&mut self, metrics: &Metrics) {
        let line = step_line(metrics, self.entropy);
        if let Some(bar) = &self.bar {
            bar.set_position(metrics.step);
            bar.set_message(line);
        } else if metrics.step.is_multiple_of(self.log_every)
            || metrics.step == self.steps
            || metrics.step == 1
        {
            say!("step: {}  {line}", metrics.step);
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

/// The metrics of a step under torchtitan's short names.
fn step_line(metrics: &Metrics, entropy: Option<Entropy>) -> String {
    let floor = entropy.and_then(|e| metrics.loss.map(|loss| bits(loss - e.rate)));
    let figures = [
        metrics.loss.map(|x| format!("loss: {x:.4}")),
        floor.map(|x| format!("bits_above_floor: {x:.3}")),
        metrics.grad_norm.map(|x| format!("grad_norm: {x:.4}")),
        metrics.lr.map(|x| format!("lr: {x:.2e}")),
        metrics.tps.map(|x| format!("tps: {}", thousands(x as u64))),
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
