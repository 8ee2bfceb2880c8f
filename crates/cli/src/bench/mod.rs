//! `nibble bench`: how fast a training step is beside what the processor could do, and each operation's vectorised code
//! beside its scalar specification.

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
    ops: one thread, scalar and vectorised code in turns; bytes are those read and written.\n\n\
    Examples:\n  \
    nibble bench\n  \
    nibble bench step shakespeare --set data.source=tinyshakespeare.txt\n  \
    nibble bench step --recipe mxfp4-hopper --steps 20\n  \
    nibble bench ops --json ops.json"
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
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum What {
    /// Training steps.
    Step,
    /// Single operations.
    Ops,
    /// Both.
    All,
}

pub fn run(args: Args) -> Result<()> {
    let mut figures = json!({});
    if args.what != What::Ops {
        figures["step"] = step::run(&args)?;
    }
    if args.what != What::Step {
        figures["ops"] = ops::run()?;
    }
    if let Some(path) = &args.json {
        std::fs::write(path, format!("{figures:#}\n")).map_err(Error::io(path))?;
    }
    Ok(())
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
