//! Recipes by name or path, compiled once for each type of activations.

use crate::element::Element;
use crate::place::plain;
use nibble_core::Recipe;
use nibble_core::recipe::{Layer, LayerKind, Passes};
use nibble_train::layer_plans::LayerPlans;
use pyo3::exceptions::{PyFileNotFoundError, PyValueError};
use pyo3::prelude::*;
use std::collections::HashMap;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

type Plans = HashMap<(String, &'static str), Arc<LayerPlans>>;

static PLANS: OnceLock<Mutex<Plans>> = OnceLock::new();

/// The plans of layers under a recipe. `recipe` is the name of a recipe that Nibble ships, or the path of a TOML file. A file is read once
/// in a process. Activations between products have the type of the layer's input, whatever the recipe says.
///
/// # Errors
/// `FileNotFoundError` for a path without a file; `ValueError` for an unknown name, and for a mistake in the file, which it names.
pub fn plans(recipe: &str, activations: Element) -> PyResult<Arc<LayerPlans>> {
    let mut known = PLANS.get_or_init(Mutex::default).lock().unwrap_or_else(PoisonError::into_inner);
    let key = (recipe.to_owned(), activations.name());
    if let Some(plans) = known.get(&key) {
        return Ok(plans.clone());
    }
    let made = Recipe { activations: plain(activations), ..read(recipe)? };
    let plans = Arc::new(LayerPlans::new(made));
    known.insert(key, plans.clone());
    Ok(plans)
}

fn read(recipe: &str) -> PyResult<Recipe> {
    let mistake = |error: nibble_core::Error| PyValueError::new_err(error.to_string());
    if !recipe.ends_with(".toml") {
        return Recipe::builtin(recipe).map_err(mistake);
    }
    let text = std::fs::read_to_string(recipe)
        .map_err(|error| PyFileNotFoundError::new_err(format!("recipe {recipe}: {error}")))?;
    Recipe::parse(recipe, &text).map_err(mistake)
}

/// The names of all recipes that Nibble ships, those that models are trained with first.
#[pyfunction]
pub fn recipe_names() -> Vec<&'static str> {
    Recipe::all_names().collect()
}

/// What a recipe does in a layer: pairs of a part (`fprop`, `dgrad`, `wgrad`, `saved x`, …) and its formats. `kind` is `linear` or
/// `expert`.
#[pyfunction]
pub fn explain(recipe: &str, kind: &str, name: &str) -> PyResult<Vec<(String, String)>> {
    let kind = match kind {
        "linear" => LayerKind::Linear,
        "expert" => LayerKind::Expert,
        other => {
            return Err(PyValueError::new_err(format!("`kind` is `{other}`, expected linear or expert")));
        }
    };
    let plan = plans(recipe, Element::Bf16)?.plan(&Layer::new(kind, name), 0.0, Passes::TRAINING);
    let products = plan.products.iter().map(|product| {
        let [a, b] = product.operands;
        let weight =
            if kind == LayerKind::Expert { ["gate_up ", "down "][product.weight.min(1)] } else { "" };
        let transform = product.transform.map_or_else(String::new, |transform| format!(", {transform}"));
        (format!("{weight}{}", product.product.name()), format!("{a} × {b}{transform}"))
    });
    let saved = plan.kept.iter().map(|kept| (format!("saved {}", kept.tensor), kept.precision.to_string()));
    Ok(products.chain(saved).collect())
}

/// Checks that a recipe may be used by layers outside a run.
///
/// # Errors
/// `ValueError` for a recipe that changes during a run's steps, or whose scales come from earlier steps, because a layer in PyTorch has no
/// run.
pub fn check(plans: &LayerPlans) -> PyResult<()> {
    let recipe = plans.recipe();
    let why = match () {
        () if recipe.is_delayed() => {
            "its scales come from earlier steps, which a layer in PyTorch does not keep"
        }
        () if recipe.stretches().len() > 1 => "it changes during a run, and a layer in PyTorch has no run",
        () => return Ok(()),
    };
    Err(PyValueError::new_err(format!("recipe `{}` cannot be used here: {why}", recipe.name)))
}

/// The number of which a layer's number of rows must be a multiple under a recipe, and whether its bits depend on the number of the step.
#[pyfunction]
pub fn layer_needs(recipe: &str, kind: &str, name: &str) -> PyResult<(usize, bool)> {
    let plans = plans(recipe, Element::Bf16)?;
    check(&plans)?;
    let layer = Layer::new(kind_named(kind)?, name);
    let draws = plans.recipe().section(layer.kind, name, 0.0).depends_on_step();
    Ok((plans.plan(&layer, 0.0, Passes::TRAINING).row_alignment, draws))
}

fn kind_named(kind: &str) -> PyResult<LayerKind> {
    match kind {
        "linear" => Ok(LayerKind::Linear),
        "expert" => Ok(LayerKind::Expert),
        other => Err(PyValueError::new_err(format!("`kind` is `{other}`, expected linear or expert"))),
    }
}
