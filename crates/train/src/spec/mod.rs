//! The description of the model: a tree of parts, built only from a configuration. Each part has an id, a kind, the shapes of its weights,
//! their sharding, and the GEMMs that use them.
//!
//! All other code that needs to know the model reads this tree. This module computes no tensors and does not depend on a backend.
//!
//! ```text
//! ModelConfig ─► ModelSpec ─► Decoder        Param::of, once for each ParamSpec: id, shape, initial values, stacks of experts
//!                    │
//!                    ├─► recipe_layers       the names that recipes' overrides match
//!                    ├─► Family::tensors     names and layouts in checkpoints: one list writes and reads
//!                    ├─► parameters          counts by group, with the keys that determine the counts, for error messages
//!                    ├─► flops_per_token     and Cost::of: a recipe's GEMM flops by the width of the operands' codes
//!                    └─► Layout              cells of the step's record
//! ```
//!
//! The parts and their ids:
//!
//! ```text
//! model.embed_tokens                        or model.patch_embed, for images
//! model.layers.0                            a block: one for each decoder layer
//!   input_layernorm
//!   self_attn                               q_proj  k_proj  v_proj  o_proj, and q_norm  k_norm, and sinks
//!    or                                     q_proj, or q_a_proj  q_a_layernorm  q_b_proj;
//!                                           kv_a_proj  k_rope_proj  kv_a_layernorm  kv_b_proj  o_proj
//!   post_attention_layernorm
//!   mlp                                     gate_up_proj  down_proj, or up_proj  down_proj
//!    or                                     gate  experts, and shared_expert with gate_up_proj  down_proj
//! model.norm
//! lm_head                                   or, where it is tied, the embedding once more
//! ```
//!
//! A block has one of two kinds of attention and one of two kinds of feed-forward half. The two choices are enums, in the description
//! (`AttentionSpec`, `FeedSpec`) and in the model (`Attention`, `Feed`). An id is not a name in a checkpoint. Ids are keys of random
//! numbers, and a [`Family`](crate::family::Family) maps ids to the tensor names and layouts of published checkpoints.

mod count;
mod latent;
mod layers;
mod part;

pub use count::Parameters;
pub use latent::{LatentShape, LatentSpec, QueriesSpec, UpSpec};
pub use layers::{
    AttentionSpec, BlockSpec, FeedSpec, GroupedQueryShape, GroupedQuerySpec, MlpSpec, MoeShape, MoeSpec,
    RouterOptions,
};
pub use part::{Extent, Group, Init, ParamSpec, Part, PartKind, Rope, Size, Update};

use crate::config::{Activation, ModelConfig, NormKind};
use nibble_core::recipe;

/// Standard deviation of initial weights, which is divided by √(2·layers) for projections back into the residual stream.
const INIT_STD: f32 = 0.02;

/// The id of the embedding, and of a tied head.
const EMBED: &str = "model.embed_tokens";
/// The id of the embedding of patches.
const PATCHES: &str = "model.patch_embed";
/// The id of a head with its own weight.
const HEAD: &str = "lm_head";

/// The description of a model.
#[derive(Debug, Clone)]
pub struct ModelSpec {
    /// The rotation of queries and keys.
    pub rope: Rope,
    /// The embedding, `[vocabulary, d]`.
    pub embed: Part,
    /// Runs of decoder layers that have the same parts, in order; no run is empty.
    pub runs: Vec<Run>,
    /// The norm before the head, `[d]`.
    pub norm: Part,
    /// The output head, `[vocabulary, d]`.
    pub head: Part,
    config: ModelConfig,
}

/// Consecutive decoder layers that differ only in their number and in whether their attention has a sliding window.
#[derive(Debug, Clone)]
pub struct Run {
    /// Number of layers of the run.
    pub layers: Size,
    /// How many layers of the run have a sliding window.
    pub sliding: usize,
    /// The first layer.
    pub block: BlockSpec,
}

impl ModelSpec {
    /// The description of a configuration's model.
    #[must_use]
    pub fn new(config: &ModelConfig) -> Self {
        let (vocabulary, d_model) =
            (Size::new("model.vocab_size", config.vocab_size), Size::d_model(config.d_model));
        let tied = config.tie_embeddings;
        let head = if tied { EMBED } else { HEAD };
        // If all layers are of one kind, the key of their number is the key of all layers.
        let key = |of_two| if config.dense_layers == 0 || config.experts == 0 { LAYERS } else { of_two };
        let runs = [
            (0, Size::new(key("model.dense_layers"), config.num_dense())),
            (config.num_dense(), Size::new(key("model.layers - model.dense_layers"), config.num_routed())),
        ];
        let run = |(first, layers): (usize, Size)| {
            let slides = |layer: &usize| config.window_of(*layer).is_some();
            // Without a window, layers are not gone over: there may be any number before a configuration is checked.
            let all = if config.sliding_window > 0 { first..first + layers.value } else { 0..0 };
            (layers.value > 0).then(|| Run {
                layers,
                sliding: all.filter(slides).count(),
                block: block(config, first),
            })
        };
        Self {
            rope: rope(config),
            embed: embedding(config, vocabulary, d_model),
            runs: runs.into_iter().filter_map(run).collect(),
            norm: norm(config, "model.norm"),
            head: Part::head(head, tied, vocabulary, d_model, INIT_STD),
            config: config.clone(),
        }
    }

    /// The decoder layers, in order.
    pub fn blocks(&self) -> impl Iterator<Item = BlockSpec> + '_ {
        (0..self.config.layers).map(|layer| block(&self.config, layer))
    }

    /// Number of decoder layers.
    #[must_use]
    pub fn num_blocks(&self) -> usize {
        self.config.layers
    }

    /// Number of leading decoder layers without a router.
    #[must_use]
    pub fn num_dense(&self) -> usize {
        self.config.num_dense()
    }

    /// The number of experts of a layer with experts.
    #[must_use]
    pub fn num_experts(&self) -> usize {
        self.config.experts
    }

    /// Every part in canonical order. The model's parameters have the same order. A forward pass uses the parts in the same order, except
    /// the norms of heads.
    pub fn parts(&self) -> impl Iterator<Item = Part> + '_ {
        let blocks = self.blocks().flat_map(|block| block.parts().into_iter().cloned().collect::<Vec<_>>());
        let (first, last) = (self.embed.clone(), [self.norm.clone(), self.head.clone()]);
        std::iter::once(first).chain(blocks).chain(last)
    }

    /// Every parameter, in canonical order.
    pub fn params(&self) -> impl Iterator<Item = ParamSpec> + '_ {
        self.parts().flat_map(|part| part.params().to_vec())
    }

    /// The layers for which recipes have settings, in the order of a forward pass.
    #[must_use]
    pub fn recipe_layers(&self) -> Vec<recipe::Layer> {
        let of_block =
            |block: BlockSpec| block.parts().into_iter().filter_map(Part::layer).collect::<Vec<_>>();
        self.blocks().flat_map(of_block).chain(self.head.layer()).collect()
    }
}

/// The embedding of tokens, or of the patches of images.
fn embedding(config: &ModelConfig, vocabulary: Size, d_model: Size) -> Part {
    if !config.sees_images() {
        return Part::embedding(EMBED, vocabulary, d_model, INIT_STD);
    }
    let positions = Size::new("data.seq_len", config.num_patches() + 1);
    let pixels = Size::new("model.patch_size", config.patch_size.pow(2));
    Part::patches(PATCHES, (positions, pixels), d_model, INIT_STD)
}

/// The key for the number of decoder layers.
const LAYERS: &str = "model.layers";

/// The rotation of queries and keys, for the last elements of each head or for all elements.
fn rope(config: &ModelConfig) -> Rope {
    let dim = if config.kv_rank > 0 { config.rope_dim } else { config.head_dim };
    // Positions of images have learned vectors.
    let theta = if config.sees_images() { 0.0 } else { config.rope_theta };
    Rope { dim, theta, scaling: config.rope_scaling }
}

/// The attention of the decoder layer of this number, with this id.
fn attention(config: &ModelConfig, layer: usize, id: &str, stds: [f32; 2]) -> AttentionSpec {
    let window = config.window_of(layer);
    let (d_model, heads, value_dim) = (config.d_model, config.heads, config.value_head_dim());
    if config.kv_rank > 0 {
        let shape = LatentShape {
            d_model,
            heads,
            nope_dim: config.head_dim.saturating_sub(config.rope_dim),
            rope_dim: config.rope_dim,
            value_dim,
            q_rank: config.q_rank,
            kv_rank: config.kv_rank,
            window,
        };
        return AttentionSpec::Latent(LatentSpec::new(id, shape, rope(config), stds));
    }
    let shape = GroupedQueryShape {
        d_model,
        heads,
        kv_heads: config.kv_heads,
        head_dim: config.head_dim,
        value_dim,
        qk_norm: config.qk_norm,
        qkv_bias: config.qkv_bias,
        o_bias: config.o_bias,
        sinks: config.attention_sinks,
        causal: config.causal,
        window,
    };
    AttentionSpec::GroupedQuery(GroupedQuerySpec::new(id, shape, config.norm_eps as f32, stds))
}

/// The norm of the residual stream with this id.
fn norm(config: &ModelConfig, id: &str) -> Part {
    let norm = Part::norm(id, Size::d_model(config.d_model), Group::Norms);
    if config.norm == NormKind::Layer { norm.with_norm_bias() } else { norm }
}

/// The decoder layer with this number.
fn block(config: &ModelConfig, layer: usize) -> BlockSpec {
    let id = format!("model.layers.{layer}");
    let norm = |part: &str| norm(config, &format!("{id}.{part}"));
    let stds = [INIT_STD, INIT_STD / (2.0 * config.layers as f32).sqrt()];
    BlockSpec {
        attn_norm: norm("input_layernorm"),
        attn: attention(config, layer, &format!("{id}.self_attn"), stds),
        mlp_norm: norm("post_attention_layernorm"),
        feed: feed(config, layer, &format!("{id}.mlp"), stds),
        eps: config.norm_eps as f32,
    }
}

/// The second half of a decoder layer: an MLP in the first layers, experts in the other layers.
fn feed(config: &ModelConfig, layer: usize, id: &str, stds: [f32; 2]) -> FeedSpec {
    let mlp = |id: &str, group, ffn| {
        let mlp = MlpSpec::new(id, group, (config.d_model, ffn), stds);
        let mlp = if config.activation == Activation::Gelu { mlp.with_gelu(stds[0]) } else { mlp };
        if config.mlp_bias { mlp.with_biases() } else { mlp }
    };
    if layer < config.num_dense() {
        return FeedSpec::Dense(mlp(id, Group::Mlps, config.ffn));
    }
    let shape = MoeShape {
        d_model: config.d_model,
        ffn: config.expert_ffn,
        experts: config.experts,
        top_k: config.top_k,
        normalize: config.norm_topk_prob,
        aux_coef: config.aux_loss_coef as f32,
        z_coef: config.z_loss_coef as f32,
    };
    let shared = (config.shared_ffn > 0)
        .then(|| mlp(&format!("{id}.shared_expert"), Group::SharedExperts, config.shared_ffn));
    let options = RouterOptions {
        scores: config.scores.into(),
        groups: config.expert_groups(),
        scale: config.route_scale as f32,
        has_bias: config.router_bias,
        balance: config.balance,
    };
    FeedSpec::Experts { moe: MoeSpec::with_options(id, shape, options, stds), shared }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::QkNorm;

    /// Ids are keys of every random number of a run, so the ids must never change.
    #[test]
    fn ids_of_a_model_with_everything() {
        let config = ModelConfig {
            vocab_size: 10,
            dense_layers: 1,
            ffn: 96,
            shared_ffn: 32,
            router_bias: true,
            qkv_bias: true,
            attention_sinks: true,
            tie_embeddings: false,
            ..ModelConfig::default()
        };
        let ids: Vec<String> = ModelSpec::new(&config).params().map(|param| param.id).collect();
        let layer = |layer: usize, feed: &[&str]| -> Vec<String> {
            let attention = [
                "input_layernorm.weight",
                "self_attn.q_proj.weight",
                "self_attn.q_proj.bias",
                "self_attn.k_proj.weight",
                "self_attn.k_proj.bias",
                "self_attn.v_proj.weight",
                "self_attn.v_proj.bias",
                "self_attn.o_proj.weight",
                "self_attn.q_norm.weight",
                "self_attn.k_norm.weight",
                "self_attn.sinks",
                "post_attention_layernorm.weight",
            ];
            attention.iter().chain(feed).map(|part| format!("model.layers.{layer}.{part}")).collect()
        };
        let dense = ["mlp.gate_up_proj.weight", "mlp.down_proj.weight"];
        let routed = [
            "mlp.gate.weight",
            "mlp.gate.e_score_correction_bias",
            "mlp.experts.gate_up_proj",
            "mlp.experts.down_proj",
            "mlp.shared_expert.gate_up_proj.weight",
            "mlp.shared_expert.down_proj.weight",
        ];
        let ends = |ids: &[&str]| ids.iter().map(ToString::to_string).collect::<Vec<_>>();
        let expected = [
            ends(&["model.embed_tokens.weight"]),
            layer(0, &dense),
            layer(1, &routed),
            ends(&["model.norm.weight", "lm_head.weight"]),
        ];
        assert_eq!(ids, expected.concat());
    }

    #[test]
    fn ids_and_shapes_of_latent_attention() {
        let config = |q_rank| ModelConfig {
            kv_heads: 4,
            qk_norm: QkNorm::None,
            kv_rank: 40,
            q_rank,
            rope_dim: 6,
            value_head_dim: 12,
            ..ModelConfig::default()
        };
        let of = |q_rank| -> Vec<(String, (usize, usize))> {
            let spec = ModelSpec::new(&config(q_rank));
            let params = spec.params().filter(|param| param.id.starts_with("model.layers.1.self_attn."));
            let short = |id: &str| id["model.layers.1.self_attn.".len()..].to_owned();
            params.map(|param| (short(&param.id), param.shape())).collect()
        };
        // The model has d 64, and 4 heads of 16 elements, 6 of which are rotated; values have 12 elements.
        let rest = [
            ("kv_a_proj.weight", (40, 64)),
            ("k_rope_proj.weight", (6, 64)),
            ("kv_a_layernorm.weight", (1, 40)),
            ("kv_b_proj.weight", (4 * (10 + 12), 40)),
            ("o_proj.weight", (64, 4 * 12)),
        ];
        let latent = [
            ("q_a_proj.weight", (24, 64)),
            ("q_a_layernorm.weight", (1, 24)),
            ("q_b_proj.weight", (4 * 16, 24)),
        ];
        let named = |parts: &[(&str, (usize, usize))]| {
            parts.iter().map(|(id, shape)| ((*id).to_owned(), *shape)).collect::<Vec<_>>()
        };
        assert_eq!(of(24), named(&[&latent[..], &rest].concat()));
        assert_eq!(of(0), named(&[&[("q_proj.weight", (64, 64))][..], &rest].concat()));
        assert_eq!(ModelSpec::new(&config(0)).rope.dim, 6);
    }

    #[test]
    fn a_tied_head_has_the_embeddings_id_and_no_parameter() {
        let spec = ModelSpec::new(&ModelConfig { vocab_size: 10, ..ModelConfig::default() });
        assert_eq!((spec.head.id.as_str(), spec.head.params().len()), ("model.embed_tokens", 0));
        assert_eq!(spec.head.weights()[0].id, spec.embed.weights()[0].id);
        assert_eq!(spec.head.layer().unwrap().kind, recipe::LayerKind::Head);
        assert!(spec.embed.layer().is_none());
    }

    #[test]
    fn runs_are_the_blocks_but_for_their_numbers() {
        for (dense_layers, experts) in [(0, 8), (1, 8), (0, 0)] {
            let config = ModelConfig { layers: 3, dense_layers, experts, ffn: 96, ..ModelConfig::default() };
            let spec = ModelSpec::new(&config);
            let of_runs = spec.runs.iter().flat_map(|run| vec![run.block.parts().len(); run.layers.value]);
            let of_blocks: Vec<usize> = spec.blocks().map(|block| block.parts().len()).collect();
            assert_eq!(of_runs.collect::<Vec<_>>(), of_blocks);
            assert_eq!(of_blocks.len(), spec.num_blocks());
        }
    }
}
