//! `nibble recipe`: what a recipe says, and what follows for a layer of each kind.

use crate::tensor_cores;
use nibble_command::error::{Error, Result};
use nibble_command::{layers, say};
use nibble_core::Recipe;
use nibble_train::checks::load_recipe;
use nibble_train::config::Config;

/// Whose sizes products have when a trace looks for those that a GPU is slow at.
const SIZES: &str = "s";

/// Lists the recipes, or explains one
///
/// Every operand's format, axis, scale rule, rounding and origin, and every change of
/// representation that follows in a layer of each kind.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:\n  \
    nibble recipe\n  \
    nibble recipe mxfp4-hopper\n  \
    nibble recipe my-recipe.toml --trace")]
pub struct Args {
    /// A built-in recipe or the path of a TOML file.
    #[arg(value_name = "NAME_OR_FILE")]
    recipe: Option<String>,
    /// Runs those layers, and prints what the backend saw of them, and what a GPU would leave to its ordinary cores.
    #[arg(long, requires = "recipe")]
    trace: bool,
}

pub fn run(args: Args) -> Result<()> {
    let Some(name) = args.recipe else {
        for name in Recipe::all_names() {
            say!("{name:<18} {}", Recipe::builtin(name)?.description);
        }
        return Ok(());
    };
    let recipe = load_recipe(&name)?;
    say!("{}", recipe.to_string().trim_end());
    if recipe.requantizations().is_empty() {
        say!("  nothing is made from an already quantized tensor");
    }
    for layer in layers::each_kind() {
        let plan =
            recipe.section(layer.kind, &layer.name, 0.0).plan(layer.kind, recipe.activations, layer.gated);
        let (changes, who) = match args.trace {
            true => (layers::changes(&recipe, &layer)?, "as a backend saw them"),
            false => (plan.clone(), "as they follow"),
        };
        if changes != plan {
            return Err(Error::Failed(format!(
                "{}: the layer does {changes:#?}, where its recipe means {plan:#?}",
                layer.name
            )));
        }
        if changes.is_empty() {
            continue;
        }
        say!("changes of representation in {} (activations and gradients), {who}:", layer.name);
        for change in &changes {
            say!("  {change}{}", if change.is_cast() { "  (a cast)" } else { "" });
        }
        say!("casts: {}", changes.iter().filter(|change| change.is_cast()).count());
    }
    if args.trace {
        for missed in tensor_cores::missed(&Config::load(SIZES, &[])?, &recipe) {
            say!("off the tensor cores of a GPU, with the sizes of `{SIZES}`: {missed}");
        }
    }
    Ok(())
}
