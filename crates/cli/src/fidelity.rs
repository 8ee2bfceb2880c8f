//! `nibble fidelity`: what recipes do to the gradients and to the held-out loss of one checkpoint, without training.

use crate::checkpoint::Trained;
use nibble_command::console::thousands;
use nibble_command::device::{self, Device, DeviceArg, On, Work};
use nibble_command::error::{Error, Result};
use nibble_command::output::{Force, Mark, Outputs};
use nibble_command::say;
use nibble_core::Recipe;
use nibble_core::recipe::Product;
use nibble_study::fidelity::{Decomposition, Gradient, Redraws};
use nibble_study::statistics::Paired;
use nibble_train::config::Config;
use nibble_train::record::SiteError;
use nibble_train::trainer::ParamGradient;
use serde_json::{Value, json};
use std::path::PathBuf;

/// Compares recipes' gradients and losses at one checkpoint
///
/// Trains nothing. For each recipe, prints the change of the held-out loss, and the error of one training step's gradient: its bias,
/// and its variance over other random numbers for stochastic rounding and signs.
#[derive(Debug, clap::Args)]
#[command(
    after_help = "Squared errors are divided by the squared norm of the reference's gradient. The expected error of one gradient is bias + variance; of one redraw, \
    only the sum can be estimated. \"Noise\" is the variance of the reference's gradient from one batch to another, which every training step has anyway.\n\n\
    Examples:\n  \
    nibble fidelity runs/tiny --recipe mxfp4-hopper --recipe mxfp4\n  \
    nibble fidelity runs/tiny --recipe mxfp4 --alone fprop --alone dgrad --alone wgrad\n  \
    nibble fidelity runs/tiny --recipe nvfp4 --sites --redraws 1\n  \
    nibble fidelity runs/tiny --recipe nvfp4 --redraws 16 --out fidelity.json"
)]
pub struct Args {
    /// Directory of a run (its newest undamaged checkpoint is used) or of one checkpoint.
    #[arg(value_name = "RUN")]
    path: PathBuf,
    /// Recipe to compare with the reference. This option may be repeated.
    #[arg(long = "recipe", value_name = "RECIPE", required = true)]
    recipes: Vec<String>,
    /// Reference recipe: errors are differences from its gradient and its loss.
    #[arg(long, value_name = "RECIPE", default_value = "bf16")]
    reference: String,
    /// Number of gradients per recipe, each with other random numbers for rounding and signs.
    #[arg(long, value_name = "N", default_value_t = 8, value_parser = clap::value_parser!(u64).range(1..))]
    redraws: u64,
    /// Number of training batches over which the noise of the reference's gradient is measured.
    #[arg(long, value_name = "N", default_value_t = 8, value_parser = clap::value_parser!(u64).range(2..))]
    batches: u64,
    /// Number of batches of 16 sequences for the held-out loss; 0 = all held-out data.
    #[arg(long, value_name = "N", default_value_t = 16)]
    held_out: usize,
    /// GEMM to measure alone, besides the whole recipe: fprop, dgrad or wgrad. Operands of this GEMM have the recipe's formats, and all other
    /// tensors the reference's. This option may be repeated.
    #[arg(long, value_name = "GEMM", value_parser = gemm)]
    alone: Vec<Product>,
    /// Also measures the error of every quantization on the first rank (QSNR, underflow, saturation, range of the blocks' largest
    /// magnitudes), and prints the errors summed over layers.
    #[arg(long)]
    sites: bool,
    /// Writes all numbers, tensor by tensor, to this JSON file.
    #[arg(long, value_name = "OUT")]
    out: Option<PathBuf>,
    #[command(flatten)]
    force: Force,
    #[command(flatten)]
    device: DeviceArg,
}

/// The recipe in one GEMM, and the reference in everything else. The tensors that are saved for wgrad belong to wgrad. The name of the result
/// says so.
///
/// # Errors
/// Returns an error if no kernel can execute the mixture, or if a key of the recipe has no effect in it.
fn alone(gemm: Product, recipe: &Recipe, reference: &Recipe) -> Result<Recipe> {
    let mut others: Vec<&str> =
        Product::ALL.into_iter().filter(|other| *other != gemm).map(Product::name).collect();
    others.extend(["dispatch", "combine"]);
    others.extend((gemm != Product::Wgrad).then_some("saved"));
    let text =
        format!("extends = \"recipe\"\n[[override]]\nproducts = {others:?}\nset.recipe = \"reference\"");
    let named = |which: &str| Ok(if which == "recipe" { recipe } else { reference }.clone());
    Ok(Recipe::parse_with(&format!("{}, {} alone", recipe.name, gemm.name()), &text, &named)?)
}

/// The GEMM of this name.
fn gemm(name: &str) -> std::result::Result<Product, String> {
    let named = Product::ALL.into_iter().find(|gemm| gemm.name() == name);
    named.ok_or_else(|| format!("expected one of {}", Product::ALL.map(Product::name).join(", ")))
}

const FIGURES: Mark = Mark::Figures("nibble fidelity");

pub fn run(args: Args) -> Result<()> {
    let trained = Trained::open(&args.path)?;
    let Some(checkpoint) = trained.checkpoint() else {
        let why = format!(
            "{}: is a model folder, expected a run or its checkpoint, which has training data",
            args.path.display()
        );
        return Err(Error::usage(why));
    };
    let step = checkpoint.position().step;
    let overrides = args.device.after(Vec::new());
    let config = trained.config(&overrides)?;
    let recipe = |name: &String| -> Result<Recipe> {
        let named = [overrides.clone(), vec![format!("recipe={name}")]].concat();
        let recipe = trained.recipe(&trained.config(&named)?, &named)?;
        if recipe.is_delayed() {
            return Err(Error::usage(format!(
                "recipe {name}: has delayed scales, which depend on earlier steps; a checkpoint alone does not decide its gradient"
            )));
        }
        Ok(recipe)
    };
    let reference = recipe(&args.reference)?;
    let mut recipes = Vec::new();
    for name in &args.recipes {
        let whole = recipe(name)?;
        recipes.push(whole.clone());
        for gemm in &args.alone {
            match alone(*gemm, &whole, &reference) {
                Ok(mixed) => recipes.push(mixed),
                Err(error) => say!("not measured: {error}"),
            }
        }
    }
    let mut outputs = Outputs::new(args.force, config.files(&args.path.to_string_lossy()));
    let out = args.out.as_ref().map(|path| outputs.named(path, &FIGURES)).transpose()?;
    crate::caching::make(&config, None)?;
    let measuring = Measuring {
        trained: &trained,
        config: &config,
        reference: &reference,
        recipes: &recipes,
        args: &args,
        step,
    };
    let found = device::run(&config.run, &measuring)?;
    match (out, found) {
        (Some(out), Some(found)) => out.write(FIGURES.json(found)),
        _ => Ok(()),
    }
}

/// The numbers of one recipe.
#[derive(Debug)]
struct OfRecipe {
    recipe: String,
    /// Relative change of the held-out loss in per cent, paired by sequence.
    held_out: Option<Paired>,
    /// The gradient of the first batch, tensor by tensor, and of all tensors.
    gradient: Vec<Decomposition>,
}

struct Measuring<'a> {
    trained: &'a Trained,
    config: &'a Config,
    reference: &'a Recipe,
    recipes: &'a [Recipe],
    args: &'a Args,
    step: u64,
}

impl Work for Measuring<'_> {
    /// All numbers, on the first rank.
    type Out = Option<Value>;

    fn run<B: Device>(&self, on: &On<'_, B>) -> Result<Option<Value>> {
        on.announce();
        let Self { trained, config, reference, recipes, args, step } = self;
        let mut trainer = trained.load(on, config, reference)?.with_data()?;
        let (held_out, targets) = trainer.held_out_sequences(args.held_out)?;
        let nats: f64 = held_out.iter().map(|nats| f64::from(*nats)).sum();
        let (mean, loss) = (nats / held_out.len().max(1) as f64, nats / targets.max(1) as f64);
        let first = trainer.gradient(0, 0)?;
        let mut over_batches = Redraws::default();
        add(&mut over_batches, &first)?;
        (1..args.batches).try_for_each(|later| add(&mut over_batches, &trainer.gradient(later, 0)?))?;
        drop(trainer);
        let noise = over_batches.decompose(&by_name(&first)).map_err(other_tensor)?;
        drop(over_batches);
        let whole = noise.last().map_or(f64::NAN, |all| all.variance / all.reference);
        if on.is_first() {
            say!(
                "checkpoint at step {}; reference {}: held-out loss {loss:.4} nats, noise of a batch's gradient {whole:.4}",
                thousands(*step),
                reference.name
            );
            say!(
                "{:36} {:>7} {:>20} {:>9} {:>9} {:>9} {:>9}",
                "recipe",
                "redraws",
                "held-out loss",
                "error",
                "bias",
                "variance",
                "/ noise"
            );
        }
        let mut all = Vec::new();
        for recipe in *recipes {
            let mut trainer = trained.load(on, config, recipe)?.with_data()?;
            let (nats, _) = trainer.held_out_sequences(args.held_out)?;
            let differences: Vec<f64> =
                nats.iter().zip(&held_out).map(|(a, b)| 100.0 * f64::from(a - b) / mean).collect();
            let mut redraws = Redraws::default();
            for redraw in 0..args.redraws {
                add(&mut redraws, &trainer.gradient(0, redraw)?)?;
            }
            let gradient = redraws.decompose(&by_name(&first)).map_err(other_tensor)?;
            let found =
                OfRecipe { recipe: recipe.name.clone(), held_out: Paired::of(&differences), gradient };
            if on.is_first() {
                say!("{}", found.line(whole));
            }
            let mut row =
                json!({ "recipe": found.recipe, "held_out": found.held_out, "gradient": found.gradient });
            if args.sites {
                let errors = trainer.quantization_errors()?;
                if on.is_first() {
                    print_sites(&errors);
                }
                row["sites"] = json!(errors);
            }
            all.push(row);
        }
        // `noise` compares the reference's gradients over training batches with the gradient of the first batch.
        let found = json!({
            "checkpoint": args.path,
            "step": step,
            "device": on.describe(),
            "version": env!("CARGO_PKG_VERSION"),
            "reference": reference.name,
            "held_out": loss,
            "batches": args.batches,
            "noise": noise,
            "recipes": all,
        });
        Ok(on.is_first().then_some(found))
    }
}

impl OfRecipe {
    /// A line of the table; `noise` is that of a batch, relative to the squared norm.
    fn line(&self, noise: f64) -> String {
        let held_out = self.held_out.map_or_else(String::new, |paired| match paired.half_width {
            Some(half) => format!("{:+.3} % ± {half:.3}", paired.mean),
            None => format!("{:+.3} %", paired.mean),
        });
        let Some(all) = self.gradient.last() else { return self.recipe.clone() };
        let relative = |value: f64| format!("{:.5}", value / all.reference);
        let (bias, variance) = match all.redraws {
            1 => ("–".to_owned(), "–".to_owned()),
            _ => (relative(all.bias), relative(all.variance)),
        };
        format!(
            "{:36} {:>7} {held_out:>20} {:>9} {bias:>9} {variance:>9} {:>9.4}",
            self.recipe,
            all.redraws,
            relative(all.bias + all.variance),
            all.error() / noise
        )
    }
}

/// Prints the errors of quantization, summed over the decoder layers.
fn print_sites(errors: &[SiteError]) {
    let mut sums: Vec<(String, SiteError)> = Vec::new();
    for error in errors {
        let site = error.in_any_layer();
        let same = |one: &&mut (String, SiteError)| {
            let key = |error: &SiteError| (error.blocks, error.transform, error.format.clone());
            one.0 == site && key(&one.1) == key(error)
        };
        match sums.iter_mut().find(same) {
            Some((_, sum)) => sum.add(error),
            None => sums.push((site, error.clone())),
        }
    }
    say!(
        "  {:34} {:8} {:8} {:>9} {:>8} {:>10} {:>10}  {}",
        "quantized tensor",
        "blocks",
        "format",
        "transform",
        "QSNR, dB",
        "underflow",
        "saturation",
        "amax of blocks"
    );
    for (site, sum) in sums {
        let fraction = |count: u64| format!("{:.5}", count as f64 / sum.values.max(1) as f64);
        let [low, high] = sum.block_amax.map(|amax| amax.log2().round() + 0.0);
        let (qsnr, range) = match sum.values {
            0 => ("–".to_owned(), "all zero".to_owned()),
            _ => (format!("{:.2}", sum.qsnr_db()), format!("2^{low} to 2^{high}")),
        };
        let transform = if sum.transform == 0 { "–".to_owned() } else { sum.transform.to_string() };
        say!(
            "  {site:34} {:8} {:8} {transform:>9} {qsnr:>8} {:>10} {:>10}  {range}",
            sum.blocks,
            sum.format,
            fraction(sum.underflowed),
            fraction(sum.saturated)
        );
    }
}

fn by_name(gradients: &[ParamGradient]) -> Vec<Gradient<'_>> {
    gradients.iter().map(|gradient| (&*gradient.name, &*gradient.values)).collect()
}

fn add(redraws: &mut Redraws, gradients: &[ParamGradient]) -> Result<()> {
    redraws.add(&by_name(gradients)).map_err(other_tensor)
}

/// Recipes of one model have the same parameters; the error names one that differs.
fn other_tensor(name: String) -> Error {
    Error::Failed(format!("the gradient of {name} is missing, or has another size, under one of the recipes"))
}
