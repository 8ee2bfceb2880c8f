//! Runs a layer of each kind with a recipe, and records its conversions.

use crate::env::Env;
use crate::error::Result;
use nibble_core::Recipe;
use nibble_core::recipe::{Change, Layer, LayerKind};
use nibble_testkit::recorder::{Recorder, traced};
use nibble_train::config::ModelConfig;
use nibble_train::one_layer::OneLayer;
use nibble_train::spec::ModelSpec;

/// One layer of each kind: an expert layer, a dense layer and the head.
pub fn each_kind() -> impl Iterator<Item = Layer> {
    [LayerKind::Expert, LayerKind::Linear, LayerKind::Head].into_iter().filter_map(of_kind)
}

/// The first layer of this kind in a model with experts and an untied head. For the kind of dense layers, the result is the first dense
/// layer that does not share its input with another layer.
pub fn of_kind(kind: LayerKind) -> Option<Layer> {
    let model = ModelSpec::new(&ModelConfig { tie_embeddings: false, ..ModelConfig::default() });
    let alone = model.blocks().next().and_then(|block| block.attn.out().layer());
    alone.into_iter().chain(model.recipe_layers()).find(|layer| layer.kind == kind)
}

/// All changes of tensor formats in one layer, forward and backward, as a recording backend observes them. `progress` is the point of the
/// run: step / number of steps.
///
/// # Errors
/// Returns an error if the environment's settings for the CPU are invalid; also the errors of the layer.
pub fn changes(recipe: &Recipe, layer: &Layer, progress: f64) -> Result<Vec<Change>> {
    let env = Env::read()?;
    let recorder = Recorder::eager(env.cpu(env.threads(0))?);
    let one = OneLayer { recipe, layer, progress };
    Ok(traced(&recorder, |begin| one.run(&recorder, begin))?)
}
