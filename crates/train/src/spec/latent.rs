//! Multi-head latent attention.
//! d model, h heads, n own elements of a head of queries and keys, r rotated elements, u value_dim, p q_rank, c kv_rank.

use super::{Extent, Group, Part, Rope, Size};

/// Sizes of multi-head latent attention.
#[derive(Debug, Clone, Copy)]
pub struct LatentShape {
    /// Model width.
    pub d_model: usize,
    /// Number of heads: queries, keys and values have the same number.
    pub heads: usize,
    /// Elements of a head of queries and keys that are not rotated: its own.
    pub nope_dim: usize,
    /// Elements after them, which are rotated. All heads share those of the key.
    pub rope_dim: usize,
    /// Elements of a head of values.
    pub value_dim: usize,
    /// Width of the latent of queries; 0 = queries come straight from the input.
    pub q_rank: usize,
    /// Width of the latent of keys and values.
    pub kv_rank: usize,
    /// The most keys that a query sees; `None`: all keys of its document up to its own.
    pub window: Option<usize>,
}

impl LatentShape {
    /// Elements of a head of queries and keys.
    #[must_use]
    pub const fn head_dim(&self) -> usize {
        self.nope_dim + self.rope_dim
    }
}

/// A latent's norm, and the projection up from it.
#[derive(Debug, Clone)]
pub struct UpSpec {
    /// `[rank]`.
    pub norm: Part,
    /// To all heads.
    pub up: Part,
}

/// How queries are projected.
#[derive(Debug, Clone)]
#[allow(clippy::large_enum_variant)] // A decoder layer has one of them, in place.
pub enum QueriesSpec {
    /// From the input: `[h·(n + r), d]`.
    Straight(Part),
    /// From a latent.
    Latent {
        /// `[p, d]`.
        down: Part,
        /// `[h·(n + r), p]`.
        up: UpSpec,
    },
}

/// Multi-head latent attention.
#[derive(Debug, Clone)]
pub struct LatentSpec {
    /// `model.layers.3.self_attn`.
    pub id: String,
    /// Sizes.
    pub shape: LatentShape,
    /// Queries.
    pub q: QueriesSpec,
    /// `[c, d]`.
    pub kv: Part,
    /// `[r, d]`.
    pub k_rope: Part,
    /// `[h·(n + u), c]`: for each head n rows of its key, then u rows of its value.
    pub kv_up: UpSpec,
    /// `[d, h·u]`.
    pub o: Part,
    /// Rotation of queries and keys, and the scale of their products.
    pub rope: Rope,
    /// ε of the latents' norms: as published, whatever ε the residual stream's norms have.
    pub eps: f32,
}

impl LatentSpec {
    /// Attention of these sizes. The output projection's weights have the second standard deviation.
    #[must_use]
    pub fn new(id: &str, shape: LatentShape, rope: Rope, [std, out_std]: [f32; 2]) -> Self {
        const GROUP: Group = Group::Attention;
        let linear = |part: &str, rows: &[Size], cols: &[Size], std| {
            Part::linear(format!("{id}.{part}"), false, GROUP, Extent::of(rows), Extent::of(cols), std)
        };
        let up = |part: &str, rank, rows: &[Size]| UpSpec {
            norm: Part::norm(&format!("{id}.{part}_a_layernorm"), rank, GROUP),
            up: linear(&format!("{part}_b_proj"), rows, &[rank], std),
        };
        let LatentShape { d_model, heads, nope_dim, rope_dim, value_dim, q_rank, kv_rank, .. } = shape;
        let (d_model, heads) = (Size::d_model(d_model), Size::new("model.heads", heads));
        let head_dim = Size::new("model.head_dim", shape.head_dim());
        let own = Size::new("model.head_dim - model.rope_dim + model.value_head_dim", nope_dim + value_dim);
        let (q_rank, kv_rank) = (Size::new("model.q_rank", q_rank), Size::new("model.kv_rank", kv_rank));
        let q = match q_rank.value {
            0 => QueriesSpec::Straight(linear("q_proj", &[heads, head_dim], &[d_model], std)),
            _ => QueriesSpec::Latent {
                down: linear("q_a_proj", &[q_rank], &[d_model], std),
                up: up("q", q_rank, &[heads, head_dim]),
            },
        };
        let value_dim = Size::new("model.value_head_dim", value_dim);
        Self {
            id: id.to_owned(),
            shape,
            q,
            kv: linear("kv_a_proj", &[kv_rank], &[d_model], std),
            k_rope: linear("k_rope_proj", &[Size::new("model.rope_dim", rope_dim)], &[d_model], std),
            kv_up: up("kv", kv_rank, &[heads, own]),
            o: linear("o_proj", &[d_model], &[heads, value_dim], out_std),
            rope,
            eps: 1e-6,
        }
    }

    /// Its parts in canonical order: that of a forward pass, except that the shared key's projection follows the one to the latent of keys.
    pub fn parts(&self) -> impl Iterator<Item = &Part> {
        let queries = match &self.q {
            QueriesSpec::Straight(part) => vec![part],
            QueriesSpec::Latent { down, up: UpSpec { norm, up } } => vec![down, norm, up],
        };
        let UpSpec { norm, up } = &self.kv_up;
        queries.into_iter().chain([&self.kv, &self.k_rope, norm, up, &self.o])
    }

    /// The projections of its input.
    pub(super) fn inputs(&self) -> [&Part; 3] {
        let (QueriesSpec::Straight(q) | QueriesSpec::Latent { down: q, .. }) = &self.q;
        [q, &self.kv, &self.k_rope]
    }

    /// The projections of latents, in the order of a forward pass.
    pub(super) fn ups(&self) -> impl Iterator<Item = &UpSpec> {
        let of_queries = match &self.q {
            QueriesSpec::Straight(_) => None,
            QueriesSpec::Latent { up, .. } => Some(up),
        };
        of_queries.into_iter().chain([&self.kv_up])
    }

    pub(super) fn pair_multiply_adds(&self) -> usize {
        self.shape.heads * (self.shape.head_dim() + self.shape.value_dim)
    }

    /// About how many values per token a forward pass saves: the input, the latents, queries, keys, values and the output.
    pub(super) fn kept_values(&self) -> f64 {
        let LatentShape { d_model, heads, value_dim, q_rank, kv_rank, .. } = self.shape;
        (d_model + q_rank + kv_rank) as f64 + 2.0 * heads as f64 * (self.shape.head_dim() + value_dim) as f64
    }
}
