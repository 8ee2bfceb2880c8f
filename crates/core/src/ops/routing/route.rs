use crate::error::expect_eq;
use crate::{Agreement, Backend, DType, Error, Result, Tensor};

/// What a token thinks of an expert: a function of its logits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Scores {
    /// Softmax over the experts.
    Softmax,
    /// The sigmoid of each logit by itself.
    Sigmoid,
}

/// The score of a group of experts, of its experts' choice scores.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GroupScore {
    /// The largest: DeepSeek-V2 ([arXiv 2405.04434](https://arxiv.org/abs/2405.04434), 2.2.2).
    Max,
    /// The sum of the two largest: DeepSeek-V3 ([arXiv 2412.19437](https://arxiv.org/abs/2412.19437), 2.1.2).
    Top2,
}

/// Groups of experts of which a token takes some: expert i is in group i / (experts / `count`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ExpertGroups {
    /// How many there are, of as many experts each.
    pub count: usize,
    /// How many a token takes its experts from: those of the largest scores.
    pub top: usize,
    /// How they are scored.
    pub score: GroupScore,
}

/// How experts are chosen and weighted.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RouteRule {
    /// What logits become.
    pub scores: Scores,
    /// Experts a token.
    pub top_k: usize,
    /// Divide the weights by their sum, of sigmoids by their sum + [`RouteRule::TINY`].
    pub normalize: bool,
    /// Choose groups first, and experts of these.
    pub groups: Option<ExpertGroups>,
    /// Factor of the weights, after all else.
    pub scale: f32,
    /// Experts take turns, whatever the scores, biases and groups: slot j of token t of a shard goes to expert (t + j · ⌊e / k⌋) mod e. For measuring:
    /// where e divides the tokens of a shard, all experts have as many slots.
    pub in_turn: bool,
}

impl RouteRule {
    /// Added to sums of sigmoids that something is divided by: they may be 0.
    pub const TINY: f32 = 1e-20;

    /// Softmax, of all experts the largest.
    pub const fn softmax(top_k: usize, normalize: bool) -> Self {
        Self { scores: Scores::Softmax, top_k, normalize, groups: None, scale: 1.0, in_turn: false }
    }

    /// Where experts take turns, that of a slot of a token of a shard, of so many experts.
    pub const fn turn(&self, token: usize, slot: usize, experts: usize) -> usize {
        (token + slot * (experts / self.top_k)) % experts
    }

    /// What is added to sums that something is divided by.
    pub const fn tiny(&self) -> f32 {
        match self.scores {
            Scores::Softmax => 0.0,
            Scores::Sigmoid => Self::TINY,
        }
    }

    /// Checks that so many experts can be chosen from.
    fn check(&self, op: &'static str, experts: usize) -> Result<()> {
        let top_k = self.top_k;
        if top_k == 0 || top_k > experts {
            return Err(Error::shape(op, "top_k", top_k, format!("1 to {experts} experts")));
        }
        let Some(ExpertGroups { count, top, score }) = self.groups else { return Ok(()) };
        if count == 0 || !experts.is_multiple_of(count) {
            return Err(Error::shape(op, "groups.count", count, format!("a divisor of {experts} experts")));
        }
        if top == 0 || top > count {
            return Err(Error::shape(op, "groups.top", top, format!("1 to {count} groups")));
        }
        let each = experts / count;
        if top_k > top * each {
            let expected = format!("at most {} experts of {top} groups", top * each);
            return Err(Error::shape(op, "top_k", top_k, expected));
        }
        if score == GroupScore::Top2 && each < 2 {
            let got = format!("that of the two largest, of {each} an expert group");
            return Err(Error::shape(op, "groups.score", got, "groups of at least 2 experts"));
        }
        Ok(())
    }
}

/// Scores of the experts, the `top_k` experts of the largest choice scores, their weights.
///
/// An expert's choice score is its score, plus its bias where there is one. Where there are groups, only experts of the best groups can be
/// chosen. Of equals, experts as groups, the lower index is first; a NaN is behind every number. Weights are scores without the bias. Or experts take
/// turns: [`RouteRule::in_turn`].
///
/// A row with a NaN or +∞ (or −∞ alone) counts as one of NaNs, whatever the scores, and has the first k experts where none takes turns.
///
/// The order of every sum:
/// * over experts: expert j to lane j mod 64, each lane in order; four neighbouring lanes as (0 + 1) + (2 + 3), those sixteen
///   sums by the tree 8, 4, 2, 1; in F32 (the load-balancing loss in F64), products by fma;
/// * over slots: in slot order, in F32;
/// * over the tokens of a shard: in chunks of [`Route::CHUNK`], in F32: token i of a chunk to lane i mod 16, each lane in order,
///   closed by the tree 8, 4, 2, 1. The chunks' sums likewise, in F64, rounded to F32 at the end of the loss. With documents each token's part of
///   the load-balancing loss is summed over the experts in F32, and then over the tokens so.
#[derive(Debug)]
pub struct Route<'a, B: Backend> {
    /// `[t, e]`, F32.
    pub logits: &'a Tensor<B>,
    /// Added to the scores for the choice alone: `e`.
    pub bias: Option<&'a B::Buf<f32>>,
    /// How experts are chosen and weighted.
    pub rule: RouteRule,
    /// Shards the tokens fall into, evenly: losses are per shard. They may be runs of tokens of any kind, such as sequences.
    pub shards: usize,
    /// Where shards are sequences of documents, for each token the one of its shard with which its document begins: the load-balancing loss of a
    /// shard is then the mean over its tokens of that of each one's document. A number out of range, 0 to the token's own, counts as the nearest in
    /// range. `t`
    pub documents: Option<&'a B::Buf<i32>>,
}

/// The result of [`Route`].
#[derive(Debug, Clone)]
pub struct Routing<B: Backend> {
    /// Expert of each (token, slot), largest choice score first where scores choose: `t · top_k`.
    pub expert: B::Buf<i32>,
    /// Its gate weight.
    pub weight: B::Buf<f32>,
    /// What the backward pass takes of every expert, F32 `[t, e]`: the softmax of the logits; of sigmoids the logits themselves, not copied.
    pub kept: Tensor<B>,
    /// log Σ exp of each token's logits: `t`.
    pub log_sum_exp: B::Buf<f32>,
    /// For each shard, tokens·slots that chose each expert: `shards · e` values.
    pub load: B::Buf<i32>,
    /// For each shard, two values: the load-balancing loss e · Σ_e (share of slots to e) · (mean probability of e), 1 where all are equal, and the
    /// z-loss mean((log Σ exp logits)²). The shares of slots, load / (k · tokens), sum to 1: in Switch Transformer's loss for several experts a
    /// token, as `transformers` has it, they sum to k. A sigmoid counts as its share of the token's sum, as in equation 19 of
    /// [arXiv 2412.19437](https://arxiv.org/abs/2412.19437). With documents: e / (k · tokens) · Σ_t Σ_e p_te · n_e / l, where l is how many tokens the
    /// document of t has, and n_e how many of their slots chose e.
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
        self.rule.check(OP, self.logits.cols)?;
        if let Some(bias) = self.bias {
            expect_eq(OP, "bias.len()", B::len(bias), self.logits.cols)?;
        }
        if let Some(documents) = self.documents {
            expect_eq(OP, "documents.len()", B::len(documents), self.logits.rows)?;
        }
        expect_eq(OP, "tokens modulo the shards", self.logits.rows % self.shards, 0)
    }

    /// Its result, yet to be written. For checked arguments.
    pub fn result(&self, b: &B) -> Result<Routing<B>> {
        let ((tokens, experts), slots) = (self.logits.shape(), self.logits.rows * self.rule.top_k);
        let kept = match self.rule.scores {
            Scores::Softmax => self.logits.unwritten_like(b)?,
            Scores::Sigmoid => self.logits.clone(),
        };
        let log_sum_exp = b.alloc(tokens)?;
        let (expert, weight) = (b.alloc(slots)?, b.alloc(slots)?);
        let (load, losses) = (b.alloc(self.shards * experts)?, b.alloc(2 * self.shards)?);
        Ok(Routing { expert, weight, kept, log_sum_exp, load, losses })
    }
}

/// The gradient of the logits, F32 `[t, e]`, from the gate weights' gradients and the two auxiliary losses. The choice, and so the bias, has none.
///
/// With weights w = f·s / D, where D is the divisor (1 without `normalize`) and f the scale, a chosen score has the gradient (f·dw − Σ dw·w) / D.
/// Of a softmax the load-balancing loss adds b, its factor times the expert's load, and a logit's gradient is s·(ds − Σ ds·s + z·lse).
/// Of sigmoids with the sum S it adds (b − Σ b·s / S) / S, and a logit's gradient is ds·s·(1 − s) + z·lse·exp(logit − lse).
#[derive(Debug)]
pub struct RouteBackward<'a, B: Backend> {
    /// What [`Route`] returned.
    pub routing: &'a Routing<B>,
    /// As given to [`Route`].
    pub rule: RouteRule,
    /// As given to [`Route`].
    pub shards: usize,
    /// As given to [`Route`]. Not beside `batch_load`.
    pub documents: Option<&'a B::Buf<i32>>,
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
    /// all rows, aux · e / rows²; of documents aux · e / (k · t), of the document's load divided by its tokens), and that of the log-sum-exp in the z-loss's, 2 · z / t, with t tokens a shard.
    pub fn loss_factors(&self) -> (f64, f32) {
        let (tokens, experts) = self.routing.kept.shape();
        let per_shard = (tokens / self.shards).max(1);
        let per_slot = match (self.batch_load, self.documents) {
            (Some(_), _) => (self.batch_rows as f64).powi(2).max(1.0),
            (None, Some(_)) => (per_shard * self.rule.top_k) as f64,
            (None, None) => (per_shard * self.rule.top_k * per_shard) as f64,
        };
        let balance = f64::from(self.aux_scale) * experts as f64 / per_slot;
        (balance, (2.0 * f64::from(self.z_scale) / per_shard as f64) as f32)
    }

    /// Checks shapes.
    pub fn check(&self) -> Result<()> {
        const OP: &str = "route_backward";
        let (tokens, experts) = self.routing.kept.shape();
        if self.shards == 0 || !tokens.is_multiple_of(self.shards) {
            return Err(Error::shape(OP, "shards", self.shards, format!("a divisor of {tokens} tokens")));
        }
        self.rule.check(OP, experts)?;
        let slots = tokens * self.rule.top_k;
        expect_eq(OP, "type of routing.kept", self.routing.kept.dtype(), DType::F32)?;
        expect_eq(OP, "routing.expert.len()", B::len(&self.routing.expert), slots)?;
        expect_eq(OP, "routing.weight.len()", B::len(&self.routing.weight), slots)?;
        expect_eq(OP, "routing.load.len()", B::len(&self.routing.load), self.shards * experts)?;
        if let Some(load) = self.batch_load {
            expect_eq(OP, "batch_load.len()", B::len(load), experts)?;
        }
        if let Some(documents) = self.documents {
            if self.batch_load.is_some() {
                let expected = "none where many rows have one loss (batch_load)";
                return Err(Error::shape(OP, "documents", "those of each shard", expected));
            }
            expect_eq(OP, "documents.len()", B::len(documents), tokens)?;
        }
        expect_eq(OP, "routing.log_sum_exp.len()", B::len(&self.routing.log_sum_exp), tokens)?;
        expect_eq(OP, "dweight.len()", B::len(self.dweight), slots)
    }

    /// Its result, yet to be written. For checked arguments.
    pub fn result(&self, b: &B) -> Result<Tensor<B>> {
        self.routing.kept.unwritten_like(b)
    }
}
