//! One rank's share of a run: the model, the memory of the model, and the phases of a step. A trainer calls this code for a real run. The
//! prediction of memory calls this code for one step of each kind, in which nothing is computed.

mod context;
mod rehearse;
mod step;

pub(crate) use context::RankContext;
pub(crate) use rehearse::on_dry;
pub(crate) use step::{Step, StepBuffers};

use crate::config::Config;
use crate::cx::Cx;
use crate::data::Batch;
use crate::error::Result;
use crate::family::Named;
use crate::layer_plans::LayerPlans;
use crate::ledger::{Ledger, Saved};
use crate::model::Decoder;
use nibble_core::ops::Control;
use nibble_core::{Kernels, MemoryStats, Mesh, Recipe, Tensor};
use std::sync::Arc;

/// The model of a rank, and the memory of its steps.
#[derive(Debug)]
pub(crate) struct RankState<'a, B: Kernels> {
    pub context: RankContext<'a, B>,
    /// This rank's part of the model.
    pub model: Decoder<B>,
    /// The arena of the weights.
    pub weights: B::Arena,
    /// The buffers of steps, which are created by the first step, or when a checkpoint is loaded.
    pub buffers: Option<StepBuffers<B>>,
    /// The arena of the copies of weights, and of activations. Steps, recordings and evaluations use this arena one after another.
    pub activations: B::Arena,
}

/// The memory of each arena of a run, on one rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RunMemory {
    /// Memory of the F32 master weights and of the RoPE table.
    pub weights: MemoryStats,
    /// Memory of the gradients that exist during a whole step.
    pub gradients: MemoryStats,
    /// Memory of AdamW's moments and of the histories of delayed scales.
    pub moments: MemoryStats,
    /// Memory of buffers that exist only within a step or an evaluation: copies of weights, activations, temporary gradients.
    pub activations: MemoryStats,
}

impl RunMemory {
    /// Each arena with its name.
    pub fn arenas(&self) -> [(&'static str, MemoryStats); 4] {
        [
            ("weights", self.weights),
            ("gradients", self.gradients),
            ("moments", self.moments),
            ("activations", self.activations),
        ]
    }
}

impl<'a, B: Kernels> RankState<'a, B> {
    /// Creates a rank. `rope` is a function that computes the RoPE table. This function checks nothing.
    pub fn assemble(
        b: &'a B,
        mesh: Mesh<'a, B>,
        config: &Config,
        recipe: Recipe,
        rope: impl FnOnce(&B) -> nibble_core::Result<Tensor<B>>,
    ) -> Result<Self> {
        let weights = b.arena("weights")?;
        let mut model = b.within(&weights, || {
            Decoder::with_rope(b, mesh, &recipe, &config.model, rope(b)?, config.seed)
        })?;
        model.recompute(&config.train.recompute);
        let context = RankContext {
            b,
            mesh,
            config: config.clone(),
            plans: Arc::new(LayerPlans::new(recipe)),
            data: None,
            step: 0,
            passed_over: 0,
            capacity_factor: config.run.capacity_factor,
            notes: Vec::new(),
            right: 0,
        };
        Ok(Self { context, model, weights, buffers: None, activations: b.arena("activations")? })
    }

    /// Number of trainable values over all ranks.
    pub fn parameters(&mut self) -> usize {
        self.model.named_tensors().iter().map(Named::num_values).sum()
    }

    /// The run's memory by arena, as counted by the allocator. Gradients and moments exist only after the first step has started.
    pub fn memory(&self) -> RunMemory {
        let b = self.context.b;
        let [gradients, moments] = match &self.buffers {
            Some(buffers) => [&buffers.gradients, &buffers.moments].map(|arena| b.arena_memory(arena)),
            None => [MemoryStats::default(); 2],
        };
        let (weights, activations) = (b.arena_memory(&self.weights), b.arena_memory(&self.activations));
        RunMemory { weights, gradients, moments, activations }
    }

    /// Creates the buffers of steps, if they do not exist yet.
    pub fn make_buffers(&mut self) -> Result<()> {
        if self.buffers.is_none() {
            let mut buffers = StepBuffers::new(&self.context, &mut self.model)?;
            buffers.restart(self.context.b, self.context.step)?;
            self.buffers = Some(buffers);
        }
        Ok(())
    }

    /// The buffers that a forward pass over this batch saves, and the number of bytes that the allocator counts for these buffers.
    pub fn ledger_of(&mut self, batch: &Batch) -> Result<(Ledger, usize)> {
        // The forward pass computes the head's gradient, whose buffer is allocated for the whole run.
        self.make_buffers()?;
        let Self { context, model, activations, .. } = self;
        let t = &context.config.train;
        let measured = context.b.within(activations, || {
            let shards = context.training_shards(context.mesh.all.rank())?;
            let cx = Cx {
                training: true,
                micro_batches: t.grad_accum,
                seed: context.config.seed,
                ..context.cx(shards)
            };
            model.prepare(&cx)?;
            let cx = cx.with_sight(context.sight(&batch.starts, batch.inputs.len())?);
            let (ids, targets) = (cx.b.upload(&batch.inputs)?, cx.b.upload(&batch.targets)?);
            let control = cx.b.zeros(Control::LEN)?;
            // Counts of conversions are dropped here, because they exist until the end of the step but are not saved for the backward pass.
            let forget = || cx.counted.borrow_mut().truncate(0);
            forget();
            let before = cx.b.memory().live_bytes - size_of::<i32>() * B::len(&ids);
            let (out, saved) = model.forward(&cx, ids, &targets, &control)?;
            drop(out);
            forget();
            // The message with the head's gradient is not a saved buffer. This call ends the reduction, and returns the gradient's buffer.
            model.params().into_iter().try_for_each(|param| param.finish_reduction(&cx))?;
            let live = cx.b.memory().live_bytes - before;
            let mut ledger = Ledger::default();
            saved.ledger(&mut ledger);
            Ok((ledger, live))
        });
        self.model.release();
        self.model.clear_gradients();
        Ok(measured?)
    }
}
