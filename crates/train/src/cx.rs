//! What every layer is handed: the backend, the other ranks, the recipe, and where in the run it is. No globals.

use crate::delayed::DelayedRecords;
use crate::layer_plans::LayerPlans;
use crate::moe::Combine;
use crate::param::Buckets;
use crate::record::{Counted, LayerSample};
use crate::shards::{Documents, Shards};
use nibble_core::ops::{Positions, Windows};
use nibble_core::recipe::{Layer, LayerPlan, Passes};
use nibble_core::{DType, Groups, Kernels, Mesh, Recipe, Tensor};
use std::cell::{Cell, RefCell};
use std::sync::Arc;

/// The context of one forward and backward pass.
#[derive(Debug)]
pub struct Cx<'a, B: Kernels> {
    /// Where it runs.
    pub b: &'a B,
    /// The ranks, this one among them.
    pub mesh: Mesh<'a, B>,
    /// Every precision, and what layers do under them.
    pub plans: Arc<LayerPlans>,
    /// The optimizer step, from 0.
    pub step: u64,
    /// step / steps of the run.
    pub progress: f64,
    /// The run's seed.
    pub seed: u64,
    /// Whether a backward pass will follow; without one nothing is made for it.
    pub training: bool,
    /// The tokens of this rank.
    pub shards: Shards<B>,
    /// Their documents, where those are kept apart.
    pub documents: Option<Documents<B>>,
    /// In training the device's own count of steps and micro-batches, [`nibble_core::ops::Clock`].
    pub clock: Option<B::Buf<u32>>,
    /// How the rows of a token's experts become one.
    pub combine: Combine,
    /// Whether experts take turns in training, whatever routers say.
    pub experts_in_turn: bool,
    /// How many slots of tokens a rank has room for where experts are divided among ranks: so many times its share if all had as many.
    pub capacity_factor: f64,
    /// The same of what a rank was sent that had more: the first exchange of this pass that did not fit; 0 if all did.
    pub overflow: Cell<f32>,
    /// Micro-batches of the step: losses are means over all of them.
    pub micro_batches: usize,
    /// Counts of conversions by site, still on the device.
    pub counted: RefCell<Counted<B>>,
    /// Gradients on their way to their sums over ranks.
    pub buckets: RefCell<Buckets<B>>,
    /// In training under a recipe with such scales, what earlier steps left for them. Without it tensors are measured.
    pub delayed: Option<DelayedRecords<B>>,
    /// In a step that measures quantizations beside what they are made of, in which layers.
    pub measures: Option<LayerSample>,
}

impl<'a, B: Kernels> Cx<'a, B> {
    /// A context for a forward pass alone, at this point of training's precision schedule; rows of experts are summed in slot order, and a rank
    /// has room for all that can come.
    pub fn inference(b: &'a B, mesh: Mesh<'a, B>, recipe: &Recipe, shards: Shards<B>, progress: f64) -> Self {
        Self::under(b, mesh, Arc::new(LayerPlans::new(recipe.clone())), shards, progress)
    }

    /// The same with the plans that were made of a recipe so far.
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
            documents: None,
            clock: None,
            delayed: None,
            measures: None,
        }
    }

    /// The same with documents kept apart.
    pub fn with_documents(self, documents: Option<Documents<B>>) -> Self {
        Self { documents, ..self }
    }

    /// Which keys each query sees, if not all of its sequence up to its own.
    pub fn windows(&self) -> Option<&Windows<B>> {
        self.documents.as_ref().map(|documents| &documents.windows)
    }

    /// Notes by how much an exchange exceeded its room, if it did. What such a pass computes means nothing.
    pub(crate) fn note_overflow(&self, factor: Option<f32>) {
        // The first says what was sent: behind it routers saw what was not sent.
        if let (Some(factor), 0.0) = (factor, self.overflow.get()) {
            self.overflow.set(factor);
        }
    }

    /// The shards that these rows are of, where they are the tokens of the context: text that is made token by token has none.
    pub fn groups_of(&self, x_td: &Tensor<B>) -> Option<&Groups<B>> {
        Some(&self.shards.groups).filter(|groups| groups.capacity == x_td.rows)
    }

    /// Where tokens of sequences of this length are: positions begin anew with each document, where those are kept apart.
    pub fn positions(&self, seq_len: usize, first: usize) -> Positions<B> {
        let starts = self.documents.as_ref().map(|documents| documents.starts.clone());
        Positions { seq_len, first, starts }
    }

    /// Every precision.
    pub fn recipe(&self) -> &Recipe {
        self.plans.recipe()
    }

    /// What a layer does now, with nothing kept beyond what its recipe says.
    pub fn plan(&self, layer: &Layer) -> Arc<LayerPlan> {
        self.plan_keeping(layer, false)
    }

    /// The same; `keep_a` as [`Passes::Both`] has it.
    pub fn plan_keeping(&self, layer: &Layer, keep_a: bool) -> Arc<LayerPlan> {
        let passes = if self.training { Passes::Both { keep_a } } else { Passes::Forward };
        self.plans.plan(layer, self.progress, passes)
    }

    /// The type of everything between the products.
    pub fn activations(&self) -> DType {
        self.recipe().activations
    }
}
