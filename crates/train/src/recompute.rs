//! Recomputation (`train.recompute`): the backward pass recomputes activations that the forward pass then does not save. Recomputation
//! changes memory and time, but no bit of a loss, a weight or a metric.
//!
//! | scope | activations that are not saved | work that the backward pass repeats |
//! |---|---|---|
//! | `norms` | the input of the experts; normed and rotated queries and keys; normed latents | norms, RoPE |
//! | `swiglu` | the experts' `a`, if wgrad reads the `a` of the forward pass | no additional op: `swiglu_backward` reads h anyway |
//! | `expert_input` | the experts' `x`, with one row per expert of a token | conversion and dispatch |
//! | `mla_up` | queries, keys and values of latent attention | their projections from the latents |
//! | `mlp_up` | `h` of experts, shared expert and MLP | the first product, SwiGLU; for an MLP also the norm |
//! | `attention` | all of a layer's first half except its input | norm, projections, attention |
//! | `mlp` | all of a dense layer's second half except its input | norm; the MLP up to its last product |
//! | `experts` | all of an expert layer's second half except its input | norm; router, dispatch, first products, SwiGLU; shared expert |
//! | `layers` | all of a layer except its input | all that the halves run, and attention's output projection |
//!
//! An entry of the list is a scope, or a scope in some decoder layers: `experts@first:8`. Layers are selected as in a recipe
//! ([`Layers`]). A scope without layers applies to all layers that it exists in. In a model without experts, `experts` means `mlp`.
//!
//! Why no bit changes:
//!
//! * The copies of weights live until the end of the step, and ops are deterministic. So a recomputed router makes the same choices, and
//!   the exchange plan is the same.
//! * Random bits are a function of tensor, element and step, so a recomputed tensor gets the same random bits.
//! * `Cx::again` drops the counts of recomputed conversions. The record contains the loads and losses of the forward pass (`Routed`).
//! * With several ranks, rows are exchanged again. All ranks run the same layers, so they make the same collective calls in the same order.
//!
//! Under `mxfp4-hopper`, wgrad's `a` is computed from the saved MXFP4 `h`, but fprop's `a` from `h` in BF16; so `a` is always recomputed in
//! this recipe. The `a` of a shared expert, or of a dense layer's MLP, is the input of a linear layer and is saved like any input. Without
//! QK norms, queries and keys are saved after the rotation, because the rotation's backward pass needs only the gradient. On one rank,
//! `expert_input` converts each token's row for fprop once, before the row is copied to the token's experts, and multiplies the counts by
//! the number of experts of a token.
//!
//! `mlp_up` computes the experts' `h` from the saved `x`. If `x` is saved in a form from which the form of fprop cannot be computed (two
//! quantizations of one plain tensor), the experts' input is dispatched again, and `mlp_up` includes `expert_input`.

use crate::config::ModelConfig;
use nibble_core::recipe::{Layer, LayerKind, Layers, RunSize};
use serde::{Deserialize, Serialize};
use std::fmt;

/// What a backward pass can recompute. A wider scope includes narrower scopes: `layers` includes all scopes but `norms` and `swiglu`,
/// `experts` includes `expert_input`, and `attention` includes `mla_up`. In the layers to which they apply, the scopes `experts` and `mlp`
/// include `mlp_up`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Scope {
    /// Outputs of norms, including rotated queries and keys, and normed latents.
    Norms,
    /// The input of the experts' second GEMM, computed from the first GEMM's output. A recipe that saves the first GEMM's output in another
    /// format always recomputes this input, from the saved copy.
    Swiglu,
    /// The experts' input, which has one row for each (token, expert) pair: tokens are dispatched again.
    ExpertInput,
    /// Queries, keys and values of latent attention (`model.kv_rank`), which are projected from the latents again. Queries that are
    /// projected directly from the layer's input are saved.
    MlaUp,
    /// The first GEMM's output in the experts, the shared expert and the MLP.
    MlpUp,
    /// Attention with its projections and the preceding norm, recomputed from the residual stream.
    Attention,
    /// The MLP of a dense layer and the preceding norm, recomputed from the residual stream.
    Mlp,
    /// The experts, the shared expert and the preceding norm, recomputed from the residual stream: tokens are routed and dispatched again.
    /// In a model without experts, the same as `mlp`.
    Experts,
    /// Whole decoder layers, recomputed from their input.
    Layers,
}

impl Scope {
    /// Every scope.
    pub const ALL: [Self; 9] = [
        Self::Norms,
        Self::Swiglu,
        Self::ExpertInput,
        Self::MlaUp,
        Self::MlpUp,
        Self::Attention,
        Self::Mlp,
        Self::Experts,
        Self::Layers,
    ];

    /// The default scopes of a run, whose recomputation costs next to nothing.
    pub const DEFAULT: [Self; 2] = [Self::Norms, Self::Swiglu];

    /// The scope's name in a configuration.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Norms => "norms",
            Self::Swiglu => "swiglu",
            Self::ExpertInput => "expert_input",
            Self::MlaUp => "mla_up",
            Self::MlpUp => "mlp_up",
            Self::Attention => "attention",
            Self::Mlp => "mlp",
            Self::Experts => "experts",
            Self::Layers => "layers",
        }
    }

    /// Whether this scope includes another in every layer.
    const fn includes(self, other: Self) -> bool {
        match self {
            Self::Experts => matches!(other, Self::ExpertInput),
            Self::Attention => matches!(other, Self::MlaUp),
            Self::Layers => !matches!(other, Self::Norms | Self::Swiglu | Self::Layers),
            _ => false,
        }
    }

    /// Whether a decoder layer computes what this scope recomputes.
    pub fn is_in(self, model: &ModelConfig, layer: usize) -> bool {
        let is_dense = layer < model.num_dense();
        match self {
            Self::Mlp => is_dense,
            Self::Experts => !is_dense || model.experts == 0,
            Self::ExpertInput => !is_dense,
            Self::MlaUp => model.kv_rank > 0,
            Self::Norms | Self::Swiglu | Self::MlpUp | Self::Attention | Self::Layers => true,
        }
    }

    /// Whether any layer of the model computes what this scope recomputes.
    pub fn is_of(self, model: &ModelConfig) -> bool {
        (0..model.layers).any(|layer| self.is_in(model, layer))
    }

    /// Why the scope does not exist in a model.
    const fn absence(self) -> &'static str {
        match self {
            Self::MlaUp => "model.kv_rank = 0: the model has no latent vectors",
            Self::Mlp => "model.dense_layers = 0: every layer has experts",
            _ => "model.experts = 0: there are no experts",
        }
    }
}

/// A separator between a scope and its layers.
const IN: char = '@';

/// An entry of `train.recompute`: a scope that applies to all decoder layers or to some of them. Written `experts` or `experts@first:8`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Entry {
    /// What is recomputed.
    pub scope: Scope,
    /// The decoder layers to which the scope applies; `None` means all decoder layers. A name selects `model.layers.N`.
    pub layers: Option<Layers>,
}

impl TryFrom<String> for Entry {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        let (name, layers) = match text.split_once(IN) {
            Some((name, layers)) => (name, Some(layers)),
            None => (text.as_str(), None),
        };
        let scope = Scope::ALL.into_iter().find(|scope| scope.name() == name).ok_or_else(|| {
            let names = Scope::ALL.map(|scope| format!("`{}`", scope.name())).join(", ");
            format!("unknown scope `{name}`, expected one of {names}")
        })?;
        let in_entry = |why| format!("{text:?}: {why}");
        Ok(Self { scope, layers: layers.map(Layers::parse).transpose().map_err(in_entry)? })
    }
}

impl From<Entry> for String {
    fn from(entry: Entry) -> Self {
        entry.to_string()
    }
}

impl fmt::Display for Entry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.scope.name())?;
        self.layers.iter().try_for_each(|layers| write!(f, "{IN}{layers}"))
    }
}

impl From<Scope> for Entry {
    fn from(scope: Scope) -> Self {
        Self { scope, layers: None }
    }
}

impl Entry {
    /// Whether the entry selects a decoder layer, whether or not its scope exists there.
    fn selects(&self, model: &ModelConfig, layer: usize) -> bool {
        self.layers.as_ref().is_none_or(|layers| layers.covers(&layer_name(layer), Some(run(model))))
    }

    /// Why the entry has no effect in a model, or selects layers that do not exist.
    pub(crate) fn fault(&self, model: &ModelConfig) -> Option<String> {
        if !self.scope.is_of(model) {
            return Some(format!("names {self}, but {}; leave it out", self.scope.absence()));
        }
        let layers = self.layers.as_ref()?;
        let all: Vec<Layer> =
            (0..model.layers).map(|layer| Layer::new(LayerKind::Linear, layer_name(layer))).collect();
        if let Some(why) = layers.fault(&all, Some(run(model))) {
            return Some(format!("names {self}, but {why}"));
        }
        let is_any = (0..model.layers).any(|l| self.selects(model, l) && self.scope.is_in(model, l));
        let dense = model.num_dense();
        (!is_any).then(|| {
            format!("names {self}, but none of these layers has it: the first {dense} layers are dense, the others have experts")
        })
    }
}

fn layer_name(layer: usize) -> String {
    format!("model.layers.{layer}")
}

/// The sizes on which a selection of layers depends.
fn run(model: &ModelConfig) -> RunSize {
    RunSize { decoder_layers: model.layers, steps: 0 }
}

/// The value of `train.recompute`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Recompute(Vec<Entry>);

impl Default for Recompute {
    fn default() -> Self {
        Self::of(&Scope::DEFAULT)
    }
}

impl FromIterator<Entry> for Recompute {
    fn from_iter<I: IntoIterator<Item = Entry>>(entries: I) -> Self {
        Self(entries.into_iter().collect())
    }
}

impl Recompute {
    /// The list that applies these scopes to all layers.
    pub fn of(scopes: &[Scope]) -> Self {
        scopes.iter().map(|scope| Entry::from(*scope)).collect()
    }

    /// The entries, in the order of the list.
    pub fn entries(&self) -> &[Entry] {
        &self.0
    }

    /// Whether any entry applies only to selected layers.
    pub fn is_by_layer(&self) -> bool {
        self.0.iter().any(|entry| entry.layers.is_some())
    }

    /// The entries of both lists in canonical order, without duplicates and without entries that a scope in all layers already includes.
    pub fn with(&self, more: &[Scope]) -> Self {
        let all = [&self.0[..], &Self::of(more).0].concat();
        let is_covered = |entry: &Entry| {
            all.iter().filter(|wider| wider.layers.is_none()).any(|wider| {
                wider.scope.includes(entry.scope) || (wider.scope == entry.scope && entry.layers.is_some())
            })
        };
        let mut normal: Vec<Entry> = Vec::new();
        for entry in all.iter().filter(|entry| !is_covered(entry)) {
            if !normal.contains(entry) {
                normal.push(entry.clone());
            }
        }
        normal.sort_by_key(|entry| entry.scope);
        Self(normal)
    }

    /// The list in the canonical order that [`Recompute::with`] describes.
    pub fn normal(&self) -> Self {
        self.with(&[])
    }

    /// The list without these scopes.
    pub fn without(&self, scopes: &[Scope]) -> Self {
        self.0.iter().filter(|entry| !scopes.contains(&entry.scope)).cloned().collect()
    }

    /// The scopes that are recomputed in a decoder layer: the scopes that exist in the layer, except those that another scope includes
    /// there.
    pub fn of_layer(&self, model: &ModelConfig, layer: usize) -> Vec<Scope> {
        let is_dense = layer < model.num_dense();
        let here =
            self.0.iter().filter(|entry| entry.scope.is_in(model, layer) && entry.selects(model, layer));
        let scopes: Vec<Scope> = here
            .map(|entry| match entry.scope {
                Scope::Experts if is_dense => Scope::Mlp,
                scope => scope,
            })
            .collect();
        let is_covered = |scope: &Scope| {
            let of_half = *scope == Scope::MlpUp;
            scopes.iter().any(|wider| {
                wider.includes(*scope) || (of_half && matches!(wider, Scope::Mlp | Scope::Experts))
            })
        };
        Scope::ALL.into_iter().filter(|scope| scopes.contains(scope) && !is_covered(scope)).collect()
    }

    /// Checks that every entry has a meaning in the model; the error text names an entry that has none.
    ///
    /// # Errors
    /// Returns the reason, if there is such an entry.
    pub fn check(&self, model: &ModelConfig) -> Result<(), String> {
        self.0.iter().find_map(|entry| entry.fault(model)).map_or(Ok(()), Err)
    }

    /// The value as an override of a configuration: `train.recompute=["norms", "swiglu"]`.
    pub fn setting(&self) -> String {
        format!("train.recompute={self}")
    }
}

/// The TOML list: `["norms", "experts@first:8"]`.
impl fmt::Display for Recompute {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let entries: Vec<String> = self.0.iter().map(|entry| format!("{:?}", entry.to_string())).collect();
        write!(f, "[{}]", entries.join(", "))
    }
}
