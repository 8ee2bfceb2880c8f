use crate::error::expect_eq;
use crate::{Agreement, Backend, DType, Error, Result, Tensor};

/// The score function of a router.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Scores {
    /// Softmax over the experts.
    Softmax,
    /// The sigmoid of each logit.
    Sigmoid,
}

/// How the score of a group is computed from the choice scores of its experts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GroupScore {
    /// The largest score, as in DeepSeek-V2 ([arXiv 2405.04434](https://arxiv.org/abs/2405.04434), section 2.2.2).
    Max,
    /// The sum of the two largest scores, as in DeepSeek-V3 ([arXiv 2412.19437](https://arxiv.org/abs/2412.19437), section 2.1.2).
    Top2,
}

/// Group-limited routing: a token's experts come from the groups with the largest scores. Expert i is in group i / (experts / `count`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ExpertGroups {
    /// Number of groups, of equal size.
    pub count: usize,
    /// Number of groups that are chosen per token: the groups with the largest scores.
    pub top: usize,
    /// The score of a group.
    pub score: GroupScore,
}

/// How experts are chosen and weighted.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RouteRule {
    /// The score function.
    pub scores: Scores,
    /// Number of experts per token.
    pub top_k: usize,
    /// Whether to divide a token's gate weights by their sum. For sigmoids, the divisor is their sum + [`RouteRule::TINY`].
    pub normalize: bool,
    /// If given, the router first chooses groups, and then chooses experts in these groups.
    pub groups: Option<ExpertGroups>,
    /// Factor of the gate weights, applied last.
    pub scale: f32,
    /// Round-robin routing, whatever the scores, biases and groups: slot j of token t of a shard goes to expert (t + j · ⌊e / k⌋) mod e.
    /// This routing is for measurements: if e divides the tokens of a shard, all experts have the same number of slots.
    pub in_turn: bool,
}

impl RouteRule {
    /// A constant that is added to divisors that are sums of sigmoids, because such a sum may be 0.
    pub const TINY: f32 = 1e-20;

    /// The rule that chooses the experts with the largest softmax probabilities over all experts.
    pub const fn softmax(top_k: usize, normalize: bool) -> Self {
        Self { scores: Scores::Softmax, top_k, normalize, groups: None, scale: 1.0, in_turn: false }
    }

    /// The expert, out of `experts`, that round-robin routing chooses for slot `slot` of a shard's token `token`.
    pub const fn turn(&self, token: usize, slot: usize, experts: usize) -> usize {
        (token + slot * (experts / self.top_k)) % experts
    }

    /// The constant that is added to divisors under this rule.
    pub const fn tiny(&self) -> f32 {
        match self.scores {
            Scores::Softmax => 0.0,
            Scores::Sigmoid => Self::TINY,
        }
    }

    /// Checks that the rule can choose from `experts` experts.
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

/// Computes the scores of experts, chooses the `top_k` experts with the largest choice scores, and weights them.
///
/// An expert's choice score is its score, plus its bias if there is one. With groups, only experts of the best groups can be chosen. Among
/// experts or groups with equal scores, the lower index comes first; a NaN comes last. Gate weights are computed from scores without the
/// bias. [`RouteRule::in_turn`] chooses round-robin instead.
///
/// A row of logits with a NaN or +∞, or with only −∞, counts as a row of NaNs under either score function. The experts of such a row are
/// the first k, unless routing is round-robin.
///
/// The order of every sum:
/// * A sum over experts adds expert j to lane j mod 64, each lane in order. Four neighbouring lanes are added as (0 + 1) + (2 + 3), and the
///   sixteen results by the tree 8, 4, 2, 1. Sums are F32 (F64 for the load-balancing loss), with products by fma.
/// * A sum over slots runs in slot order, in F32.
/// * A sum over the tokens of a shard has chunks of [`Route::CHUNK`] tokens. Token i of a chunk is added to lane i mod 16 in F32, each lane
///   in order, and the lanes are reduced by the tree 8, 4, 2, 1. The sums of chunks are added in the same way, in F64; the loss is rounded
///   to F32 at the end. With documents, each token's share of the load-balancing loss is summed over experts in F32, and then over tokens
///   in this order.
#[derive(Debug)]
pub struct Route<'a, B: Backend> {
    /// Shape `[t, e]`, F32.
    pub logits: &'a Tensor<B>,
    /// A bias for each expert, which is added to the scores only for the choice of experts: `e` values.
    pub bias: Option<&'a B::Buf<f32>>,
    /// How experts are chosen and weighted.
    pub rule: RouteRule,
    /// Number of shards of equal size; losses are per shard. A shard may be any run of tokens, such as a sequence.
    pub shards: usize,
    /// For shards that are sequences of packed documents, the index of the first token of each token's document, counted within the shard:
    /// `t` values. The load-balancing loss of a shard is then the mean of its documents' losses, weighted by their tokens. An index outside
    /// the range 0 to the token's own index is clamped.
    pub documents: Option<&'a B::Buf<i32>>,
}

/// The result of [`Route`].
#[derive(Debug, Clone)]
pub struct Routing<B: Backend> {
    /// Expert of each (token, slot), by descending choice score unless routing is round-robin: `t · top_k`.
    pub expert: B::Buf<i32>,
    /// Gate weight of each (token, slot).
    pub weight: B::Buf<f32>,
    /// Saved for the backward pass, F32 `[t, e]`: the softmax of the logits; for sigmoids, the logits themselves, without a copy.
    pub kept: Tensor<B>,
    /// log Σ exp of each token's logits: `t` values.
    pub log_sum_exp: B::Buf<f32>,
    /// For each shard, the number of (token, slot) pairs per expert: `shards · e` values.
    pub load: B::Buf<i32>,
    /// Two values per shard. The first is the load-balancing loss e · Σ_e (share of slots sent to e) · (mean probability of e), which is 1
    /// if experts are balanced. The second is the z-loss mean((log Σ exp logits)²). The shares of slots, load / (k · tokens), sum to 1
    /// here; in the loss of `transformers`, the shares sum to k, because that loss extends Switch Transformer's loss to several experts per
    /// token. With sigmoid scores, the probability of an expert is its sigmoid divided by the token's sum of sigmoids, as in equation 19 of
    /// [arXiv 2412.19437](https://arxiv.org/abs/2412.19437). With documents, the loss is e / (k · tokens) · Σ_t Σ_e p_te · n_e / l, where
    /// the document of token t has l tokens, and n_e of the document's slots chose expert e.
    pub losses: B::Buf<f32>,
}

impl<B: Backend> Route<'_, B> {
    /// Number of tokens of a chunk. The probabilities of a chunk's tokens are summed before the sums of chunks are added.
    pub const CHUNK: usize = 64;

    /// How closely the results of two backends must agree.
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

    /// Allocates the result. Call `check` first.
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

/// The gradient of the logits, F32 `[t, e]`, from the gradients of gate weights and the two auxiliary losses. The choice of experts and its
/// bias have no gradient.
///
/// With weights w = f·s / D, where D is the divisor (1 without `normalize`) and f the scale, a chosen score has the gradient (f·dw − Σ
/// dw·w) / D. For softmax, the load-balancing loss adds b, the loss's factor times the expert's load, to this gradient ds; a logit's
/// gradient is s·(ds − Σ ds·s + z·lse). For sigmoids with the sum S, the load-balancing loss adds (b − Σ b·s / S) / S to ds; a logit's
/// gradient is ds·s·(1 − s) + z·lse·exp(logit − lse).
#[derive(Debug)]
pub struct RouteBackward<'a, B: Backend> {
    /// The result of [`Route`].
    pub routing: &'a Routing<B>,
    /// The rule that was given to [`Route`].
    pub rule: RouteRule,
    /// The number of shards that was given to [`Route`].
    pub shards: usize,
    /// The documents that were given to [`Route`]; `None` with `batch_load`.
    pub documents: Option<&'a B::Buf<i32>>,
    /// Gradient of each (token, slot)'s gate weight: `t · top_k`.
    pub dweight: &'a B::Buf<f32>,
    /// Factor of each shard's load-balancing loss in the total loss, or of the single loss with `batch_load`.
    pub aux_scale: f32,
    /// If given, a single load-balancing loss over the rows of several routings replaces the losses per shard. This buffer is the number of
    /// (token, slot) pairs per expert over those rows, `e` whole numbers. The loss is e · Σ_e (load / rows) · (mean probability of e).
    pub batch_load: Option<&'a B::Buf<f64>>,
    /// The number of rows that `batch_load` counts; unused if every shard has its own loss.
    pub batch_rows: usize,
    /// Factor of each shard's z-loss in the total loss.
    pub z_scale: f32,
}

impl<B: Backend> RouteBackward<'_, B> {
    /// How closely the results of two backends must agree.
    pub const AGREEMENT: Agreement = Agreement::Bitwise;

    /// Factors of the two losses in a logit's gradient, with t tokens per shard. In the load-balancing loss, the factor of an expert's load
    /// is aux · e / (k · t²), or aux · e / rows² with one loss for all rows. With documents, the factor of a document's load divided by its
    /// tokens is aux · e / (k · t). In the z-loss, the factor of the log-sum-exp is 2 · z / t.
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

    /// Allocates the result. Call `check` first.
    pub fn result(&self, b: &B) -> Result<Tensor<B>> {
        self.routing.kept.unwritten_like(b)
    }
}
