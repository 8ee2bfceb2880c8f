//! Layers that consist of several parts: attention, an MLP, a mixture of experts. Dimensions: d model, h heads, g key/value heads, c
//! head_dim, u value_dim, f ffn, e experts.

use super::{Extent, Group, LatentSpec, Part, Size};
use crate::config::{Activation, Balance, QkNorm};
use nibble_core::ops::{ExpertGroups, RouteRule, Scores};

/// Sizes of grouped-query attention.
#[derive(Debug, Clone, Copy)]
pub struct GroupedQueryShape {
    /// Model width.
    pub d_model: usize,
    /// Number of query heads.
    pub heads: usize,
    /// Number of key and value heads.
    pub kv_heads: usize,
    /// Number of elements of a head of queries and keys.
    pub head_dim: usize,
    /// Number of elements of a head of values.
    pub value_dim: usize,
    /// Whether queries and keys are normalized, and over which elements.
    pub qk_norm: QkNorm,
    /// Whether the projections to queries, keys and values have biases.
    pub qkv_bias: bool,
    /// Whether the projection of attention's output has a bias.
    pub o_bias: bool,
    /// Whether each query head has an attention sink.
    pub sinks: bool,
    /// Whether a query attends only to keys up to its own position.
    pub causal: bool,
    /// The largest number of keys to which a query attends; `None` means all keys of its document up to the query's own position.
    pub window: Option<usize>,
}

/// Attention in which several heads of queries share keys and values.
#[derive(Debug, Clone)]
pub struct GroupedQuerySpec {
    /// The id of the layer, such as `model.layers.3.self_attn`.
    pub id: String,
    /// The layer's sizes.
    pub shape: GroupedQueryShape,
    /// The projection to queries, `[h·c, d]`, and its bias `[h·c]` if there is one.
    pub q: Part,
    /// The projection to keys, `[g·c, d]`, and its bias `[g·c]` if there is one.
    pub k: Part,
    /// The projection to values, `[g·u, d]`, and its bias `[g·u]` if there is one.
    pub v: Part,
    /// The projection of attention's output, `[d, h·u]`, and its bias `[d]` if there is one.
    pub o: Part,
    /// Norms of queries and of keys. A norm over each head has a weight `[c]`; norms over all heads together have the weights `[h·c]` and
    /// `[g·c]`.
    pub norms: Option<[Part; 2]>,
    /// Attention sinks `[h]`: each query head has one additional score that belongs to no key.
    pub sinks: Option<Part>,
    /// ε of the norms.
    pub eps: f32,
}

impl GroupedQuerySpec {
    /// Describes grouped-query attention of these sizes. The second standard deviation applies to the initial weights of the output
    /// projection.
    #[must_use]
    pub fn new(id: &str, shape: GroupedQueryShape, eps: f32, [std, out_std]: [f32; 2]) -> Self {
        const GROUP: Group = Group::Attention;
        let (heads, kv_heads) =
            (Size::new("model.heads", shape.heads), Size::new("model.kv_heads", shape.kv_heads));
        let head_dim = Size::new("model.head_dim", shape.head_dim);
        // A configuration may leave out the width of values. Values are then as wide as keys.
        let value_dim = match shape.value_dim == shape.head_dim {
            true => head_dim,
            false => Size::new("model.value_head_dim", shape.value_dim),
        };
        let d_model = Extent::of(&[Size::d_model(shape.d_model)]);
        let into = |part: &str, heads, dim| {
            let (id, rows) = (format!("{id}.{part}"), Extent::of(&[heads, dim]));
            let part_of = Part::linear(id, false, GROUP, rows, d_model.clone(), std);
            if shape.qkv_bias { part_of.with_bias() } else { part_of }
        };
        let norm = |part: &str, width: &[Size]| Part::norm_over(&format!("{id}.{part}"), width, GROUP);
        let norms = match shape.qk_norm {
            QkNorm::None => None,
            QkNorm::Heads => Some(["q_norm", "k_norm"].map(|part| norm(part, &[head_dim]))),
            QkNorm::Width => {
                Some([norm("q_norm", &[heads, head_dim]), norm("k_norm", &[kv_heads, head_dim])])
            }
        };
        let values = Extent::of(&[heads, value_dim]);
        let o = Part::linear(format!("{id}.o_proj"), false, GROUP, d_model.clone(), values, out_std);
        Self {
            id: id.to_owned(),
            shape,
            q: into("q_proj", heads, head_dim),
            k: into("k_proj", kv_heads, head_dim),
            v: into("v_proj", kv_heads, value_dim),
            o: if shape.o_bias { o.with_bias() } else { o },
            norms,
            sinks: shape.sinks.then(|| Part::sinks(format!("{id}.sinks"), heads, std)),
            eps,
        }
    }

    /// The layer's parts, in canonical order.
    pub fn parts(&self) -> impl Iterator<Item = &Part> {
        let linears = [&self.q, &self.k, &self.v, &self.o];
        linears.into_iter().chain(self.norms.iter().flatten()).chain(&self.sinks)
    }

    fn pair_multiply_adds(&self) -> usize {
        let GroupedQueryShape { heads, head_dim, value_dim, .. } = self.shape;
        heads * (head_dim + value_dim)
    }

    /// Approximate number of values per token that a forward pass saves: the input, queries, keys, values and the output.
    fn kept_values(&self) -> f64 {
        let GroupedQueryShape { d_model, heads, head_dim, value_dim, .. } = self.shape;
        d_model as f64 + 2.0 * heads as f64 * (head_dim + value_dim) as f64
    }
}

/// Attention of a decoder layer.
#[derive(Debug, Clone)]
// A decoder layer stores one of the variants in place, so a box would save nothing.
#[allow(clippy::large_enum_variant)]
pub enum AttentionSpec {
    /// Attention in which several heads of queries share keys and values.
    GroupedQuery(GroupedQuerySpec),
    /// Attention whose keys and values are projected from a latent.
    Latent(LatentSpec),
}

impl AttentionSpec {
    /// The id of the layer, such as `model.layers.3.self_attn`.
    #[must_use]
    pub fn id(&self) -> &str {
        match self {
            Self::GroupedQuery(spec) => &spec.id,
            Self::Latent(spec) => &spec.id,
        }
    }

    /// The layer's parts, in canonical order.
    #[must_use]
    pub fn parts(&self) -> Vec<&Part> {
        match self {
            Self::GroupedQuery(spec) => spec.parts().collect(),
            Self::Latent(spec) => spec.parts().collect(),
        }
    }

    /// The projections that read the layer's input, in the order of their gradients. If the precisions of these projections agree, the
    /// input is converted only once for all of them.
    #[must_use]
    pub fn inputs(&self) -> [&Part; 3] {
        match self {
            Self::GroupedQuery(spec) => [&spec.q, &spec.k, &spec.v],
            Self::Latent(spec) => spec.inputs(),
        }
    }

    /// The projections whose inputs are latents.
    #[must_use]
    pub fn of_latents(&self) -> Vec<&Part> {
        match self {
            Self::GroupedQuery(_) => Vec::new(),
            Self::Latent(spec) => spec.ups().map(|up| &up.up).collect(),
        }
    }

    /// The projection of attention's output.
    #[must_use]
    pub fn out(&self) -> &Part {
        match self {
            Self::GroupedQuery(spec) => &spec.o,
            Self::Latent(spec) => &spec.o,
        }
    }

    /// Number of multiply-adds per query-key pair, for the scores and for the weighted values.
    #[must_use]
    pub fn pair_multiply_adds(&self) -> usize {
        match self {
            Self::GroupedQuery(spec) => spec.pair_multiply_adds(),
            Self::Latent(spec) => spec.pair_multiply_adds(),
        }
    }

    fn kept_values(&self) -> f64 {
        match self {
            Self::GroupedQuery(spec) => spec.kept_values(),
            Self::Latent(spec) => spec.kept_values(),
        }
    }
}

/// An MLP: the MLP of a dense layer, or the shared expert.
#[derive(Debug, Clone)]
pub struct MlpSpec {
    /// The id of the layer: `model.layers.3.mlp`, or `model.layers.3.mlp.shared_expert`.
    pub id: String,
    /// The activation function between the projections.
    pub activation: Activation,
    /// The gated projection, `[2f, d]`: the rows of the gate precede the rows of the up projection. For GELU, the up projection `[f, d]`.
    /// A bias follows the weight if there is one.
    pub gate_up: Part,
    /// The down projection, `[d, f]`, and its bias `[d]` if there is one.
    pub down: Part,
}

impl MlpSpec {
    /// Describes an MLP of these widths. `group` is the group of dense layers' MLPs or of shared experts. The second standard deviation
    /// applies to the initial weights of the down projection.
    #[must_use]
    pub fn new(id: &str, group: Group, (d_model, ffn): (usize, usize), [std, out_std]: [f32; 2]) -> Self {
        let key = if group == Group::SharedExperts { "model.shared_ffn" } else { "model.ffn" };
        let (outside, inside) = (Extent::of(&[Size::d_model(d_model)]), Extent::of(&[Size::new(key, ffn)]));
        let both = Extent { times: 2, ..inside.clone() };
        let (gate_up, down) = (format!("{id}.gate_up_proj"), format!("{id}.down_proj"));
        Self {
            id: id.to_owned(),
            activation: Activation::Swiglu,
            gate_up: Part::linear(gate_up, true, group, both, outside.clone(), std),
            down: Part::linear(down, false, group, outside, inside, out_std),
        }
    }

    /// The same MLP with GELU and a single input projection instead of SwiGLU, with the same widths. `std`: as in [`MlpSpec::new`].
    #[must_use]
    pub fn with_gelu(self, std: f32) -> Self {
        let weight = &self.gate_up.weights()[0];
        let (rows, cols) = (Extent { times: 1, ..weight.rows.clone() }, weight.cols.clone());
        let up = Part::linear(format!("{}.up_proj", self.id), false, self.gate_up.group, rows, cols, std);
        Self { activation: Activation::Gelu, gate_up: up, ..self }
    }

    /// The MLP with a bias for each output of both projections.
    #[must_use]
    pub fn with_biases(self) -> Self {
        Self { gate_up: self.gate_up.with_bias(), down: self.down.with_bias(), ..self }
    }

    /// The MLP's parts, in canonical order.
    pub fn parts(&self) -> impl Iterator<Item = &Part> {
        [&self.gate_up, &self.down].into_iter()
    }

    /// Approximate number of values per token that a forward pass saves: the inputs of each GEMM and of SwiGLU or GELU.
    fn kept_values(&self) -> f64 {
        let matrices = |part: &Part| part.weights().first().cloned();
        let inputs: f64 = self.parts().filter_map(matrices).map(|weight| weight.cols.len() as f64).sum();
        inputs + matrices(&self.gate_up).map_or(0.0, |weight| weight.rows.len() as f64)
    }
}

/// Sizes of a mixture-of-experts layer.
#[derive(Debug, Clone, Copy)]
pub struct MoeShape {
    /// Model width.
    pub d_model: usize,
    /// Width inside an expert.
    pub ffn: usize,
    /// Number of experts over all ranks.
    pub experts: usize,
    /// Number of experts per token.
    pub top_k: usize,
    /// Whether the gate weights are divided by their sum.
    pub normalize: bool,
    /// Factor of the load-balancing loss.
    pub aux_coef: f32,
    /// Factor of the z-loss.
    pub z_coef: f32,
}

/// How a router differs from the default router, which selects the experts with the largest softmax probabilities.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RouterOptions {
    /// The function that converts logits to scores.
    pub scores: Scores,
    /// The groups of experts, from which the best groups are selected first.
    pub groups: Option<ExpertGroups>,
    /// Factor of the gate weights.
    pub scale: f32,
    /// Whether each expert has a bias that affects only the selection.
    pub has_bias: bool,
    /// The set of tokens over which the load-balancing loss is computed.
    pub balance: Balance,
}

impl Default for RouterOptions {
    fn default() -> Self {
        Self { scores: Scores::Softmax, groups: None, scale: 1.0, has_bias: false, balance: Balance::Shard }
    }
}

/// Router and experts of a decoder layer.
#[derive(Debug, Clone)]
pub struct MoeSpec {
    /// The id of the layer, such as `model.layers.3.mlp`.
    pub id: String,
    /// The layer's sizes, and the factors of the router's losses.
    pub shape: MoeShape,
    /// How the router differs from the default router.
    pub options: RouterOptions,
    /// The router's weight `[e, d]`, and the bias for the selection, `[e]`, if there is one.
    pub router: Part,
    /// The experts' stacked projections, `[e · 2f, d]` and `[e · d, f]`.
    pub experts: Part,
}

impl MoeSpec {
    /// Describes a mixture of experts of these sizes. The second standard deviation applies to the initial weights of the experts' down
    /// projections.
    #[must_use]
    pub fn new(id: &str, shape: MoeShape, stds: [f32; 2]) -> Self {
        Self::with_options(id, shape, RouterOptions::default(), stds)
    }

    /// Like [`MoeSpec::new`], but the router has these options.
    #[must_use]
    pub fn with_options(id: &str, shape: MoeShape, options: RouterOptions, stds: [f32; 2]) -> Self {
        let (experts, d_model) = (Size::new("model.experts", shape.experts), Size::d_model(shape.d_model));
        let ffn = Size::new("model.expert_ffn", shape.ffn);
        Self {
            id: id.to_owned(),
            shape,
            options,
            router: Part::router(format!("{id}.gate"), (experts, d_model), stds[0], options.has_bias),
            experts: Part::experts(format!("{id}.experts"), (experts, shape.top_k), (d_model, ffn), stds),
        }
    }

    /// The layer's parts, in canonical order.
    pub fn parts(&self) -> impl Iterator<Item = &Part> {
        [&self.router, &self.experts].into_iter()
    }

    /// The rule by which the router selects experts and computes gate weights.
    #[must_use]
    pub fn rule(&self) -> RouteRule {
        let (MoeShape { top_k, normalize, .. }, RouterOptions { scores, groups, scale, .. }) =
            (self.shape, self.options);
        RouteRule { scores, top_k, normalize, groups, scale, in_turn: false }
    }

    /// Approximate number of values per token that a forward pass saves: input and output of the first GEMM, for each of the token's
    /// experts.
    fn kept_values(&self) -> f64 {
        let MoeShape { top_k, d_model, ffn, .. } = self.shape;
        top_k as f64 * (d_model as f64 + 2.0 * ffn as f64)
    }
}

/// The second half of a decoder layer, after attention.
#[derive(Debug, Clone)]
// A decoder layer stores one of the variants in place, so a box would save nothing.
#[allow(clippy::large_enum_variant)]
pub enum FeedSpec {
    /// One MLP, which processes all tokens.
    Dense(MlpSpec),
    /// Experts, of which each token passes some.
    Experts {
        /// Router and experts.
        moe: MoeSpec,
        /// The shared expert, if there is one. Every token passes the shared expert.
        shared: Option<MlpSpec>,
    },
}

impl FeedSpec {
    /// The parts of the experts or the MLP, in canonical order.
    #[must_use]
    pub fn parts(&self) -> Vec<&Part> {
        match self {
            Self::Dense(mlp) => mlp.parts().collect(),
            Self::Experts { moe, shared } => {
                moe.parts().chain(shared.iter().flat_map(MlpSpec::parts)).collect()
            }
        }
    }

    /// The ids of the layers that consist of several parts, each with its group.
    fn nodes(&self) -> Vec<(&str, Group)> {
        match self {
            Self::Dense(mlp) => vec![(&mlp.id, Group::Mlps)],
            Self::Experts { moe, shared } => {
                let shared = shared.iter().map(|mlp| (mlp.id.as_str(), Group::SharedExperts));
                [(moe.id.as_str(), Group::Experts)].into_iter().chain(shared).collect()
            }
        }
    }

    fn kept_values(&self) -> f64 {
        match self {
            Self::Dense(mlp) => mlp.kept_values(),
            Self::Experts { moe, shared } => {
                moe.kept_values() + shared.as_ref().map_or(0.0, MlpSpec::kept_values)
            }
        }
    }
}

/// A decoder layer: norm, attention, norm, and then experts or one MLP.
#[derive(Debug, Clone)]
pub struct BlockSpec {
    /// The norm before attention, `[d]`.
    pub attn_norm: Part,
    /// Attention.
    pub attn: AttentionSpec,
    /// The norm before the experts or the MLP, `[d]`.
    pub mlp_norm: Part,
    /// The experts, or one MLP.
    pub feed: FeedSpec,
    /// ε of the norms.
    pub eps: f32,
}

impl BlockSpec {
    /// The decoder layer's parts, in canonical order.
    #[must_use]
    pub fn parts(&self) -> Vec<&Part> {
        let attention = [&self.attn_norm].into_iter().chain(self.attn.parts());
        attention.chain([&self.mlp_norm]).chain(self.feed.parts()).collect()
    }

    /// The ids of the layers that consist of several parts, each with the group in which its saved activations are counted.
    pub(super) fn nodes(&self) -> Vec<(&str, Group)> {
        [(self.attn.id(), Group::Attention)].into_iter().chain(self.feed.nodes()).collect()
    }

    /// Approximate number of values per token that a forward pass saves.
    pub(super) fn kept_values(&self) -> f64 {
        self.attn.kept_values() + self.feed.kept_values()
    }
}
