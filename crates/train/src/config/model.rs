//! The table `[model]`: the shape of a decoder and its losses.

use super::require::{fail, require};
use super::{
    Activation, GroupScore, LayerAttention, NormKind, QkNorm, RopeScaling, Scores, is_default, is_one,
    is_true,
};
use crate::error::Result;
use nibble_core::ops::ExpertGroups;
use serde::{Deserialize, Serialize};

/// The shape of a decoder. Each layer has attention (grouped-query, or latent as in DeepSeek), followed by experts (as in Qwen3-MoE) or by
/// one MLP (as in Qwen3 and Llama).
///
/// A configuration without experts omits the keys of experts: `top_k`, `expert_ffn`, `shared_ffn`, `norm_topk_prob`, and the keys of the
/// router's losses. For a model without experts, the values of the keys of experts are 0 or false.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ModelConfig {
    /// Number of rows of the embedding; 0 means the vocabulary size of the data. For an image classifier, `vocab_size` is the number of
    /// classes.
    pub vocab_size: usize,
    /// Side in pixels of the square images of an image classifier; 0 means a language model. Images must have a single channel.
    #[serde(skip_serializing_if = "is_default")]
    pub image_size: usize,
    /// Side in pixels of the square patches into which an image is divided. The side must divide `image_size`. A linear layer embeds each
    /// patch, and each position has a learned vector instead of RoPE.
    #[serde(skip_serializing_if = "is_default")]
    pub patch_size: usize,
    /// Width of the residual stream.
    pub d_model: usize,
    /// Number of decoder layers.
    pub layers: usize,
    /// Number of query heads.
    pub heads: usize,
    /// Number of key and value heads, which must divide `heads`.
    pub kv_heads: usize,
    /// Width of a head of queries and keys. The width must be even, because RoPE rotates pairs of elements.
    pub head_dim: usize,
    /// Width of a head of values; 0 means the same width as `head_dim`. See [`ModelConfig::value_head_dim`].
    pub value_head_dim: usize,
    /// The RMSNorm of queries and keys before RoPE. `true` normalizes each head separately, as in Qwen3. `"width"` normalizes all heads
    /// together, as in OLMoE. `false` means no norm, as in Llama.
    pub qk_norm: QkNorm,
    /// Whether the projections to queries, keys and values have biases, as in Qwen2.5. Not available with `kv_rank`.
    #[serde(skip_serializing_if = "is_default")]
    pub qkv_bias: bool,
    /// Whether the projection of attention's output has a bias. Not available with `kv_rank`.
    #[serde(skip_serializing_if = "is_default")]
    pub o_bias: bool,
    /// Whether each query head has an attention sink, as in GPT-OSS: a learnt logit that takes part in the head's softmax but has no value
    /// vector. Not available with `kv_rank`.
    #[serde(skip_serializing_if = "is_default")]
    pub attention_sinks: bool,
    /// Whether attention is causal: a query attends to no key after its own position. If `false`, each query attends to its whole sequence.
    /// Only image classifiers (`data.labels`) allow `false`, because a language model would see the token that it predicts.
    #[serde(skip_serializing_if = "is_true")]
    pub causal: bool,
    /// Sliding window: the largest number of keys that a query attends to, including its own key, as in Mistral; 0 means no limit.
    #[serde(skip_serializing_if = "is_default")]
    pub sliding_window: usize,
    /// The layers with the sliding window, as a pattern that repeats over the layers. For example, `["sliding", "full"]` gives the window
    /// to layers 0, 2, 4…, as in GPT-OSS. An empty list means that all layers have the sliding window.
    #[serde(skip_serializing_if = "is_default")]
    pub sliding_window_layers: Vec<LayerAttention>,
    /// The norm of the residual stream: `rms`, or `layer` for LayerNorm, which has biases.
    #[serde(skip_serializing_if = "is_default")]
    pub norm: NormKind,
    /// The nonlinearity of an MLP: `swiglu`, or `gelu`, which has a single projection before the nonlinearity. Only without experts.
    #[serde(skip_serializing_if = "is_default")]
    pub activation: Activation,
    /// Whether the projections of MLPs have biases. Only without experts.
    #[serde(skip_serializing_if = "is_default")]
    pub mlp_bias: bool,
    /// Hidden width of the MLP in a dense layer; 0 means that no layer is dense.
    pub ffn: usize,
    /// Number of dense layers in a model with experts. The dense layers precede the layers with experts. In a model without experts, all
    /// layers are dense and `dense_layers` is 0.
    pub dense_layers: usize,
    /// Number of experts of a layer; 0 means that every layer is dense.
    pub experts: usize,
    /// Number of experts to which a token is sent.
    pub top_k: usize,
    /// Width inside an expert.
    pub expert_ffn: usize,
    /// Hidden width of the shared expert, which processes every token; 0 means no shared expert.
    pub shared_ffn: usize,
    /// Whether the weights of a token's selected experts are normalized to sum to 1.
    pub norm_topk_prob: bool,
    /// Largest number of tokens of a sequence, in training and generation; 0 means `data.seq_len`. See
    /// [`Config::positions`](super::Config::positions).
    #[serde(skip_serializing_if = "is_default")]
    pub max_positions: usize,
    /// The router's score function: `softmax` or `sigmoid`.
    #[serde(skip_serializing_if = "is_default")]
    pub scores: Scores,
    /// Whether each expert has a bias. The bias is added to the expert's score only for the selection of experts. The bias has no gradient,
    /// but changes in each step by `train.router_bias_rate`.
    #[serde(skip_serializing_if = "is_default")]
    pub router_bias: bool,
    /// Number of groups into which the experts are divided; 0 means no groups. Each group consists of equally many consecutive experts.
    #[serde(skip_serializing_if = "is_default")]
    pub groups: usize,
    /// Number of groups from which a token's experts are selected. The groups with the best scores for the token are used.
    #[serde(skip_serializing_if = "is_default")]
    pub top_groups: usize,
    /// How a group is scored. `max` takes the score of the group's best expert, and `top2` takes the sum of the scores of the group's two
    /// best experts.
    #[serde(skip_serializing_if = "is_default")]
    pub group_score: GroupScore,
    /// Factor by which the weights of a token's experts are multiplied, as the last step of routing.
    #[serde(skip_serializing_if = "is_one")]
    pub route_scale: f64,
    /// Base of the RoPE frequencies.
    pub rope_theta: f64,
    /// ε of RMSNorm and LayerNorm.
    pub norm_eps: f64,
    /// Whether the output head shares the embedding's weight.
    pub tie_embeddings: bool,
    /// Weight of the load-balancing loss. The loss is summed over layers with experts and averaged over a step's shards and micro-batches.
    /// Under `balance = "shard"`, the loss of one layer and one shard is (number of experts) · Σ f · p, summed over the experts. In this
    /// formula, f is the fraction of the shard's token slots that the expert gets, and p is the expert's mean probability in the shard.
    /// Under uniform routing, the load-balancing loss is 1. The setting `train.shards` therefore determines the number of tokens over which
    /// the loss balances the experts. The load-balancing loss of `transformers` is defined differently. In an exported `config.json`,
    /// `router_aux_loss_coef` is therefore `aux_loss_coef` times (number of layers with experts) / `top_k`.
    pub aux_loss_coef: f64,
    /// The set of tokens over which the load-balancing loss balances experts: `shard`, `sequence`, or `batch`. `batch` gives the loss of
    /// `transformers`.
    #[serde(skip_serializing_if = "is_default")]
    pub balance: Balance,
    /// Weight of the router's z-loss.
    pub z_loss_coef: f64,
    /// Width of the latent vector from which the keys and values of all heads are projected, as in DeepSeek-V2 and V3; 0 means
    /// grouped-query attention. If `kv_rank` is not 0, `kv_heads` must equal `heads`, and `qk_norm`, `qkv_bias` and `attention_sinks` must
    /// be false.
    #[serde(skip_serializing_if = "is_default")]
    pub kv_rank: usize,
    /// Width of the latent vector from which the queries of all heads are projected; 0 means that queries are projected directly from the
    /// layer's input. Requires `kv_rank`.
    #[serde(skip_serializing_if = "is_default")]
    pub q_rank: usize,
    /// Number of elements that RoPE rotates in each query and key. The rotated elements are the last of the `head_dim` elements. All heads
    /// share the rotated elements of the keys. The number of rotated elements must be even and less than `head_dim`. Without `kv_rank`,
    /// RoPE rotates all elements and `rope_dim` is 0.
    #[serde(skip_serializing_if = "is_default")]
    pub rope_dim: usize,
    /// Scaling of the RoPE frequencies for longer contexts.
    #[serde(skip_serializing_if = "is_default")]
    pub rope_scaling: RopeScaling,
}

impl ModelConfig {
    /// Width of one head's values, after the default of the key `value_head_dim` is resolved. The attention output of a head has the same
    /// width as the head's values.
    #[must_use]
    pub fn value_head_dim(&self) -> usize {
        if self.value_head_dim == 0 { self.head_dim } else { self.value_head_dim }
    }
}

impl ModelConfig {
    /// Whether the model classifies images.
    #[must_use]
    pub fn sees_images(&self) -> bool {
        self.patch_size > 0
    }

    /// Number of patches of an image; 0 for a language model.
    #[must_use]
    pub fn num_patches(&self) -> usize {
        self.image_size.checked_div(self.patch_size).unwrap_or(0).pow(2)
    }
}

impl Default for ModelConfig {
    fn default() -> Self {
        Self {
            vocab_size: 0,
            image_size: 0,
            patch_size: 0,
            d_model: 64,
            layers: 2,
            heads: 4,
            kv_heads: 2,
            head_dim: 16,
            value_head_dim: 0,
            qk_norm: QkNorm::Heads,
            qkv_bias: false,
            o_bias: false,
            attention_sinks: false,
            causal: true,
            sliding_window: 0,
            sliding_window_layers: Vec::new(),
            norm: NormKind::Rms,
            activation: Activation::Swiglu,
            mlp_bias: false,
            ffn: 0,
            dense_layers: 0,
            experts: 8,
            top_k: 2,
            expert_ffn: 64,
            shared_ffn: 0,
            norm_topk_prob: true,
            max_positions: 0,
            scores: Scores::Softmax,
            router_bias: false,
            groups: 0,
            top_groups: 0,
            group_score: GroupScore::Max,
            route_scale: 1.0,
            rope_theta: 10_000.0,
            norm_eps: 1e-6,
            tie_embeddings: true,
            aux_loss_coef: 0.01,
            balance: Balance::Shard,
            z_loss_coef: 0.001,
            kv_rank: 0,
            q_rank: 0,
            rope_dim: 0,
            rope_scaling: RopeScaling::default(),
        }
    }
}

impl ModelConfig {
    /// Number of dense layers, which are the first layers.
    #[must_use]
    pub fn num_dense(&self) -> usize {
        if self.experts == 0 { self.layers } else { self.dense_layers.min(self.layers) }
    }

    /// Number of layers with experts, which follow the dense layers.
    #[must_use]
    pub fn num_routed(&self) -> usize {
        self.layers - self.num_dense()
    }
}

impl ModelConfig {
    /// The groups from which experts are selected, if there are groups.
    #[must_use]
    pub fn expert_groups(&self) -> Option<ExpertGroups> {
        let (count, top) = (self.groups, self.top_groups);
        (count > 0).then(|| ExpertGroups { count, top, score: self.group_score.into() })
    }

    /// Checks the groups of experts and the factor of the experts' weights.
    pub(super) fn validate_routing(&self) -> Result<()> {
        let (experts, groups, top) = (self.experts, self.groups, self.top_groups);
        let scale = self.route_scale;
        require(scale.is_finite() && scale > 0.0, "model.route_scale", || {
            format!("is {scale:?}, expected a number above 0")
        })?;
        if groups == 0 {
            return match top {
                0 => Ok(()),
                _ => {
                    fail("model.top_groups", format!("is {top}, but model.groups = 0: set model.groups too"))
                }
            };
        }
        require(experts.is_multiple_of(groups), "model.groups", || {
            format!("is {groups}, not a divisor of model.experts = {experts}")
        })?;
        require((1..=groups).contains(&top), "model.top_groups", || {
            format!("is {top}, expected 1 to model.groups = {groups}")
        })?;
        let each = experts / groups;
        require(self.top_k <= top * each, "model.top_k", || {
            format!(
                "is {}, more than the {} experts in model.top_groups = {top} groups (model.groups = {groups})",
                self.top_k,
                top * each
            )
        })?;
        require(self.group_score == GroupScore::Max || each >= 2, "model.group_score", || {
            format!(
                "is \"top2\", but with model.groups = {groups} each group has {each} expert: use \"max\", or fewer groups"
            )
        })
    }
}

/// The set of tokens over which the load-balancing loss balances experts, as written in a configuration.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Balance {
    /// A separate loss for each layer and shard, summed over layers and averaged over shards. The loss of a layer and shard is 1 under
    /// uniform routing.
    #[default]
    Shard,
    /// One loss for all layers, shards and ranks of a micro-batch, like `load_balancing_loss_func` of `transformers`: experts · Σ (an
    /// expert's tokens per row) · (the expert's mean probability), where each token has one row per layer with experts. The loss is `top_k`
    /// under uniform routing, and does not depend on `train.shards`.
    Batch,
    /// A separate loss for each layer and sequence, averaged over sequences, as in DeepSeek-V2 and -V3 ([arXiv
    /// 2412.19437](https://arxiv.org/abs/2412.19437), equations 17 to 20). The formula is that of `Shard`, with sequences instead of
    /// shards.
    Sequence,
}

impl Balance {
    /// The name of this variant in a configuration.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Shard => "shard",
            Self::Batch => "batch",
            Self::Sequence => "sequence",
        }
    }
}
