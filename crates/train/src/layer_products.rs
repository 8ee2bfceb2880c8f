//! The matrix products of one layer: which a recipe means, and which a GPU is asked for.

use crate::cost::operands;
use crate::one_layer::OneLayer;
use nibble_choice::products::{ProductDesc, Ragged};
use nibble_core::formats::BlockAxis;
use nibble_core::ops::{Numbers, Stored};
use nibble_core::recipe::{Layer, LayerKind, Pass, Precision, Product, Section};
use nibble_core::{DType, DeviceKind, Recipe, Result};
use nibble_dry::{Dry, Multiplied};

/// A product that a layer asks for.
#[derive(Debug, Clone, PartialEq)]
pub struct LayerProduct {
    /// Which of the three.
    pub product: Product,
    /// The operation that asks for it.
    pub op: &'static str,
    /// What it is, for a layer that is small.
    pub desc: ProductDesc,
}

impl LayerProduct {
    /// How its operands are stored.
    #[must_use]
    pub fn stored(&self) -> [Stored; 2] {
        [self.desc.a, self.desc.b].map(|factor| factor.stored())
    }
}

/// The products of a layer at a point of a run (step / steps), as a GPU is asked for them: those alike once, in the order of a step.
///
/// # Errors
/// What the layer returns, for a recipe that it cannot follow.
pub fn seen(recipe: &Recipe, layer: &Layer, progress: f64) -> Result<Vec<LayerProduct>> {
    let dry = Dry::new(DeviceKind::Gpu);
    let mut forward = usize::MAX;
    let mut begin = |pass, _: &'static str, _: u64| {
        if pass == Pass::Backward {
            forward = dry.products_so_far();
        }
    };
    let ((), all) = dry.products(|| OneLayer { recipe, layer, progress }.run(&dry, &mut begin))?;
    // A mixture's router multiplies as well: by shards, or dense.
    let of_experts = |desc: &ProductDesc| desc.groups.is_some_and(|groups| groups.rows_each.is_none());
    let mut seen = Vec::new();
    let mut of_lines = 0;
    for (number, Multiplied { op, desc }) in all.into_iter().enumerate() {
        if layer.kind == LayerKind::Expert && !of_experts(&desc) {
            continue;
        }
        let product = match desc.ragged {
            Ragged::Contraction => Product::Wgrad,
            Ragged::Rows => {
                of_lines += 1;
                // The head makes its gradients where it makes its losses.
                let is_first =
                    if layer.kind == LayerKind::Head { of_lines % 2 == 1 } else { number < forward };
                if is_first { Product::Fprop } else { Product::Dgrad }
            }
        };
        let made = LayerProduct { product, op, desc };
        if !seen.contains(&made) {
            seen.push(made);
        }
    }
    Ok(seen)
}

/// The products that a recipe means for a layer, and how their operands are stored: weight by weight. None for a router's gate, which no layer runs
/// by itself.
#[must_use]
pub fn planned(recipe: &Recipe, layer: &Layer, progress: f64) -> Vec<(Product, [Stored; 2])> {
    let section = recipe.section(layer.kind, &layer.name, progress);
    let weights = match layer.kind {
        LayerKind::Router => 0,
        LayerKind::Expert => 2,
        LayerKind::Linear | LayerKind::Head => 1,
    };
    let of_weight = |which| {
        let stored = |product| stored_pair(&section, (layer.kind, which), product, recipe.activations);
        Product::ALL.map(|product| (product, stored(product)))
    };
    (0..weights).flat_map(of_weight).collect()
}

/// The numbers that a product multiplies of a layer's `which`-th weight.
pub(crate) fn numbers(
    section: &Section,
    weight: (LayerKind, usize),
    product: Product,
    activations: DType,
) -> Numbers {
    let [a, b] = stored_pair(section, weight, product, activations);
    Numbers::of(a, b)
}

/// How its operands are stored.
fn stored_pair(
    section: &Section,
    (kind, which): (LayerKind, usize),
    product: Product,
    activations: DType,
) -> [Stored; 2] {
    let [a, b] = operands(product, kind, which, section, activations);
    let is_square = b.axis == BlockAxis::Tile && b.format.spec().tiles;
    let of_weight = if is_square { BlockAxis::Tile } else { BlockAxis::Row };
    let axes = match product {
        Product::Wgrad => [BlockAxis::Col; 2],
        Product::Fprop | Product::Dgrad => [BlockAxis::Row, of_weight],
    };
    [stored(&a, axes[0]), stored(&b, axes[1])]
}

/// Whether the products seen of a layer have the operands that its recipe means: each pair of them, and no other. Pairs of several weights that are
/// alike are seen once.
#[must_use]
pub fn agree(seen: &[LayerProduct], planned: &[(Product, [Stored; 2])]) -> bool {
    let is_meant = |made: &LayerProduct| planned.contains(&(made.product, made.stored()));
    let is_seen =
        |pair: &(Product, [Stored; 2])| seen.iter().any(|made| (made.product, made.stored()) == *pair);
    seen.iter().all(is_meant) && planned.iter().all(is_seen)
}

fn stored(precision: &Precision, axis: BlockAxis) -> Stored {
    match precision.dtype() {
        Some(dtype) => Stored::plain(dtype),
        None => Stored { format: precision.format, rule: precision.scale, axis },
    }
}
