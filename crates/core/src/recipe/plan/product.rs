//! The products of a layer.

use crate::DType;
use crate::ops::{Numbers, Stored, Taken};
use crate::recipe::{LayerKind, Precision, Product, Section, Site, Transform};
use nibble_formats::BlockAxis;

/// One of the products of a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ProductPlan {
    /// The kind of product: fprop, dgrad or wgrad.
    pub product: Product,
    /// The index of the weight in the layer. An expert has two weights, other layers have one.
    pub weight: usize,
    /// The sites of the two operands, which are places in the recipe where their precisions are chosen.
    pub sites: [Site; 2],
    /// The format, scale rule and block axis of the two operands.
    pub operands: [Stored; 2],
    /// The random Hadamard transform of both operands along the contraction, if there is one.
    pub transform: Option<Transform>,
}

impl ProductPlan {
    /// A product with the layer's weight number `weight`.
    pub(super) fn new(
        section: &Section,
        kind: LayerKind,
        weight: usize,
        product: Product,
        activations: DType,
    ) -> Self {
        let sites = operand_sites(kind, weight, product);
        let [a, b] = match (kind, product) {
            // The router's scores and their gradients are F32.
            (LayerKind::Router, Product::Fprop) => [Precision::plain(activations), section.at(Site::FpropW)],
            (LayerKind::Router, Product::Dgrad) => [Precision::plain(DType::F32), section.at(Site::FpropW)],
            (LayerKind::Router, Product::Wgrad) => [DType::F32, activations].map(Precision::plain),
            _ => sites.map(|site| section.at(site)),
        };
        let axes = match product {
            Product::Wgrad => [BlockAxis::Col; 2],
            _ if b.axis == BlockAxis::Tile && b.format.spec().tiles => [BlockAxis::Row, BlockAxis::Tile],
            _ => [BlockAxis::Row; 2],
        };
        let operands = [stored(&a, axes[0]), stored(&b, axes[1])];
        Self { product, weight, sites, operands, transform: section.transform(product) }
    }

    /// For each operand, its storage after the lift to E4M3 inside the product; `None` for an operand that the product does not lift.
    pub fn lifted(&self) -> [Option<Stored>; 2] {
        let numbers = self.numbers();
        [0, 1].map(|i| {
            let x = self.operands[i];
            (numbers.takes(x) == Taken::Lifted).then(|| x.lifted_as(i == 1))
        })
    }

    /// The type of the numbers that the product multiplies.
    pub fn numbers(&self) -> Numbers {
        let [a, b] = self.operands;
        Numbers::of(a, b)
    }
}

fn stored(precision: &Precision, axis: BlockAxis) -> Stored {
    match precision.dtype() {
        Some(dtype) => Stored::plain(dtype),
        None => Stored { format: precision.format, rule: precision.scale, axis },
    }
}

/// The sites of a product's operands; the sites of an expert's second product differ from those of the first.
fn operand_sites(kind: LayerKind, weight: usize, product: Product) -> [Site; 2] {
    use Site::*;
    match (kind, product, weight) {
        (LayerKind::Expert, Product::Fprop, 1) => [FpropA, FpropW],
        (LayerKind::Expert, Product::Dgrad, 0) => [DgradDh, DgradW],
        (LayerKind::Expert, Product::Wgrad, 0) => [WgradDh, WgradX],
        (LayerKind::Expert, Product::Wgrad, 1) => [WgradDy, WgradA],
        (_, Product::Fprop, _) => [FpropX, FpropW],
        (_, Product::Dgrad, _) => [DgradDy, DgradW],
        (_, Product::Wgrad, _) => [WgradDy, WgradX],
    }
}
