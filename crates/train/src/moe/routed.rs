//! The experts of a layer with the dispatch of their rows and the sum of their outputs, for tokens whose experts are already chosen.
//!
//! [`super::Moe`] adds the router, which chooses them. The order of work is described there.

use super::{Exchange, ExchangePlan, Experts, ExpertsDgrad, ExpertsSaved, Outgoing, Sending};
use crate::convert::LayerName;
use crate::cx::Cx;
use crate::ledger::{Ledger, Saved};
use nibble_core::ops::Routing;
use nibble_core::recipe::{Conversion, ExpertPlan, Precision};
use nibble_core::{Error, Kernels, Operand, Result, Tensor};

/// The experts of one layer, without a router.
#[derive(Debug, Clone)]
pub struct RoutedExperts<B: Kernels> {
    /// This rank's experts.
    pub experts: Experts<B>,
    /// Number of experts on all ranks together.
    pub num_experts: usize,
    /// Number of experts of a token.
    pub top_k: usize,
    /// Whether to save the layer's input; otherwise [`RoutedSaved::give_input`] recomputes the input.
    pub keep_input: bool,
    /// Whether to recompute the experts' input from the layer's input in the backward pass, instead of saving one row for each expert of a
    /// token. On several ranks, this recomputation dispatches the rows again.
    pub remake_x: bool,
}

/// The saved activations of [`RoutedExperts`].
#[derive(Debug)]
pub struct RoutedSaved<B: Kernels> {
    /// The layer's input, unless it is recomputed.
    pub x_td: Option<Tensor<B>>,
    /// The order of the rows. It follows from the routing.
    pub plan: ExchangePlan<B>,
    /// The experts' activations.
    pub experts: ExpertsSaved<B>,
}

impl<B: Kernels> RoutedSaved<B> {
    /// Returns the layer's input for the backward pass; if the input was not saved, `again` recomputes the input.
    pub fn give_input(&mut self, again: impl FnOnce() -> Result<Tensor<B>>) -> Result<Tensor<B>> {
        let x_td = match self.x_td.take() {
            Some(x_td) => x_td,
            None => again()?,
        };
        Ok(self.x_td.insert(x_td).clone())
    }

    /// Lists the layer's input, if it is saved, under the name `layer`.
    pub(super) fn ledger_of_input(&self, layer: &str, ledger: &mut Ledger) {
        if let Some(x_td) = &self.x_td {
            ledger.tensor(layer, "x", x_td);
        }
    }

    /// Lists the other saved buffers.
    pub(super) fn ledger_of_rows(&self, ledger: &mut Ledger) {
        self.plan.ledger(ledger);
        self.experts.ledger(ledger);
    }
}

impl<B: Kernels> RoutedExperts<B> {
    /// Experts of which each token gets `top_k` out of `num_experts`. All activations are saved.
    pub fn new(experts: Experts<B>, num_experts: usize, top_k: usize) -> Self {
        Self { experts, num_experts, top_k, keep_input: true, remake_x: false }
    }

    /// The forward pass up to its last product. Returns the input of that product, and the saved activations.
    pub(super) fn hidden(
        &self,
        cx: &Cx<'_, B>,
        x_td: &Tensor<B>,
        routing: &Routing<B>,
    ) -> Result<(Operand<B>, RoutedSaved<B>)> {
        let plan = self.experts.plan(cx);
        let layer = plan.experts()?;
        let ExpertPlan { x_sent, x, .. } = layer;
        let row_alignment = plan.row_alignment;
        let exchange = self.exchange(cx);
        let rows =
            |sending: Option<&Sending<B>>| exchange.outgoing(sending, self.name().of("x"), x_td, x_sent);
        let (plan, rows) = exchange.plan_beside(routing, row_alignment, rows)?;
        let (x_rd, kept) = if self.remakes_x(layer) {
            (self.fprop_input(cx, &x.first(), rows, &plan)?, None)
        } else {
            let x_rd = exchange.deliver(&plan, rows)?;
            let (x_rd, kept) = cx.convert(self.experts.of_gate_up(), &x_rd, x, Some(&plan.map.groups))?;
            (x_rd, Some(kept))
        };
        let (a_rf, experts) = self.experts.hidden(cx, x_rd, kept, &plan)?;
        let kept = self.keep_input.then(|| x_td.clone());
        Ok((a_rf, RoutedSaved { x_td: kept, plan, experts }))
    }

    /// Converts the input's rows from the form in which they are sent to the form that fprop multiplies. No tensor is computed for the
    /// backward pass.
    fn fprop_input(
        &self,
        cx: &Cx<'_, B>,
        fprop: &Conversion,
        rows: Outgoing<B>,
        plan: &ExchangePlan<B>,
    ) -> Result<Operand<B>> {
        let name = self.experts.of_gate_up();
        match rows {
            // Each token is converted once, then copied to its experts. With tensor scales, which are per expert, a token cannot be
            // converted once for all experts.
            Outgoing::Here(rows) if !fprop.to.first().has_tensor_scale() => {
                let (x_td, _) = cx.counted_for(self.top_k, || cx.convert(name, &rows, fprop, None))?;
                self.exchange(cx).dispatch(plan, &x_td)
            }
            // Records keep the format in which the recipe sends them.
            rows => {
                let x_rd = self.exchange(cx).deliver(plan, rows)?;
                Ok(cx.convert(name, &x_rd, fprop, Some(&plan.map.groups))?.0)
            }
        }
    }

    /// Whether the backward pass dispatches the experts' input again. It does so for h too, unless the saved input determines the form that
    /// the first product multiplies.
    fn remakes_x(&self, layer: &ExpertPlan) -> bool {
        self.remake_x || (!self.experts.keep_h && layer.x.first_of_second().is_none())
    }

    /// Recomputes what the experts' backward pass reads and the forward pass did not save: the experts' input, and the first product's
    /// output.
    fn complete(
        &self,
        cx: &Cx<'_, B>,
        layer: &ExpertPlan,
        x_td: &Tensor<B>,
        plan: &ExchangePlan<B>,
        saved: &mut ExpertsSaved<B>,
    ) -> Result<()> {
        let (name, groups) = (self.experts.of_gate_up(), Some(&plan.map.groups));
        let fprop = match (&saved.x, &saved.h) {
            (Some(_), Some(_)) => return Ok(()),
            (Some(x), None) => {
                let missing = Error::Defect { place: "moe", what: "h is neither kept nor made again" };
                let to = layer.x.first_of_second().ok_or(missing)?;
                Some(cx.again(|| cx.convert(name, x, &to, groups))?.0)
            }
            (None, h) => {
                let x_rd = self.arrived_again(cx, layer, x_td, plan)?;
                let to_first = || cx.again(|| cx.convert(name, &x_rd, &layer.x.first(), groups));
                let fprop = h.is_none().then(to_first).transpose()?.map(|(fprop, _)| fprop);
                saved.x = Some(self.kept_input(cx, layer, &x_rd, plan)?);
                fprop
            }
        };
        if let Some(x_rd) = fprop {
            saved.h = Some(cx.again(|| self.experts.h_again(cx, x_rd, plan))?);
        }
        Ok(())
    }

    /// The experts' rows as they arrive, dispatched again.
    fn arrived_again(
        &self,
        cx: &Cx<'_, B>,
        layer: &ExpertPlan,
        x_td: &Tensor<B>,
        plan: &ExchangePlan<B>,
    ) -> Result<Operand<B>> {
        let exchange = self.exchange(cx);
        let arrived = || {
            let rows = exchange.outgoing(plan.sending(), self.name().of("x"), x_td, &layer.x_sent)?;
            exchange.deliver(plan, rows)
        };
        cx.again(arrived)
    }

    /// The rows that the backward pass reads, from the rows that arrived again.
    fn kept_input(
        &self,
        cx: &Cx<'_, B>,
        layer: &ExpertPlan,
        x_rd: &Operand<B>,
        plan: &ExchangePlan<B>,
    ) -> Result<Operand<B>> {
        let to = layer.x.second();
        let kept = || cx.convert(self.experts.of_gate_up(), x_rd, &to, Some(&plan.map.groups));
        // A plain tensor that is quantized once for both passes was counted in the forward pass. A tensor that is quantized only for this
        // pass was not counted.
        let counted = !layer.x.to.quantizes_twice();
        Ok(if counted { cx.again(kept)? } else { kept()? }.0)
    }

    fn exchange<'a, 'c>(&self, cx: &'a Cx<'c, B>) -> Exchange<'a, 'c, B> {
        Exchange::new(cx, self.num_experts, self.top_k)
    }

    /// Rows in the form in which the experts send them back. Each slot's row is converted separately, on every mesh.
    fn returning(
        &self,
        cx: &Cx<'_, B>,
        tensor: &'static str,
        to: &Precision,
        rows_rd: Tensor<B>,
        plan: &ExchangePlan<B>,
    ) -> Result<Operand<B>> {
        cx.form(self.name().of(tensor), &rows_rd, to, Some(&plan.map.groups))
    }

    /// The names of the rows in dispatch and combine.
    fn name(&self) -> LayerName<'_> {
        LayerName::new(&self.experts.name)
    }

    /// The forward pass, for tokens whose experts and gate weights are given. Other work runs while the ranks of the experts send rows back.
    /// On one rank no rows are sent, so the other work runs after the experts' rows are summed, when less memory is in use.
    ///
    /// # Errors
    /// Passes on errors of the backend, of other ranks and of the other work.
    pub fn forward_beside<T>(
        &self,
        cx: &Cx<'_, B>,
        x_td: Tensor<B>,
        routing: &Routing<B>,
        beside: impl FnOnce() -> Result<T>,
    ) -> Result<(Tensor<B>, RoutedSaved<B>, T)> {
        let (a_rf, saved) = self.hidden(cx, &x_td, routing)?;
        drop(x_td);
        let y_rd = self.experts.output(cx, a_rf, &saved.plan)?;
        let layer = self.experts.plan(cx);
        let y_rd = self.returning(cx, "y", &layer.experts()?.y_sent, y_rd, &saved.plan)?;
        let exchange = self.exchange(cx);
        let returning = exchange.begin_combine(&saved.plan, y_rd)?;
        let sum = || exchange.finish_combine(&saved.plan, returning, None);
        let (y_td, made) = in_turn(saved.plan.wire.is_some(), sum, beside)?;
        Ok((y_td, saved, made))
    }

    /// The backward pass. Other work runs while rows are sent back, like in [`RoutedExperts::forward_beside`]. The gradients of weights are
    /// also computed during this transfer. `router` receives the layer's input and the gradient of each slot's gate weight, and returns what
    /// it adds to the gradient of the input.
    ///
    /// # Errors
    /// Passes on errors of the backend, of other ranks, of `router` and of the other work.
    pub fn backward_beside<T>(
        &mut self,
        cx: &Cx<'_, B>,
        saved: RoutedSaved<B>,
        dy_td: Tensor<B>,
        router: impl FnOnce(&Tensor<B>, B::Buf<f32>) -> Result<Option<Tensor<B>>>,
        beside: impl FnOnce() -> Result<T>,
    ) -> Result<(Tensor<B>, T)> {
        let RoutedSaved { x_td, plan, mut experts } = saved;
        let missing = Error::Defect { place: "moe", what: "its input is neither kept nor made again" };
        let x_td = x_td.ok_or(missing)?;
        let layer = self.experts.plan(cx);
        let layer = layer.experts()?;
        self.complete(cx, layer, &x_td, &plan, &mut experts)?;
        let exchange = self.exchange(cx).backward();
        let dy_td = exchange.outgoing(plan.sending(), self.name().of("dy"), &dy_td, &layer.dy_sent)?;
        let dy_rd = exchange.deliver(&plan, dy_td)?;
        let ExpertsDgrad { dx, dgate, wgrad } = self.experts.dgrad(cx, experts, dy_rd, &plan)?;
        let dgate = exchange.begin_return_scalars(&plan, dgate)?;
        let dx_rd = self.returning(cx, "dx", &layer.dx_sent, dx, &plan)?;
        let returning = exchange.begin_combine(&plan, dx_rd)?;
        self.experts.wgrad(cx, wgrad, &plan)?;
        let dx_router = router(&x_td, dgate.wait(cx.b)?)?;
        drop(x_td);
        let travels = plan.wire.is_some();
        let sum = move || exchange.finish_combine(&plan, returning, dx_router.as_ref());
        in_turn(travels, sum, beside)
    }
}

/// Sums the rows that are sent back, and runs other work. If rows are being transferred, the other work runs first.
fn in_turn<S, T>(
    travels: bool,
    sum: impl FnOnce() -> Result<S>,
    beside: impl FnOnce() -> Result<T>,
) -> Result<(S, T)> {
    if travels {
        let made = beside()?;
        return Ok((sum()?, made));
    }
    Ok((sum()?, beside()?))
}
