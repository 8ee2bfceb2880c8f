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

/// The passes for which copies of weights are made.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum CopiesFor {
    /// Both passes in training, otherwise the forward pass.
    #[default]
    AllPasses,
    /// The forward pass only.
    Forward,
    /// The backward pass only. A copy that costs nothing beside another may be made for the forward pass, too.
    Backward,
}

/// The context of one forward and backward pass.
#[derive(Debug)]
pub struct Cx<'a, B: Kernels> {
    /// The backend.
    pub b: &'a B,
    /// The mesh of ranks.
    pub mesh: Mesh<'a, B>,
    /// The recipe, and the plans of the layers under this recipe.
    pub plans: Arc<LayerPlans>,
    /// The number of the optimizer step, counted from 0.
    pub step: u64,
    /// The progress of the run: step / number of steps.
    pub progress: f64,
    /// The run's seed.
    pub seed: u64,
    /// Whether a backward pass follows this forward pass. If `training` is false, nothing is computed for a backward pass.
    pub training: bool,
    /// The passes for which copies of weights are made.
    pub copies: CopiesFor,
    /// The tokens of this rank, divided into shards.
    pub shards: Shards<B>,
    /// The keys to which each query attends, and the documents to which the tokens belong.
    pub sight: Sight<B>,
    /// In training, the counter of steps and micro-batches on the device: [`nibble_core::ops::Clock`].
    pub clock: Option<B::Buf<u32>>,
    /// How the output rows of a token's experts are summed.
    pub combine: Combine,
    /// Whether training assigns experts to tokens round-robin, regardless of the router's scores.
    pub experts_in_turn: bool,
    /// Capacity of a rank in token slots under expert parallelism, as a multiple of the slots that the rank gets under uniform routing.
    pub capacity_factor: f64,
    /// How full the fullest rank was in the first exchange of this pass that exceeded a rank's capacity: the number of token slots sent to
    /// this rank, as a multiple of the rank's share. 0 means that no exchange exceeded the capacity.
    pub overflow: Cell<f32>,
    /// Number of micro-batches in the current step. Losses are averaged over all micro-batches of the step.
    pub micro_batches: usize,
    /// The quantization counts of each conversion, which are still on the device.
    pub counted: RefCell<Counted<B>>,
    /// Gradients that have not yet been summed over ranks.
    pub buckets: RefCell<Buckets<B>>,
    /// In training, the amax histories for delayed scales. If `delayed` is `None`, each quantization computes its scales from the tensor
    /// that it quantizes.
    pub delayed: Option<DelayedRecords<B>>,
    /// The layers in which the current step compares quantized values with the original values; `None` if this step measures nothing.
    pub measures: Option<LayerSample>,
    /// The error of every quantization so far, if an analysis measures quantization errors; `None` in training.
    pub errors: Option<RefCell<Vec<SiteError>>>,
}

impl<'a, B: Kernels> Cx<'a, B> {
    /// A context for inference. The context uses the precisions that the recipe has at point `progress` of training. The output rows of a
    /// token's experts are summed in slot order, and no exchange between ranks can overflow.
    pub fn inference(b: &'a B, mesh: Mesh<'a, B>, recipe: &Recipe, shards: Shards<B>, progress: f64) -> Self {
        Self::under(b, mesh, Arc::new(LayerPlans::new(recipe.clone())), shards, progress)
    }

    /// A context for inference with an existing cache of layer plans.
    pub fn under(
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
            copies: CopiesFor::default(),
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

    /// Replaces the field `sight` of the context, which determines the keys that each query attends to.
    pub fn with_sight(self, sight: Sight<B>) -> Self {
        Self { sight, ..self }
    }

    /// The keys to which each query attends in a layer whose sliding window is `window`; see [`Sight::windows`].
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

    /// The shards to which the rows of `x_td` belong, if the rows are the tokens of the context. Tokens that are generated one by one have
    /// no shards.
    pub fn groups_of(&self, x_td: &Tensor<B>) -> Option<&Groups<B>> {
        Some(&self.shards.groups).filter(|groups| groups.capacity == x_td.rows)
    }

    /// The positions of tokens in sequences of length `seq_len`. With document masking, positions restart at 0 with each document.
    pub fn positions(&self, seq_len: usize, first: usize) -> Positions<B> {
        Positions { seq_len, first, starts: self.sight.starts.clone() }
    }

    /// The recipe of the run.
    pub fn recipe(&self) -> &Recipe {
        self.plans.recipe()
    }

    /// The plan of a layer at this point of the run. Under the returned plan, the layer's forward pass saves only the activations that the
    /// recipe selects.
    pub fn plan(&self, layer: &Layer) -> Arc<LayerPlan> {
        self.plan_keeping(layer, false)
    }

    /// The plan of a layer at this point of the run. `keep_a` has the same meaning as in [`Passes::Both`].
    pub fn plan_keeping(&self, layer: &Layer, keep_a: bool) -> Arc<LayerPlan> {
        let passes = if self.training { Passes::Both { keep_a } } else { Passes::Forward };
        self.plans.plan(layer, self.progress, passes)
    }

    /// Whether copies of weights are made for dgrad.
    pub(crate) fn copies_for_dgrad(&self) -> bool {
        self.training && self.copies != CopiesFor::Forward
    }

    /// The data type of activations between GEMMs.
    pub fn activations(&self) -> DType {
        self.recipe().activations
    }
}
