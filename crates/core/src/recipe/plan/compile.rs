//! Compiles a recipe's section to a layer's plan.

use super::change::Form;
use super::conversion::{Cols, Conversion, Kept, LayerTensor, Reader, Rows, TensorSize};
use super::product::ProductPlan;
use super::route::{Pair, Route};
use crate::DType;
use crate::recipe::{Layer, LayerKind, Precision, Product, Section, Site};

/// The passes that a layer runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Passes {
    /// The layer runs only a forward pass, and saves nothing.
    Forward,
    /// The layer runs a forward pass, and a backward pass from what the forward pass saves.
    Both {
        /// Whether to save the input of an expert's second product, if the section does not decide this. The input is saved, instead of
        /// recomputed from h, only if the forward pass has exactly the bits that wgrad takes.
        keep_a: bool,
    },
}

impl Passes {
    /// A forward and a backward pass for training, which save only the tensors that the section of the recipe names.
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
    /// The matrix product `product` of weight number `weight`, as the reader of a tensor.
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

    /// The conversion of a layer's input to the form that fprop of the first weight multiplies and, if there is a backward pass, to the
    /// form that is saved for it.
    pub fn x(&self, from: Form, size: TensorSize) -> Conversion {
        let fprop = self.reader(0, Product::Fprop);
        let (to, readers) = match self.passes {
            Passes::Forward => (Pair::One(self.route(Site::FpropX)), [fprop, Reader::Several]),
            Passes::Both { .. } => (self.pair([Site::FpropX, Site::SavedX]), [fprop, Reader::Backward]),
        };
        Conversion { tensor: LayerTensor::forward("x", size), from, to, readers }
    }

    /// The tensors that a forward pass saves for the backward pass.
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
            // The head saves gradients, and the router saves the choice of experts.
            LayerKind::Head | LayerKind::Router => Vec::new(),
        }
    }

    /// The precision in which the kernel of SwiGLU writes a copy of its input h for the backward pass; `None` if h is saved without a copy.
    pub fn kept_h(&self) -> Option<Precision> {
        Some(self.section.at(Site::SavedH)).filter(|h| self.passes != Passes::Forward && h.format.is_block())
    }
}
