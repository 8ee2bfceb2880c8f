//! The router: F32 sums, never quantized. t tokens, d model, e experts, k top-k.

use super::MoeShape;
use crate::config::Balance;
use crate::cx::Cx;
use crate::ledger::{Ledger, Saved};
use crate::param::{Param, Wanted};
use crate::spec::MoeSpec;
use nibble_core::ops::{Gemm, Route, RouteBackward, RouteRule, Routing, Scores};
use nibble_core::recipe::{Layer, LayerKind};
use nibble_core::{DType, Kernels, Operand, Result, Tensor};

/// Logits X·Wᵀ, scores, top-k.
#[derive(Debug, Clone)]
pub struct Router<B: Kernels> {
    /// `[e, d]`.
    pub weight: Param<B>,
    /// Bias of each expert's score in the top-k choice: `[e]`. The load of the experts changes the bias, not a gradient.
    pub bias: Option<Param<B>>,
    /// Sizes and loss factors.
    pub shape: MoeShape,
    /// How experts are chosen, and their gate weights computed.
    pub rule: RouteRule,
    /// What its load-balancing loss is taken over.
    pub balance: Balance,
}

/// What the router decided. The caller brings the router's input to the backward pass.
#[derive(Debug)]
pub struct RouterSaved<B: Kernels> {
    pub(super) layer: String,
    scores: Scores,
    /// Experts and weights.
    pub routing: Routing<B>,
    /// What the load-balancing loss is taken over, if not over each shard by itself: set before the backward pass.
    pub(super) batch: Option<BatchLoad<B>>,
}

/// The load of all expert layers together: the load-balancing loss takes their rows as one batch.
#[derive(Debug, Clone)]
pub struct BatchLoad<B: Kernels> {
    /// Slots of the micro-batch that chose each expert, over all layers and ranks: whole numbers.
    pub load: B::Buf<f64>,
    /// Rows of probabilities: layers · tokens of the micro-batch.
    pub rows: usize,
}

impl<B: Kernels> Saved for RouterSaved<B> {
    fn ledger(&self, ledger: &mut Ledger) {
        let kept = if self.scores == Scores::Softmax { "probs" } else { "logits" };
        ledger.tensor(&self.layer, kept, &self.routing.kept);
        ledger.words::<B, i32>(&self.layer, "routing", &self.routing.expert);
        ledger.words::<B, f32>(&self.layer, "routing", &self.routing.weight);
        ledger.words::<B, f32>(&self.layer, "routing", &self.routing.log_sum_exp);
        ledger.words::<B, i32>(&self.layer, "routing", &self.routing.load);
        ledger.words::<B, f32>(&self.layer, "routing", &self.routing.losses);
    }
}

impl<B: Kernels> Router<B> {
    /// Random weights. This rank stores its own rows of the F32 master, and computes with all rows. Biases are zeros.
    ///
    /// # Errors
    /// As [`Param::only`] for another part than a router; from the backend.
    pub fn new(cx: &Cx<'_, B>, spec: &MoeSpec) -> Result<Self> {
        let (weight, bias) = Param::with_bias(cx, &spec.router)?;
        Ok(Self { weight, bias, shape: spec.shape, rule: spec.rule(), balance: spec.options.balance })
    }

    /// Its parameters.
    pub fn params(&mut self) -> impl Iterator<Item = &mut Param<B>> {
        [&mut self.weight].into_iter().chain(&mut self.bias)
    }

    /// Number of equal runs of this rank's tokens, each with its own losses and loads.
    fn runs(&self, cx: &Cx<'_, B>) -> usize {
        if cx.training { cx.shards.balance_runs(self.balance) } else { cx.shards.local }
    }

    /// Where documents begin, if each has its own load-balancing loss: in training, where each sequence has one.
    fn documents<'c>(&self, cx: &'c Cx<'_, B>) -> Option<&'c B::Buf<i32>> {
        let of_sequences = cx.training && self.balance == Balance::Sequence;
        cx.sight.starts.as_ref().filter(|_| of_sequences)
    }

    /// Its name in a recipe's overrides.
    fn layer(&self) -> &str {
        self.weight.layer()
    }

    /// See [`Layer::wanted`](crate::layers::Layer::wanted): F32 unless the recipe says BF16.
    pub fn wanted(&self, cx: &Cx<'_, B>) -> Wanted<'_, B> {
        let layer = Layer::new(LayerKind::Router, self.layer());
        self.weight.for_products(&cx.plan(&layer).weights, self.layer())
    }

    /// Routes the tokens of this rank.
    pub fn forward(&self, cx: &Cx<'_, B>, x_td: &Tensor<B>) -> Result<RouterSaved<B>> {
        let x = Operand::Plain(x_td.clone());
        let logits = Gemm { a: &x, b: self.weight.w()?, out: DType::F32 }.run(cx.b)?;
        let bias = self.bias.as_ref().map(|bias| bias.plain()?.f32("router", "bias")).transpose()?;
        let routing = Route {
            logits: &logits,
            bias,
            rule: RouteRule { in_turn: cx.training && cx.experts_in_turn, ..self.rule },
            shards: self.runs(cx),
            documents: self.documents(cx),
        }
        .run(cx.b)?;
        Ok(RouterSaved { layer: self.layer().to_owned(), scores: self.rule.scores, routing, batch: None })
    }

    /// Adds the weight's gradient; returns the input's, in the type of the input.
    pub fn backward(
        &mut self,
        cx: &Cx<'_, B>,
        saved: RouterSaved<B>,
        x_td: &Tensor<B>,
        dweight_tk: &B::Buf<f32>,
    ) -> Result<Tensor<B>> {
        // A step's loss is the mean over its runs of tokens and micro-batches.
        let runs = self.runs(cx);
        let all_runs = (cx.mesh.all.world() * runs * cx.micro_batches) as f32;
        // Where all rows are taken together, a micro-batch has one balance loss.
        let (losses, batch) = match &saved.batch {
            Some(batch) => (cx.micro_batches as f32, Some(batch)),
            None => (all_runs, None),
        };
        let op = RouteBackward {
            routing: &saved.routing,
            rule: self.rule,
            shards: runs,
            dweight: dweight_tk,
            aux_scale: self.shape.aux_coef / losses,
            documents: self.documents(cx),
            batch_load: batch.map(|batch| &batch.load),
            batch_rows: batch.map_or(0, |batch| batch.rows),
            z_scale: self.shape.z_coef / all_runs,
        };
        let dlogits = Operand::Plain(op.run(cx.b)?);
        let dx = Gemm { a: &dlogits, b: self.weight.wt(cx)?.as_ref(), out: x_td.dtype() }.run(cx.b)?;
        let x = Operand::Plain(x_td.clone());
        self.weight.accumulate_wgrad(cx, &dlogits, &x, &cx.shards.groups)?;
        Ok(dx)
    }
}
