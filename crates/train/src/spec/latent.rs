//! Multi-head latent attention. Dimensions: d model, h heads, n unrotated elements of a head of queries and keys, r rotated elements, u
//! value_dim, p q_rank, c kv_rank.

use super::{Extent, Group, Part, Rope, Size};

/// Sizes of multi-head latent attention.
#[derive(Debug, Clone, Copy)]
pub struct LatentShape {
    /// Model width.
    pub d_model: usize,
    /// Number of heads, which is the same for queries, keys and values.
    pub heads: usize,
    /// Number of elements per head of queries and keys that are neither rotated nor shared among heads.
    pub nope_dim: usize,
    /// Number of rotated elements per head, which follow the `nope_dim` other elements. All heads share the rotated elements of the key.
    pub rope_dim: usize,
    /// Number of elements of a head of values.
    pub value_dim: usize,
    /// Width of the latent of queries; 0 means that queries are projected directly from the input.
    pub q_rank: usize,
    /// Width of the latent of keys and values.
    pub kv_rank: usize,
    /// The largest number of keys to which a query attends; `None` means all keys of its document up to the query's own position.
    pub window: Option<usize>,
}

impl LatentShape {
    /// Number of elements of a head of queries and keys.
    #[must_use]
    pub const fn head_dim(&self) -> usize {
        self.nope_dim + self.rope_dim
    }
}

/// The norm of a latent, and the projection from the latent to all heads.
#[derive(Debug, Clone)]
pub struct UpSpec {
    /// The weight of the latent's norm, `[rank]`.
    pub norm: Part,
    /// The projection from the latent to all heads.
    pub up: Part,
}

/// How queries are projected.
#[derive(Debug, Clone)]
#[allow(clippy::large_enum_variant)] // A decoder layer stores one of the variants in place.
pub enum QueriesSpec {
    /// A projection directly from the input: `[h·(n + r), d]`.
    Straight(Part),
    /// A projection through a latent.
    Latent {
        /// The projection from the input to the latent, `[p, d]`.
        down: Part,
        /// The projection from the latent to all heads, `[h·(n + r), p]`, with the latent's norm.
        up: UpSpec,
    },
}

/// Multi-head latent attention.
#[derive(Debug, Clone)]
pub struct LatentSpec {
    /// The id of the layer, such as `model.layers.3.self_attn`.
    pub id: String,
    /// The layer's sizes.
    pub shape: LatentShape,
    /// The projection of queries.
    pub q: QueriesSpec,
    /// The projection from the input to the latent of keys and values, `[c, d]`.
    pub kv: Part,
    /// The projection from the input to the rotated elements of the key, `[r, d]`.
    pub k_rope: Part,
    /// The projection from the latent to keys and values, `[h·(n + u), c]`: each head has n rows for its key, then u rows for its value.
    pub kv_up: UpSpec,
    /// The projection of attention's output, `[d, h·u]`.
    pub o: Part,
    /// The rotation of queries and keys, and the scale of their products.
    pub rope: Rope,
    /// The ε of the norms of the latents; it is the published value, even if the norms of the residual stream have another ε.
    pub eps: f32,
}

impl LatentSpec {
    /// Describes latent attention of these sizes. The second standard deviation applies to the initial weights of the output projection.
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

    /// The layer's parts in canonical order: the order of a forward pass, except that the projection to the shared key follows the
    /// projection to the latent of keys.
    pub fn parts(&self) -> impl Iterator<Item = &Part> {
        let queries = match &self.q {
            QueriesSpec::Straight(part) => vec![part],
            QueriesSpec::Latent { down, up: UpSpec { norm, up } } => vec![down, norm, up],
        };
        let UpSpec { norm, up } = &self.kv_up;
        queries.into_iter().chain([&self.kv, &self.k_rope, norm, up, &self.o])
    }

    /// The projections that read the layer's input.
    pub(super) fn inputs(&self) -> [&Part; 3] {
        let (QueriesSpec::Straight(q) | QueriesSpec::Latent { down: q, .. }) = &self.q;
        [q, &self.kv, &self.k_rope]
    }

    /// The projections that read latents, in the order of a forward pass.
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

    /// Approximate number of values per token that a forward pass saves: the input, the latents, queries, keys, values and the output.
    pub(super) fn kept_values(&self) -> f64 {
        let LatentShape { d_model, heads, value_dim, q_rank, kv_rank, .. } = self.shape;
        (d_model + q_rank + kv_rank) as f64 + 2.0 * heads as f64 * (self.shape.head_dim() + value_dim) as f64
    }
}
