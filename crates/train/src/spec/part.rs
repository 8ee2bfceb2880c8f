//! The leaves of a model's description: parts that have weights, and the shapes of those.

use crate::config::RopeScaling;
use nibble_core::recipe::{Layer, LayerKind};

/// Parts that are counted together where sizes are reported.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Group {
    /// Embedding and head.
    Tables,
    /// Projections of attention, norms of heads, and sinks.
    Attention,
    /// MLPs of dense layers.
    Mlps,
    /// Shared experts, which every token passes.
    SharedExperts,
    /// The experts that routers choose: these alone are divided over ranks.
    Experts,
    /// Routers.
    Routers,
    /// Norms of the residual stream.
    Norms,
}

impl Group {
    /// Every group, in the order of a forward pass.
    pub const ALL: [Self; 7] = [
        Self::Tables,
        Self::Attention,
        Self::Mlps,
        Self::SharedExperts,
        Self::Experts,
        Self::Routers,
        Self::Norms,
    ];

    /// Its name in messages.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Tables => "embedding and head",
            Self::Attention => "attention",
            Self::Mlps => "the MLPs",
            Self::SharedExperts => "the shared experts",
            Self::Experts => "the experts",
            Self::Routers => "the routers",
            Self::Norms => "the norms",
        }
    }
}

/// A size of the model, and the configuration key that sets it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Size {
    /// `model.d_model`.
    pub key: &'static str,
    /// The value of the key.
    pub value: usize,
}

impl Size {
    /// The size that this key sets.
    #[must_use]
    pub const fn new(key: &'static str, value: usize) -> Self {
        Self { key, value }
    }

    /// Width of the residual stream.
    pub(super) const fn d_model(value: usize) -> Self {
        Self::new("model.d_model", value)
    }
}

/// A number of rows or columns: `times` · a product of sizes, such as heads · head_dim.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Extent {
    /// 2 where the gate and the up projection lie in one matrix.
    pub times: usize,
    /// Empty for the one row of a vector.
    pub sizes: Vec<Size>,
}

impl Extent {
    /// The product of these.
    #[must_use]
    pub fn of(sizes: &[Size]) -> Self {
        Self { times: 1, sizes: sizes.to_vec() }
    }

    /// The number; saturates at `usize::MAX`.
    #[must_use]
    pub fn len(&self) -> usize {
        self.sizes.iter().fold(self.times, |product, size| product.saturating_mul(size.value))
    }

    /// Whether it is 0.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The number; `None` beyond 128 bits.
    #[must_use]
    pub fn count(&self) -> Option<u128> {
        let mut sizes = self.sizes.iter().map(|size| size.value as u128);
        sizes.try_fold(self.times as u128, u128::checked_mul)
    }
}

/// Initial values of a tensor.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Init {
    /// Zeros, as of every bias.
    Zeros,
    /// Ones, as of every norm.
    Ones,
    /// Normally distributed values of this standard deviation. Each is a function of the seed, the tensor's id and its own index.
    Normal(f32),
}

/// What changes a tensor in a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Update {
    /// Its gradient, by AdamW.
    Gradient,
    /// The load of experts, without a gradient: see [`nibble_core::ops::BalanceBias`]. Every rank has the whole tensor.
    Load,
}

/// A trained tensor: a matrix `[rows, cols]`, a stack of them, or a vector `[cols]`.
#[derive(Debug, Clone, PartialEq)]
pub struct ParamSpec {
    /// `model.layers.3.self_attn.q_proj.weight`. It keys random numbers, transforms' signs and the histories of delayed scales, so it does
    /// not depend on the tensor's name elsewhere.
    pub id: String,
    /// How many experts' matrices are stacked in it, divided among the ranks; `None` for a tensor that every rank computes with.
    pub experts: Option<Size>,
    /// Rows of a matrix.
    pub rows: Extent,
    /// Columns.
    pub cols: Extent,
    /// Initial values.
    pub init: Init,
    /// What changes them.
    pub update: Update,
}

impl ParamSpec {
    fn matrix(id: String, rows: Extent, cols: Extent, std: f32) -> Self {
        Self { id, experts: None, rows, cols, init: Init::Normal(std), update: Update::Gradient }
    }

    fn vector(id: String, cols: Extent, init: Init, update: Update) -> Self {
        Self { id, experts: None, rows: Extent::of(&[]), cols, init, update }
    }

    /// Whether it is a vector, as opposed to a matrix of one row.
    #[must_use]
    pub fn is_vector(&self) -> bool {
        self.rows.sizes.is_empty()
    }

    /// Rows and columns of a matrix, one of the stack.
    #[must_use]
    pub fn shape(&self) -> (usize, usize) {
        (self.rows.len(), self.cols.len())
    }

    /// Matrices stacked in it, over all ranks.
    #[must_use]
    pub fn stack(&self) -> usize {
        self.experts.map_or(1, |experts| experts.value)
    }

    /// Values over all ranks; none beyond 128 bits.
    #[must_use]
    pub fn count(&self) -> Option<u128> {
        let matrix = self.rows.count()?.checked_mul(self.cols.count()?)?;
        matrix.checked_mul(self.stack() as u128)
    }

    /// The sizes that its number of values grows with.
    pub(super) fn sizes(&self) -> impl Iterator<Item = Size> + '_ {
        self.experts.into_iter().chain(self.cols.sizes.iter().copied()).chain(self.rows.sizes.iter().copied())
    }
}

/// What a part does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PartKind {
    /// Looks up rows of its table by token.
    Embedding,
    /// RMSNorm.
    Norm,
    /// Attention sinks: scores that belong to no key.
    Sinks,
    /// Y = X·Wᵀ; SwiGLU follows a gated one.
    Linear {
        /// Whether its output is a gate and the values that it gates.
        gated: bool,
    },
    /// Logits of experts.
    Router,
    /// Two grouped products with SwiGLU between.
    Experts {
        /// Experts per token.
        top_k: usize,
    },
    /// Logits of the vocabulary, and the loss.
    Head {
        /// Whether it uses the embedding's weight.
        tied: bool,
    },
}

/// A part of the model that has weights: a leaf of the tree.
#[derive(Debug, Clone, PartialEq)]
pub struct Part {
    /// `model.layers.3.self_attn.q_proj`: the part's name in recipes, counts and lists of saved activations.
    pub id: String,
    /// What it does.
    pub kind: PartKind,
    /// The group under which it is counted.
    pub group: Group,
    weights: Vec<ParamSpec>,
}

impl Part {
    /// A table `[vocabulary, d]`.
    pub(super) fn embedding(id: &str, vocabulary: Size, d_model: Size, std: f32) -> Self {
        let weights = vec![table(id, vocabulary, d_model, std)];
        Self { id: id.to_owned(), kind: PartKind::Embedding, group: Group::Tables, weights }
    }

    /// The output head `[vocabulary, d]`; tied if it has the embedding's id.
    #[must_use]
    pub fn head(id: &str, tied: bool, vocabulary: Size, d_model: Size, std: f32) -> Self {
        let weights = vec![table(id, vocabulary, d_model, std)];
        Self { id: id.to_owned(), kind: PartKind::Head { tied }, group: Group::Tables, weights }
    }

    /// A norm over this many columns.
    #[must_use]
    pub fn norm(id: &str, width: Size, group: Group) -> Self {
        Self::norm_over(id, &[width], group)
    }

    /// A norm over the product of these sizes.
    #[must_use]
    pub fn norm_over(id: &str, width: &[Size], group: Group) -> Self {
        let weight =
            ParamSpec::vector(format!("{id}.weight"), Extent::of(width), Init::Ones, Update::Gradient);
        Self { id: id.to_owned(), kind: PartKind::Norm, group, weights: vec![weight] }
    }

    /// A sink for each head. It is its own parameter, `model.layers.3.self_attn.sinks`.
    pub(super) fn sinks(id: String, heads: Size, std: f32) -> Self {
        let weight = ParamSpec::vector(id.clone(), Extent::of(&[heads]), Init::Normal(std), Update::Gradient);
        Self { id, kind: PartKind::Sinks, group: Group::Attention, weights: vec![weight] }
    }

    /// A linear layer `[rows, cols]`.
    #[must_use]
    pub fn linear(id: String, gated: bool, group: Group, rows: Extent, cols: Extent, std: f32) -> Self {
        let weights = vec![ParamSpec::matrix(format!("{id}.weight"), rows, cols, std)];
        Self { id, kind: PartKind::Linear { gated }, group, weights }
    }

    /// The same with a bias for each output, which follows the weight.
    #[must_use]
    pub(super) fn with_bias(mut self) -> Self {
        let of_outputs = self.weights.iter().map(|weight| weight.rows.clone());
        let bias = |rows| ParamSpec::vector(format!("{}.bias", self.id), rows, Init::Zeros, Update::Gradient);
        let biases: Vec<ParamSpec> = of_outputs.map(bias).collect();
        self.weights.extend(biases);
        self
    }

    /// A router `[experts, d]`, and the bias `[experts]` of its choice, if there is one.
    pub(super) fn router(id: String, (experts, d_model): (Size, Size), std: f32, has_bias: bool) -> Self {
        let (rows, cols) = (Extent::of(&[experts]), Extent::of(&[d_model]));
        let mut weights = vec![ParamSpec::matrix(format!("{id}.weight"), rows.clone(), cols, std)];
        weights.extend(has_bias.then(|| {
            ParamSpec::vector(format!("{id}.e_score_correction_bias"), rows, Init::Zeros, Update::Load)
        }));
        Self { id, kind: PartKind::Router, group: Group::Routers, weights }
    }

    /// Experts, whose stacks are: gate and up projections `[experts · 2·ffn, d]`, each expert's gate rows before its up rows, and down
    /// projections `[experts · d, ffn]`.
    pub(super) fn experts(
        id: String,
        (experts, top_k): (Size, usize),
        (d_model, ffn): (Size, Size),
        [std, out_std]: [f32; 2],
    ) -> Self {
        let stack = |part: &str, rows, cols, std| ParamSpec {
            experts: Some(experts),
            ..ParamSpec::matrix(format!("{id}.{part}"), rows, cols, std)
        };
        let (inside, outside) = (Extent::of(&[ffn]), Extent::of(&[d_model]));
        let both = Extent { times: 2, ..inside.clone() };
        let weights = vec![
            stack("gate_up_proj", both, outside.clone(), std),
            stack("down_proj", outside, inside, out_std),
        ];
        Self { id, kind: PartKind::Experts { top_k }, group: Group::Experts, weights }
    }

    /// Every weight that it uses, including the embedding's if the head is tied.
    #[must_use]
    pub fn weights(&self) -> &[ParamSpec] {
        &self.weights
    }

    /// Its own parameters, in canonical order.
    #[must_use]
    pub fn params(&self) -> &[ParamSpec] {
        match self.kind {
            PartKind::Head { tied: true } => &[],
            _ => &self.weights,
        }
    }

    /// Its description in recipes; `None` for a part that no recipe describes.
    #[must_use]
    pub fn layer(&self) -> Option<Layer> {
        let (kind, gated) = match self.kind {
            PartKind::Embedding | PartKind::Norm | PartKind::Sinks => return None,
            PartKind::Linear { gated } => (LayerKind::Linear, gated),
            PartKind::Router => (LayerKind::Router, false),
            PartKind::Experts { .. } => (LayerKind::Expert, false),
            PartKind::Head { .. } => (LayerKind::Head, false),
        };
        Some(Layer { kind, name: self.id.clone(), gated })
    }

    /// Parameters of the matrices that multiply a token. Each of the part's three products takes as many multiply-adds per token.
    #[must_use]
    pub fn active_parameters(&self) -> usize {
        let matrices = |times: usize| {
            let matrices = self.weights.iter().filter(|weight| !weight.rows.sizes.is_empty());
            let each = matrices.map(|weight| weight.rows.len() * weight.cols.len());
            times * each.sum::<usize>()
        };
        match self.kind {
            PartKind::Embedding | PartKind::Norm | PartKind::Sinks => 0,
            PartKind::Linear { .. } | PartKind::Router | PartKind::Head { .. } => matrices(1),
            PartKind::Experts { top_k } => matrices(top_k),
        }
    }
}

fn table(id: &str, vocabulary: Size, d_model: Size, std: f32) -> ParamSpec {
    ParamSpec::matrix(format!("{id}.weight"), Extent::of(&[vocabulary]), Extent::of(&[d_model]), std)
}

/// How queries and keys are rotated by their position; the same in every layer.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Rope {
    /// Elements of a head that are rotated, in pairs.
    pub dim: usize,
    /// Base of the frequencies.
    pub theta: f64,
    /// How the frequencies are changed.
    pub scaling: RopeScaling,
}
