//! Recipes by name or path, compiled once for each type of activations.

use crate::element::Element;
use crate::place::plain;
use nibble_core::Recipe;
use nibble_core::recipe::{Layer, LayerKind, LayerPlan, Layers, Passes, RunSize, Steps};
use nibble_train::layer_plans::LayerPlans;
use pyo3::exceptions::{PyFileNotFoundError, PyValueError};
use pyo3::prelude::*;
use std::collections::HashMap;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

/// The plans of layers under a recipe, at one point of a run (step / steps).
#[derive(Clone)]
pub struct Plans {
    /// The plans.
    pub layers: Arc<LayerPlans>,
    /// The point.
    pub progress: f64,
}

impl Plans {
    /// The plan of a layer in training.
    pub fn plan(&self, layer: &Layer) -> Arc<LayerPlan> {
        self.layers.plan(layer, self.progress, Passes::TRAINING)
    }

    fn recipe(&self) -> &Recipe {
        self.layers.recipe()
    }
}

type Known = HashMap<(String, &'static str), Plans>;

static KNOWN: OnceLock<Mutex<Known>> = OnceLock::new();

/// The plans of layers under a recipe. `recipe` is the name of a recipe that Nibble ships, or the path of a TOML file. Behind it may stand
/// the sizes of the run and a point of it: `nvfp4-nvidia?layers=12&steps=1000&progress=0.82`. A file is read once in a process. Activations
/// between products have the type of the layer's input, whatever the recipe says.
///
/// # Errors
/// `FileNotFoundError` for a path without a file; `ValueError` for an unknown name, and for a mistake in the file, which it names.
pub fn plans(recipe: &str, activations: Element) -> PyResult<Plans> {
    let mut known = KNOWN.get_or_init(Mutex::default).lock().unwrap_or_else(PoisonError::into_inner);
    let key = (recipe.to_owned(), activations.name());
    if let Some(plans) = known.get(&key) {
        return Ok(plans.clone());
    }
    let (name, run) = recipe.split_once('?').map_or((recipe, None), |(name, run)| (name, Some(run)));
    let mut made = Recipe { activations: plain(activations), ..read(name)? };
    let mut progress = 0.0;
    if let Some(run) = run {
        let (size, at) = run_of(run).ok_or_else(|| {
            PyValueError::new_err(format!("recipe `{recipe}`: expected `?layers=N&steps=N&progress=F`"))
        })?;
        (made, progress) = (made.in_run(size), at);
    }
    let plans = Plans { layers: Arc::new(LayerPlans::new(made)), progress };
    known.insert(key, plans.clone());
    Ok(plans)
}

/// The sizes of a run and a point of it.
fn run_of(text: &str) -> Option<(RunSize, f64)> {
    let mut values = text.split('&').map(|pair| pair.split_once('='));
    let mut next = |key: &str| values.next()?.filter(|(found, _)| *found == key).map(|(_, value)| value);
    let (decoder_layers, steps) = (next("layers")?.parse().ok()?, next("steps")?.parse().ok()?);
    Some((RunSize { decoder_layers, steps }, next("progress")?.parse().ok()?))
}

/// Whether a recipe depends on the sizes of the run or on the steps done: whether it counts layers from an end of the model, or changes
/// during a run.
#[pyfunction]
pub fn depends_on_run(recipe: &str) -> PyResult<bool> {
    Ok(is_of_run(plans(recipe, Element::Bf16)?.recipe()))
}

fn is_of_run(recipe: &Recipe) -> bool {
    let counts = |layers: &Layers| matches!(layers, Layers::First(_) | Layers::Last(_));
    recipe.overrides.iter().any(|o| o.steps != Steps::ALL || o.layers.iter().any(counts))
}

/// The points of a run (step / steps) from which a recipe differs from what it was before; the first is 0. `layers` and `steps` are the
/// sizes of the run.
#[pyfunction]
pub fn recipe_changes(recipe: &str, layers: usize, steps: u64) -> PyResult<Vec<f64>> {
    let of_run = format!("{recipe}?layers={layers}&steps={steps}&progress=0");
    let stretches = plans(&of_run, Element::Bf16)?.recipe().stretches();
    Ok(stretches.into_iter().map(|(from, _)| from).collect())
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

/// The names and descriptions of all recipes that Nibble ships, those that models are trained with first.
#[pyfunction]
pub fn recipe_names() -> PyResult<Vec<(&'static str, String)>> {
    Recipe::all_names().map(|name| Ok((name, read(name)?.description))).collect()
}

/// What a recipe does in a layer: pairs of a part (`fprop`, `dgrad`, `wgrad`, `saved x`, …) and its formats. `kind` is `linear` or
/// `expert`. Rows that are sent to experts in another form than that of activations, and random bits, are parts too.
#[pyfunction]
pub fn explain(recipe: &str, kind: &str, name: &str) -> PyResult<Vec<(String, String)>> {
    let kind = kind_named(kind)?;
    let plans = plans(recipe, Element::Bf16)?;
    let plan = plans.plan(&Layer::new(kind, name));
    let products = plan.products.iter().map(|product| {
        let [a, b] = product.operands;
        let weight =
            if kind == LayerKind::Expert { ["gate_up ", "down "][product.weight.min(1)] } else { "" };
        let transform = product.transform.map_or_else(String::new, |transform| format!(", {transform}"));
        (format!("{weight}{}", product.product.name()), format!("{a} × {b}{transform}"))
    });
    let saved = plan.kept.iter().map(|kept| (format!("saved {}", kept.tensor), kept.precision.to_string()));
    let sent = plan.experts().ok().into_iter().flat_map(|experts| {
        let rows = [("sent x", &experts.x_sent), ("sent dy", &experts.dy_sent)];
        rows.into_iter()
            .filter(|(_, form)| form.dtype().is_none())
            .map(|(part, form)| (part.into(), form.to_string()))
    });
    let draws = plans.recipe().section(kind, name, plans.progress).depends_on_step();
    let random = draws.then(|| ("random bits".into(), "drawn anew in each step".into()));
    Ok(products.chain(sent).chain(saved).chain(random).collect())
}

/// Checks that a recipe may be used by a layer in PyTorch.
///
/// # Errors
/// `ValueError` for a recipe whose scales come from earlier steps, and for one that depends on a run of which nothing is known.
pub fn check(plans: &Plans) -> PyResult<()> {
    let recipe = plans.recipe();
    let why = match () {
        () if recipe.is_delayed() => {
            "cannot be used here: its scales come from earlier steps, which a layer in PyTorch does not keep"
        }
        () if recipe.run.is_none() && is_of_run(recipe) => {
            "depends on the run: give `convert` the number of steps, and set `random_bits(model).progress` during the run"
        }
        () => return Ok(()),
    };
    Err(PyValueError::new_err(format!("recipe `{}` {why}", recipe.name)))
}

/// The number of which a layer's number of rows must be a multiple under a recipe, and whether its bits depend on the number of the step.
#[pyfunction]
pub fn layer_needs(recipe: &str, kind: &str, name: &str) -> PyResult<(usize, bool)> {
    let plans = plans(recipe, Element::Bf16)?;
    check(&plans)?;
    let layer = Layer::new(kind_named(kind)?, name);
    let draws = plans.recipe().section(layer.kind, name, plans.progress).depends_on_step();
    Ok((plans.plan(&layer).row_alignment, draws))
}

fn kind_named(kind: &str) -> PyResult<LayerKind> {
    match kind {
        "linear" => Ok(LayerKind::Linear),
        "expert" => Ok(LayerKind::Expert),
        other => Err(PyValueError::new_err(format!("`kind` is `{other}`, expected linear or expert"))),
    }
}
