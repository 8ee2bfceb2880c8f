//! `nibble bench`: how fast a training step is beside what the processor could do, each operation's vectorised code beside
//! its scalar specification, and the GPU's conversions, products and expert layers beside the speed of its memory and tensor
//! cores.

mod experts;
mod gemm;
mod gpu;
mod kernels;
mod ops;
mod step;

use crate::error::{Error, Result};
use clap::ValueEnum;
use serde_json::json;
use std::path::PathBuf;

/// Measures training steps and operations on this machine.
#[derive(Debug, clap::Args)]
#[command(
    after_help = "step: tokens a second under each recipe; the floor is the products' arithmetic divided by the rate that the\n\
    processor reaches at nothing but multiply-adds, measured in the same run; and where the time goes.\n\
    ops: one thread, scalar and vectorised code in turns; bytes are those read and written.\n\
    kernels: the GPU's conversions, single calls with the L2 flushed before each; the floor is the time in which this GPU's\n\
    memory can move the bytes that must move, by its copy and fill rates measured in the same run.\n\
    gemm: the GPU's products, back to back until the chip is at its power limit, and single calls; the floor is the larger of\n\
    operations / rate of the fastest dense product and of the memory's floor. About three minutes, --quick a third of one.\n\
    experts: the expert layer, forward and backward, under each recipe: its time and where it goes, what it keeps, what each\n\
    fused conversion saves, and from which sizes on it is faster than BF16. About two minutes.\n\n\
    Examples:\n  \
    nibble bench\n  \
    nibble bench step shakespeare --set data.source=tinyshakespeare.txt\n  \
    nibble bench step --recipe mxfp4-hopper --steps 20\n  \
    nibble bench ops --json ops.json\n  \
    nibble bench kernels --shapes 32768x7168,4096x7168 --only lift --plot lift.svg\n  \
    nibble bench gemm --only wgrad --only dgrad --json gemm.json --plot roofline.svg\n  \
    nibble bench gemm --only \"fprop 4096x7168\" --tune tuned.json\n  \
    nibble bench experts --quick --only V3 --only Qwen3"
)]
pub struct Args {
    /// What to measure.
    #[arg(value_enum, default_value_t = What::All)]
    what: What,
    /// Configuration of the step: a built-in one or the path of a TOML file.
    #[arg(value_name = "CONFIG", default_value = "tiny")]
    config: String,
    /// Changes a value of the configuration.
    #[arg(long = "set", value_name = "KEY=VALUE")]
    overrides: Vec<String>,
    /// Recipes to measure; all built-in ones where left out.
    #[arg(long = "recipe", value_name = "RECIPE")]
    recipes: Vec<String>,
    /// Steps measured under each recipe, after two that are not.
    #[arg(long, value_name = "N", default_value_t = 8)]
    steps: usize,
    /// Also writes the figures here.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Of `kernels`, `gemm` and `experts`, only those whose name contains this, in either case.
    #[arg(long, value_name = "NAME")]
    only: Vec<String>,
    /// Also draws into this SVG file: the shares of the floor of `kernels`, the roofline of `gemm`.
    #[arg(long, value_name = "FILE")]
    plot: Option<PathBuf>,
    /// `gemm`, `experts`: bursts alone, on a chip that has not reached its power limit.
    #[arg(long)]
    quick: bool,
    #[command(flatten)]
    kernels: kernels::Args,
    #[command(flatten)]
    gemm: gemm::Args,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum What {
    /// Training steps.
    Step,
    /// Single operations.
    Ops,
    /// Both of these.
    All,
    /// The GPU's conversions.
    Kernels,
    /// The GPU's products.
    Gemm,
    /// The expert layer on the GPU.
    Experts,
}

pub fn run(args: Args) -> Result<()> {
    let mut figures = json!({});
    if matches!(args.what, What::Step | What::All) {
        figures["step"] = step::run(&args)?;
    }
    if matches!(args.what, What::Ops | What::All) {
        figures["ops"] = ops::run()?;
    }
    let plot = args.plot.as_deref();
    if args.what == What::Kernels {
        figures["kernels"] = kernels::run(&args.kernels, &args.only, plot)?;
    }
    if args.what == What::Gemm {
        figures["gemm"] = gemm::run(&args.gemm, args.quick, &args.only, plot)?;
    }
    if args.what == What::Experts {
        figures["experts"] = experts::run(args.quick, &args.only)?;
    }
    if let Some(path) = &args.json {
        std::fs::write(path, format!("{figures:#}\n")).map_err(Error::io(path))?;
    }
    Ok(())
}

/// What the scripts of `benchmarks/peers` printed into files of this name.
#[cfg(test)]
fn printed(name: &str) -> String {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../../benchmarks");
    let folders = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    let text: String = folders.filter_map(|at| std::fs::read_to_string(at.join(name)).ok()).collect();
    assert!(!text.is_empty(), "no {name} in {folder}");
    text
}

/// The middle value; the mean of the two middle ones of an even number, NaN of none.
fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    let middle = values.len() / 2;
    match values.len() {
        0 => f64::NAN,
        n if n % 2 == 1 => values[middle],
        _ => (values[middle - 1] + values[middle]) / 2.0,
    }
}
