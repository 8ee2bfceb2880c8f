//! `nibble recipe`: what a recipe says, and what it does to one expert layer.

use crate::checkpoint;
use crate::console::say;
use crate::error::{Error, Result};
use nibble_core::{Recipe, SoloComm};
use nibble_train::config::Config;
use nibble_train::cx::{Event, Pass};
use nibble_train::trainer::{Trainer, load_recipe};
use std::cell::RefCell;
use std::path::Path;

/// Lists the recipes, or prints one: every operand's format, axis, scale rule, rounding and origin.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:\n  \
    nibble recipe\n  \
    nibble recipe mxfp4-hopper\n  \
    nibble recipe my-recipe.toml --trace")]
pub struct Args {
    /// A built-in recipe or the path of a TOML file.
    #[arg(value_name = "NAME_OR_FILE")]
    recipe: Option<String>,
    /// Also does one training step and prints every change of representation in one expert layer.
    #[arg(long, requires = "recipe")]
    trace: bool,
}

pub fn run(args: Args) -> Result<()> {
    let Some(name) = args.recipe else {
        for name in Recipe::names() {
            say!("{name:<18} {}", Recipe::builtin(name)?.description);
        }
        return Ok(());
    };
    let recipe = load_recipe(&name)?;
    say!("{}", recipe.to_string().trim_end());
    if recipe.requantizations().is_empty() {
        say!("  nothing is made from an already quantized tensor");
    }
    if args.trace { trace(&name) } else { Ok(()) }
}

/// The layer whose changes of representation are printed.
pub const EXPERTS: &str = "model.layers.0.mlp.experts";

/// One decoder layer, and four shards of 128 tokens: what the recipes' blocks ask for at least.
const TINY: &str = "\
    model.layers = 1
    train.batch_size = 4
    train.shards = 4
    train.steps = 1
    train.warmup_steps = 0
";

/// Every change of representation in one training step of a small model under a recipe.
pub fn changes(recipe: &str) -> Result<Vec<Event>> {
    let config = Config::from_text(TINY, Path::new("trace.toml"), &[format!("recipe={recipe}")])?;
    let cpu = checkpoint::cpu(&config)?;
    let events = RefCell::new(Vec::new());
    Trainer::new(&cpu, &SoloComm, &config)?.traced_step(Some(&events))?;
    Ok(events.into_inner())
}

fn trace(recipe: &str) -> Result<()> {
    let events: Vec<Event> = changes(recipe)?.into_iter().filter(|e| e.layer == EXPERTS).collect();
    if events.is_empty() {
        return Err(Error::Failed(format!("the step noted nothing about {EXPERTS}")));
    }
    say!("changes of representation in {EXPERTS} (activations and gradients):");
    for event in &events {
        let pass = match event.pass {
            Pass::Forward => "forward",
            Pass::Backward => "backward",
        };
        let alone = if event.is_cast() { "  (a cast)" } else { "" };
        say!("  {pass:<9} {:<25} {:<3} {} → {}{alone}", event.op, event.tensor, event.from, event.to);
    }
    let alone = events.iter().filter(|e| e.is_cast()).count();
    say!("casts: {alone}");
    Ok(())
}
