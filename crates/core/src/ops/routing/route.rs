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

/// How the router computes the score of a group of experts from the choice scores of its experts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GroupScore {
    /// The largest score, as in DeepSeek-V2 ([arXiv 2405.04434](https://arxiv.org/abs/2405.04434), section 2.2.2).
    Max,
    /// The sum of the two largest scores, as in DeepSeek-V3 ([arXiv 2412.19437](https://arxiv.org/abs/2412.19437), section 2.1.2).
    Top2,
}

/// Group-limited routing: the router chooses all experts of a token from a few groups, those with the largest group scores. Expert i is in
/// group i / (experts / `count`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ExpertGroups {
    /// The number of groups, which all have the same number of experts.
    pub count: usize,
    /// The number of groups that are chosen per token.
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
    /// Whether to divide a token's gate weights by their sum. If scores are sigmoids, the divisor is the sum of the token's gate weights +
    /// [`RouteRule::TINY`].
    pub normalize: bool,
    /// The groups of experts in group-limited routing, in which the router first chooses groups and then chooses experts of these groups.
    pub groups: Option<ExpertGroups>,
    /// The factor by which all gate weights are multiplied after they are normalized.
    pub scale: f32,
    /// Whether routing is round-robin and ignores scores, biases and groups: with e experts and k slots per token, slot j of token t of a
    /// shard goes to expert (t + j · ⌊e / k⌋) mod e. Round-robin routing is for measurements, because all experts get the same number of
    /// slots if e divides the number of tokens of a shard.
    pub in_turn: bool,
}

impl RouteRule {
    /// A constant that is added to a sum of sigmoids before a division by it, because the sum may be 0.
    pub const TINY: f32 = 1e-20;

    /// The rule that chooses, for each token, the `top_k` experts with the largest softmax probabilities.
    pub const fn softmax(top_k: usize, normalize: bool) -> Self {
        Self { scores: Scores::Softmax, top_k, normalize, groups: None, scale: 1.0, in_turn: false }
    }

    /// The expert that round-robin routing over `experts` experts chooses for slot `slot` of token `token` of a shard.
    pub const fn turn(&self, token: usize, slot: usize, experts: usize) -> usize {
        (token + slot * (experts / self.top_k)) % experts
    }

    /// The constant that is added to a sum of scores before a division by it: 0 for softmax, [`RouteRule::TINY`] for sigmoids.
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

/// Computes the scores of experts from the router's logits, chooses the `top_k` experts with the largest choice scores for each token, and
/// computes their gate weights.
///
/// The choice score of an expert is the sum of its score and its bias, if there is a bias. With groups, only experts of the groups with the
/// largest group scores can be chosen. Among experts or groups with equal scores, the one with the lower index is preferred. A score of NaN
/// ranks below all other scores. Gate weights are computed from scores without the bias. [`RouteRule::in_turn`] chooses round-robin
/// instead.
///
/// If a row of logits contains a NaN or +∞, or only −∞, all scores of the row are NaN under either score function. Such a row is sent to
/// experts 0 to k − 1, unless routing is round-robin.
///
/// Sums are computed in the following order:
/// * A sum over experts is divided into 64 partial sums (lanes). The value of expert j is added to lane j mod 64, in ascending order of j.
///   Each four neighbouring lanes are added as (0 + 1) + (2 + 3). A tree then adds the sixteen results at the distances 8, 4, 2 and 1. Sums
///   over experts are in F32, or in F64 for the load-balancing loss. Products are added by fma.
/// * A sum over slots runs in slot order, in F32.
/// * A sum over the tokens of a shard is divided into chunks of [`Route::CHUNK`] tokens. In a chunk, token i is added to lane i mod 16 in
///   F32, in ascending order of i. A tree then adds the lanes at the distances 8, 4, 2 and 1. The sums of the chunks are added in the same
///   order, but in F64. The loss is rounded to F32 at the end. With documents, the contribution of each token to the load-balancing loss is
///   first summed over experts in F32. The contributions of all tokens are then summed in the same order as other sums over tokens.
#[derive(Debug)]
pub struct Route<'a, B: Backend> {
    /// Shape `[t, e]`, F32.
    pub logits: &'a Tensor<B>,
    /// A bias for each expert (`e` values), which is added to the scores only when experts are chosen.
    pub bias: Option<&'a B::Buf<f32>>,
    /// How experts are chosen and weighted.
    pub rule: RouteRule,
    /// The number of shards of equal size into which the tokens are divided. The op returns the losses of each shard. A shard may be any
    /// run of consecutive tokens, such as a sequence.
    pub shards: usize,
    /// If each shard is a sequence of packed documents: for each token, the index within the shard of the first token of its document (`t`
    /// values). With documents, the load-balancing loss of a shard is the mean of the losses of its documents, weighted by their numbers of
    /// tokens. An index outside the range 0 to the token's own index is clamped.
    pub documents: Option<&'a B::Buf<i32>>,
}

/// The result of [`Route`].
#[derive(Debug, Clone)]
pub struct Routing<B: Backend> {
    /// The expert of each (token, slot), `t · top_k` values. The experts of a token are in descending order of choice score, unless routing
    /// is round-robin.
    pub expert: B::Buf<i32>,
    /// Gate weight of each (token, slot).
    pub weight: B::Buf<f32>,
    /// The tensor that is saved for the backward pass, F32 `[t, e]`. For softmax scores it is the softmax of the logits. For sigmoid scores
    /// it is the tensor of logits itself, not a copy.
    pub kept: Tensor<B>,
    /// The log-sum-exp of the logits of each token; `t` values.
    pub log_sum_exp: B::Buf<f32>,
    /// The number of (token, slot) pairs per expert in each shard; `shards · e` values.
    pub load: B::Buf<i32>,
    /// Two values per shard. The first loss of a shard is the load-balancing loss e · Σ_e (share of slots sent to e) · (mean probability of
    /// e), which is 1 if experts are balanced. The second loss of a shard is the z-loss mean((log Σ exp logits)²). The share of slots of an
    /// expert is load / (k · tokens), so these shares sum to 1. In the load-balancing loss of `transformers`, which extends the loss of
    /// Switch Transformer to several experts per token, the shares sum to k. With sigmoid scores, the probability of an expert is its
    /// sigmoid divided by the sum of the token's sigmoids, by equation 19 of [arXiv 2412.19437](https://arxiv.org/abs/2412.19437). With
    /// documents, the loss is e / (k · tokens) · Σ_t Σ_e p_te · n_e / l, where the document of token t has l tokens, and n_e of the
    /// document's slots chose expert e.
    pub losses: B::Buf<f32>,
}

impl<B: Backend> Route<'_, B> {
    /// The number of tokens of a chunk in sums over tokens. The op first sums the probabilities of the tokens of each chunk, and then adds
    /// the sums of the chunks.
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

/// Computes the gradient of the logits, F32 `[t, e]`, from the gradients of the gate weights and of the two auxiliary losses. The choice of
/// experts, and the biases that affect only this choice, have no gradient.
///
/// A gate weight is w = f·s / D, where s is the score, f is the factor `scale`, and D is the divisor (1 without `normalize`). With
/// `normalize`, the score of a chosen expert has the gradient (f·dw − Σ dw·w) / D; otherwise it has the gradient f·dw. Let ds be this
/// gradient of a score, and b the load of the expert times the factor of the load-balancing loss. For softmax, b is added to ds, and the
/// gradient of a logit is s·(ds − Σ ds·s + z·lse). For sigmoids whose sum is S, (b − Σ b·s / S) / S is added to ds, and the gradient of a
/// logit is ds·s·(1 − s) + z·lse·exp(logit − lse).
#[derive(Debug)]
pub struct RouteBackward<'a, B: Backend> {
    /// The result of [`Route`].
    pub routing: &'a Routing<B>,
    /// The value of [`Route::rule`] in the forward pass.
    pub rule: RouteRule,
    /// The value of [`Route::shards`] in the forward pass.
    pub shards: usize,
    /// The value of [`Route::documents`] in the forward pass, or `None` with `batch_load`.
    pub documents: Option<&'a B::Buf<i32>>,
    /// The gradient of the gate weight of each (token, slot); `t · top_k` values.
    pub dweight: &'a B::Buf<f32>,
    /// The factor by which each load-balancing loss is multiplied in the total loss. There is one such loss per shard, or a single one with
    /// `batch_load`.
    pub aux_scale: f32,
    /// If `batch_load` is given, a single load-balancing loss over the rows of several calls of [`Route`] replaces the losses per shard.
    /// This buffer contains the number of (token, slot) pairs of each expert over all those rows, as `e` whole numbers. This single loss is
    /// e · Σ_e (load / rows) · (mean probability of e).
    pub batch_load: Option<&'a B::Buf<f64>>,
    /// The number of rows over which `batch_load` counts. This number is unused if every shard has its own load-balancing loss.
    pub batch_rows: usize,
    /// The factor by which the z-loss of each shard is multiplied in the total loss.
    pub z_scale: f32,
}

impl<B: Backend> RouteBackward<'_, B> {
    /// How closely the results of two backends must agree.
    pub const AGREEMENT: Agreement = Agreement::Bitwise;

    /// The factors with which the two auxiliary losses enter the gradient of a logit, for t tokens per shard. The load-balancing loss adds
    /// the load of the expert times aux · e / (k · t²). If there is one loss for all rows, this factor is aux · e / rows². With documents,
    /// the loss adds the load of the expert in the document, divided by the number of tokens of the document, times aux · e / (k · t). The
    /// z-loss adds the log-sum-exp of the logits times 2 · z / t.
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
