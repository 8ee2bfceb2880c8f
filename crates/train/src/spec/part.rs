//! The leaves of a model's description: parts that have weights, and the shapes of these weights.

use crate::config::RopeScaling;
use nibble_core::recipe::{Layer, LayerKind};

/// A group of parts whose sizes are reported together.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Group {
    /// The embedding and the head.
    Tables,
    /// Projections of attention, norms of heads, and sinks.
    Attention,
    /// MLPs of dense layers.
    Mlps,
    /// Shared experts, through which every token passes.
    SharedExperts,
    /// The experts from which routers select. Only these experts are sharded over expert-parallel ranks.
    Experts,
    /// The routers of expert layers.
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

    /// The group's name in messages.
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
    /// The configuration key, such as `model.d_model`.
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

/// A number of rows or columns: `times` multiplied by a product of sizes, such as heads · head_dim.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Extent {
    /// The factor: 2 if the gate and the up projection are in one matrix, otherwise 1.
    pub times: usize,
    /// The sizes of the product. The list is empty for the single row of a vector.
    pub sizes: Vec<Size>,
}

impl Extent {
    /// The product of these sizes.
    #[must_use]
    pub fn of(sizes: &[Size]) -> Self {
        Self { times: 1, sizes: sizes.to_vec() }
    }

    /// The number of rows or columns, which saturates at `usize::MAX`.
    #[must_use]
    pub fn len(&self) -> usize {
        self.sizes.iter().fold(self.times, |product, size| product.saturating_mul(size.value))
    }

    /// Whether the number is 0.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The number of rows or columns; `None` if the number exceeds 128 bits.
    #[must_use]
    pub fn count(&self) -> Option<u128> {
        let mut sizes = self.sizes.iter().map(|size| size.value as u128);
        sizes.try_fold(self.times as u128, u128::checked_mul)
    }
}

/// Initial values of a tensor.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Init {
    /// The values are zero, as in every bias.
    Zeros,
    /// The values are one, as in every norm.
    Ones,
    /// The values are normally distributed with this standard deviation. Each value is a function of the seed, the tensor's id and the
    /// value's index.
    Normal(f32),
}

/// The rule by which a step changes a tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Update {
    /// AdamW changes the tensor according to its gradient.
    Gradient,
    /// The tensor changes according to the loads of experts and has no gradient: see [`nibble_core::ops::BalanceBias`]. Every rank has the
    /// whole tensor.
    Load,
    /// The tensor is frozen: it does not change and has no gradient.
    Never,
}

/// A trained tensor: a matrix `[rows, cols]`, a stack of such matrices, or a vector `[cols]`.
#[derive(Debug, Clone, PartialEq)]
pub struct ParamSpec {
    /// The tensor's id, such as `model.layers.3.self_attn.q_proj.weight`. The id seeds random numbers and the signs of Hadamard transforms,
    /// and identifies the histories of delayed scales, so it does not depend on the tensor's name in checkpoints.
    pub id: String,
    /// Number of experts whose matrices are stacked in the tensor and sharded over ranks. `None` for a tensor that every rank uses as a
    /// whole.
    pub experts: Option<Size>,
    /// Number of rows of a matrix.
    pub rows: Extent,
    /// Number of columns.
    pub cols: Extent,
    /// The tensor's initial values.
    pub init: Init,
    /// The rule by which a step changes the tensor.
    pub update: Update,
}

impl ParamSpec {
    fn matrix(id: String, rows: Extent, cols: Extent, std: f32) -> Self {
        Self { id, experts: None, rows, cols, init: Init::Normal(std), update: Update::Gradient }
    }

    fn vector(id: String, cols: Extent, init: Init, update: Update) -> Self {
        Self { id, experts: None, rows: Extent::of(&[]), cols, init, update }
    }

    /// Whether the tensor is a vector, as opposed to a matrix of one row.
    #[must_use]
    pub fn is_vector(&self) -> bool {
        self.rows.sizes.is_empty()
    }

    /// Numbers of rows and columns of one matrix of the stack.
    #[must_use]
    pub fn shape(&self) -> (usize, usize) {
        (self.rows.len(), self.cols.len())
    }

    /// Number of matrices that are stacked in the tensor, over all ranks.
    #[must_use]
    pub fn stack(&self) -> usize {
        self.experts.map_or(1, |experts| experts.value)
    }

    /// Number of values over all ranks; `None` if the number exceeds 128 bits.
    #[must_use]
    pub fn count(&self) -> Option<u128> {
        let matrix = self.rows.count()?.checked_mul(self.cols.count()?)?;
        matrix.checked_mul(self.stack() as u128)
    }

    /// The sizes that determine the tensor's number of values.
    pub(super) fn sizes(&self) -> impl Iterator<Item = Size> + '_ {
        self.experts.into_iter().chain(self.cols.sizes.iter().copied()).chain(self.rows.sizes.iter().copied())
    }
}

/// The kind of a part, which says what the part computes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PartKind {
    /// An embedding, which looks up a row of its weight for each token.
    Embedding,
    /// An embedding of patches of images: a linear layer with a bias, which is never quantized, and a vector for each position.
    Patches,
    /// An RMSNorm, or a LayerNorm, which has a bias.
    Norm,
    /// Attention sinks, which are scores that belong to no key.
    Sinks,
    /// A linear layer, Y = X·Wᵀ. SwiGLU follows a gated linear layer.
    Linear {
        /// Whether the layer's output consists of a gate and of the values that the gate multiplies.
        gated: bool,
    },
    /// A router, which computes logits of experts.
    Router,
    /// Experts: two grouped GEMMs with SwiGLU between them.
    Experts {
        /// Number of experts per token.
        top_k: usize,
    },
    /// The output head, which computes logits of the vocabulary and the loss.
    Head {
        /// Whether the head uses the embedding's weight.
        tied: bool,
    },
}

/// A part of the model that has weights: a leaf of the model's tree.
#[derive(Debug, Clone, PartialEq)]
pub struct Part {
    /// The part's id, such as `model.layers.3.self_attn.q_proj`: the part's name in recipes, counts and lists of saved activations.
    pub id: String,
    /// The kind of the part.
    pub kind: PartKind,
    /// The group in which the part is counted.
    pub group: Group,
    weights: Vec<ParamSpec>,
}

impl Part {
    /// An embedding `[vocabulary, d]`.
    pub(super) fn embedding(id: &str, vocabulary: Size, d_model: Size, std: f32) -> Self {
        let weights = vec![table(id, vocabulary, d_model, std)];
        Self { id: id.to_owned(), kind: PartKind::Embedding, group: Group::Tables, weights }
    }

    /// The embedding of patches of `pixels` pixels, `[d, pixels]`, with its bias `[d]` and the vectors of all positions, `[positions · d]`.
    pub(super) fn patches(id: &str, (positions, pixels): (Size, Size), d_model: Size, std: f32) -> Self {
        let (d, init) = (Extent::of(&[d_model]), Init::Normal(std));
        let weights = vec![
            ParamSpec::matrix(format!("{id}.weight"), d.clone(), Extent::of(&[pixels]), std),
            ParamSpec::vector(format!("{id}.bias"), d, Init::Zeros, Update::Gradient),
            ParamSpec::vector(
                format!("{id}.positions"),
                Extent::of(&[positions, d_model]),
                init,
                Update::Gradient,
            ),
        ];
        Self { id: id.to_owned(), kind: PartKind::Patches, group: Group::Tables, weights }
    }

    /// The output head `[vocabulary, d]`. A tied head has the embedding's id.
    #[must_use]
    pub fn head(id: &str, tied: bool, vocabulary: Size, d_model: Size, std: f32) -> Self {
        let weights = vec![table(id, vocabulary, d_model, std)];
        Self { id: id.to_owned(), kind: PartKind::Head { tied }, group: Group::Tables, weights }
    }

    /// Describes a norm over this many columns.
    #[must_use]
    pub fn norm(id: &str, width: Size, group: Group) -> Self {
        Self::norm_over(id, &[width], group)
    }

    /// A norm whose number of columns is the product of these sizes.
    #[must_use]
    pub fn norm_over(id: &str, width: &[Size], group: Group) -> Self {
        let weight =
            ParamSpec::vector(format!("{id}.weight"), Extent::of(width), Init::Ones, Update::Gradient);
        Self { id: id.to_owned(), kind: PartKind::Norm, group, weights: vec![weight] }
    }

    /// The same norm with a bias for each column, which makes it a LayerNorm. The bias follows the weight.
    #[must_use]
    pub fn with_norm_bias(mut self) -> Self {
        let biases: Vec<ParamSpec> = self
            .weights
            .iter()
            .map(|weight| {
                ParamSpec::vector(
                    format!("{}.bias", self.id),
                    weight.cols.clone(),
                    Init::Zeros,
                    Update::Gradient,
                )
            })
            .collect();
        self.weights.extend(biases);
        self
    }

    /// An attention sink for each head. The part is also its own parameter, `model.layers.3.self_attn.sinks`.
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

    /// The same linear layer with a bias for each output. The bias follows the weight.
    #[must_use]
    pub(super) fn with_bias(mut self) -> Self {
        let of_outputs = self.weights.iter().map(|weight| weight.rows.clone());
        let bias = |rows| ParamSpec::vector(format!("{}.bias", self.id), rows, Init::Zeros, Update::Gradient);
        let biases: Vec<ParamSpec> = of_outputs.map(bias).collect();
        self.weights.extend(biases);
        self
    }

    /// A router `[experts, d]`, and the bias `[experts]` for its selection, if there is one.
    pub(super) fn router(id: String, (experts, d_model): (Size, Size), std: f32, has_bias: bool) -> Self {
        let (rows, cols) = (Extent::of(&[experts]), Extent::of(&[d_model]));
        let mut weights = vec![ParamSpec::matrix(format!("{id}.weight"), rows.clone(), cols, std)];
        weights.extend(has_bias.then(|| {
            ParamSpec::vector(format!("{id}.e_score_correction_bias"), rows, Init::Zeros, Update::Load)
        }));
        Self { id, kind: PartKind::Router, group: Group::Routers, weights }
    }

    /// Experts with two stacks: gate and up projections `[experts · 2·ffn, d]`, in which each expert's gate rows precede its up rows, and
    /// down projections `[experts · d, ffn]`.
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

    /// Every weight that the part uses, including the embedding's weight if the head is tied.
    #[must_use]
    pub fn weights(&self) -> &[ParamSpec] {
        &self.weights
    }

    /// The part's own parameters, in canonical order.
    #[must_use]
    pub fn params(&self) -> &[ParamSpec] {
        match self.kind {
            PartKind::Head { tied: true } => &[],
            _ => &self.weights,
        }
    }

    /// The part as a layer of recipes; `None` for a part for which recipes have no settings.
    #[must_use]
    pub fn layer(&self) -> Option<Layer> {
        let (kind, gated) = match self.kind {
            PartKind::Embedding | PartKind::Patches | PartKind::Norm | PartKind::Sinks => return None,
            PartKind::Linear { gated } => (LayerKind::Linear, gated),
            PartKind::Router => (LayerKind::Router, false),
            PartKind::Experts { .. } => (LayerKind::Expert, false),
            PartKind::Head { .. } => (LayerKind::Head, false),
        };
        Some(Layer { kind, name: self.id.clone(), gated })
    }

    /// Number of parameters of the matrices that multiply a token. Each of the part's three GEMMs (fprop, dgrad, wgrad) needs this many
    /// multiply-adds per token.
    #[must_use]
    pub fn active_parameters(&self) -> usize {
        let matrices = |times: usize| {
            let matrices = self.weights.iter().filter(|weight| !weight.rows.sizes.is_empty());
            let each = matrices.map(|weight| weight.rows.len() * weight.cols.len());
            times * each.sum::<usize>()
        };
        match self.kind {
            // Patches are not counted: a small part, of which there is no gradient of the input.
            PartKind::Embedding | PartKind::Patches | PartKind::Norm | PartKind::Sinks => 0,
            PartKind::Linear { .. } | PartKind::Router | PartKind::Head { .. } => matrices(1),
            PartKind::Experts { top_k } => matrices(top_k),
        }
    }
}

fn table(id: &str, vocabulary: Size, d_model: Size, std: f32) -> ParamSpec {
    ParamSpec::matrix(format!("{id}.weight"), Extent::of(&[vocabulary]), Extent::of(&[d_model]), std)
}

/// The rotation of queries and keys according to their position, which is the same in every layer.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Rope {
    /// Number of elements of a head that are rotated, in pairs.
    pub dim: usize,
    /// Base of the frequencies; 0 means that nothing is rotated.
    pub theta: f64,
    /// The scaling of the frequencies.
    pub scaling: RopeScaling,
}
