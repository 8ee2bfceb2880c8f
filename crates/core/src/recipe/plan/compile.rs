//! Compiles a section to a plan.

use super::change::Form;
use super::conversion::{Cols, Conversion, Kept, LayerTensor, Reader, Rows, TensorSize};
use super::product::ProductPlan;
use super::route::{Pair, Route};
use crate::DType;
use crate::recipe::{Layer, LayerKind, Precision, Product, Section, Site};

/// The passes of a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Passes {
    /// Only a forward pass: nothing is saved.
    Forward,
    /// A forward pass, and a backward pass from what it saves.
    Both {
        /// If the section does not say how to save the input of an expert's second product: save it if the forward pass has exactly the
        /// bits that wgrad takes, instead of recomputing it from h.
        keep_a: bool,
    },
}

impl Passes {
    /// Training that saves only what the section says.
    pub const TRAINING: Self = Self::Both { keep_a: false };
}

/// Compiles a plan.
pub(super) struct Compiler<'a> {
    pub section: &'a Section,
    pub layer: &'a Layer,
    pub products: &'a [ProductPlan],
    pub activations: DType,
    pub passes: Passes,
}

impl Compiler<'_> {
    /// The product with the `weight`-th weight, as a reader.
    pub fn reader(&self, weight: usize, product: Product) -> Reader {
        Reader::Product(self.products[Product::ALL.len() * weight + product as usize])
    }

    pub fn route(&self, site: Site) -> Route {
        self.section.route(self.layer.kind, site, self.activations)
    }

    pub fn pair(&self, sites: [Site; 2]) -> Pair {
        self.section.pair(self.layer.kind, sites, self.activations)
    }

    pub fn form(&self, site: Site) -> Form {
        (&self.section.at(site)).into()
    }

    /// The input of a layer, which the first weight multiplies: for fprop, and in the form to save if there is a backward pass.
    pub fn x(&self, from: Form, size: TensorSize) -> Conversion {
        let fprop = self.reader(0, Product::Fprop);
        let (to, readers) = match self.passes {
            Passes::Forward => (Pair::One(self.route(Site::FpropX)), [fprop, Reader::Several]),
            Passes::Both { .. } => (self.pair([Site::FpropX, Site::SavedX]), [fprop, Reader::Backward]),
        };
        Conversion { tensor: LayerTensor::forward("x", size), from, to, readers }
    }

    /// What a forward pass saves.
    pub fn kept(&self) -> Vec<Kept> {
        let Passes::Both { keep_a } = self.passes else { return Vec::new() };
        let is_expert = self.layer.kind == LayerKind::Expert;
        let rows = if is_expert { Rows::Routed } else { Rows::Tokens };
        let kept = |tensor, precision, cols| Kept { tensor, precision, size: TensorSize::new(rows, cols) };
        let at = |site| self.section.at(site);
        let h = (self.layer.gated || is_expert).then(|| kept("h", at(Site::SavedH), Cols::Outputs));
        let a = self.section.second_a(keep_a).filter(|_| is_expert);
        match self.layer.kind {
            LayerKind::Linear | LayerKind::Expert => {
                let x = kept("x", at(Site::SavedX), Cols::Inputs);
                [x].into_iter().chain(h).chain(a.map(|a| kept("a", a, Cols::Hidden))).collect()
            }
            // They save gradients and the choice of experts.
            LayerKind::Head | LayerKind::Router => Vec::new(),
        }
    }

    /// The form in which SwiGLU's kernel writes its input for the backward pass; none if it is saved as it is.
    pub fn kept_h(&self) -> Option<Precision> {
        Some(self.section.at(Site::SavedH)).filter(|h| self.passes != Passes::Forward && h.format.is_block())
    }
}
