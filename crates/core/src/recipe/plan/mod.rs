//! The plan of a layer: what the layer does under its section of the recipe. A plan is compiled once for each stretch of a run in which the
//! recipe does not change, and does not depend on a backend.
//!
//! | field | says |
//! |---|---|
//! | `conversions` | for each tensor, the [`Route`] from its existing representation to each representation that is read, and the readers |
//! | `products` | fprop, dgrad and wgrad of each weight: how both operands are stored, and which numbers are multiplied |
//! | `weights` | the copies of the weights that a step makes |
//! | `kept` | what a forward pass saves |
//!
//! A route is a cast, a quantization, a transcode, or a dequantization followed by a quantization. A fused kernel that computes a tensor
//! writes the form that a [`Computed`] describes. If the kernel leaves the conversion to a separate op, the plan gives the reason.
//!
//! Layers execute plans. In the crate `train`, `Cx::plan` compiles a plan (`layer_plans.rs`), `Cx::convert` runs a [`Conversion`], and
//! `Cx::compute` runs a fused kernel and converts its output. [`LayerPlan::steps`] lists the same conversions in the order in which the
//! layer runs them.
//!
//! All other code that depends on a layer's precisions reads the layer's plan. `nibble recipe` prints the plan, `nibble recipe --cost`
//! computes costs from the plan, and `--trace` compares the plan with the operations that a backend received. `model_plan.rs` of `train`
//! uses the plans to lay out the step's record and the histories of delayed scales.
//!
//! Two tests compare plans with actual runs: `train/tests/numerics/recipe_plan` with the operations that a backend receives, and
//! `train/tests/numerics/planned.rs` with the sites that a step counts and the tensors that it saves, under random recipes and models.

mod change;
mod compile;
mod conversion;
mod dense;
mod experts;
mod product;
mod route;
mod steps;

pub use change::{Change, Form, Pass};
pub use compile::Passes;
pub use conversion::{Cols, Conversion, Kept, LayerTensor, Reader, Rows, TensorSize};
pub use dense::{HeadPlan, LinearPlan, SharedInput};
pub use experts::{ExpertPlan, WgradA};
pub use product::ProductPlan;
pub use route::{Computed, Pair, Route};
pub use steps::Step;

use super::{Layer, LayerKind, Precision, Product, Section, Site};
use crate::{DType, Error, Result};
use compile::Compiler;
use steps::Steps;

/// The converted copies of a weight that products read. The copies are computed once per step.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct WeightPlan {
    /// The precision of the copy that fprop reads.
    pub w: Precision,
    /// The precision of the copy that dgrad reads.
    pub wt: Precision,
    /// The type of the copy that dgrad reads, if it is decoded from the copy that fprop reads. Such a copy is decoded in each micro-batch
    /// when it is needed, and is not stored in addition to the codes.
    pub decoded: Option<DType>,
    /// Whether the copy that dgrad reads is the transpose of the copy that fprop reads, both from one quantization.
    pub is_one: bool,
}

impl WeightPlan {
    fn of(section: &Section) -> Self {
        let (w, wt) = (section.at(Site::FpropW), section.at(Site::DgradW));
        Self { w, wt, decoded: section.decoded_for_dgrad(), is_one: section.has_one_weight() }
    }
}

/// The conversions of a layer, by its kind.
#[derive(Debug, Clone, PartialEq)]
pub enum Conversions {
    /// The conversions of a dense linear layer.
    Linear(Box<LinearPlan>),
    /// The conversions of an expert layer.
    Experts(Box<ExpertPlan>),
    /// The conversions of the output head.
    Head(Box<HeadPlan>),
    /// No conversions: a router converts only its weight.
    Router,
}

/// The plan of a layer: the formats of its weights and tensors, the conversions between them, and the matrix products.
#[derive(Debug, Clone, PartialEq)]
pub struct LayerPlan {
    /// The layer.
    pub layer: Layer,
    /// The copies of the layer's weights.
    pub weights: WeightPlan,
    /// The matrix products fprop, dgrad and wgrad of each weight, weight by weight.
    pub products: Vec<ProductPlan>,
    /// The conversions of the layer's tensors.
    pub conversions: Conversions,
    /// The tensors that a forward pass saves for the backward pass.
    pub kept: Vec<Kept>,
    /// The number of which the first row of each group is a multiple: 128 if any tensor has blocks, otherwise 1.
    pub row_alignment: usize,
    /// The type of activations outside of matrix products.
    pub activations: DType,
}

impl LayerPlan {
    /// The plan of `layer` if `section` is the section of the recipe that applies to it.
    pub fn new(section: &Section, layer: &Layer, activations: DType, passes: Passes) -> Self {
        let weights = if layer.kind == LayerKind::Expert { 2 } else { 1 };
        let of_weight = |weight| {
            Product::ALL.map(|product| ProductPlan::new(section, layer.kind, weight, product, activations))
        };
        let products: Vec<ProductPlan> = (0..weights).flat_map(of_weight).collect();
        let compiler = Compiler { section, layer, products: &products, activations, passes };
        let conversions = match layer.kind {
            LayerKind::Linear => Conversions::Linear(Box::new(compiler.linear())),
            LayerKind::Expert => Conversions::Experts(Box::new(compiler.experts())),
            LayerKind::Head => Conversions::Head(Box::new(compiler.head())),
            LayerKind::Router => Conversions::Router,
        };
        let kept = compiler.kept();
        Self {
            layer: layer.clone(),
            weights: WeightPlan::of(section),
            products,
            conversions,
            kept,
            row_alignment: if section.has_blocks() { 128 } else { 1 },
            activations,
        }
    }

    /// The product `product` of weight number `weight`; `None` if the layer has no such weight.
    pub fn product(&self, weight: usize, product: Product) -> Option<&ProductPlan> {
        self.products.iter().find(|plan| (plan.weight, plan.product) == (weight, product))
    }

    /// The plan of a dense linear layer.
    ///
    /// # Errors
    /// [`Error::Defect`] if the plan is for another kind of layer.
    pub fn linear(&self) -> Result<&LinearPlan> {
        match &self.conversions {
            Conversions::Linear(plan) => Ok(plan),
            _ => Err(Error::Defect { place: "linear", what: "its plan is that of another kind of layer" }),
        }
    }

    /// The plan of an expert layer.
    ///
    /// # Errors
    /// The same errors as [`LayerPlan::linear`].
    pub fn experts(&self) -> Result<&ExpertPlan> {
        match &self.conversions {
            Conversions::Experts(plan) => Ok(plan),
            _ => Err(Error::Defect { place: "experts", what: "their plan is that of another kind of layer" }),
        }
    }

    /// The plan of the output head.
    ///
    /// # Errors
    /// The same errors as [`LayerPlan::linear`].
    pub fn head(&self) -> Result<&HeadPlan> {
        match &self.conversions {
            Conversions::Head(plan) => Ok(plan),
            _ => Err(Error::Defect { place: "head", what: "its plan is that of another kind of layer" }),
        }
    }

    /// Every change of the representation of an activation or gradient, in the order in which the layer makes these changes on one rank,
    /// without recomputation of saved tensors. The list does not include copies of weights, because they are computed once per step.
    pub fn steps(&self) -> Vec<Step> {
        let mut steps = Steps::new(self.activations);
        match &self.conversions {
            Conversions::Linear(plan) => plan.steps(&mut steps, self.layer.gated),
            Conversions::Experts(plan) => plan.steps(&mut steps),
            Conversions::Head(plan) => {
                [&plan.x, &plan.dlogits].into_iter().for_each(|conversion| steps.convert(conversion));
                steps.in_one_kernel("head_loss+quantize");
            }
            Conversions::Router => {}
        }
        steps.made()
    }

    /// The changes of [`LayerPlan::steps`] in the form in which a backend observes changes.
    pub fn changes(&self) -> Vec<Change> {
        self.steps().into_iter().map(|step| step.change).collect()
    }

    /// The conversions that fused kernels of the layer cannot make and that separate operations make instead, each with the reason.
    pub fn unfused(&self) -> Vec<String> {
        match &self.conversions {
            Conversions::Experts(plan) => plan.unfused(),
            _ => Vec::new(),
        }
    }
}
