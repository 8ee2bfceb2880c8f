//! `nibble bench exchange`: the bytes of a layer's all-to-all between ranks, and the error of its sums; with
//! `--ranks`, its time.

mod routing;
mod sums;
mod timed;
mod traffic;

use nibble_command::env::Env;
use nibble_command::error::Result;
use nibble_command::say;
use nibble_core::recipe::{LayerKind, Site};
use nibble_core::{DType, Recipe, RowKind};
use nibble_formats::{Format, ScaleRule};
use nibble_train::checks::{load_recipe, recipe_files};
use serde_json::{Value, json};
use std::path::PathBuf;
use sums::{Errors, TOP_KS};
use timed::TimedArgs;
use traffic::Traffic;

/// Number of columns of a token's row.
const COLS: usize = 7168;
/// Number of experts of the layer.
const EXPERTS: usize = 256;
/// Number of selected experts per token.
const TOP_K: usize = 8;
/// Numbers of ranks that divide the experts.
const RANKS: [usize; 3] = [2, 4, 8];
/// Number of tokens of all ranks, for which experts are sampled.
const TOKENS: usize = 8192;

/// Measures the all-to-all of an expert layer: bytes per token, and rounding errors of combine; with --ranks, only the time of the
/// all-to-all.
#[derive(Debug, clap::Args)]
#[command(
    after_help = "A token's row has 7168 columns and is sent to 8 of 256 experts; the experts are divided among 2, 4 or 8 ranks. The 8 \
    experts of each token are chosen at random. Under balanced routing, all experts have equal probability. Under zipf routing, the weight \
    of expert e is 1 / (e + 1), so rank 0 has the busiest experts. `slots` and `tree` are values of the configuration key train.combine. \
    The columns `all` count all bytes; the columns `leaves` exclude the bytes that a rank sends to itself.\n\n\
    The last table gives the relative errors, against F64 sums, of sums of rows of normally distributed numbers. The rows are summed on \
    the CPU, once in the way of train.combine = `slots` and once in the way of `tree`.\n\n\
    With --ranks, the command only measures the time in which N ranks send rows to each other. Three stages are timed: the quantization of \
    rows and their packing into messages, the all-to-all alone, and the unpacking of messages into rows sorted by expert. Each row is sent \
    to one rank. With skewed splits, rank 0 receives 1.5 times as many rows as with equal splits. Between CPU ranks, rows are copied \
    through host memory, so the times of CPU ranks say nothing about GPU links; use few rows with CPU ranks.\n\n\
    Examples:\n  \
    nibble bench exchange\n  \
    nibble bench exchange --recipe bf16 --json exchange.json\n  \
    nibble bench exchange --ranks 2 --device cuda\n  \
    nibble bench exchange --ranks 2 --device cpu --rows 256 --cols 512 --splits equal"
)]
pub struct Args {
    /// Recipe, which sets the number formats: the name of a built-in recipe (`nibble recipe` lists the names) or the path of a TOML file.
    #[arg(long, value_name = "RECIPE", default_value = "mxfp4-hopper")]
    recipe: String,
    #[command(flatten)]
    timed: TimedArgs,
}

impl Args {
    /// The files that the benchmark reads.
    pub(crate) fn inputs(&self) -> Vec<PathBuf> {
        recipe_files(&self.recipe)
    }
}

/// Row formats for each direction of the exchange.
#[derive(Debug, Clone, Copy)]
struct Rows {
    /// Formats of dispatched rows in the forward and the backward pass.
    dispatch: [RowKind; 2],
    /// Formats of combined rows in the forward and the backward pass.
    combine: [RowKind; 2],
    /// Format of combined rows for the tree, which sums only plain rows.
    tree: RowKind,
}

impl Rows {
    /// The row formats of a recipe, without its overrides.
    fn of(recipe: &Recipe) -> Self {
        let section = recipe.of(LayerKind::Expert);
        let kind = |format, rule| RowKind { format, rule, cols: COLS };
        let of = |site| kind(section.at(site).format, section.at(site).scale);
        let dispatch = [Site::DispatchFwd, Site::DispatchBwd].map(of);
        let plain = match recipe.activations {
            DType::F32 => Format::F32,
            DType::Bf16 => Format::Bf16,
        };
        Self { dispatch, combine: Site::COMBINE.map(of), tree: kind(plain, ScaleRule::Amax) }
    }
}

pub fn run(args: &Args) -> Result<Value> {
    if let Some(figures) = args.timed.run()? {
        return Ok(figures);
    }
    let recipe = load_recipe(&args.recipe)?;
    let env = Env::read()?;
    let cpu = env.cpu(env.threads(0))?;
    let rows = Rows::of(&recipe);
    let Rows { dispatch: [forward, backward], combine: [back, back_backward], tree } = rows;
    let name = &recipe.name;
    say!(
        "exchange of a layer under {name}: bytes a token, mean of {TOKENS}; top {TOP_K} of {EXPERTS} experts"
    );
    say!(
        "rows of {COLS} columns: {} forward, {} backward, {} on the way back",
        forward.format,
        backward.format,
        match back.format == back_backward.format {
            true => back.format.to_string(),
            false => format!("{} and {}", back.format, back_backward.format),
        }
    );
    if recipe.quantized_combine().is_some() {
        say!("a run under this recipe uses slots; `tree` is for rows combined in {}", tree.format);
    }
    let counted = Traffic::each(rows);
    counted.iter().for_each(Traffic::table);
    let errors = TOP_KS.map(|top_k| Errors::of(&cpu, top_k));
    let errors = errors.into_iter().collect::<Result<Vec<_>, _>>()?;
    sums::table(&errors);
    Ok(json!({
        "recipe": name, "cols": COLS, "experts": EXPERTS, "top_k": TOP_K, "tokens": TOKENS,
        "rows": {
            "dispatch_forward": forward.format.to_string(), "dispatch_backward": backward.format.to_string(),
            "combine_forward": back.format.to_string(), "combine_backward": back_backward.format.to_string(),
            "tree": tree.format.to_string(),
        },
        "bytes_a_token": counted.iter().map(Traffic::figures).collect::<Vec<_>>(),
        "errors": errors.iter().map(Errors::figures).collect::<Vec<_>>(),
    }))
}
