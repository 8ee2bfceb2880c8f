//! What a layer does under its section of the recipe. A plan is compiled once for each stretch of a run in which the recipe does not
//! change, and is a plain value without a backend.
//!
//! | field | says |
//! |---|---|
//! | `conversions` | for each tensor, the [`Route`] from the representation that exists to each one that is read, and who reads it |
//! | `products` | fprop, dgrad and wgrad of each weight: how both operands are stored, and which numbers are multiplied |
//! | `weights` | the copies of the weights that a step makes |
//! | `kept` | what a forward pass saves |
//!
//! A route is a cast, a quantization, a transcode, or a dequantization followed by a quantization. A fused kernel that computes a tensor
//! writes it as a [`Computed`] says. Where the kernel leaves the conversion to a separate op, the plan says why.
//!
//! Layers execute plans. In the crate `train`, `Cx::plan` compiles (`layer_plans.rs`), `Cx::convert` carries a [`Conversion`] out, and
//! `Cx::compute` runs a fused kernel and converts what it wrote. [`LayerPlan::steps`] lists the same changes in the order in which the
//! layer makes them.
//!
//! Everything else that speaks of a layer's precisions reads its plan: `nibble recipe` prints it, `--cost` counts it, and `--trace`
//! compares it with what a backend was asked for. `model_plan.rs` of `train` lays out the step's record and the histories of delayed
//! scales by it.
//!
//! Two tests hold plans to what happens: `train/tests/numerics/recipe_plan` compares them with what a backend is asked for, and
//! `train/tests/numerics/planned.rs` with the sites that a step counts and with what it saves, under random recipes and models.

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

/// How products take a weight: the copies that are made of it once a step.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct WeightPlan {
    /// For fprop.
    pub w: Precision,
    /// For dgrad.
    pub wt: Precision,
    /// Whether that is decoded from fprop's, and to what: wherever a backward pass asks, once a micro-batch, and not kept beside the codes.
    pub decoded: Option<DType>,
    /// Whether that is the same in the other order, of one quantization.
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
    /// Of a dense linear layer.
    Linear(Box<LinearPlan>),
    /// Of an expert layer.
    Experts(Box<ExpertPlan>),
    /// Of the head.
    Head(Box<HeadPlan>),
    /// A router converts nothing but its weight.
    Router,
}

/// What a layer does.
#[derive(Debug, Clone, PartialEq)]
pub struct LayerPlan {
    /// Which layer it is.
    pub layer: Layer,
    /// The copies of its weights.
    pub weights: WeightPlan,
    /// Weight by weight fprop, dgrad and wgrad.
    pub products: Vec<ProductPlan>,
    /// What becomes of its tensors.
    pub conversions: Conversions,
    /// What a forward pass keeps of the tensors that a section speaks of.
    pub kept: Vec<Kept>,
    /// Multiples of which groups of ragged rows begin at: 128 where any tensor has blocks, else 1.
    pub row_alignment: usize,
    /// The type of everything between the products.
    pub activations: DType,
}

impl LayerPlan {
    /// The plan of a layer of this section.
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

    /// Of a dense linear layer.
    ///
    /// # Errors
    /// [`Error::Defect`] for the plan of another kind of layer.
    pub fn linear(&self) -> Result<&LinearPlan> {
        match &self.conversions {
            Conversions::Linear(plan) => Ok(plan),
            _ => Err(Error::Defect { place: "linear", what: "its plan is that of another kind of layer" }),
        }
    }

    /// Of an expert layer.
    ///
    /// # Errors
    /// As [`LayerPlan::linear`].
    pub fn experts(&self) -> Result<&ExpertPlan> {
        match &self.conversions {
            Conversions::Experts(plan) => Ok(plan),
            _ => Err(Error::Defect { place: "experts", what: "their plan is that of another kind of layer" }),
        }
    }

    /// Of the head.
    ///
    /// # Errors
    /// As [`LayerPlan::linear`].
    pub fn head(&self) -> Result<&HeadPlan> {
        match &self.conversions {
            Conversions::Head(plan) => Ok(plan),
            _ => Err(Error::Defect { place: "head", what: "its plan is that of another kind of layer" }),
        }
    }

    /// Every change of representation of activations and gradients, in the order in which the layer makes them on one rank, with nothing made again
    /// that is kept. Weights' copies are left out: they are made once a step.
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

    /// [`LayerPlan::steps`] as a backend sees them.
    pub fn changes(&self) -> Vec<Change> {
        self.steps().into_iter().map(|step| step.change).collect()
    }

    /// What its fused kernels leave to operations of their own, and why.
    pub fn unfused(&self) -> Vec<String> {
        match &self.conversions {
            Conversions::Experts(plan) => plan.unfused(),
            _ => Vec::new(),
        }
    }
}
