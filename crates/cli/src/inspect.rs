//! `nibble inspect`: writes the tensors of one training step to a file, for comparison with another implementation.

use nibble_command::changes::Changes;
use nibble_command::console::bytes;
use nibble_command::device::{self, Device, On, Work};
use nibble_command::error::{Error, Result};
use nibble_command::output::{Force, Mark, Outputs};
use nibble_command::{say, warn};
use nibble_train::checkpoint::metadata;
use nibble_train::config::Config;
use nibble_train::trainer::{Inspection, Trainer};
use std::path::PathBuf;

/// Writes the tensors of one forward and backward pass to a file
///
/// The file contains the weights, the token ids, the selected experts of each token, the logits and the gradients.
#[derive(Debug, clap::Args)]
#[command(
    after_help = "All tensors in OUT are F32. Each weight has the same name as in a checkpoint; the gradient of the weight NAME is \
    `grad.NAME`. The command also writes the model's dimensions to a .json file beside OUT. With several ranks (`run.ranks`), OUT \
    contains the tensors of all ranks, and these tensors are bit-identical to those of one rank. \
    `benchmarks/peers/parity.py` compares the tensors in OUT with those of the same computation in PyTorch.\n\n\
    Examples:\n  \
    nibble inspect tiny --recipe f32 --out step.safetensors\n  \
    python3 benchmarks/peers/parity.py step.safetensors --model step.json"
)]
pub struct Args {
    /// Configuration of the model: a built-in configuration or the path of a TOML file.
    #[arg(value_name = "CONFIG", default_value = "tiny")]
    config: String,
    #[command(flatten)]
    changes: Changes,
    /// Safetensors file to write.
    #[arg(long, value_name = "OUT")]
    out: PathBuf,
    /// Number of training steps whose token ids are written. `ids.K` and `targets.K` contain the input and target token ids of the K-th
    /// step after the first step. If attention is masked between packed documents, `starts.K` contains, for each token, the position at
    /// which the token's document begins.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..))]
    steps: u64,
    #[command(flatten)]
    force: Force,
}

const TENSORS: Mark = Mark::Tensors("nibble inspect");
const SIZES: Mark = Mark::Figures("nibble inspect");

pub fn run(args: Args) -> Result<()> {
    let config = Config::load(&args.config, &args.changes.overrides())?;
    let mut outputs = Outputs::new(args.force, config.files(&args.config));
    let out = outputs.named(&args.out, &TENSORS)?;
    // A device or a pipe has no folder in which the file with the sizes could be written.
    let beside = (!out.is_direct()).then(|| outputs.named(&args.out.with_extension("json"), &SIZES));
    let beside = beside
        .transpose()
        .map_err(|e| Error::usage(format!("the model's sizes, beside the tensors: {e}")))?;
    let seen = device::run(&config.run, &Inspect { config: &config, steps: args.steps })?;
    let size = seen.tensors.shapes().map(|(_, shape)| 4 * shape.iter().product::<usize>() as u64).sum();
    let mut about = metadata();
    TENSORS.tensors(&mut about);
    out.write_with(|to| seen.tensors.write(&about, to))?;
    say!("{}: {} tensors, {}", args.out.display(), seen.tensors.shapes().count(), bytes(size));
    if let Some(beside) = beside {
        let told = beside.path().display().to_string();
        let sizes = serde_json::from_str(&seen.model).map_err(|e| Error::Failed(format!("{told}: {e}")))?;
        beside.write(SIZES.json(sizes))?;
        say!("{told}: the model's sizes");
    }
    Ok(())
}

/// The data of an inspected step.
struct Seen {
    tensors: Inspection,
    /// The model's sizes as a JSON object.
    model: String,
}

struct Inspect<'a> {
    config: &'a Config,
    steps: u64,
}

impl Work for Inspect<'_> {
    type Out = Seen;

    fn run<B: Device>(&self, on: &On<'_, B>) -> Result<Seen> {
        on.announce();
        let mut trainer = Trainer::new(on.b, on.mesh, self.config)?;
        trainer.take_notes().iter().filter(|_| on.is_first()).for_each(|note| warn!("warning: {note}"));
        let model = trainer.config_json();
        Ok(Seen { tensors: trainer.inspect(self.steps)?, model })
    }
}
