//! One rank's part of a run: the model, the memory that it lies in, and the parts of a step. A trainer drives it through a run; the
//! prediction of memory takes it through one step of each kind, where nothing is computed.

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
    /// The model, this rank's part of it.
    pub model: Decoder<B>,
    /// The arena of the weights.
    pub weights: B::Arena,
    /// Made by the first step, or by loading a checkpoint.
    pub buffers: Option<StepBuffers<B>>,
    /// The arena of weights' copies and activations. Steps, recordings and evaluations use it in turn.
    pub activations: B::Arena,
}

/// The arenas of a run, on one rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RunMemory {
    /// F32 masters, and RoPE's table.
    pub weights: MemoryStats,
    /// Gradients that live through a step.
    pub gradients: MemoryStats,
    /// AdamW's moments, and the histories of delayed scales.
    pub moments: MemoryStats,
    /// What lives only within a step or an evaluation: copies of the weights, activations, temporary gradients.
    pub activations: MemoryStats,
}

impl RunMemory {
    /// Each arena by its name.
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
    /// A rank whose RoPE table `rope` computes. Nothing is checked.
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
        };
        Ok(Self { context, model, weights, buffers: None, activations: b.arena("activations")? })
    }

    /// Number of trainable values over all ranks.
    pub fn parameters(&mut self) -> usize {
        self.model.named_tensors().iter().map(Named::num_values).sum()
    }

    /// The run's memory by arena, from the allocator. Gradients and moments exist from the first step on.
    pub fn memory(&self) -> RunMemory {
        let b = self.context.b;
        let [gradients, moments] = match &self.buffers {
            Some(buffers) => [&buffers.gradients, &buffers.moments].map(|arena| b.arena_memory(arena)),
            None => [MemoryStats::default(); 2],
        };
        let (weights, activations) = (b.arena_memory(&self.weights), b.arena_memory(&self.activations));
        RunMemory { weights, gradients, moments, activations }
    }

    /// Makes the buffers of steps, if there are none yet.
    pub fn make_buffers(&mut self) -> Result<()> {
        if self.buffers.is_none() {
            let mut buffers = StepBuffers::new(&self.context, &mut self.model)?;
            buffers.restart(self.context.b, self.context.step)?;
            self.buffers = Some(buffers);
        }
        Ok(())
    }

    /// What a forward pass over this batch saves, and the allocator's bytes for it.
    pub fn ledger_of(&mut self, batch: &Batch) -> Result<(Ledger, usize)> {
        // The forward pass computes the head's gradient, which gets its place for the whole run.
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
            // Counts of conversions live until the end of the step; they are not for the backward pass.
            let forget = || cx.counted.borrow_mut().truncate(0);
            forget();
            let before = cx.b.memory().live_bytes - size_of::<i32>() * B::len(&ids);
            let (out, saved) = model.forward(&cx, ids, &targets, &control)?;
            drop(out);
            forget();
            // The message with the head's gradient is not saved, and the gradient's buffer comes back.
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
