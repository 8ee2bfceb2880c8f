//! A layer of each kind under a recipe, and what a backend sees of it.

use crate::env::Env;
use crate::error::Result;
use nibble_core::Recipe;
use nibble_core::recipe::{Change, Layer, LayerKind};
use nibble_testkit::recorder::{Recorder, traced};
use nibble_train::one_layer::OneLayer;

/// An expert layer, a dense one and the head.
pub fn each_kind() -> [Layer; 3] {
    let named = |kind, name: &str| Layer { kind, name: name.to_owned(), gated: false };
    [named(LayerKind::Expert, EXPERTS), named(LayerKind::Linear, DENSE), named(LayerKind::Head, "lm_head")]
}

/// An expert layer.
pub const EXPERTS: &str = "model.layers.0.mlp.experts";
/// A dense layer that shares its input with no other.
pub const DENSE: &str = "model.layers.0.self_attn.o_proj";

/// Every change of representation in one layer, forward and backward, as a backend sees them at a point of a run (step / steps).
///
/// # Errors
/// A CPU that cannot be had as the environment asks for it; what the layer returns.
pub fn changes(recipe: &Recipe, layer: &Layer, progress: f64) -> Result<Vec<Change>> {
    let env = Env::read()?;
    let recorder = Recorder::eager(env.cpu(env.threads(0))?);
    let one = OneLayer { recipe, layer, progress };
    Ok(traced(&recorder, |begin| one.run(&recorder, begin))?)
}
