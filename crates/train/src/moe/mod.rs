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
mod routed;
mod router;

pub use crate::spec::MoeShape;
pub use exchange::{Combine, Exchange, ExchangeBytes, ExchangePlan, Outgoing, Sending, SlotCounts, Wire};
pub use experts::{Experts, ExpertsDgrad, ExpertsSaved, WgradOperands};
pub use routed::{RoutedExperts, RoutedSaved};
pub use router::{BatchLoad, Router, RouterSaved};

use crate::cx::Cx;
use crate::layers::Layer;
use crate::ledger::{Ledger, Saved};
use crate::param::{Param, Wanted};
use crate::recompute::Scope;
use crate::spec::MoeSpec;
use nibble_core::ops::Routing;
use nibble_core::{Kernels, Occupancy, Result, Tensor};

/// The router and the experts of one decoder layer.
#[derive(Debug, Clone)]
pub struct Moe<B: Kernels> {
    /// The layer's name, for example `model.layers.3.mlp`.
    pub name: String,
    /// The router.
    pub router: Router<B>,
    /// The experts.
    pub routed: RoutedExperts<B>,
}

/// The layer's saved activations.
#[derive(Debug)]
pub struct MoeSaved<B: Kernels> {
    router: RouterSaved<B>,
    routed: RoutedSaved<B>,
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
            placed: match &self.routed.plan.overflow {
                None => Placed::Here(self.routed.plan.map.occupancy.clone()),
                Some(overflow) => Placed::AmongRanks(overflow.clone()),
            },
            batch: None,
        }
    }

    /// Returns the layer's input for the backward pass; if the input was not saved, `again` recomputes the input.
    pub fn give_input(&mut self, again: impl FnOnce() -> Result<Tensor<B>>) -> Result<Tensor<B>> {
        self.routed.give_input(again)
    }

    /// Sets the loads for the load-balancing loss.
    pub(crate) fn balance_over(&mut self, batch: Option<BatchLoad<B>>) {
        self.router.batch = batch;
    }
}

impl<B: Kernels> Saved for MoeSaved<B> {
    fn ledger(&self, ledger: &mut Ledger) {
        self.routed.ledger_of_input(&self.router.layer, ledger);
        self.router.ledger(ledger);
        self.routed.ledger_of_rows(ledger);
    }
}

impl<B: Kernels> Moe<B> {
    /// Creates the layer with random weights.
    pub fn new(cx: &Cx<'_, B>, spec: &MoeSpec) -> Result<Self> {
        Ok(Self {
            name: spec.id.clone(),
            router: Router::new(cx, spec)?,
            routed: RoutedExperts::new(
                Experts::new(cx, &spec.experts)?,
                spec.shape.experts,
                spec.shape.top_k,
            ),
        })
    }

    /// Runs the forward pass, and runs other work while the ranks of the experts send rows back: [`RoutedExperts::forward_beside`].
    ///
    /// # Errors
    /// Passes on errors of the backend, of other ranks and of the other work.
    pub fn forward_beside<T>(
        &self,
        cx: &Cx<'_, B>,
        x_td: Tensor<B>,
        beside: impl FnOnce() -> Result<T>,
    ) -> Result<(Tensor<B>, MoeSaved<B>, T)> {
        let router = self.router.forward(cx, &x_td)?;
        let (y_td, routed, made) = self.routed.forward_beside(cx, x_td, &router.routing, beside)?;
        Ok((y_td, MoeSaved { router, routed }, made))
    }

    /// Runs the backward pass, and runs other work while rows are sent back: [`RoutedExperts::backward_beside`].
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
        let (Self { router, routed, .. }, MoeSaved { router: routing, routed: saved }) = (self, saved);
        let of_router =
            |x_td: &Tensor<B>, dweight: B::Buf<f32>| router.backward(cx, routing, x_td, &dweight).map(Some);
        routed.backward_beside(cx, saved, dy_td, of_router, beside)
    }
}

impl<B: Kernels> Layer<B> for Moe<B> {
    type In = Tensor<B>;
    type Out = Tensor<B>;
    type Saved = MoeSaved<B>;

    fn wanted(&self, cx: &Cx<'_, B>) -> Vec<Wanted<'_, B>> {
        let router = [self.router.wanted(cx)];
        router.into_iter().chain(self.routed.experts.wanted(cx)).collect()
    }

    fn params(&mut self) -> Vec<&mut Param<B>> {
        let mut params: Vec<_> = self.router.params().collect();
        params.extend(self.routed.experts.params());
        params
    }

    fn recompute(&mut self, scopes: &[Scope]) {
        let has = |scope| scopes.contains(&scope);
        self.routed.keep_input = !has(Scope::Norms);
        self.routed.experts.keep_a = !has(Scope::Swiglu);
        self.routed.experts.keep_h = !has(Scope::MlpUp);
        self.routed.remake_x = has(Scope::ExpertInput) && !has(Scope::Experts) && !has(Scope::Layers);
    }

    /// The forward pass, in which `x_td` is the normalized residual stream.
    fn forward(&self, cx: &Cx<'_, B>, x_td: Tensor<B>) -> Result<(Tensor<B>, MoeSaved<B>)> {
        let (y_td, saved, ()) = self.forward_beside(cx, x_td, || Ok(()))?;
        Ok((y_td, saved))
    }

    fn again(&self, cx: &Cx<'_, B>, x_td: Tensor<B>) -> Result<MoeSaved<B>> {
        let router = self.router.forward(cx, &x_td)?;
        let routed = self.routed.hidden(cx, &x_td, &router.routing)?.1;
        Ok(MoeSaved { router, routed })
    }

    fn backward(&mut self, cx: &Cx<'_, B>, saved: MoeSaved<B>, dy_td: Tensor<B>) -> Result<Tensor<B>> {
        Ok(self.backward_beside(cx, saved, dy_td, || Ok(()))?.0)
    }
}
