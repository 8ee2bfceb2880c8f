//! `nibble recipe`: explains a recipe, and derives the conversions in a layer of each kind.

mod cost;
mod products;

use crate::run_files::RunFiles;
use crate::tensor_cores;
use nibble_command::error::{Error, Result};
use nibble_command::{layers, say};
use nibble_core::Recipe;
use nibble_core::recipe::{Change, Layer, Passes};
use nibble_train::checks::{for_run, idle_overrides, load_recipe, notes};
use nibble_train::config::Config;
use nibble_train::metrics::{Lost, read_layers};
use nibble_train::trainer::LAYERS_FILE;
use std::path::Path;

/// The configuration whose sizes are used to find GEMMs that miss the tensor cores (`--trace`), and overrides without effect.
const SIZES: &str = "s";

/// What becomes of a transform that does not divide a layer's width.
const SHORTENED: &str = "a transform that does not divide the numbers that fprop or dgrad of a layer contracts is shortened there, to the longest of \
                         64, 32 and 16 that does; if none does, it is left out there; a run says so at its start";

/// Lists the built-in recipes, or explains one recipe
///
/// For the recipe NAME_OR_FILE, prints the format, block axis, scale rule and rounding of every GEMM operand, and the tensor from which the
/// operand is converted. --all also prints every conversion in one layer of each kind. If the conversions change during a run, --all prints
/// them for each range of steps.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:\n  \
    nibble recipe\n  \
    nibble recipe --studies\n  \
    nibble recipe mxfp4-hopper\n  \
    nibble recipe mxfp4-hopper --all\n  \
    nibble recipe my-recipe.toml --trace\n  \
    nibble recipe runs/tiny --trace\n  \
    nibble recipe hif4 --cost llama-3-8b")]
pub struct Args {
    /// What to explain: a built-in recipe, a recipe's TOML file, or a run's directory (explains that run's recipe).
    #[arg(value_name = "NAME_OR_FILE")]
    recipe: Option<String>,
    /// Lists the recipes for ablation studies of a format or of a technique, instead of the recipes for training.
    #[arg(long, conflicts_with_all = ["recipe", "all", "trace", "cost"])]
    studies: bool,
    /// Also prints every conversion, the saved activations, the operands that are converted from quantized tensors, and all settings of the
    /// recipe's overrides. With --cost, also prints the published costs of other recipes from the HiFloat4 study.
    #[arg(long, requires = "recipe")]
    all: bool,
    /// Like --all, but runs one layer of each kind and prints the conversions that ran. Also prints each layer's GEMMs with their operands,
    /// scales and kernels, and lists the GEMMs that a GPU would not compute on tensor cores. For a run that measured quantization
    /// (train.quantization_every), also names the tensors of which many values became zero or saturated.
    #[arg(long, requires = "recipe")]
    trace: bool,
    /// Prints only the cost of a training step of the configuration CONFIG under the recipe: the percentage of multiply-adds per kind of
    /// layer and code width, and the work outside GEMMs. --cost without CONFIG uses the configuration tiny.
    #[arg(long, value_name = "CONFIG", num_args = 0..=1, default_missing_value = "tiny", requires = "recipe", conflicts_with = "trace")]
    cost: Option<String>,
}

fn list(studies: bool) -> Result<()> {
    let names: Vec<&str> =
        if studies { Recipe::study_names().collect() } else { Recipe::training_names().collect() };
    let width = names.iter().map(|name| name.len()).max().unwrap_or(0);
    for name in names {
        say!("{name:<width$} {}", Recipe::builtin(name)?.description);
    }
    if !studies {
        say!(
            "{} more are studies of a format or a technique: nibble recipe --studies",
            Recipe::study_names().count()
        );
    }
    Ok(())
}

pub fn run(args: Args) -> Result<()> {
    let Some(name) = args.recipe else {
        return list(args.studies);
    };
    if let Some(config) = args.cost {
        return cost::run(&name, &config, args.all);
    }
    let run = run_of(&name)?;
    let (sizes, of_sizes) = match &run {
        Some(run) => (run.config.clone(), name.as_str()),
        None => (Config::load(SIZES, &[])?, SIZES),
    };
    let recipe = match &run {
        Some(run) => run.recipe.clone().map_err(Error::usage)?,
        None => for_run(&sizes, load_recipe(&name)?),
    };
    let is_short = !(args.all || args.trace);
    let text = if is_short { format!("{recipe:#}") } else { recipe.to_string() };
    say!("{}", text.trim_end());
    match recipe.requantizations().len() {
        0 => say!("  nothing is made from an already quantized tensor"),
        1 if is_short => say!("  1 operand is made from an already quantized tensor, which --all prints"),
        n if is_short => say!("  {n} operands are made from already quantized tensors, which --all prints"),
        _ => {}
    }
    for note in idle((&sizes, of_sizes), &recipe) {
        say!("  note: {note}");
    }
    if recipe.transforms_widths() {
        say!("  {SHORTENED}");
    }
    if is_short {
        layers::each_kind().for_each(|layer| summarize(&recipe, &layer));
        return Ok(());
    }
    let mut counted = false;
    for layer in layers::each_kind() {
        counted |= explain(&recipe, &layer, args.trace)?;
        if args.trace {
            products::tell(&recipe, &layer)?;
        }
    }
    if counted {
        say!(
            "a cast reads a tensor only to quantize it, along its rows or its columns (both are two), or to dequantize it"
        );
    }
    if args.trace {
        notes(&sizes, &recipe).iter().for_each(|note| say!("with the model of `{of_sizes}`: {note}"));
        for missed in tensor_cores::missed(&sizes, &recipe) {
            say!("off the tensor cores of a GPU, with the sizes of `{of_sizes}`: {missed}");
        }
        if let Some(run) = &run {
            measured(run)?.iter().for_each(|line| say!("{line}"));
        }
    }
    Ok(())
}

/// The run in a directory of this name, unless a recipe has the name.
fn run_of(name: &str) -> Result<Option<RunFiles>> {
    let is_run = !Recipe::all_names().any(|known| known == name) && Path::new(name).is_dir();
    is_run.then(|| RunFiles::read(Path::new(name))).transpose()
}

/// What the steps of a run that measured quantization say of values that became zero or were cut off.
fn measured(run: &RunFiles) -> Result<Vec<String>> {
    let layers = read_layers(&run.dir.join(LAYERS_FILE))?.metrics;
    let steps: Vec<_> = layers.iter().filter(|layers| layers.is_measured()).collect();
    let (Some(first), Some(last)) = (steps.first(), steps.last()) else {
        return Ok(vec!["the run measured no quantization: set train.quantization_every".to_owned()]);
    };
    let lost = Lost::of_run(steps.iter().copied());
    let what = if lost.is_empty() { "no site loses most of its values" } else { "values are lost:" };
    let mut lines = vec![format!(
        "{} steps of the run, {} to {}, were measured; {what}",
        steps.len(),
        first.step,
        last.step
    )];
    lines.extend(lost.iter().map(|(step, lost)| format!("  step {step}: {lost}")));
    Ok(lines)
}

/// Notes for overrides without effect. Only a run refuses them, and not in built-in recipes.
fn idle((config, name): (&Config, &str), recipe: &Recipe) -> Vec<String> {
    let in_a_run = format!("with the layers and the {} steps of `{name}`", config.train.steps);
    idle_overrides(config, recipe).into_iter().map(|idle| format!("{idle} ({in_a_run})")).collect()
}

/// Prints the number of changes of representation in one layer.
fn summarize(recipe: &Recipe, layer: &Layer) {
    let plans = recipe.plans(layer);
    for ((from, to), plan) in &plans {
        let changes = plan.changes();
        if changes.is_empty() {
            continue;
        }
        let part = if plans.len() > 1 { format!(", steps {from}..{to}") } else { String::new() };
        let casts = changes.iter().map(Change::casts).sum::<usize>();
        let (name, changes) = (&layer.name, changes.len());
        say!("  {name}{part}: {changes} changes of representation, casts: {casts}; --all prints them");
    }
}

/// Prints the changes of representation in one layer, for each part of a run in which they differ. Returns whether there are any changes.
fn explain(recipe: &Recipe, layer: &Layer, trace: bool) -> Result<bool> {
    let plans = recipe.plans(layer);
    if trace {
        recipe.stretches().into_iter().try_for_each(|(from, _)| assert_traced(recipe, layer, from))?;
    }
    if plans.iter().all(|(_, plan)| plan.changes().is_empty()) {
        return Ok(false);
    }
    let who = if trace { "as a backend saw them" } else { "as they follow" };
    for ((from, to), plan) in &plans {
        let part = if plans.len() > 1 { format!(", steps {from}..{to}") } else { String::new() };
        say!("changes of representation in {} (activations and gradients), {who}{part}:", layer.name);
        let changes = plan.changes();
        for change in &changes {
            let casts = match change.casts() {
                0 => String::new(),
                1 => "  (a cast)".into(),
                n => format!("  ({n} casts)"),
            };
            say!("  {change}{casts}");
        }
        plan.unfused().iter().for_each(|line| say!("  {line}"));
        say!("casts: {}", changes.iter().map(Change::casts).sum::<usize>());
        let kept: Vec<String> =
            plan.kept.iter().map(|kept| format!("{} {}", kept.tensor, kept.precision)).collect();
        if !kept.is_empty() {
            say!("saved for the backward pass: {}", kept.join(", "));
        }
    }
    Ok(true)
}

/// Runs a layer at a point of a run, and compares the layer's conversions with its plan.
fn assert_traced(recipe: &Recipe, layer: &Layer, progress: f64) -> Result<()> {
    let seen = layers::changes(recipe, layer, progress)?;
    match Change::difference(&seen, &recipe.plan(layer, progress, Passes::TRAINING).changes()) {
        None => Ok(()),
        Some(what) => Err(Error::Failed(format!("{}: from {progress} of the steps on, {what}", layer.name))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The recipe has five overrides: one that covers no step, one that a later override hides, one that changes nothing, and two that have
    /// an effect.
    #[test]
    fn overrides_that_decide_nothing_are_noted() {
        let text = r#"
            extends = "fp8-flow"
            [[override]]
            steps = "0.99..1"
            set.recipe = "bf16"
            [[override]]
            layers = "*.experts"
            set.recipe = "bf16"
            [[override]]
            layers = "*.experts"
            set.recipe = "mxfp4-hopper"
            [[override]]
            layers = "model.layers.0.self_attn.*"
            set.recipe = "fp8-flow"
            [[override]]
            layers = "model.layers.1.self_attn.*"
            set.recipe = "bf16"
            [[override]]
            layers = "model.layers.1000.*"
            set.recipe = "bf16"
        "#;
        let sizes = Config::load(SIZES, &[]).unwrap();
        let notes = idle((&sizes, SIZES), &Recipe::parse("shipped", text).unwrap());
        let expected = [
            ("`override[1]`", "0.99..1 has none of the 30 steps"),
            ("`override[2]`", "later overrides replace it"),
            ("`override[4]`", "same setting without it"),
            ("`override[6]`", "no layer name matches"),
        ];
        assert_eq!(notes.len(), expected.len(), "{notes:#?}");
        for (note, (key, why)) in notes.iter().zip(expected) {
            assert!(note.starts_with(key) && note.contains(why) && note.contains("steps of `s`"), "{note}");
        }
        for name in Recipe::all_names() {
            assert_eq!(idle((&sizes, SIZES), &Recipe::builtin(name).unwrap()), [""; 0], "{name}");
        }
    }
}
