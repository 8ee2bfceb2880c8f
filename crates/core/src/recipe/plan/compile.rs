//! How a plan follows from a section.

use super::change::Form;
use super::conversion::{Cols, Conversion, Kept, LayerTensor, Reader, Rows, TensorSize};
use super::product::ProductPlan;
use super::route::{Pair, Route};
use crate::DType;
use crate::recipe::{Layer, LayerKind, Precision, Product, Section, Site};

/// Which passes of a layer are to run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Passes {
    /// A forward pass alone: nothing is kept.
    Forward,
    /// A forward pass, and a backward pass of what it keeps.
    Both {
        /// Where the section does not say how to keep the input of an expert's second product, keep it if the forward pass has the very bits that
        /// wgrad takes, instead of making it again from h.
        keep_a: bool,
    },
}

impl Passes {
    /// Training in which nothing is kept beyond what the section says.
    pub const TRAINING: Self = Self::Both { keep_a: false };
}

/// Makes a plan.
pub(super) struct Compiler<'a> {
    pub section: &'a Section,
    pub layer: &'a Layer,
    pub products: &'a [ProductPlan],
    pub activations: DType,
    pub passes: Passes,
}

impl Compiler<'_> {
    /// What a product with the `weight`-th weight reads.
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

    /// The input of a layer, which the first weight multiplies: for fprop, and, where a backward pass follows, as it is kept.
    pub fn x(&self, from: Form, size: TensorSize) -> Conversion {
        let fprop = self.reader(0, Product::Fprop);
        let (to, readers) = match self.passes {
            Passes::Forward => (Pair::One(self.route(Site::FpropX)), [fprop, Reader::Several]),
            Passes::Both { .. } => (self.pair([Site::FpropX, Site::SavedX]), [fprop, Reader::Backward]),
        };
        Conversion { tensor: LayerTensor::forward("x", size), from, to, readers }
    }

    /// What a forward pass keeps.
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
            // Gradients, and what is chosen.
            LayerKind::Head | LayerKind::Router => Vec::new(),
        }
    }

    /// What SwiGLU's kernel writes of its input for the backward pass; none where that is kept as it is.
    pub fn kept_h(&self) -> Option<Precision> {
        Some(self.section.at(Site::SavedH)).filter(|h| self.passes != Passes::Forward && h.format.is_block())
    }
}
