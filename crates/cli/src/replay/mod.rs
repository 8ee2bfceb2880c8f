//! `nibble replay`: repeats a step of a run, and says whether data, weights or formats made its loss or gradient abnormal.

mod origin;
mod record;
mod sequences;
mod verdict;
mod weights;

use nibble_command::device::{self, Device, DeviceArg, On, Work};
use nibble_command::error::{Error, Result};
use nibble_command::output::{Force, Mark, Outputs};
use nibble_command::say;
use nibble_train::trainer::{Trainer, Tried};
use origin::Origin;
use record::{Recorded, is_same};
use sequences::Sequence;
use serde_json::{Value, json};
use std::path::PathBuf;
use verdict::{Blame, Culprit, Tries, Verdict, culprits, stands_out};
use weights::{Suspect, differing, suspects};

/// Finds the cause of a loss spike or a NaN of a run
///
/// Computes the state before the step from the newest earlier checkpoint, and repeats the step under the run's recipe and in BF16, with the
/// step's batch and with batches of neighbouring steps. Says whether the data, the weights or the formats are to blame. Changes nothing in the
/// run.
#[derive(Debug, clap::Args)]
#[command(
    after_help = "A run records a step whose loss or gradient is not finite, or whose loss is far above its running mean. Any other step can be repeated \
    as well.\n\n\
    Examples:\n  \
    nibble replay runs/tiny\n  \
    nibble replay runs/tiny 120 --out replay.json"
)]
pub struct Args {
    /// Directory of a run.
    #[arg(value_name = "RUN")]
    dir: PathBuf,
    /// Step to repeat, counted from 1 as in the metrics; by default the last recorded spike.
    #[arg(value_name = "STEP", value_parser = clap::value_parser!(u64).range(1..))]
    step: Option<u64>,
    /// Batches of neighbouring steps that are compared with the step's own.
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = clap::value_parser!(u64).range(1..))]
    batches: u64,
    /// If the weights are to blame: also trains from the checkpoint before to the step, and says whether training alone leads to them.
    #[arg(long)]
    retrace: bool,
    /// Writes all numbers to this JSON file.
    #[arg(long, value_name = "OUT")]
    out: Option<PathBuf>,
    #[command(flatten)]
    force: Force,
    #[command(flatten)]
    device: DeviceArg,
}

const FIGURES: Mark = Mark::Figures("nibble replay");

pub fn run(args: Args) -> Result<()> {
    let recorded = Recorded::read(&args.dir)?;
    let step = recorded.step(args.step, &args.dir)?;
    let overrides = args.device.after(Vec::new());
    let origin = Origin::find(&args.dir, step - 1, &overrides)?;
    let mut outputs = Outputs::new(args.force, origin.config.files(&args.dir.to_string_lossy()));
    let out = args.out.as_ref().map(|path| outputs.named(path, &FIGURES)).transpose()?;
    crate::caching::make(&origin.config, None)?;
    let replaying =
        Replaying { args: &args, recorded: &recorded, origin: &origin, step, overrides: &overrides };
    let found = device::run(&origin.config.run, &replaying)?;
    match out {
        Some(out) => out.write(FIGURES.json(found)),
        None => Ok(()),
    }
}

struct Replaying<'a> {
    args: &'a Args,
    recorded: &'a Recorded,
    origin: &'a Origin,
    /// The step, counted from 1.
    step: u64,
    overrides: &'a [String],
}

/// What stands out in the weights before the step.
#[derive(Default)]
struct Weights {
    suspects: Vec<Suspect>,
    /// Whether the batch stood out under the weights of the checkpoint before; `None` if that was not asked.
    stood_out: Option<bool>,
    /// Whether training from an earlier state leads to them; `None` if it was not asked for.
    follows: Option<bool>,
}

/// The state before the step, and the steps that lead to it.
struct Reached<'a, B: Device> {
    trainer: Trainer<'a, B>,
    /// Number of repeated steps.
    steps: u64,
    /// The first of them whose loss is not the recorded one.
    deviates: Option<u64>,
}

impl Work for Replaying<'_> {
    type Out = Value;

    fn run<B: Device>(&self, on: &On<'_, B>) -> Result<Value> {
        on.announce();
        let Self { recorded, origin, step, .. } = self;
        let Reached { mut trainer, steps, deviates } = self.reach(on)?;
        self.require_batch(&trainer)?;
        let others = self.others(&trainer)?;
        let (recipe, recipe_others) = self.tries(&mut trainer, &others)?;
        let (state, device) = (trainer.weights()?, trainer.device_kind());
        drop(trainer);
        let mut in_bf16 = origin.load_bf16(on)?;
        in_bf16.set_weights(&state, step - 1)?;
        let (bf16, bf16_others) = self.tries(&mut in_bf16, &others)?;
        let tries = Tries { recipe, bf16, recipe_others, bf16_others };
        let mut verdict = Verdict::of(&tries, recorded.before(*step));
        let mut weights = Weights::default();
        if verdict.blame == Blame::Data {
            weights.stood_out = self.stood_out(on, &mut in_bf16, &others)?;
            // The earlier weights must not stay in the trainer, whose losses are told below.
            in_bf16.set_weights(&state, step - 1)?;
            if weights.stood_out == Some(false) {
                verdict.blame = Blame::Weights;
            }
        }
        let reproduced = recorded.agrees(*step, &tries.recipe);

        say!("state before step {step}: {}, and {steps} steps from there", origin.describe());
        say!("{}", self.told_of_record(reproduced, deviates, device));
        table(&tries, &verdict, &origin.recipe.name);
        say!("to blame: {}", verdict.blame.explained());
        let (mut sequences, mut sites) = (Vec::new(), Vec::new());
        match verdict.blame {
            Blame::None => {}
            Blame::Data => {
                sequences = sequences::worst(&mut in_bf16, step - 1, verdict.limit)?;
                sequences.iter().for_each(|sequence| say!("  {}", sequence.told()));
            }
            Blame::Weights => {
                drop(in_bf16);
                self.suspects(on, &state, &mut weights)?;
            }
            Blame::Format => {
                sites = culprits(&tries);
                sites.iter().for_each(|culprit| say!("  {}", told_of_site(culprit)));
            }
        }
        Ok(self.figures((&tries, &verdict), (reproduced, deviates), (sequences, sites, weights), device))
    }
}

impl Replaying<'_> {
    /// Repeats the steps from the origin to the state before the step.
    fn reach<'a, B: Device>(&self, on: &On<'a, B>) -> Result<Reached<'a, B>> {
        let mut trainer = self.origin.load(on)?;
        let first = trainer.step();
        if first >= self.step {
            let why = format!("STEP: is {}, and the run begins after step {first}", self.step);
            return Err(Error::usage(why));
        }
        let mut deviates = None;
        while trainer.step() < self.step - 1 {
            let metrics = trainer.train_step()?;
            let differs = |recorded: f64| metrics.loss.is_none_or(|loss| !is_same(loss, recorded));
            if deviates.is_none() && self.recorded.loss(metrics.step).is_some_and(differs) {
                deviates = Some(metrics.step);
            }
        }
        Ok(Reached { trainer, steps: self.step - 1 - first, deviates })
    }

    /// Checks that the step's batch is the recorded one.
    fn require_batch<B: Device>(&self, trainer: &Trainer<'_, B>) -> Result<()> {
        let Some(spike) = self.recorded.spike(self.step) else { return Ok(()) };
        if trainer.batches_of(self.step - 1)?.sha256() == spike.batch_sha256 {
            return Ok(());
        }
        Err(Error::Failed(format!(
            "the batch of step {} is not the recorded one: the data have changed since the run, and the step cannot be repeated",
            self.step
        )))
    }

    /// The numbers, from 0, of neighbouring steps whose batches have targets: alternately before and after the step.
    fn others<B: Device>(&self, trainer: &Trainer<'_, B>) -> Result<Vec<u64>> {
        let at = self.step - 1;
        let mut found = Vec::new();
        // Batches without targets are rare; a source of nothing else has no step to repeat.
        for distance in 1..=2 * self.args.batches + 8 {
            for other in [at.checked_sub(distance), at.checked_add(distance)].into_iter().flatten() {
                if (found.len() as u64) < self.args.batches && trainer.batches_of(other)?.counted > 0 {
                    found.push(other);
                }
            }
        }
        Ok(found)
    }

    /// The step with its own batch and with others.
    fn tries<B: Device>(&self, trainer: &mut Trainer<'_, B>, others: &[u64]) -> Result<(Tried, Vec<Tried>)> {
        let Some(own) = trainer.try_step(self.step - 1)? else {
            return Err(Error::usage(format!("STEP: step {} has no target, and so no loss", self.step)));
        };
        let tried = others.iter().map(|other| trainer.try_step(*other));
        Ok((own, tried.collect::<nibble_train::Result<Vec<_>>>()?.into_iter().flatten().collect()))
    }

    /// Says whether the repeated step is the recorded one.
    fn told_of_record(&self, reproduced: Option<bool>, deviates: Option<u64>, device: &str) -> String {
        let elsewhere = self.recorded.spike(self.step).filter(|spike| spike.device != device);
        match (reproduced, deviates) {
            (Some(true), _) => "the step comes out as recorded, bit for bit".to_owned(),
            (None, _) => "the run has no record of the step".to_owned(),
            (Some(false), _) if elsewhere.is_some() => {
                "the step does not come out bit for bit: the run computed it on another kind of device".to_owned()
            }
            (Some(false), Some(first)) => format!(
                "the record cannot be reproduced: step {first}, on the way, does not come out as recorded. The same recipe, data and seed give \
                 other bits on another kind of device or with another version; otherwise a value has changed in memory"
            ),
            (Some(false), None) => {
                "the record cannot be reproduced: the steps before come out as recorded, and this one does not. Without another kind of device or \
                 version, a value has changed in memory during the step"
                    .to_owned()
            }
        }
    }

    /// The state before that of the origin.
    fn earlier(&self) -> Result<Origin> {
        let last = self.origin.step().map_or(0, |step| step.saturating_sub(1));
        Origin::find(&self.args.dir, last, self.overrides)
    }

    /// Whether the step's batch stood out under earlier weights, which the trainer gets. `None` if there is no earlier checkpoint: random weights
    /// predict all batches alike.
    fn stood_out<B: Device>(
        &self,
        on: &On<'_, B>,
        in_bf16: &mut Trainer<'_, B>,
        others: &[u64],
    ) -> Result<Option<bool>> {
        let earlier = self.earlier()?;
        if earlier.step().is_none() {
            return Ok(None);
        }
        in_bf16.set_weights(&earlier.weights(on)?, self.step - 1)?;
        let (own, others) = self.tries(in_bf16, others)?;
        Ok(Some(stands_out(&own, &others)))
    }

    /// The weights that stand out against an earlier state, and, if it is asked for, whether training leads to them.
    fn suspects<B: Device>(
        &self,
        on: &On<'_, B>,
        now: &[(String, Vec<f32>)],
        weights: &mut Weights,
    ) -> Result<()> {
        let earlier = self.earlier()?;
        match weights.stood_out {
            Some(_) => say!(
                "  at the {} the batch is normal: the weights have become unstable since, and fail on this batch",
                earlier.describe()
            ),
            None => say!("  most of the other batches are abnormal as well"),
        }
        let found = suspects(now, &earlier.weights(on)?);
        for Suspect { name, index, now, earlier: before, bit, non_finite, .. } in found.iter().take(NAMED) {
            let bit = bit.map_or_else(String::new, |bit| format!(": bit {bit} is flipped"));
            let count = match non_finite {
                0 | 1 => String::new(),
                count => format!(" ({count} values are not finite)"),
            };
            say!(
                "  {name}: value {index} is {now}, and was {before:e} at the {}{bit}{count}",
                earlier.describe()
            );
        }
        if found.is_empty() {
            say!(
                "  no single weight stands out against the {}: the whole state has moved, as in a run that diverges",
                earlier.describe()
            );
        }
        weights.suspects = found;
        if self.args.retrace {
            weights.follows = Some(self.retrace(on, &earlier, now)?);
        }
        Ok(())
    }

    /// Whether training from an earlier state leads to these weights, bit for bit. A run that diverges does so by itself.
    fn retrace<B: Device>(
        &self,
        on: &On<'_, B>,
        earlier: &Origin,
        now: &[(String, Vec<f32>)],
    ) -> Result<bool> {
        let mut trainer = earlier.load(on)?;
        while trainer.step() < self.step - 1 {
            trainer.train_step()?;
        }
        let differing = differing(now, &trainer.weights()?);
        match &differing[..] {
            [] => say!("  training from the {} leads to these weights, bit for bit", earlier.describe()),
            [(name, index), ..] => {
                let count = differing.len();
                say!(
                    "  training from the {} leads to other weights, in {count} parameters, first {name} at value {index}: on the same kind of \
                     device and with the same version, a value has changed in memory",
                    earlier.describe()
                );
            }
        }
        Ok(differing.is_empty())
    }

    fn figures(
        &self,
        (tries, verdict): (&Tries, &Verdict),
        (reproduced, deviates): (Option<bool>, Option<u64>),
        (sequences, sites, weights): (Vec<Sequence>, Vec<Culprit>, Weights),
        device: &str,
    ) -> Value {
        let one = |tried: &Tried| json!({ "loss": tried.loss, "grad_norm": tried.grad_norm, "non_finite": tried.non_finite });
        let all = |tried: &[Tried]| tried.iter().map(one).collect::<Vec<_>>();
        json!({
            "run": self.args.dir,
            "step": self.step,
            "device": device,
            "version": env!("CARGO_PKG_VERSION"),
            "recipe": self.origin.recipe.name,
            "origin": self.origin.describe(),
            "record": self.recorded.spike(self.step),
            "recorded_loss": self.recorded.loss(self.step),
            "reproduced": reproduced,
            "first_deviation": deviates,
            "usual_loss": verdict.base,
            "limit": verdict.limit,
            "blame": verdict.blame,
            "under_recipe": one(&tries.recipe),
            "under_bf16": one(&tries.bf16),
            "other_batches_under_recipe": all(&tries.recipe_others),
            "other_batches_under_bf16": all(&tries.bf16_others),
            "sequences": sequences,
            "sites": sites,
            "weights": weights.suspects,
            "batch_stood_out_earlier": weights.stood_out,
            "weights_follow_from_training": weights.follows,
        })
    }
}

/// So many weights are printed.
const NAMED: usize = 5;

/// Prints losses and norms.
fn table(tries: &Tries, verdict: &Verdict, recipe: &str) {
    say!("{:26} {:>12} {:>14} {:>26}", "", "loss", "gradient norm", "loss of other batches");
    for (name, own, others) in
        [(recipe, &tries.recipe, &tries.recipe_others), ("bf16", &tries.bf16, &tries.bf16_others)]
    {
        let finite = others.iter().map(|other| other.loss).filter(|loss| loss.is_finite());
        let range = finite.map(|loss| (loss, loss)).reduce(|(a, b), (c, d)| (a.min(c), b.max(d)));
        let broken = others.iter().filter(|other| other.non_finite.is_some()).count();
        let range = range.map(|(low, high)| format!("{low:.4} to {high:.4}"));
        let broken = (broken > 0).then(|| format!("{broken} of {} not finite", others.len()));
        let told = [range, broken].into_iter().flatten().collect::<Vec<_>>().join(", ");
        say!("{name:26} {:>12.4} {:>14.4} {told:>26}", own.loss, own.grad_norm);
        own.non_finite.iter().for_each(|site| say!("  not finite first: {site}"));
    }
    say!("usual loss {:.4}, abnormal above {:.4}", verdict.base, verdict.limit);
}

fn told_of_site(culprit: &Culprit) -> String {
    let Culprit { layer, tensor, layers, what, share, share_of_others } = culprit;
    let layer = match &layers[..] {
        [number] => layer.replace('*', &number.to_string()),
        _ => layer.clone(),
    };
    let layers = match &layers[..] {
        [] | [_] => String::new(),
        some => format!(" in layers {}", some.iter().map(usize::to_string).collect::<Vec<_>>().join(", ")),
    };
    let of = if *what == "not finite" { "blocks" } else { "values other than zero" };
    let others = share_of_others
        .map_or_else(String::new, |share| format!("; with other batches {:.2} %", 100.0 * share));
    format!("{layer}.{tensor}{layers} {what}: {:.2} % of its {of}{others}", 100.0 * share)
}
