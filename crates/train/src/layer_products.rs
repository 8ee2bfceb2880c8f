//! The matrix products of one layer: which a recipe means, and which a GPU is asked for.

use crate::cost::{operand_sites, operands};
use crate::one_layer::OneLayer;
use nibble_core::formats::BlockAxis;
use nibble_core::ops::{Numbers, ProductDesc, Ragged, Stored};
use nibble_core::recipe::{Layer, LayerKind, Pass, Precision, Product, Section, Site};
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
        [self.desc.a, self.desc.b].map(|factor| factor.stored)
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

/// A product that a recipe means for a layer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PlannedProduct {
    /// Whose section decides its operands.
    pub kind: LayerKind,
    /// Which of the three.
    pub product: Product,
    /// The sites of its operands.
    pub sites: [Site; 2],
    /// How they are stored.
    pub stored: [Stored; 2],
}

/// The products that a recipe means for a layer, weight by weight. None for a router's gate, which no layer runs by itself.
#[must_use]
pub fn planned(recipe: &Recipe, layer: &Layer, progress: f64) -> Vec<PlannedProduct> {
    let (section, kind) = (recipe.section(layer.kind, &layer.name, progress), layer.kind);
    let weights = match kind {
        LayerKind::Router => 0,
        LayerKind::Expert => 2,
        LayerKind::Linear | LayerKind::Head => 1,
    };
    let of_weight = |which| {
        Product::ALL.map(|product| PlannedProduct {
            kind,
            product,
            sites: operand_sites(product, kind, which),
            stored: stored_pair(&section, (kind, which), product, recipe.activations),
        })
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

/// What the products seen of a layer have otherwise than its recipe means, in a sentence; none where they are those that it means, each pair of operands
/// of them, and no other. Pairs of several weights that are alike are seen once.
#[must_use]
pub fn difference(seen: &[LayerProduct], planned: &[PlannedProduct]) -> Option<String> {
    let is_seen = |meant: &PlannedProduct| seen.iter().any(|made| is_made_as(made, meant));
    let is_meant = |made: &&LayerProduct| planned.iter().any(|meant| is_made_as(made, meant));
    if let Some(made) = seen.iter().find(|made| !is_meant(made)) {
        return Some(made.otherwise_than(planned));
    }
    planned.iter().find(|meant| !is_seen(meant)).map(|meant| {
        let [a, b] = [0, 1].map(|side| format!("{} ({})", meant.key(side), meant.stored[side]));
        format!("the layer never multiplies {a} by {b}, as its recipe means")
    })
}

fn is_made_as(made: &LayerProduct, meant: &PlannedProduct) -> bool {
    (made.product, made.stored()) == (meant.product, meant.stored)
}

impl PlannedProduct {
    /// The key of one operand in a recipe's file.
    fn key(&self, side: usize) -> String {
        format!("`{}.{}`", self.kind.name(), self.sites[side].key())
    }
}

impl LayerProduct {
    /// What of it is otherwise than in the planned product that it is closest to.
    fn otherwise_than(&self, planned: &[PlannedProduct]) -> String {
        let stored = self.stored();
        let alike = |meant: &PlannedProduct| {
            let sides = stored.iter().zip(&meant.stored);
            sides.filter(|(made, meant)| made == meant).count()
        };
        let same = planned.iter().filter(|meant| meant.product == self.product);
        let Some(meant) = same.max_by_key(|meant| alike(meant)) else {
            let ([a, b], product) = (stored, self.product.name());
            return format!("the layer multiplies {a} by {b} ({product}), where its recipe means nothing");
        };
        let of_side = |side: usize| {
            let (found, expected) = (stored[side], meant.stored[side]);
            (found != expected).then(|| {
                format!("{} is {expected} by the recipe, and {found} is multiplied", meant.key(side))
            })
        };
        (0..2).filter_map(of_side).collect::<Vec<_>>().join("; ")
    }
}

fn stored(precision: &Precision, axis: BlockAxis) -> Stored {
    match precision.dtype() {
        Some(dtype) => Stored::plain(dtype),
        None => Stored { format: precision.format, rule: precision.scale, axis },
    }
}
