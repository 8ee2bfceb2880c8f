//! The mixture-of-experts layer: router → dispatch → permute → experts → unpermute → combine.
//!
//! Work that does not need the transferred rows overlaps their transfer. The overlap determines the order of a layer's work:
//!
//! | transferred | computed meanwhile |
//! |---|---|
//! | counts, to the host | sorting slots by rank, packing records, and quantizing the rows that will be sent |
//! | y, back to its tokens | the shared expert, if there is one |
//! | gradients of gate weights, and dx | gradients of the experts' weights; then the router's and the shared expert's backward passes |
//!
//! Both dgrads therefore precede the first wgrad, also on one rank. The operands of the second product's wgrad live through one more
//! product, and h and the rows of dh are freed before both wgrads. [`Moe::forward_beside`] and [`Moe::backward_beside`] take the shared
//! expert as the work that overlaps the transfer. On one rank, where no rows are sent, the shared expert runs after the sum of the experts'
//! rows, when less memory is in use. The overlap changes no product and no sum, so the bits are those of one rank.
//! `train/tests/ranks/beside.rs` tests the order.
//!
//! SwiGLU's kernel multiplies its output by the gate weight, so combine is a plain sum. Two tensors stay in the type of activations even if
//! the recipe's fused kernels quantize: h before SwiGLU, and da before SwiGLU's backward pass.
//!
//! Rows of an expert are contiguous, in the order of (global token, slot), and begin at a multiple of 128 rows (of 1 if nothing is
//! quantized). `Groups` holds each expert's offset and length on the device. No valid result depends on the contents of padding rows.
//!
//! A replica of the experts has `train.expert_shards` / dp parts of a micro-batch. `AssignParts` maps the expert of each slot to (expert,
//! part), by which rows are sorted and padded. Gradients of weights contract the rows of these groups, and a tensor scale covers one such
//! group. `JoinGroups` groups the same rows by expert, for the products with experts' weights. With one part per rank both groupings are
//! the same, and neither op runs.
//!
//! Legend: t tokens of this rank, r expert-sorted rows (padding included), d model, f ffn, e experts, l experts of this rank, k top-k.

mod exchange;
mod experts;
mod router;

pub use crate::spec::MoeShape;
pub use exchange::{Combine, Exchange, ExchangeBytes, ExchangePlan, Outgoing, Sending, SlotCounts, Wire};
pub use experts::{Experts, ExpertsDgrad, ExpertsSaved, WgradOperands};
pub use router::{BatchLoad, Router, RouterSaved};

use crate::convert::LayerName;
use crate::cx::Cx;
use crate::layers::Layer;
use crate::ledger::{Ledger, Saved};
use crate::param::{Param, Wanted};
use crate::recompute::Scope;
use crate::spec::MoeSpec;
use nibble_core::ops::Routing;
use nibble_core::recipe::{Conversion, ExpertPlan, Precision};
use nibble_core::{Error, Kernels, Occupancy, Operand, Result, Tensor};

/// The router and the experts of one decoder layer.
#[derive(Debug, Clone)]
pub struct Moe<B: Kernels> {
    /// The layer's name, for example `model.layers.3.mlp`.
    pub name: String,
    /// The router.
    pub router: Router<B>,
    /// This rank's experts.
    pub experts: Experts<B>,
    /// Whether to save the layer's input; otherwise [`MoeSaved::give_input`] recomputes the input.
    pub keep_input: bool,
    /// Whether to recompute the experts' input from the layer's input in the backward pass, instead of saving one row for each expert of a
    /// token. On several ranks, this recomputation dispatches the rows again.
    pub remake_x: bool,
}

/// The layer's saved activations.
#[derive(Debug)]
pub struct MoeSaved<B: Kernels> {
    /// The layer's input, unless it is recomputed.
    x_td: Option<Tensor<B>>,
    router: RouterSaved<B>,
    plan: ExchangePlan<B>,
    experts: ExpertsSaved<B>,
}

/// The values that an expert layer contributes to the step's record. These values are saved even if the layer's activations are recomputed.
#[derive(Debug, Clone)]
pub struct Routed<B: Kernels> {
    layer: String,
    /// The number of (token, slot) pairs per expert, `[shards · e]`, for each shard of this rank, or for each sequence with `balance =
    /// "sequence"`.
    pub load: B::Buf<i32>,
    /// The load-balancing loss and the z-loss of each shard, or of each sequence with `balance = "sequence"`.
    pub losses: B::Buf<f32>,
    /// Whether the rows fit on this rank.
    pub placed: Placed<B>,
    /// The expert loads over which the layer's load-balancing loss is computed, if this is not done for each shard separately. The loads
    /// come from the forward pass; the recomputation in the backward pass does not change these loads.
    pub batch: Option<BatchLoad<B>>,
}

/// Whether the rows of a layer fit the capacity of the buffers.
#[derive(Debug, Clone)]
pub enum Placed<B: Kernels> {
    /// On one rank, the number of rows that were found, and the capacity.
    Here(Occupancy<B>),
    /// On several ranks, the value of [`ExchangePlan::overflow`].
    AmongRanks(B::Buf<f32>),
}

impl<B: Kernels> Saved for Routed<B> {
    fn ledger(&self, ledger: &mut Ledger) {
        ledger.words::<B, i32>(&self.layer, "routing", &self.load);
        ledger.words::<B, f32>(&self.layer, "routing", &self.losses);
        match &self.placed {
            Placed::Here(occupancy) => ledger.words::<B, i32>(&self.layer, "routing", &occupancy.found),
            Placed::AmongRanks(overflow) => ledger.words::<B, f32>(&self.layer, "routing", overflow),
        }
        if let Some(batch) = &self.batch {
            ledger.words::<B, f64>(&self.layer, "routing", &batch.load);
        }
    }
}

impl<B: Kernels> MoeSaved<B> {
    /// The router's choice.
    pub fn routing(&self) -> &Routing<B> {
        &self.router.routing
    }

    /// The expert loads, the router losses, and whether the rows fit the capacity of the buffers.
    pub fn routed(&self) -> Routed<B> {
        let routing = &self.router.routing;
        Routed {
            layer: self.router.layer.clone(),
            load: routing.load.clone(),
            losses: routing.losses.clone(),
            placed: match &self.plan.overflow {
                None => Placed::Here(self.plan.map.occupancy.clone()),
                Some(overflow) => Placed::AmongRanks(overflow.clone()),
            },
            batch: None,
        }
    }

    /// Returns the layer's input for the backward pass; if the input was not saved, `again` recomputes the input.
    pub fn give_input(&mut self, again: impl FnOnce() -> Result<Tensor<B>>) -> Result<Tensor<B>> {
        let x_td = match self.x_td.take() {
            Some(x_td) => x_td,
            None => again()?,
        };
        Ok(self.x_td.insert(x_td).clone())
    }

    /// Sets the loads for the load-balancing loss.
    pub(crate) fn balance_over(&mut self, batch: Option<BatchLoad<B>>) {
        self.router.batch = batch;
    }
}

impl<B: Kernels> Saved for MoeSaved<B> {
    fn ledger(&self, ledger: &mut Ledger) {
        if let Some(x_td) = &self.x_td {
            ledger.tensor(&self.router.layer, "x", x_td);
        }
        self.router.ledger(ledger);
        self.plan.ledger(ledger);
        self.experts.ledger(ledger);
    }
}

impl<B: Kernels> Moe<B> {
    /// Creates the layer with random weights.
    pub fn new(cx: &Cx<'_, B>, spec: &MoeSpec) -> Result<Self> {
        Ok(Self {
            name: spec.id.clone(),
            router: Router::new(cx, spec)?,
            experts: Experts::new(cx, &spec.experts)?,
            keep_input: true,
            remake_x: false,
        })
    }

    /// The forward pass up to its last product. Returns the input of that product, and the saved activations.
    fn hidden(&self, cx: &Cx<'_, B>, x_td: &Tensor<B>) -> Result<(Operand<B>, MoeSaved<B>)> {
        let plan = self.experts.plan(cx);
        let layer = plan.experts()?;
        let ExpertPlan { x_sent, x, .. } = layer;
        let row_alignment = plan.row_alignment;
        let router = self.router.forward(cx, x_td)?;
        let exchange = self.exchange(cx);
        let rows =
            |sending: Option<&Sending<B>>| exchange.outgoing(sending, self.name().of("x"), x_td, x_sent);
        let (plan, rows) = exchange.plan_beside(&router.routing, row_alignment, rows)?;
        let (x_rd, kept) = if self.remakes_x(layer) {
            (self.fprop_input(cx, &x.first(), rows, &plan)?, None)
        } else {
            let x_rd = exchange.deliver(&plan, rows)?;
            let (x_rd, kept) = cx.convert(self.experts.of_gate_up(), &x_rd, x, Some(&plan.map.groups))?;
            (x_rd, Some(kept))
        };
        let (a_rf, experts) = self.experts.hidden(cx, x_rd, kept, &plan)?;
        let kept = self.keep_input.then(|| x_td.clone());
        Ok((a_rf, MoeSaved { x_td: kept, router, plan, experts }))
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
                let top_k = self.router.shape.top_k;
                let (x_td, _) = cx.counted_for(top_k, || cx.convert(name, &rows, fprop, None))?;
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
        Exchange::new(cx, self.router.shape.experts, self.router.shape.top_k)
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

    /// Runs the forward pass, and runs other work while the ranks of the experts send rows back. On one rank no rows are sent, so the other
    /// work runs after the experts' rows are summed, when less memory is in use.
    ///
    /// # Errors
    /// Passes on errors of the backend, of other ranks and of the other work.
    pub fn forward_beside<T>(
        &self,
        cx: &Cx<'_, B>,
        x_td: Tensor<B>,
        beside: impl FnOnce() -> Result<T>,
    ) -> Result<(Tensor<B>, MoeSaved<B>, T)> {
        let (a_rf, saved) = self.hidden(cx, &x_td)?;
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

    /// Runs the backward pass, and runs other work while rows are sent back, like [`Moe::forward_beside`]. The gradients of weights are
    /// also computed during this transfer.
    ///
    /// # Errors
    /// Passes on errors of the backend, of other ranks and of the other work.
    pub fn backward_beside<T>(
        &mut self,
        cx: &Cx<'_, B>,
        saved: MoeSaved<B>,
        dy_td: Tensor<B>,
        beside: impl FnOnce() -> Result<T>,
    ) -> Result<(Tensor<B>, T)> {
        let MoeSaved { x_td, router, plan, mut experts } = saved;
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
        let dx_router = self.router.backward(cx, router, &x_td, &dgate.wait(cx.b)?)?;
        drop(x_td);
        let travels = plan.wire.is_some();
        let sum = move || exchange.finish_combine(&plan, returning, Some(&dx_router));
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

impl<B: Kernels> Layer<B> for Moe<B> {
    type In = Tensor<B>;
    type Out = Tensor<B>;
    type Saved = MoeSaved<B>;

    fn wanted(&self, cx: &Cx<'_, B>) -> Vec<Wanted<'_, B>> {
        let router = [self.router.wanted(cx)];
        router.into_iter().chain(self.experts.wanted(cx)).collect()
    }

    fn params(&mut self) -> Vec<&mut Param<B>> {
        let mut params: Vec<_> = self.router.params().collect();
        params.extend(self.experts.params());
        params
    }

    fn recompute(&mut self, scopes: &[Scope]) {
        let has = |scope| scopes.contains(&scope);
        self.keep_input = !has(Scope::Norms);
        self.experts.keep_a = !has(Scope::Swiglu);
        self.experts.keep_h = !has(Scope::MlpUp);
        self.remake_x = has(Scope::ExpertInput) && !has(Scope::Experts) && !has(Scope::Layers);
    }

    /// The forward pass, in which `x_td` is the normalized residual stream.
    fn forward(&self, cx: &Cx<'_, B>, x_td: Tensor<B>) -> Result<(Tensor<B>, MoeSaved<B>)> {
        let (y_td, saved, ()) = self.forward_beside(cx, x_td, || Ok(()))?;
        Ok((y_td, saved))
    }

    fn again(&self, cx: &Cx<'_, B>, x_td: Tensor<B>) -> Result<MoeSaved<B>> {
        Ok(self.hidden(cx, &x_td)?.1)
    }

    fn backward(&mut self, cx: &Cx<'_, B>, saved: MoeSaved<B>, dy_td: Tensor<B>) -> Result<Tensor<B>> {
        Ok(self.backward_beside(cx, saved, dy_td, || Ok(()))?.0)
    }
}
