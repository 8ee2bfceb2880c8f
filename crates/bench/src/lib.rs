//! `nibble bench`: measures training steps against the processor's peak, and each operation's vectorised code against its scalar
//! specification. The command measures the GPU's conversions, GEMMs, attention and expert layers against the rates of its memory and tensor
//! cores. The command also measures the bytes and the time of the all-to-all between ranks.

mod attention;
mod exchange;
mod experts;
mod figures;
mod fit;
mod floors;
mod gemm;
mod gpu;
mod grouped;
mod kernels;
mod ops;
mod passes;
mod peers;
mod ranks;
mod recompute;
mod step;
mod timeline;

use nibble_command::error::Result;
use nibble_command::output::{Force, Mark, Outputs};
use serde_json::json;
use std::path::PathBuf;

/// Benchmarks training steps and single operations
///
/// Some benchmarks measure the CPU of this machine, others the GPU.
#[derive(Debug, clap::Args)]
#[command(
    subcommand_value_name = "WHAT",
    subcommand_help_heading = "What to measure",
    after_help = "Each benchmark has its own options; for example, `nibble bench gemm --help` lists the options of `gemm`.\n\n\
    Examples:\n  \
    nibble bench\n  \
    nibble bench step shakespeare --set data.source=tinyshakespeare.txt\n  \
    nibble bench ops --json ops.json\n  \
    nibble bench kernels --shapes 32768x7168,4096x7168 --only lift --plot lift.svg\n  \
    nibble bench gemm --only wgrad --only dgrad --json gemm.json --plot roofline.svg\n  \
    nibble bench attention --only 192\n  \
    nibble bench experts --quick --only V3 --only Qwen3\n  \
    nibble bench exchange --recipe bf16\n  \
    nibble bench exchange --ranks 2 --device cuda\n  \
    nibble bench grouped --format mxfp8-e4m3 --groups 8"
)]
pub struct Args {
    #[command(subcommand)]
    what: Option<What>,
    /// Also writes the measured values to this JSON file.
    #[arg(long, value_name = "OUT", global = true)]
    json: Option<PathBuf>,
    #[command(flatten)]
    force: Force,
}

#[derive(Debug, clap::Subcommand)]
enum What {
    Step(step::Args),
    /// Measures CPU operations on one thread, alternating between scalar and vectorised code. GB/s counts the bytes that an operation reads
    /// and writes.
    Ops,
    /// Runs the benchmarks `step` and `ops`. `nibble bench` without arguments runs both for the configuration `tiny`.
    All(step::Args),
    Kernels(kernels::Args),
    Gemm(gemm::Args),
    Attention(attention::Args),
    Experts(experts::Args),
    Grouped(grouped::Args),
    Exchange(exchange::Args),
}

impl What {
    /// The mark by which a later run recognises the file of figures.
    fn mark(&self) -> Mark {
        Mark::Figures(match self {
            Self::Step(_) => "nibble bench step",
            Self::Ops => "nibble bench ops",
            Self::All(_) => "nibble bench all",
            Self::Kernels(_) => "nibble bench kernels",
            Self::Gemm(_) => "nibble bench gemm",
            Self::Attention(_) => "nibble bench attention",
            Self::Experts(_) => "nibble bench experts",
            Self::Grouped(_) => "nibble bench grouped",
            Self::Exchange(_) => "nibble bench exchange",
        })
    }

    /// The files that the benchmark reads.
    fn inputs(&self) -> Result<Vec<PathBuf>> {
        match self {
            Self::Step(args) | Self::All(args) => args.inputs(),
            Self::Exchange(args) => Ok(args.inputs()),
            _ => Ok(Vec::new()),
        }
    }
}

/// Runs the selected measurements, prints them, and writes the figures if requested.
///
/// # Errors
/// Returns a usage error for a missing device or configuration, and passes on errors of the measured work.
pub fn run(args: Args) -> Result<()> {
    let what = args.what.unwrap_or_else(|| What::All(step::Args::default()));
    let mut outputs = Outputs::new(args.force, what.inputs()?);
    let mark = what.mark();
    let json = args.json.as_ref().map(|path| outputs.named(path, &mark)).transpose()?;
    let figures = match &what {
        What::Step(args) => json!({ "step": step::run(args)? }),
        What::Ops => json!({ "ops": ops::run()? }),
        What::All(args) => json!({ "step": step::run(args)?, "ops": ops::run()? }),
        What::Kernels(args) => json!({ "kernels": kernels::run(args, &mut outputs)? }),
        What::Gemm(args) => json!({ "gemm": gemm::run(args, &mut outputs)? }),
        What::Attention(args) => json!({ "attention": attention::run(args)? }),
        What::Experts(args) => json!({ "experts": experts::run(args)? }),
        What::Grouped(args) => json!({ "grouped": grouped::run(args)? }),
        What::Exchange(args) => json!({ "exchange": exchange::run(args)? }),
    };
    if let Some(json) = json {
        json.write(mark.json(figures))?;
    }
    Ok(())
}

/// The outputs of the scripts of `benchmarks/peers` in files of this name.
#[cfg(test)]
fn printed(name: &str) -> String {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../../benchmarks");
    let folders = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    let text: String = folders.filter_map(|at| std::fs::read_to_string(at.join(name)).ok()).collect();
    assert!(!text.is_empty(), "no {name} in {folder}");
    text
}
