//! The context that every layer gets as an argument: the backend, the other ranks, the recipe, and the position in the run. There are no
//! global variables.

use crate::delayed::DelayedRecords;
use crate::layer_plans::LayerPlans;
use crate::moe::Combine;
use crate::param::Buckets;
use crate::record::{Counted, LayerSample, SiteError};
use crate::shards::{Shards, Sight};
use nibble_core::ops::{Positions, Windows};
use nibble_core::recipe::{Layer, LayerPlan, Passes};
use nibble_core::{DType, Groups, Kernels, Mesh, Recipe, Result, Tensor};
use std::cell::{Cell, RefCell};
use std::sync::Arc;

/// The context of one forward and backward pass.
#[derive(Debug)]
pub struct Cx<'a, B: Kernels> {
    /// The backend.
    pub b: &'a B,
    /// The mesh of ranks.
    pub mesh: Mesh<'a, B>,
    /// The recipe, and the layers' plans under this recipe.
    pub plans: Arc<LayerPlans>,
    /// The number of the optimizer step, counted from 0.
    pub step: u64,
    /// The progress of the run: step / number of steps.
    pub progress: f64,
    /// The run's seed.
    pub seed: u64,
    /// Whether a backward pass follows. If not, nothing is computed for a backward pass.
    pub training: bool,
    /// This rank's tokens, in shards.
    pub shards: Shards<B>,
    /// The keys to which each query attends, and the documents of the tokens.
    pub sight: Sight<B>,
    /// In training, the device's count of steps and micro-batches: [`nibble_core::ops::Clock`].
    pub clock: Option<B::Buf<u32>>,
    /// How the output rows of a token's experts are summed.
    pub combine: Combine,
    /// Whether training assigns experts to tokens in turn, regardless of the router's scores.
    pub experts_in_turn: bool,
    /// Capacity of a rank under expert parallelism, in slots, as a multiple of the rank's share under uniform routing.
    pub capacity_factor: f64,
    /// The number of slots sent to the fullest rank in the first exchange of this pass that overflowed, as a multiple of the rank's share;
    /// 0 without an overflow.
    pub overflow: Cell<f32>,
    /// Number of micro-batches in the step. Losses are means over all micro-batches.
    pub micro_batches: usize,
    /// Counts of conversions by site, which are still on the device.
    pub counted: RefCell<Counted<B>>,
    /// Gradients whose sum over ranks is pending.
    pub buckets: RefCell<Buckets<B>>,
    /// In training, the histories for delayed scales. If `None`, quantizations measure their tensors.
    pub delayed: Option<DelayedRecords<B>>,
    /// The layers in which a step compares quantized values with the original values; `None` in other steps.
    pub measures: Option<LayerSample>,
    /// The error of every quantization so far, in an analysis that measures it; `None` in training.
    pub errors: Option<RefCell<Vec<SiteError>>>,
}

impl<'a, B: Kernels> Cx<'a, B> {
    /// A context for inference, at this point of training's precision schedule. A token's expert rows are summed in slot order, and no
    /// exchange can overflow.
    pub fn inference(b: &'a B, mesh: Mesh<'a, B>, recipe: &Recipe, shards: Shards<B>, progress: f64) -> Self {
        Self::under(b, mesh, Arc::new(LayerPlans::new(recipe.clone())), shards, progress)
    }

    /// A context for inference with an existing cache of layer plans.
    pub(crate) fn under(
        b: &'a B,
        mesh: Mesh<'a, B>,
        plans: Arc<LayerPlans>,
        shards: Shards<B>,
        progress: f64,
    ) -> Self {
        Self {
            b,
            mesh,
            plans,
            step: 0,
            progress,
            seed: 0,
            training: false,
            shards,
            combine: Combine::Slots,
            experts_in_turn: false,
            capacity_factor: f64::INFINITY,
            overflow: Cell::new(0.0),
            micro_batches: 1,
            counted: RefCell::default(),
            buckets: RefCell::default(),
            sight: Sight::default(),
            clock: None,
            delayed: None,
            measures: None,
            errors: None,
        }
    }

    /// The same context, in which queries attend to the keys of `sight`.
    pub fn with_sight(self, sight: Sight<B>) -> Self {
        Self { sight, ..self }
    }

    /// The keys to which each query attends in a layer with this sliding window: see [`Sight::windows`].
    pub fn windows(&self, window: Option<usize>, seq_len: usize) -> Result<Option<&Windows<B>>> {
        self.sight.windows(window, seq_len)
    }

    /// Notes the overflow of an exchange, as a factor; `None` if the exchange did not overflow. The results of a pass with an overflow are
    /// meaningless.
    pub(crate) fn note_overflow(&self, factor: Option<f32>) {
        // Only the first overflow gives a true count: later routers read inputs that lack the rows that were not sent.
        if let (Some(factor), 0.0) = (factor, self.overflow.get()) {
            self.overflow.set(factor);
        }
    }

    /// The shards of these rows, if the rows are the tokens of the context. Text that is generated token by token has no shards.
    pub fn groups_of(&self, x_td: &Tensor<B>) -> Option<&Groups<B>> {
        Some(&self.shards.groups).filter(|groups| groups.capacity == x_td.rows)
    }

    /// Positions of tokens in sequences of this length. With document masking, positions restart with each document.
    pub fn positions(&self, seq_len: usize, first: usize) -> Positions<B> {
        Positions { seq_len, first, starts: self.sight.starts.clone() }
    }

    /// The recipe of the run.
    pub fn recipe(&self) -> &Recipe {
        self.plans.recipe()
    }

    /// The current plan of a layer. A layer with this plan saves only what its recipe says.
    pub fn plan(&self, layer: &Layer) -> Arc<LayerPlan> {
        self.plan_keeping(layer, false)
    }

    /// The current plan of a layer, with `keep_a` of [`Passes::Both`].
    pub fn plan_keeping(&self, layer: &Layer, keep_a: bool) -> Arc<LayerPlan> {
        let passes = if self.training { Passes::Both { keep_a } } else { Passes::Forward };
        self.plans.plan(layer, self.progress, passes)
    }

    /// The type of activations between GEMMs.
    pub fn activations(&self) -> DType {
        self.recipe().activations
    }
}
