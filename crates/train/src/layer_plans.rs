//! The plans of layers under a recipe. Each plan is compiled once for each stretch of a run in which the recipe does not change.

use nibble_core::Recipe;
use nibble_core::recipe::{Layer, LayerPlan, Passes};
use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

/// A recipe, and all layer plans that have been compiled from the recipe so far.
#[derive(Debug)]
pub struct LayerPlans {
    recipe: Recipe,
    /// The points of a run (step / steps) at which the recipe may change, in order.
    starts: Vec<f64>,
    /// The compiled plans by layer name.
    compiled: Mutex<HashMap<String, Vec<Compiled>>>,
}

/// A layer's plan in one stretch of a run.
#[derive(Debug)]
struct Compiled {
    stretch: usize,
    passes: Passes,
    plan: Arc<LayerPlan>,
}

impl LayerPlans {
    /// Starts without compiled plans.
    pub fn new(recipe: Recipe) -> Self {
        let starts = recipe.stretches().into_iter().map(|(start, _)| start).collect();
        Self { recipe, starts, compiled: Mutex::default() }
    }

    /// The recipe.
    pub fn recipe(&self) -> &Recipe {
        &self.recipe
    }

    /// The plan of a layer at point `progress` (step / steps) of a run.
    pub fn plan(&self, layer: &Layer, progress: f64, passes: Passes) -> Arc<LayerPlan> {
        let stretch = self.starts.partition_point(|start| *start <= progress);
        // A poisoned lock is harmless, because each plan is inserted in one step.
        let mut compiled = self.compiled.lock().unwrap_or_else(PoisonError::into_inner);
        let is_it = |known: &&Compiled| {
            (known.stretch, known.passes) == (stretch, passes) && known.plan.layer == *layer
        };
        if let Some(known) = compiled.get(&layer.name).and_then(|known| known.iter().find(is_it)) {
            return Arc::clone(&known.plan);
        }
        let plan = Arc::new(self.recipe.plan(layer, progress, passes));
        let made = Compiled { stretch, passes, plan: Arc::clone(&plan) };
        compiled.entry(layer.name.clone()).or_default().push(made);
        plan
    }
}
