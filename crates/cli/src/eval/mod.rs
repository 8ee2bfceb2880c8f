//! `nibble eval`: the held-out loss of a checkpoint, or its task scores and perplexities.

mod scoring;

use crate::checkpoint::Trained;
use nibble_command::changes::Changes;
use nibble_command::console::{bits, thousands};
use nibble_command::device::{self, Device, On, Work};
use nibble_command::error::{Error, Result};
use nibble_command::output::{Force, Outputs};
use nibble_command::{say, warn};
use nibble_core::Recipe;
use nibble_train::checkpoint::Checkpoint;
use nibble_train::config::Config;
use nibble_train::data::{Entropy, files_of};
use nibble_train::evaluation::Task;
use std::path::{Path, PathBuf};

/// Computes a checkpoint's held-out loss, task scores or perplexity
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:\n  \
    nibble eval runs/tiny\n  \
    nibble eval runs/tiny/checkpoints/step-00000200\n  \
    nibble eval runs/tiny --recipe bf16      the same weights under another recipe\n  \
    nibble eval runs/shakespeare --set data.source=other.txt\n  \
    nibble eval my-model --set data.source=book.txt   the folder of a Hugging Face model\n  \
    nibble eval my-model --task quiz.jsonl     multiple-choice questions instead of held-out data\n  \
    nibble eval my-model --perplexity book.txt --stride 64\n\n\
    Each line of a --task file is a JSON object with the keys \"question\", \"choices\" and \"answer\" (the index of the right choice, \
    counted from 0). The model scores each choice as the continuation of the question and a space. The tokenizer's BOS token, if any, \
    precedes the question; --add-bos-token=false omits the BOS token. The metric `acc` picks the choice with the highest log-likelihood, \
    `acc_norm` the choice with the highest log-likelihood per character, and `acc_bytes` the choice with the highest log-likelihood per \
    byte, as in lm-evaluation-harness.\n\n\
    --perplexity computes one perplexity over all documents of SOURCE. For a run, the token data.bos_token precedes each document, or \
    data.eos_token if the run has no BOS token. For a model folder, the tokenizer's bos_token precedes each document, or its eos_token if \
    the tokenizer has no bos_token. Each forward pass predicts --stride tokens of a document. The context of these tokens is the \
    preceding part of the document, as far as the whole fits into data.seq_len tokens. For documents longer than data.seq_len, a smaller \
    stride gives each predicted token more context, but the computation takes longer.")]
pub struct Args {
    /// Directory of a run, of one checkpoint, or of a Hugging Face model. For a run, Nibble uses the newest undamaged checkpoint.
    #[arg(value_name = "RUN_OR_MODEL")]
    path: PathBuf,
    /// Scores the multiple-choice questions in FILE, instead of computing the held-out loss. This option may be repeated.
    #[arg(long = "task", value_name = "FILE")]
    tasks: Vec<PathBuf>,
    /// Computes the perplexity of the texts in SOURCE (a file, a folder or a glob), instead of the held-out loss. This option may be
    /// repeated.
    #[arg(long = "perplexity", value_name = "SOURCE")]
    texts: Vec<String>,
    /// Number of tokens that --perplexity predicts per forward pass, from 1 to data.seq_len. Default: data.seq_len.
    #[arg(long, value_name = "TOKENS", requires = "texts")]
    stride: Option<usize>,
    /// Whether the tokenizer's BOS token, if any, precedes each question of --task. Default: the value of the configuration key
    /// eval.add_bos_token, which is true unless the run sets it to false.
    #[arg(long, value_name = "BOOL", requires = "tasks")]
    add_bos_token: Option<bool>,
    /// Also writes the log-likelihood of each choice of each --task question to this JSON file.
    #[arg(long, value_name = "FILE", requires = "tasks")]
    samples: Option<PathBuf>,
    #[command(flatten)]
    force: Force,
    #[command(flatten)]
    changes: Changes,
}

pub fn run(args: Args) -> Result<()> {
    let trained = Trained::open(&args.path)?;
    let overrides = args.changes.overrides();
    require_of_evaluation(&overrides)?;
    if !args.tasks.is_empty() || !args.texts.is_empty() {
        let tasks = Task::open_all(&args.tasks)?;
        let mut config = trained.config(&[trained.tokens()?, overrides.clone()].concat())?;
        config.eval.add_bos_token = args.add_bos_token.unwrap_or(config.eval.add_bos_token);
        let recipe = trained.recipe(&config, &overrides)?;
        let stride = args.stride.unwrap_or(config.data.seq_len);
        if !(1..=config.data.seq_len).contains(&stride) {
            let why = format!("--stride: got {stride}, expected 1 to {} (data.seq_len)", config.data.seq_len);
            return Err(Error::usage(why));
        }
        // Missing files are reported before the first task is scored; this also ensures that no output replaces an input.
        let texts = args.texts.iter().map(|text| files_of(text)).collect::<nibble_train::Result<Vec<_>>>()?;
        let mut outputs = Outputs::new(args.force, [args.tasks.clone(), texts.concat()].concat());
        let samples = args.samples.map(|path| outputs.named(&path, &scoring::SAMPLES)).transpose()?;
        let texts = args.texts;
        let (trained, config, recipe) = (&trained, &config, &recipe);
        let scoring = scoring::Scoring { trained, config, recipe, tasks, texts, stride };
        let found = device::run(&config.run, &scoring)?;
        return samples.map_or(Ok(()), |samples| samples.write(scoring::SAMPLES.json(found)));
    }
    let config = trained.config(&overrides)?;
    let recipe = trained.recipe(&config, &overrides)?;
    crate::caching::make(&config, None)?;
    device::run(
        &config.run,
        &Evaluation { trained: &trained, path: &args.path, config: &config, recipe: &recipe },
    )
}

/// Keys, and tables of keys, that affect only training.
const OF_TRAINING: [&str; 13] = [
    "seed",
    "model.aux_loss_coef",
    "model.balance",
    "model.z_loss_coef",
    "train.",
    "eval.",
    "checkpoint.",
    "run.dir",
    "run.ranks",
    "run.dp",
    "run.capacity_factor",
    "run.reductions",
    "run.log_every",
];

/// Keys of these tables that also affect evaluation, because evaluation uses the same batches as training.
const OF_BOTH: [&str; 4] = ["train.batch_size", "train.combine", "train.expert_shards", "train.shards"];

/// Refuses overrides that have no effect on an evaluation.
fn require_of_evaluation(overrides: &[String]) -> Result<()> {
    let keys = Config::keys();
    let named = overrides.iter().filter_map(|o| Some(o.split_once('=')?.0.trim()));
    let mut known = named.filter(|key| keys.iter().any(|known| known == key));
    let of_training = |key: &&str| {
        OF_TRAINING.iter().any(|start| key == start || start.ends_with('.') && key.starts_with(start))
            && !OF_BOTH.contains(key)
    };
    match known.find(of_training) {
        None => Ok(()),
        Some(key) => Err(Error::usage(format!("`{key}`: has no effect in an evaluation; leave it out"))),
    }
}

struct Evaluation<'a> {
    trained: &'a Trained,
    path: &'a Path,
    config: &'a Config,
    recipe: &'a Recipe,
}

impl Work for Evaluation<'_> {
    type Out = ();

    fn run<B: Device>(&self, on: &On<'_, B>) -> Result<()> {
        let Self { trained, path, config, recipe } = self;
        on.announce();
        let mut trainer = trained.load(on, config, recipe)?.with_data()?;
        let unit = config.unit();
        let checkpoint = trained.checkpoint();
        let is_other = |checkpoint: &&Checkpoint, sha256: &str| checkpoint.position().data_sha256 != sha256;
        let sha256 = trainer.data()?.sha256();
        if let Some(checkpoint) = checkpoint.filter(|checkpoint| is_other(checkpoint, &sha256)) {
            warn!("warning: {}", other_data(checkpoint, config));
        }
        let entropy = trainer.data()?.entropy();
        let mut go_on = |done, of| {
            evaluating_line(done, of);
            Ok(true)
        };
        let found = trainer.evaluate_while(0, &mut go_on)?;
        let loss = found.and_then(|found| found.loss());
        match checkpoint.map(|checkpoint| (checkpoint.path().display(), checkpoint.position().step)) {
            Some((path, step)) => say!("checkpoint: {path} (step {})", thousands(step)),
            None => say!("model: {}", path.display()),
        }
        say!("recipe: {}  data: {}", trainer.recipe().name, config.data.described());
        say!("{}", held_out_line(loss, unit));
        if let Some(accuracy) = found.and_then(|found| found.accuracy()) {
            say!("held-out accuracy: {:.2} %", 100.0 * accuracy);
        }
        if let (Some(entropy), Some(loss)) = (entropy, loss) {
            say!("{}", against(entropy, loss));
        }
        Ok(())
    }
}

/// The warning that the data differ from the training data.
fn other_data(checkpoint: &Checkpoint, config: &Config) -> String {
    let source = &config.data.source;
    let trained = Config::from_text(&checkpoint.position().config, checkpoint.path(), &[]);
    match trained.map(|config| config.data.source) {
        Ok(then) if then != *source => {
            format!("the model was trained on {then}, and {source} holds other data")
        }
        _ => format!(
            "{source} has changed since the checkpoint was written: what is held out now may have been trained on"
        ),
    }
}

/// The text printed instead of a loss if there are no targets.
pub const NO_TARGET: &str = "none, no token is a target";

/// The printed line with the held-out loss, or with the reason why there is no loss.
pub fn held_out_line(loss: Option<f64>, unit: &str) -> String {
    match loss {
        Some(loss) => format!("held-out loss: {loss:.4} nats a {unit}, {:.4} bits a {unit}", bits(loss)),
        None => format!("held-out loss: {NO_TARGET}"),
    }
}

/// Compares a loss with the entropy rate of the data and with the unigram loss.
pub fn against(Entropy { rate, unigram }: Entropy, loss: f64) -> String {
    let share = (loss - rate) / (unigram - rate);
    format!(
        "H {rate:.4} (the floor), U {unigram:.4} (frequencies alone)\n\
         {:.4} bits above the floor, (loss - H)/(U - H) = {share:.4}",
        bits(loss - rate)
    )
}

/// Prints the progress of a long evaluation, in at most ten lines.
pub fn evaluating_line(done: usize, of: usize) {
    const LONG: usize = 100;
    if of >= LONG && (done * 10) / of != ((done - 1) * 10) / of {
        say!("evaluation: batch {} of {}", thousands(done as u64), thousands(of as u64));
    }
}
