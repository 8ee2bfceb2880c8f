//! `nibble models`: published models, and the memory that each needs on a GPU that trains it in full.

use nibble_command::console::{bytes, thousands};
use nibble_command::error::{Error, Result};
use nibble_command::say;
use nibble_train::checks::check_sizes;
use nibble_train::config::{Config, published_models, tiny_models};
use nibble_train::family;
use nibble_train::plan::{Fit, GPUS, Gpu, RECIPES, Trial, fits_whole, overrides};
use nibble_train::recompute::Recompute;
use nibble_train::spec::ModelSpec;

/// Lists published models and which GPU can train each model
///
/// Prints the parameter count of each published model, and predicts with which recipe and which recomputation one GPU of 80 GB or one GPU
/// of 141 GB can train the whole model. Also lists one small model per model family. `nibble models` runs without a GPU.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:\n  \
    nibble models\n  \
    nibble models llama-3-8b")]
pub struct Args {
    /// A built-in configuration or the path of a TOML file. With CONFIG, prints the predicted memory of training this configuration on one
    /// GPU: one column per recipe, one row per set of recomputed activations.
    #[arg(value_name = "CONFIG")]
    config: Option<String>,
}

pub fn run(args: Args) -> Result<()> {
    match args.config {
        Some(name) => one(&name),
        None => all(),
    }
}

/// The printed properties of a model that do not depend on the device.
struct Told {
    family: &'static str,
    parameters: String,
    active: String,
}

fn told(config: &Config) -> Result<Told> {
    check_sizes(config)?;
    let spec = ModelSpec::new(&config.model);
    let parameters = spec.num_parameters().and_then(|count| u64::try_from(count).ok());
    Ok(Told {
        family: family::of(&config.model).name(),
        parameters: parameters.map_or("beyond counting".into(), thousands),
        active: thousands(spec.active_parameters()),
    })
}

/// Prints the list of models.
fn all() -> Result<()> {
    let [small, .., large] = &GPUS;
    say!("published models, and the recipe with which one GPU trains each in full:");
    let title = ["name", "family", "parameters", "active", small.name, large.name];
    say!("{}", row(title.map(String::from)));
    let mut noted = Vec::new();
    for name in published_models() {
        let config = Config::load(name, &[])?;
        let Told { family, parameters, active } = told(&config)?;
        let own = config.train.recompute.normal();
        let mut on = |gpu| Ok::<_, Error>(cell(&fits_whole(&config, gpu)?, gpu, &own, &mut noted));
        say!("{}", row([name.into(), family.into(), parameters, active, on(small)?, on(large)?]));
    }
    for (i, recompute) in noted.iter().enumerate() {
        say!("({}): with {}", i + 1, overrides(&[recompute.setting()]));
    }
    say!("tried: {}; then each with more and more recomputed.", RECIPES.join(", "));
    say!("state N x: weights, moments and gradients alone take N times the GPU's memory.");
    say!("a small model of each family, which trains in seconds:");
    for name in tiny_models() {
        say!("{name:<21}  {:>8}", told(&Config::load(name, &[])?)?.parameters);
    }
    say!("look at one: nibble models NAME, or nibble train NAME --dry-run=gpu");
    say!("start from published weights: nibble train NAME --from FOLDER");
    Ok(())
}

/// Formats a row of the list, at most 100 columns wide.
fn row([name, family, parameters, active, small, large]: [String; 6]) -> String {
    let row = format!("{name:<16}  {family:<11}  {parameters:>15}  {active:>14}  {small:<16}  {large}");
    row.trim_end().to_owned()
}

/// The cell of a model and a GPU. If the model needs more recomputation than its configuration has, a numbered note appears below the list.
fn cell(fit: &Fit, gpu: &Gpu, own: &Recompute, noted: &mut Vec<Recompute>) -> String {
    let times = |bytes: usize| format!("{:.2} x", bytes as f64 / gpu.bytes as f64);
    match fit {
        Fit::With(Trial { recipe, recompute }) if recompute == own => (*recipe).to_owned(),
        Fit::With(Trial { recipe, recompute }) => {
            let known = noted.iter().position(|known| known == recompute);
            let at = known.unwrap_or(noted.len());
            if known.is_none() {
                noted.push(recompute.clone());
            }
            format!("{recipe} ({})", at + 1)
        }
        Fit::TooLarge(bytes) => format!("needs {}", times(*bytes)),
        Fit::StateTooLarge(bytes) => format!("state {}", times(*bytes)),
    }
}

/// Prints one model with every recipe and every level of recomputation.
fn one(name: &str) -> Result<()> {
    const KEY: &str = "train.recompute";
    let config = Config::load(name, &[])?;
    let Told { family, parameters, active } = told(&config)?;
    let (sequences, tokens) = (config.train.batch_size, config.data.seq_len);
    say!("{name}: {family}, {parameters} parameters, {active} active per token");
    say!("memory of one GPU that trains all of it, {sequences} x {tokens} tokens per micro-batch:");
    let trials = Trial::all(&config);
    let lists: Vec<String> = trials.iter().map(|trial| trial.recompute.to_string()).collect();
    let width = lists.iter().map(String::len).max().unwrap_or(0).max(KEY.len());
    let line = |title: &str, cells: Vec<String>| {
        let cells: String = cells.iter().map(|cell| format!("  {cell:>12}")).collect();
        say!("{title:width$}{cells}");
    };
    line(KEY, RECIPES.map(String::from).to_vec());
    for (trials, list) in trials.chunks(RECIPES.len()).zip(lists.iter().step_by(RECIPES.len())) {
        // Some recipes do not support this batch.
        let size = |trial: &Trial| trial.bytes(&config).map_or("-".into(), |size| bytes(size as u64));
        line(list, trials.iter().map(size).collect());
    }
    let gpus = GPUS.iter().map(|gpu| format!("{} {}", gpu.name, bytes(gpu.bytes as u64)));
    say!("a GPU has: {}", gpus.collect::<Vec<_>>().join(", "));
    say!("look at one: nibble train {name} --recipe RECIPE --set '{KEY}=LIST' --dry-run=gpu");
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use nibble_train::recompute::Scope;

    #[test]
    fn a_cell_says_what_is_set_besides_and_how_far_it_is_from_fitting() {
        let gpu = Gpu { name: "a GPU", bytes: 100 };
        let own = Recompute::default();
        let with = |recompute: &Recompute| Fit::With(Trial { recipe: "bf16", recompute: recompute.clone() });
        let [layers, experts] = [Scope::Layers, Scope::Experts].map(|scope| Recompute::of(&[scope]));
        let mut noted = Vec::new();
        let mut of = |fit: &Fit| cell(fit, &gpu, &own, &mut noted);
        let fits = [with(&own), with(&layers), with(&experts), with(&layers)];
        assert_eq!(fits.each_ref().map(&mut of), ["bf16", "bf16 (1)", "bf16 (2)", "bf16 (1)"]);
        assert_eq!(of(&Fit::TooLarge(140)), "needs 1.40 x");
        assert_eq!(of(&Fit::StateTooLarge(230)), "state 2.30 x");
        assert_eq!(noted, [layers, experts]);
    }
}
