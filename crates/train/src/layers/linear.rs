//! Dense linear layer Y = X·Wᵀ under a recipe. Legend: t tokens, n outputs, k inputs.
//!
//! The layer's plan names two representations of x: one for fprop and one for the backward pass. `forward` converts x to both, multiplies,
//! returns the representation for the backward pass as [`LinearSaved`], and drops x itself. `backward` converts the saved x for wgrad,
//! quantizes dy for dgrad and wgrad (in one read if the formats allow it), and runs both products.
//!
//! Under `mxfp4-hopper`, fprop multiplies E4M3 codes that are quantized from the plain x. The saved MXFP4 codes are also quantized from the
//! plain x, so fprop and wgrad read two different roundings of the same x.

use super::Layer;
use crate::convert::LayerName;
use crate::cx::Cx;
use crate::ledger::{Ledger, Saved};
use crate::lifts::Lifting;
use crate::param::{Param, Wanted, Writes};
use crate::spec::Part;
use nibble_core::ops::{AddBias, AddBiasBackward, Gemm};
use nibble_core::recipe::{self, LayerPlan, Product};
use nibble_core::{DType, Error, Kernels, Operand, Result, Tensor};
use std::sync::Arc;

/// A dense linear layer, with or without a bias for each output.
#[derive(Debug, Clone)]
pub struct Linear<B: Kernels> {
    /// The weight `[n, k]`.
    pub weight: Param<B>,
    /// The bias `[1, n]`, which is added to the rounded product; the sum is rounded again.
    pub bias: Option<Param<B>>,
    /// The layer's description for recipes.
    pub layer: recipe::Layer,
    /// The name whose hash seeds the random signs of the Hadamard transforms in this layer's GEMMs. If several projections share one input,
    /// this is the name of the layer that contains these projections; otherwise it is the layer's own name.
    pub linear: String,
    /// Type of the output.
    pub out: DType,
}

/// The input of a linear layer, in the format in which the recipe saves the input for the backward pass.
#[derive(Debug)]
pub struct LinearSaved<B: Kernels> {
    layer: String,
    /// The saved input `[t, k]`.
    pub x: Operand<B>,
}

impl<B: Kernels> LinearSaved<B> {
    /// The saved input of a layer of this name, for a backward pass whose forward pass ran elsewhere.
    pub fn new(layer: &str, x: Operand<B>) -> Self {
        Self { layer: layer.to_owned(), x }
    }
}

impl<B: Kernels> Saved for LinearSaved<B> {
    fn ledger(&self, ledger: &mut Ledger) {
        ledger.operand(&self.layer, "x", &self.x);
    }
}

impl<B: Kernels> Linear<B> {
    /// Creates the layer with random weights. Each rank stores only its own rows of the F32 master weight, but computes with all rows. A
    /// bias is initialized to zeros. `out` is the data type of the layer's output.
    ///
    /// # Errors
    /// Returns [`Error::Shape`] if `part` is not a linear layer, and passes on errors of the backend.
    pub fn new(cx: &Cx<'_, B>, part: &Part, out: DType) -> Result<Self> {
        let (weight, bias) = Param::with_bias(cx, part)?;
        let linear = weight.layer().to_owned();
        let layer = part.layer().ok_or_else(|| Error::shape("linear", "part", &part.id, "a linear layer"))?;
        Ok(Self { weight, bias, layer, linear, out })
    }

    /// Marks this linear layer as one of several projections of `layer` that read the same input.
    pub fn with_input_of(self, layer: &str) -> Self {
        Self { linear: layer.to_owned(), ..self }
    }

    /// The layer's own name, which no other layer has, so that no two layers share random bits. [`Linear::layer`] may have the name of an
    /// enclosing layer.
    pub(super) fn site(&self) -> &str {
        self.weight.layer()
    }

    fn name(&self) -> LayerName<'_> {
        LayerName { layer: self.site(), linear: &self.linear }
    }

    /// One of the layer's products, for the counts of its lifts.
    fn lifting(&self, product: Product) -> Lifting<'_, B> {
        Lifting { layer: self.site(), weight: &self.weight, number: 0, product }
    }

    /// The layer's precision plan at the current step.
    pub fn plan(&self, cx: &Cx<'_, B>) -> Arc<LayerPlan> {
        cx.plan(&self.layer)
    }

    /// Runs the forward pass up to, but not including, the layer's GEMM. Returns the operand that fprop reads, and the input that is saved
    /// for the backward pass.
    pub fn input(&self, cx: &Cx<'_, B>, x_tk: &Tensor<B>) -> Result<(Operand<B>, LinearSaved<B>)> {
        let plan = self.plan(cx);
        let x = Operand::Plain(x_tk.clone());
        let (fprop, saved) = cx.convert(self.name(), &x, &plan.linear()?.x, cx.groups_of(x_tk))?;
        Ok((fprop, LinearSaved::new(self.site(), saved)))
    }

    /// Fprop's operand alone, without a saved input.
    pub(super) fn fprop_input(&self, cx: &Cx<'_, B>, x_tk: &Tensor<B>) -> Result<Operand<B>> {
        let plan = self.plan(cx);
        let x = Operand::Plain(x_tk.clone());
        Ok(cx.convert(self.name(), &x, &plan.linear()?.x.first(), cx.groups_of(x_tk))?.0)
    }

    /// Computes the output Y from an input operand that other layers may share.
    pub fn product(&self, cx: &Cx<'_, B>, x: &Operand<B>) -> Result<Tensor<B>> {
        let w = self.weight.w()?;
        let groups = Some(&cx.shards.groups).filter(|groups| groups.capacity == x.rows());
        cx.measure_lifts(self.lifting(Product::Fprop), || self.plan(cx), [x, w], groups)?;
        let mut y = Gemm { a: x, b: w, out: self.out }.run(cx.b)?;
        if let Some(bias) = &self.bias {
            AddBias { x: &mut y, bias: bias.plain()? }.run(cx.b)?;
        }
        Ok(y)
    }

    /// Returns dX, and adds the gradients of weight and bias, but for one that is frozen. `x` is the input in the form that wgrad reads; other
    /// layers may share `x`.
    pub fn gradients(&mut self, cx: &Cx<'_, B>, x: &Operand<B>, dy_tn: &Tensor<B>) -> Result<Tensor<B>> {
        let (plan, groups) = (self.plan(cx), &cx.shards.groups);
        let dy = Operand::Plain(dy_tn.clone());
        let (rows, cols) = cx.convert(self.name(), &dy, &plan.linear()?.dy, Some(groups))?;
        let wt = self.weight.wt(cx)?;
        cx.measure_lifts(self.lifting(Product::Dgrad), || self.plan(cx), [&rows, &wt], Some(groups))?;
        let dx_tk = Gemm { a: &rows, b: &wt, out: cx.activations() }.run(cx.b)?;
        drop(wt);
        if self.weight.has_gradient() {
            cx.measure_lifts(self.lifting(Product::Wgrad), || self.plan(cx), [&cols, x], None)?;
            self.weight.accumulate_wgrad(cx, &cols, x, groups)?;
        }
        if let Some(bias) = self.bias.as_mut().filter(|bias| bias.has_gradient()) {
            bias.add_gradient(cx, Writes::Adds, |dbias, _| AddBiasBackward { dy: dy_tn, dbias }.run(cx.b))?;
        }
        Ok(dx_tk)
    }
}

impl<B: Kernels> Layer<B> for Linear<B> {
    type In = Tensor<B>;
    type Out = Tensor<B>;
    type Saved = LinearSaved<B>;

    fn wanted(&self, cx: &Cx<'_, B>) -> Vec<Wanted<'_, B>> {
        let bias = self.bias.iter().map(Param::as_it_is);
        [self.weight.for_products(&self.plan(cx).weights, &self.linear)].into_iter().chain(bias).collect()
    }

    fn params(&mut self) -> Vec<&mut Param<B>> {
        [&mut self.weight].into_iter().chain(&mut self.bias).collect()
    }

    fn forward(&self, cx: &Cx<'_, B>, x_tk: Tensor<B>) -> Result<(Tensor<B>, LinearSaved<B>)> {
        let (x, saved) = self.input(cx, &x_tk)?;
        Ok((self.product(cx, &x)?, saved))
    }

    fn again(&self, cx: &Cx<'_, B>, x_tk: Tensor<B>) -> Result<LinearSaved<B>> {
        Ok(self.input(cx, &x_tk)?.1)
    }

    fn backward(&mut self, cx: &Cx<'_, B>, saved: LinearSaved<B>, dy_tn: Tensor<B>) -> Result<Tensor<B>> {
        let (plan, groups) = (self.plan(cx), &cx.shards.groups);
        let x = match self.weight.has_gradient() {
            true => cx.convert(self.name(), &saved.x, &plan.linear()?.wgrad_x, Some(groups))?.0,
            // Nothing reads it.
            false => saved.x.clone(),
        };
        drop(saved);
        self.gradients(cx, &x, &dy_tn)
    }
}
