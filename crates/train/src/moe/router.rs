//! The router: F32 sums, never quantized. t tokens, d model, e experts, k top-k.

use super::MoeShape;
use crate::cx::Cx;
use crate::ledger::{Ledger, Saved};
use crate::param::{Param, Wanted};
use crate::spec::Part;
use nibble_core::ops::{Gemm, Route, RouteBackward, Routing};
use nibble_core::recipe::LayerKind;
use nibble_core::{DType, Kernels, Operand, Result, Tensor};

/// Logits X·Wᵀ, softmax, top-k.
#[derive(Debug, Clone)]
pub struct Router<B: Kernels> {
    /// `[e, d]`.
    pub weight: Param<B>,
    /// Sizes and loss factors.
    pub shape: MoeShape,
}

/// What the router decided. Its input is made again by the caller.
#[derive(Debug)]
pub struct RouterSaved<B: Kernels> {
    pub(super) layer: String,
    /// Experts and weights.
    pub routing: Routing<B>,
    /// What the load-balancing loss is taken over, if not over each shard by itself: set before the backward pass.
    pub(super) batch: Option<BatchLoad<B>>,
}

/// Loads that all layers with experts have in common: the load-balancing loss takes their rows as one.
#[derive(Debug, Clone)]
pub struct BatchLoad<B: Kernels> {
    /// Tokens·slots of the micro-batch that chose each expert, over all layers and ranks: whole numbers.
    pub load: B::Buf<f64>,
    /// Rows of probabilities: layers · tokens of the micro-batch.
    pub rows: usize,
}

impl<B: Kernels> Saved for RouterSaved<B> {
    fn ledger(&self, ledger: &mut Ledger) {
        ledger.tensor(&self.layer, "probs", &self.routing.probs);
        ledger.words::<B, i32>(&self.layer, "routing", &self.routing.expert);
        ledger.words::<B, f32>(&self.layer, "routing", &self.routing.weight);
        ledger.words::<B, f32>(&self.layer, "routing", &self.routing.log_sum_exp);
        ledger.words::<B, i32>(&self.layer, "routing", &self.routing.load);
        ledger.words::<B, f32>(&self.layer, "routing", &self.routing.losses);
    }
}

impl<B: Kernels> Router<B> {
    /// Random weights, of which this rank keeps its rows; every rank computes with all of them.
    pub fn new(cx: &Cx<'_, B>, part: &Part, shape: MoeShape) -> Result<Self> {
        Ok(Self { weight: Param::only(cx, part)?, shape })
    }

    /// The name by which a recipe's overrides know it.
    fn layer(&self) -> &str {
        self.weight.layer()
    }

    /// See [`Layer::wanted`](crate::layers::Layer::wanted): F32 unless the recipe says BF16.
    pub fn wanted(&self, cx: &Cx<'_, B>) -> Wanted<'_, B> {
        self.weight.for_products(&cx.section(LayerKind::Router, self.layer()))
    }

    /// Routes the tokens of this rank.
    pub fn forward(&self, cx: &Cx<'_, B>, x_td: &Tensor<B>) -> Result<RouterSaved<B>> {
        let x = Operand::Plain(x_td.clone());
        let logits = Gemm { a: &x, b: self.weight.w()?, out: DType::F32 }.run(cx.b)?;
        let (top_k, normalize) = (self.shape.top_k, self.shape.normalize);
        let routing = Route { logits: &logits, top_k, normalize, shards: cx.shards.local }.run(cx.b)?;
        Ok(RouterSaved { layer: self.layer().to_owned(), routing, batch: None })
    }

    /// Adds the weight's gradient; returns the input's, in the type of the input.
    pub fn backward(
        &mut self,
        cx: &Cx<'_, B>,
        saved: RouterSaved<B>,
        x_td: &Tensor<B>,
        dweight_tk: &B::Buf<f32>,
    ) -> Result<Tensor<B>> {
        // A step's loss is the mean over its shards and micro-batches.
        let shards = (cx.mesh.all.world() * cx.shards.local * cx.micro_batches) as f32;
        // There is one balance loss a micro-batch where its rows are taken together.
        let (losses, batch) = match &saved.batch {
            Some(batch) => (cx.micro_batches as f32, Some(batch)),
            None => (shards, None),
        };
        let op = RouteBackward {
            routing: &saved.routing,
            top_k: self.shape.top_k,
            normalize: self.shape.normalize,
            shards: cx.shards.local,
            dweight: dweight_tk,
            aux_scale: self.shape.aux_coef / losses,
            batch_load: batch.map(|batch| &batch.load),
            batch_rows: batch.map_or(0, |batch| batch.rows),
            z_scale: self.shape.z_coef / shards,
        };
        let dlogits = Operand::Plain(op.run(cx.b)?);
        let dx = Gemm { a: &dlogits, b: self.weight.wt()?, out: x_td.dtype() }.run(cx.b)?;
        let x = Operand::Plain(x_td.clone());
        self.weight.accumulate_wgrad(cx, &dlogits, &x, &cx.shards.groups)?;
        Ok(dx)
    }
}
