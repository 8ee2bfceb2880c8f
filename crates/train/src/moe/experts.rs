//! The experts of one rank under a recipe: two grouped products with SwiGLU between them, and their backward passes. Legend: r
//! expert-sorted rows, d model, f ffn, l experts of this rank.

use super::ExchangePlan;
use crate::convert::LayerName;
use crate::cx::Cx;
use crate::ledger::{Ledger, Saved};
use crate::lifts::Lifting;
use crate::param::{Gathering, Param, Wanted};
use crate::spec::{ParamSpec, Part};
use nibble_core::ops::{Emit, GroupedGemm, Swiglu, SwigluBackward};
use nibble_core::recipe::{ExpertPlan, Layer, LayerKind, LayerPlan, Precision, Product, WgradA};
use nibble_core::{Error, Kernels, Operand, Result, Tensor};
use std::sync::Arc;

/// The numbers of the two weights in the layer's plan.
const GATE_UP: usize = 0;
const DOWN: usize = 1;

/// The stacked weights of this rank's experts.
#[derive(Debug, Clone)]
pub struct Experts<B: Kernels> {
    /// The layer's name, for example `model.layers.3.mlp.experts`.
    pub name: String,
    /// The gate and up projections of the l experts on this rank, `[l · 2f, d]`; each expert's gate rows precede its up rows.
    pub gate_up: Param<B>,
    /// The down projections of the l experts on this rank, `[l · d, f]`.
    pub down: Param<B>,
    /// Whether to save the input of the down projection, if the recipe does not decide this. The input is saved only if the forward pass
    /// already has exactly the bits that wgrad reads; otherwise the input is recomputed from h.
    pub keep_a: bool,
    /// Whether to save h, the output of the gate and up projections, instead of recomputing h from the experts' input.
    pub keep_h: bool,
}

/// The experts' saved activations: their input and the first product's output, in the recipe's precisions.
#[derive(Debug)]
pub struct ExpertsSaved<B: Kernels> {
    layer: String,
    /// The experts' input `[r, d]`; `None` if the backward pass recomputes this input from the layer's input.
    pub x: Option<Operand<B>>,
    /// The first product's output `[r, 2f]`; `None` if the backward pass recomputes this output from the experts' input.
    pub h: Option<Operand<B>>,
    /// The second product's input `[r, f]`, in the recipe's saved form. If the recipe does not set this form, the input has the form that
    /// the second product's wgrad reads. `None` means that the input is recomputed from h.
    pub a: Option<Operand<B>>,
}

/// The results of dgrad: the gradients of rows and gate weights, and the operands that the rest of the backward pass needs.
#[derive(Debug)]
pub struct ExpertsDgrad<B: Kernels> {
    /// The gradient dx of the expert-sorted rows: `[r, d]`.
    pub dx: Tensor<B>,
    /// The gradient of each row's gate weight: `[r]`.
    pub dgate: B::Buf<f32>,
    /// The operands for [`Experts::wgrad`].
    pub wgrad: WgradOperands<B>,
}

/// The operands of the wgrad GEMMs of both weights.
#[derive(Debug)]
pub struct WgradOperands<B: Kernels> {
    dy: Operand<B>,
    a: Operand<B>,
    dh: Operand<B>,
    /// The experts' input in the saved form.
    x: Operand<B>,
}

impl<B: Kernels> ExpertsSaved<B> {
    /// The saved activations of a layer of this name, for a backward pass whose forward pass ran elsewhere.
    pub fn new(layer: &str, x: Option<Operand<B>>, h: Option<Operand<B>>, a: Option<Operand<B>>) -> Self {
        Self { layer: layer.to_owned(), x, h, a }
    }
}

impl<B: Kernels> Saved for ExpertsSaved<B> {
    fn ledger(&self, ledger: &mut Ledger) {
        if let Some(x) = &self.x {
            ledger.operand(&self.layer, "x", x);
        }
        if let Some(h) = &self.h {
            ledger.operand(&self.layer, "h", h);
        }
        if let Some(a) = &self.a {
            ledger.operand(&self.layer, "a", a);
        }
    }
}

impl<B: Kernels> Experts<B> {
    /// Creates the experts with random weights, which depend on each expert's global number.
    pub fn new(cx: &Cx<'_, B>, part: &Part) -> Result<Self> {
        let [gate_up, down] = part.weights() else {
            let got = format!("{} of {}", part.weights().len(), part.id);
            return Err(Error::shape("experts", "weights", got, "a stack for each of two products"));
        };
        let param = |spec: &ParamSpec| Param::of(cx, spec);
        let name = part.id.clone();
        Ok(Self { name, gate_up: param(gate_up)?, down: param(down)?, keep_a: false, keep_h: true })
    }

    /// See [`Layer::wanted`](crate::layers::Layer::wanted).
    pub fn wanted(&self, cx: &Cx<'_, B>) -> Vec<Wanted<'_, B>> {
        let plan = self.plan(cx);
        [&self.gate_up, &self.down].map(|weight| weight.for_products(&plan.weights, &weight.name)).into()
    }

    /// Creates the copies of the weights that this step's GEMMs read.
    ///
    /// # Errors
    /// Passes on errors of the backend and of other ranks.
    pub fn prepare(&mut self, cx: &Cx<'_, B>) -> Result<()> {
        Gathering::begin(cx, vec![self.wanted(cx)])?.finish_next(cx, self.params())
    }

    /// The experts' parameters, in canonical order.
    pub fn params(&mut self) -> Vec<&mut Param<B>> {
        vec![&mut self.gate_up, &mut self.down]
    }

    /// The layer's precision plan at the current step.
    pub fn plan(&self, cx: &Cx<'_, B>) -> Arc<LayerPlan> {
        cx.plan_keeping(&Layer::new(LayerKind::Expert, &self.name), self.keep_a)
    }

    /// One of the layer's products, for the counts of its lifts.
    fn lifting(&self, number: usize, product: Product) -> Lifting<'_, B> {
        let weight = if number == GATE_UP { &self.gate_up } else { &self.down };
        Lifting { layer: &self.name, weight, number, product }
    }

    /// The names of the first product's operands.
    pub(super) fn of_gate_up(&self) -> LayerName<'_> {
        LayerName { layer: &self.name, linear: &self.gate_up.name }
    }

    /// The names of the second product's operands.
    fn of_down(&self) -> LayerName<'_> {
        LayerName { layer: &self.name, linear: &self.down.name }
    }

    /// Runs the forward pass on token rows that were received from their ranks and sorted by expert.
    ///
    /// # Errors
    /// Passes on errors of the backend.
    pub fn forward(
        &self,
        cx: &Cx<'_, B>,
        x_rd: Operand<B>,
        plan: &ExchangePlan<B>,
    ) -> Result<(Tensor<B>, ExpertsSaved<B>)> {
        let layer = self.plan(cx);
        let (x, kept) = cx.convert(self.of_gate_up(), &x_rd, &layer.experts()?.x, Some(&plan.map.groups))?;
        drop(x_rd);
        let (a, saved) = self.hidden(cx, x, Some(kept), plan)?;
        Ok((self.output(cx, a, plan)?, saved))
    }

    /// The forward pass up to its last product, on expert-sorted rows in the form that fprop multiplies. Returns the last product's input
    /// and the saved activations. `kept` is the rows in the form that the backward pass reads.
    pub(super) fn hidden(
        &self,
        cx: &Cx<'_, B>,
        x: Operand<B>,
        kept: Option<Operand<B>>,
        plan: &ExchangePlan<B>,
    ) -> Result<(Operand<B>, ExpertsSaved<B>)> {
        let h_rf = self.first_product(cx, &x, plan)?;
        drop(x);
        let layer = self.plan(cx);
        let ExpertPlan { a, h, keeps_a, .. } = layer.experts()?;
        let save_h = h.as_ref().filter(|_| self.keep_h).map(Precision::codec).transpose()?;
        let (weight, groups) = (Some(&plan.gate_r), &plan.map.groups);
        let (a, second, narrow_h) = cx.compute(self.of_down(), a, Some(groups), |a| {
            let out = Swiglu { h: &h_rf, weight, groups: Some(groups), a, save_h }.run(cx.b)?;
            Ok((out.a, out.h))
        })?;
        let h = self.keep_h.then(|| narrow_h.map_or(Operand::Plain(h_rf), Operand::Block));
        let a_kept = keeps_a.then_some(second);
        Ok((a, ExpertsSaved::new(&self.name, kept, h, a_kept)))
    }

    fn first_product(&self, cx: &Cx<'_, B>, x_rd: &Operand<B>, plan: &ExchangePlan<B>) -> Result<Tensor<B>> {
        let groups = &plan.experts;
        let w = self.gate_up.w()?;
        cx.measure_lifts(self.lifting(GATE_UP, Product::Fprop), || self.plan(cx), [x_rd, w], Some(groups))?;
        GroupedGemm { x: x_rd, w, groups, out: cx.activations() }.run(cx.b)
    }

    /// Recomputes the first product's output in the form in which it is saved, from rows in the form that fprop multiplies.
    pub(super) fn h_again(
        &self,
        cx: &Cx<'_, B>,
        x_rd: Operand<B>,
        plan: &ExchangePlan<B>,
    ) -> Result<Operand<B>> {
        let h_rf = self.first_product(cx, &x_rd, plan)?;
        drop(x_rd);
        let layer = self.plan(cx);
        let Some(h) = &layer.experts()?.h else { return Ok(Operand::Plain(h_rf)) };
        // Only SwiGLU's kernel writes this form.
        let (a, save_h, weight) = (Emit::Plain(cx.activations()), Some(h.codec()?), Some(&plan.gate_r));
        let out = Swiglu { h: &h_rf, weight, groups: Some(&plan.map.groups), a, save_h }.run(cx.b)?;
        Ok(out.h.map_or(Operand::Plain(h_rf), Operand::Block))
    }

    /// Computes the last product of the forward pass.
    pub(super) fn output(
        &self,
        cx: &Cx<'_, B>,
        a_rf: Operand<B>,
        plan: &ExchangePlan<B>,
    ) -> Result<Tensor<B>> {
        let groups = &plan.experts;
        let w = self.down.w()?;
        cx.measure_lifts(self.lifting(DOWN, Product::Fprop), || self.plan(cx), [&a_rf, w], Some(groups))?;
        GroupedGemm { x: &a_rf, w, groups, out: cx.activations() }.run(cx.b)
    }

    /// The backward pass: returns the gradient dx of the expert-sorted rows and the gradient of each row's gate weight.
    ///
    /// # Errors
    /// Passes on errors of [`Experts::dgrad`] and [`Experts::wgrad`].
    pub fn backward(
        &mut self,
        cx: &Cx<'_, B>,
        saved: ExpertsSaved<B>,
        dy_rd: Operand<B>,
        plan: &ExchangePlan<B>,
    ) -> Result<(Tensor<B>, B::Buf<f32>)> {
        let ExpertsDgrad { dx, dgate, wgrad } = self.dgrad(cx, saved, dy_rd, plan)?;
        self.wgrad(cx, wgrad, plan)?;
        Ok((dx, dgate))
    }

    /// Runs the backward pass without the gradients of weights. Callers run `dgrad` before `wgrad`, because other ranks wait for dx.
    ///
    /// # Errors
    /// Returns [`Error::Defect`] if the input is missing, and passes on errors of the backend.
    pub fn dgrad(
        &self,
        cx: &Cx<'_, B>,
        mut saved: ExpertsSaved<B>,
        dy_rd: Operand<B>,
        plan: &ExchangePlan<B>,
    ) -> Result<ExpertsDgrad<B>> {
        let (groups, experts) = (&plan.map.groups, &plan.experts);
        let missing = Error::Defect { place: "experts", what: "their input is neither kept nor made again" };
        let x = saved.x.take().ok_or(missing)?;
        let layer = self.plan(cx);
        let layer = layer.experts()?;
        let (dy_rows, dy_cols) = cx.convert(self.of_down(), &dy_rd, &layer.dy, Some(groups))?;
        drop(dy_rd);
        let back = |dy: &Operand<B>, number: usize| {
            let lifting = self.lifting(number, Product::Dgrad);
            let w = lifting.weight.wt(cx)?;
            cx.measure_lifts(lifting, || self.plan(cx), [dy, &w], Some(experts))?;
            GroupedGemm { x: dy, w: &w, groups: experts, out: cx.activations() }.run(cx.b)
        };
        let da_rf = back(&dy_rows, DOWN)?;
        drop(dy_rows);
        let (dh_rows, dh, a, dgate) = self.swiglu_backward(cx, layer, &saved, da_rf, plan)?;
        drop(saved);
        let dx = back(&dh_rows, GATE_UP)?;
        Ok(ExpertsDgrad { dx, dgate, wgrad: WgradOperands { dy: dy_cols, a, dh, x } })
    }

    /// Adds the gradients of both weights, but for a weight that is frozen.
    ///
    /// # Errors
    /// Passes on errors of the backend, and errors of other ranks if a sum of gradients over ranks starts here.
    pub fn wgrad(
        &mut self,
        cx: &Cx<'_, B>,
        operands: WgradOperands<B>,
        plan: &ExchangePlan<B>,
    ) -> Result<()> {
        let WgradOperands { dy, a, dh, x } = operands;
        let groups = &plan.map.groups;
        let layer = self.plan(cx);
        if self.down.has_gradient() {
            cx.measure_lifts(self.lifting(DOWN, Product::Wgrad), || layer.clone(), [&dy, &a], None)?;
            self.down.accumulate_wgrad(cx, &dy, &a, groups)?;
        }
        drop((dy, a));
        if !self.gate_up.has_gradient() {
            return Ok(());
        }
        let (x, _) = cx.convert(self.of_gate_up(), &x, &layer.experts()?.wgrad_x, Some(groups))?;
        cx.measure_lifts(self.lifting(GATE_UP, Product::Wgrad), || layer.clone(), [&dh, &x], None)?;
        self.gate_up.accumulate_wgrad(cx, &dh, &x, groups)
    }

    /// Computes dh for dgrad and for wgrad, `a` for wgrad (recomputed unless it was saved), and the gradient of each row's gate weight. One
    /// kernel computes all of them, and directly writes the forms that the products read if the recipe allows this.
    #[allow(clippy::type_complexity)]
    fn swiglu_backward(
        &self,
        cx: &Cx<'_, B>,
        layer: &ExpertPlan,
        saved: &ExpertsSaved<B>,
        da_rf: Tensor<B>,
        plan: &ExchangePlan<B>,
    ) -> Result<(Operand<B>, Operand<B>, Operand<B>, B::Buf<f32>)> {
        let groups = &plan.map.groups;
        let missing = Error::Defect { place: "experts", what: "h is neither kept nor made again" };
        let h = saved.h.as_ref().ok_or(missing)?;
        let a = match &layer.wgrad_a {
            WgradA::Again { a, .. } => Some(cx.emit(a)?),
            WgradA::Kept(_) => None,
        };
        let (rows, cols, (a, dgate)) = cx.compute(self.of_gate_up(), &layer.dh, Some(groups), |dh| {
            let weight = Some(&plan.gate_r);
            let grads = SwigluBackward { h, da: &da_rf, weight, groups: Some(groups), dh, a }.run(cx.b)?;
            Ok((grads.dh, (grads.a, grads.dweight)))
        })?;
        drop(da_rf);
        let (a, _) = match (&layer.wgrad_a, &saved.a, &a) {
            (WgradA::Kept(to), Some(a), _) => cx.convert(self.of_down(), a, to, Some(groups))?,
            (WgradA::Again { a: to, counts }, _, Some(a)) => {
                let made = || cx.convert_computed(self.of_down(), a, to, Some(groups));
                if *counts { made()? } else { cx.again(made)? }
            }
            _ => return Err(Error::Defect { place: "experts", what: "a is neither kept nor made again" }),
        };
        Ok((rows, cols, a, dgate))
    }
}
