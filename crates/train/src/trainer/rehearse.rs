//! A run on a backend that computes nothing: every part of it that takes memory, once.

use super::Trainer;
use super::checks;
use super::step::Step;
use crate::config::Config;
use crate::data::Batch;
use crate::error::Result;
use crate::ledger::Ledger;
use nibble_core::{Comm, DType, Kernels, Recipe, Tensor};

impl<'a, B: Kernels> Trainer<'a, B> {
    /// A trainer of these sizes, whose weights and gradients have places and whose values mean nothing.
    pub(crate) fn of_shapes(
        b: &'a B,
        comm: &'a dyn Comm<B>,
        config: &Config,
        recipe: &Recipe,
    ) -> Result<Self> {
        let table = |b: &B| Tensor::unwritten(b, DType::F32, config.data.seq_len, config.model.head_dim);
        let mut trainer = Self::assemble(b, comm, config, recipe.clone(), table)?;
        trainer.make_buffers()?;
        Ok(trainer)
    }

    /// A forward pass for what it keeps; then, at every point of the run where precisions change, a step and an evaluation.
    ///
    /// # Errors
    /// From the backend, where it has no more room.
    pub(crate) fn rehearse(&mut self) -> Result<Ledger> {
        let config = self.setup.config.clone();
        let (size, seq_len, steps) = (config.train.batch_size, config.data.seq_len, config.train.steps);
        let world = self.setup.comm.world();
        // More micro-batches than two find what the second found.
        let micro_batches = config.train.grad_accum.min(2);
        let (mine, all) = (Batch::zeroed(size / world, seq_len), Batch::zeroed(size, seq_len));
        let (ledger, _) = self.ledger_of(&mine)?;
        self.activations = self.setup.b.arena("activations")?;
        for step in checks::steps_of_change(&self.setup.recipe, steps) {
            self.setup.step = step;
            if step < steps {
                self.rehearse_step(micro_batches)?;
            }
            let Self { setup, model, activations, .. } = self;
            setup.b.within(activations, || {
                Ok((|| -> Result<()> {
                    model.prepare(&setup.inference_cx(1)?)?;
                    setup.held_out_nats(model, &all)?;
                    model.release();
                    Ok(())
                })())
            })??;
        }
        Ok(ledger)
    }

    /// The step of this number, with all of its micro-batches.
    ///
    /// # Errors
    /// As [`Trainer::rehearse`].
    pub(crate) fn rehearse_whole_step(&mut self, step: u64) -> Result<()> {
        self.setup.step = step;
        self.rehearse_step(self.setup.config.train.grad_accum)
    }

    /// The parts that a step of so many micro-batches consists of.
    fn rehearse_step(&mut self, micro_batches: usize) -> Result<()> {
        let Self { setup, model, buffers, activations, .. } = self;
        let Some(buffers) = buffers else { return Ok(()) };
        setup.b.within(activations, || {
            Ok((|| -> Result<()> {
                let mut step = Step::new(setup, model, buffers)?;
                step.first_micro_batch()?;
                for _ in 1..micro_batches {
                    step.next_micro_batch()?;
                }
                step.optimize()?;
                step.end();
                Ok(())
            })())
        })?
    }
}
