//! What every layer is handed: the backend, the other ranks, the recipe, and where in the run it is. No globals.

use crate::delayed::DelayedRecords;
use crate::layer_plans::LayerPlans;
use crate::moe::Combine;
use crate::param::Buckets;
use crate::record::{Counted, LayerSample};
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
    /// The recipe, and the plans of layers under it.
    pub plans: Arc<LayerPlans>,
    /// The optimizer step, from 0.
    pub step: u64,
    /// step / steps of the run.
    pub progress: f64,
    /// The run's seed.
    pub seed: u64,
    /// Whether a backward pass follows. If not, nothing is computed for it.
    pub training: bool,
    /// This rank's tokens, in shards.
    pub shards: Shards<B>,
    /// Which of their keys each query sees, and their documents.
    pub sight: Sight<B>,
    /// In training, the device's count of steps and micro-batches: [`nibble_core::ops::Clock`].
    pub clock: Option<B::Buf<u32>>,
    /// How the output rows of a token's experts are summed.
    pub combine: Combine,
    /// Whether training assigns experts in turn, whatever the router says.
    pub experts_in_turn: bool,
    /// Capacity of a rank under expert parallelism, in slots, as a multiple of its share under uniform routing.
    pub capacity_factor: f64,
    /// The slots that the fullest rank was sent in the first exchange of this pass that overflowed, as a multiple of its share; 0 without
    /// an overflow.
    pub overflow: Cell<f32>,
    /// Micro-batches of the step: losses are means over all of them.
    pub micro_batches: usize,
    /// Counts of conversions by site, still on the device.
    pub counted: RefCell<Counted<B>>,
    /// Gradients whose sum over ranks is pending.
    pub buckets: RefCell<Buckets<B>>,
    /// In training, the histories for delayed scales. Without them, tensors are measured.
    pub delayed: Option<DelayedRecords<B>>,
    /// In a step that compares quantized values with their originals: the layers in which it does so.
    pub measures: Option<LayerSample>,
}

impl<'a, B: Kernels> Cx<'a, B> {
    /// A context for a forward pass alone, at this point of training's precision schedule. A token's expert rows are summed in slot order,
    /// and no exchange can overflow.
    pub fn inference(b: &'a B, mesh: Mesh<'a, B>, recipe: &Recipe, shards: Shards<B>, progress: f64) -> Self {
        Self::under(b, mesh, Arc::new(LayerPlans::new(recipe.clone())), shards, progress)
    }

    /// The same with an existing cache of layer plans.
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
        }
    }

    /// The same context in which queries see these keys.
    pub fn with_sight(self, sight: Sight<B>) -> Self {
        Self { sight, ..self }
    }

    /// Which keys each query sees in a layer with this sliding window: see [`Sight::windows`].
    pub fn windows(&self, window: Option<usize>, seq_len: usize) -> Result<Option<&Windows<B>>> {
        self.sight.windows(window, seq_len)
    }

    /// Notes by how much an exchange overflowed, if it did. What such a pass computes is meaningless.
    pub(crate) fn note_overflow(&self, factor: Option<f32>) {
        // Only the first overflow is a true count: later routers see the results of rows that were not sent.
        if let (Some(factor), 0.0) = (factor, self.overflow.get()) {
            self.overflow.set(factor);
        }
    }

    /// The shards of these rows, if they are the tokens of the context. Text that is generated token by token has no shards.
    pub fn groups_of(&self, x_td: &Tensor<B>) -> Option<&Groups<B>> {
        Some(&self.shards.groups).filter(|groups| groups.capacity == x_td.rows)
    }

    /// Positions of tokens in sequences of this length. They restart with each document, where documents are kept apart.
    pub fn positions(&self, seq_len: usize, first: usize) -> Positions<B> {
        Positions { seq_len, first, starts: self.sight.starts.clone() }
    }

    /// The recipe.
    pub fn recipe(&self) -> &Recipe {
        self.plans.recipe()
    }

    /// The plan of a layer now; nothing is saved beyond what its recipe says.
    pub fn plan(&self, layer: &Layer) -> Arc<LayerPlan> {
        self.plan_keeping(layer, false)
    }

    /// The plan of a layer now, with `keep_a` of [`Passes::Both`].
    pub fn plan_keeping(&self, layer: &Layer, keep_a: bool) -> Arc<LayerPlan> {
        let passes = if self.training { Passes::Both { keep_a } } else { Passes::Forward };
        self.plans.plan(layer, self.progress, passes)
    }

    /// The type of activations between products.
    pub fn activations(&self) -> DType {
        self.recipe().activations
    }
}
