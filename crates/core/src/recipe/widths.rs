//! Transforms in a model whose widths they do not divide.

use super::{Layer, LayerKind, Product, Recipe, Section, Setting, Transform};
use std::collections::BTreeMap;
use std::sync::Arc;

/// The contraction lengths of a layer's fprop, dgrad and wgrad, in the order of [`Product::ALL`]. If a layer has several weights, each
/// length is the greatest common divisor of their lengths. The value 0 means that transforms of every length are allowed.
pub type Contracted = [usize; Product::ALL.len()];

/// The contraction lengths of the products of a model's layers, by the name of the layer.
pub type Widths = BTreeMap<String, Contracted>;

/// A product of a layer whose transform is shorter than the recipe requests, or left out, because the requested length does not divide the
/// contraction.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Shortened {
    /// The kind of the layer.
    pub kind: LayerKind,
    /// The layer's name.
    pub layer: String,
    /// The product.
    pub product: Product,
    /// The contraction length of the product, as in [`Contracted`].
    pub contracted: usize,
    /// The length of the transform that the recipe requests.
    pub from: usize,
    /// The length of the transform that the layer uses; `None` if the layer uses no transform.
    pub to: Option<usize>,
}

impl Recipe {
    /// The recipe for a model whose layers have these contraction lengths. If the length of a transform does not divide the contraction
    /// length of its product, [`Recipe::section`] returns the longest shorter transform whose length divides it ([`Transform::fitted`]). If
    /// there is no such transform, the product has no transform. The operands of such a product have no `correction` either, because a
    /// correction is unbiased only with a transform. The method [`Recipe::to_toml`] writes the recipe as it was read, whatever the
    /// contraction lengths are.
    #[must_use]
    pub fn with_widths(self, widths: Widths) -> Self {
        Self { widths: Some(Arc::new(widths)), ..self }
    }

    /// The recipe for a model in which the lengths of all transforms divide the contraction lengths.
    #[must_use]
    pub fn without_widths(self) -> Self {
        Self { widths: None, ..self }
    }

    /// Whether the recipe depends on the contraction lengths of layers, because fprop or dgrad of some layer has a transform at some point
    /// of a run.
    pub fn transforms_widths(&self) -> bool {
        let of_base = LayerKind::ALL.into_iter().flat_map(|kind| self.of(kind).settings(kind));
        let of_overrides = self.overrides.iter().flat_map(|o| o.set.iter().map(|(_, setting)| *setting));
        let by_width =
            |setting| matches!(setting, Setting::Transform(Product::Fprop | Product::Dgrad, Some(_)));
        of_base.chain(of_overrides).any(by_width)
    }

    /// The transforms of the recipe that are shortened or left out in these layers, at any point of a run. Each transform is listed once.
    pub fn shortened(&self, layers: &[Layer]) -> Vec<Shortened> {
        let mut all = Vec::new();
        for Layer { kind, name, .. } in layers {
            let Some(widths) = self.widths_of(name) else { continue };
            for progress in self.boundaries() {
                let written = self.written_section(*kind, name, progress);
                for product in kind.transformed() {
                    let contracted = widths[*product as usize];
                    let Some(whole) = written.transform(*product) else { continue };
                    let to = whole.fitted(contracted).map(|transform| transform.len);
                    let (product, layer, from) = (*product, name.clone(), whole.len);
                    let new = Shortened { kind: *kind, layer, product, contracted, from, to };
                    if to != Some(from) && !all.contains(&new) {
                        all.push(new);
                    }
                }
            }
        }
        all
    }

    fn widths_of(&self, layer: &str) -> Option<&Contracted> {
        self.widths.as_ref()?.get(layer)
    }

    /// A section as written, with the transforms that the layer's widths allow.
    pub(super) fn fitted(&self, layer: &str, mut section: Section) -> Section {
        if let Some(widths) = self.widths_of(layer) {
            Product::ALL.into_iter().for_each(|product| section.fit(product, widths[product as usize]));
        }
        section
    }
}

impl Transform {
    /// The transform for a product with this contraction length. If the length of this transform divides the contraction length, the result
    /// is this transform. Otherwise the result is the longest shorter transform whose length divides the contraction length, with signs
    /// that are sampled in the same way. Returns `None` if there is no such transform.
    #[must_use]
    pub fn fitted(self, contracted: usize) -> Option<Self> {
        let lengths = nibble_formats::hadamard::LENGTHS.into_iter().rev();
        let len = lengths.filter(|len| *len <= self.len).find(|len| contracted.is_multiple_of(*len))?;
        Some(Self { len, ..self })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::recipe::{Signs, Site};
    use nibble_formats::Correction;

    #[test]
    fn the_longest_transform_that_divides_a_width() {
        let of = |len, contracted| {
            Transform::new(len, Signs::Step).unwrap().fitted(contracted).map(|transform| transform.len)
        };
        let widths = [0, 384, 192, 96, 48, 40, 1].map(|contracted| of(128, contracted));
        assert_eq!(widths, [Some(128), Some(128), Some(64), Some(32), Some(16), None, None]);
        assert_eq!([64, 48].map(|contracted| of(32, contracted)), [Some(32), Some(16)]);
    }

    #[test]
    fn a_section_has_what_its_layer_allows() {
        let recipe = Recipe::builtin("nvfp4-quartet2").unwrap();
        let widths = [("wide", 256), ("narrow", 192), ("odd", 40)];
        let widths = widths.map(|(name, width)| (name.to_owned(), [width, width, 0])).into();
        let fitted = recipe.clone().with_widths(widths);
        let of = |name: &str| fitted.section(LayerKind::Linear, name, 0.0);
        let whole = recipe.section(LayerKind::Linear, "wide", 0.0);
        assert_eq!([of("wide"), of("unknown")], [whole; 2]);
        let lengths = |name| Product::ALL.map(|product| of(name).transform(product).map(|of| of.len));
        assert_eq!(lengths("narrow"), [None, Some(64), Some(128)]);
        assert_eq!(lengths("odd"), [None, None, Some(128)]);
        let correction = |name, site| of(name).at(site).scaling.correction;
        let sites = [Site::DgradDy, Site::DgradW, Site::WgradDy].map(|site| correction("odd", site));
        assert_eq!(sites, [Correction::None, Correction::None, Correction::MsEden]);
        assert_eq!(correction("narrow", Site::DgradDy), Correction::MsEden);
        let layers = ["wide", "narrow", "odd"].map(|name| Layer::new(LayerKind::Linear, name));
        let told = fitted.shortened(&layers).into_iter().map(|s| (s.layer, s.product, s.from, s.to));
        let expected = [("narrow", Some(64)), ("odd", None)];
        let expected = expected.map(|(name, to)| (name.to_owned(), Product::Dgrad, 128, to));
        assert_eq!(told.collect::<Vec<_>>(), expected);
        assert_eq!(fitted.to_toml(), recipe.to_toml());
    }
}
