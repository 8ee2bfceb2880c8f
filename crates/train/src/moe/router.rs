//! The router: its sums are F32, and it is never quantized. Legend: t tokens, d model, e experts, k top-k.

use super::MoeShape;
use crate::config::Balance;
use crate::cx::Cx;
use crate::ledger::{Ledger, Saved};
use crate::param::{Param, Wanted};
use crate::spec::MoeSpec;
use nibble_core::ops::{Gemm, Route, RouteBackward, RouteRule, Routing, Scores};
use nibble_core::recipe::{Layer, LayerKind};
use nibble_core::{DType, Kernels, Operand, Result, Tensor};

/// The router computes logits X·Wᵀ and their scores, and chooses the top-k experts.
#[derive(Debug, Clone)]
pub struct Router<B: Kernels> {
    /// The weight `[e, d]`.
    pub weight: Param<B>,
    /// The bias that is added to each expert's score for the top-k choice: `[e]`. The bias has no gradient: each step changes the bias
    /// according to the load of the experts.
    pub bias: Option<Param<B>>,
    /// The sizes of the layer, and the factors of the router's losses.
    pub shape: MoeShape,
    /// How experts are chosen, and how their gate weights are computed.
    pub rule: RouteRule,
    /// The rows over which the load-balancing loss is computed.
    pub balance: Balance,
}

/// The router's saved decision. The router's input is not saved here, because the caller passes the input to the backward pass.
#[derive(Debug)]
pub struct RouterSaved<B: Kernels> {
    pub(super) layer: String,
    scores: Scores,
    /// The chosen experts and their gate weights.
    pub routing: Routing<B>,
    /// The loads for the load-balancing loss, if the loss is not computed for each shard separately. These loads are set before the
    /// backward pass.
    pub(super) batch: Option<BatchLoad<B>>,
}

/// The expert loads of all expert layers together. The load-balancing loss treats the rows of these layers as one batch.
#[derive(Debug, Clone)]
pub struct BatchLoad<B: Kernels> {
    /// For each expert, how many slots of the micro-batch chose this expert, over all layers and ranks; the values are whole numbers.
    pub load: B::Buf<f64>,
    /// Number of rows of router probabilities: layers · tokens of the micro-batch.
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
    /// Creates the router with random weights. This rank stores only its own rows of the F32 master weight, but computes with all rows.
    /// Biases start with zeros.
    ///
    /// # Errors
    /// Returns the error of [`Param::only`] if the part is not a router, and passes on errors of the backend.
    pub fn new(cx: &Cx<'_, B>, spec: &MoeSpec) -> Result<Self> {
        let (weight, bias) = Param::with_bias(cx, &spec.router)?;
        Ok(Self { weight, bias, shape: spec.shape, rule: spec.rule(), balance: spec.options.balance })
    }

    /// The router's parameters.
    pub fn params(&mut self) -> impl Iterator<Item = &mut Param<B>> {
        [&mut self.weight].into_iter().chain(&mut self.bias)
    }

    /// Number of equal runs of this rank's tokens, each with its own losses and loads.
    fn runs(&self, cx: &Cx<'_, B>) -> usize {
        if cx.training { cx.shards.balance_runs(self.balance) } else { cx.shards.local }
    }

    /// The starts of documents, if each document has its own load-balancing loss. Documents have their own losses in training if each
    /// sequence has its own loss.
    fn documents<'c>(&self, cx: &'c Cx<'_, B>) -> Option<&'c B::Buf<i32>> {
        let of_sequences = cx.training && self.balance == Balance::Sequence;
        cx.sight.starts.as_ref().filter(|_| of_sequences)
    }

    /// The router's name in a recipe's overrides.
    fn layer(&self) -> &str {
        self.weight.layer()
    }

    /// Like [`Layer::wanted`](crate::layers::Layer::wanted); the copy of the weight is F32 unless the recipe sets BF16.
    pub fn wanted(&self, cx: &Cx<'_, B>) -> Wanted<'_, B> {
        let layer = Layer::new(LayerKind::Router, self.layer());
        self.weight.for_products(&cx.plan(&layer).weights, self.layer())
    }

    /// Chooses the experts for the tokens of this rank.
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

    /// Adds the gradient of the weight, and returns the gradient of the input in the type of the input.
    pub fn backward(
        &mut self,
        cx: &Cx<'_, B>,
        saved: RouterSaved<B>,
        x_td: &Tensor<B>,
        dweight_tk: &B::Buf<f32>,
    ) -> Result<Tensor<B>> {
        // A step's loss is the mean over its micro-batches and their runs of tokens.
        let runs = self.runs(cx);
        let all_runs = (cx.mesh.all.world() * runs * cx.micro_batches) as f32;
        // If all rows are one batch, a micro-batch has a single load-balancing loss.
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
