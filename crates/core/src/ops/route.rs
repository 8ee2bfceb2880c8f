use crate::error::expect_eq;
use crate::{Agreement, Backend, DType, Error, Result, Tensor};

/// Softmax over the experts, the `top_k` largest (the lower index first among equals), their weights.
///
/// Experts are chosen by probability. A row with a NaN or +∞ has NaN probabilities and the first k experts.
///
/// The order of every sum:
/// * over experts: expert j to lane j mod 64, each lane in order; four neighbouring lanes as (0 + 1) + (2 + 3), those sixteen
///   sums by the tree 8, 4, 2, 1; in F32 (the load-balancing loss in F64), products by fma;
/// * over slots: in slot order, in F32;
/// * over the tokens of a shard: in chunks of [`Route::CHUNK`], in F32: token i of a chunk to lane i mod 16, each lane in order,
///   closed by the tree 8, 4, 2, 1. The chunks' sums likewise, in F64, rounded to F32 at the end of the loss.
#[derive(Debug)]
pub struct Route<'a, B: Backend> {
    /// `[t, e]`, F32.
    pub logits: &'a Tensor<B>,
    /// Experts a token.
    pub top_k: usize,
    /// Divide the weights by their sum.
    pub normalize: bool,
    /// Shards the tokens fall into, evenly: losses are per shard.
    pub shards: usize,
}

/// The result of [`Route`].
#[derive(Debug, Clone)]
pub struct Routing<B: Backend> {
    /// Expert of each (token, slot), largest weight first: `t · top_k`.
    pub expert: B::Buf<i32>,
    /// Its gate weight.
    pub weight: B::Buf<f32>,
    /// Softmax of the logits, F32 `[t, e]`.
    pub probs: Tensor<B>,
    /// log Σ exp of each token's logits: `t`.
    pub log_sum_exp: B::Buf<f32>,
    /// For each shard, tokens·slots that chose each expert: `shards · e` values.
    pub load: B::Buf<i32>,
    /// For each shard, two values: the load-balancing loss e · Σ_e (share of slots to e) · (mean probability of e), 1 where all are equal (the
    /// shares, load / (k · tokens), sum to 1: in Switch Transformer's loss for several experts a token, as `transformers` has it, they sum to k),
    /// and the z-loss mean((log Σ exp logits)²).
    pub losses: B::Buf<f32>,
}

impl<B: Backend> Route<'_, B> {
    /// Tokens whose probabilities are summed by themselves.
    pub const CHUNK: usize = 64;

    /// What backends owe each other.
    pub const AGREEMENT: Agreement = Agreement::Bitwise;

    /// Checks shapes.
    pub fn check(&self) -> Result<()> {
        const OP: &str = "route";
        expect_eq(OP, "type of logits", self.logits.dtype(), DType::F32)?;
        if self.shards == 0 {
            return Err(Error::shape(OP, "shards", 0, "at least 1"));
        }
        check_top_k(OP, self.top_k, self.logits.cols)?;
        expect_eq(OP, "tokens modulo the shards", self.logits.rows % self.shards, 0)
    }

    /// Its result, yet to be written. For checked arguments.
    pub fn result(&self, b: &B) -> Result<Routing<B>> {
        let ((tokens, experts), slots) = (self.logits.shape(), self.logits.rows * self.top_k);
        let (probs, log_sum_exp) = (self.logits.unwritten_like(b)?, b.alloc(tokens)?);
        let (expert, weight) = (b.alloc(slots)?, b.alloc(slots)?);
        let (load, losses) = (b.alloc(self.shards * experts)?, b.alloc(2 * self.shards)?);
        Ok(Routing { expert, weight, probs, log_sum_exp, load, losses })
    }
}

fn check_top_k(op: &'static str, top_k: usize, experts: usize) -> Result<()> {
    if top_k == 0 || top_k > experts {
        return Err(Error::shape(op, "top_k", top_k, format!("1 to {experts} experts")));
    }
    Ok(())
}

/// The gradient of the logits, F32 `[t, e]`, from the gate weights' gradients and the two auxiliary losses.
#[derive(Debug)]
pub struct RouteBackward<'a, B: Backend> {
    /// What [`Route`] returned.
    pub routing: &'a Routing<B>,
    /// As given to [`Route`].
    pub top_k: usize,
    /// As given to [`Route`].
    pub normalize: bool,
    /// As given to [`Route`].
    pub shards: usize,
    /// Gradient of each (token, slot)'s gate weight: `t · top_k`.
    pub dweight: &'a B::Buf<f32>,
    /// Factor of each shard's load-balancing loss in the total loss; of the one loss, where there is one of all.
    pub aux_scale: f32,
    /// Takes many rows, of this routing and of others, into one loss, e · Σ_e (load / rows) · (mean probability of e), instead of one a shard: tokens·slots
    /// that chose each expert, whole numbers, `e` of them.
    pub batch_load: Option<&'a B::Buf<f64>>,
    /// How many rows those are; of no interest where every shard has its loss.
    pub batch_rows: usize,
    /// Factor of each shard's z-loss in the total loss.
    pub z_scale: f32,
}

impl<B: Backend> RouteBackward<'_, B> {
    /// What backends owe each other.
    pub const AGREEMENT: Agreement = Agreement::Bitwise;

    /// The losses' parts of a logit's gradient: the factor of an expert's load in the load-balancing loss's, aux · e / (k · t²) (of one loss for
    /// all rows, aux · e / rows²), and that of the log-sum-exp in the z-loss's, 2 · z / t, with t tokens a shard.
    pub fn loss_factors(&self) -> (f64, f32) {
        let (tokens, experts) = self.routing.probs.shape();
        let per_shard = (tokens / self.shards).max(1);
        let per_slot = match self.batch_load {
            Some(_) => (self.batch_rows as f64).powi(2).max(1.0),
            None => (per_shard * self.top_k * per_shard) as f64,
        };
        let balance = f64::from(self.aux_scale) * experts as f64 / per_slot;
        (balance, (2.0 * f64::from(self.z_scale) / per_shard as f64) as f32)
    }

    /// Checks shapes.
    pub fn check(&self) -> Result<()> {
        const OP: &str = "route_backward";
        let (tokens, experts) = self.routing.probs.shape();
        if self.shards == 0 || !tokens.is_multiple_of(self.shards) {
            return Err(Error::shape(OP, "shards", self.shards, format!("a divisor of {tokens} tokens")));
        }
        check_top_k(OP, self.top_k, experts)?;
        let slots = tokens * self.top_k;
        expect_eq(OP, "type of routing.probs", self.routing.probs.dtype(), DType::F32)?;
        expect_eq(OP, "routing.expert.len()", B::len(&self.routing.expert), slots)?;
        expect_eq(OP, "routing.weight.len()", B::len(&self.routing.weight), slots)?;
        expect_eq(OP, "routing.load.len()", B::len(&self.routing.load), self.shards * experts)?;
        if let Some(load) = self.batch_load {
            expect_eq(OP, "batch_load.len()", B::len(load), experts)?;
        }
        expect_eq(OP, "routing.log_sum_exp.len()", B::len(&self.routing.log_sum_exp), tokens)?;
        expect_eq(OP, "dweight.len()", B::len(self.dweight), slots)
    }

    /// Its result, yet to be written. For checked arguments.
    pub fn result(&self, b: &B) -> Result<Tensor<B>> {
        self.routing.probs.unwritten_like(b)
    }
}
