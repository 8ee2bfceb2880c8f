//! Gradients and held-out losses of one state of the weights, for comparing recipes on it without training.

use super::Trainer;
use super::weights::gather;
use crate::error::{Error, Result};
use crate::rank::{RankState, Step};
use crate::record::{SiteError, Told};
use nibble_core::{Error as CoreError, Kernels};
use std::path::Path;

/// The gradient of a parameter.
#[derive(Debug, Clone, PartialEq)]
pub struct ParamGradient {
    /// The parameter's name.
    pub name: String,
    /// All values of the gradient, gathered from all ranks, in F32.
    pub values: Vec<f32>,
}

impl<B: Kernels> Trainer<'_, B> {
    /// Computes the gradient of a training step without running the optimizer. The step is `later` steps after the trainer's step. In every
    /// call the weights are the same, and calls with equal `later` use the same tokens. `redraw` selects other random numbers for
    /// stochastic rounding and for Hadamard signs; 0 selects the run's own random numbers. Every rank must call this function, and all
    /// ranks get the same values.
    ///
    /// # Errors
    /// Returns [`Error::Data`] for a step without a target, and passes on errors of the backend, the data and other ranks.
    pub fn gradient(&mut self, later: u64, redraw: u64) -> Result<Vec<ParamGradient>> {
        Ok(self.gradient_seen(later, redraw, false)?.0)
    }

    /// Measures the error of every quantization on this rank, in the step that `gradient(0, 0)` computes.
    ///
    /// # Errors
    /// Returns the errors of [`Trainer::gradient`].
    pub fn quantization_errors(&mut self) -> Result<Vec<SiteError>> {
        Ok(self.gradient_seen(0, 0, true)?.1)
    }

    fn gradient_seen(
        &mut self,
        later: u64,
        redraw: u64,
        errors: bool,
    ) -> Result<(Vec<ParamGradient>, Vec<SiteError>)> {
        self.require_settled("gradient")?;
        self.rank.make_buffers()?;
        let (b, mesh) = (self.rank.context.b, self.rank.context.mesh);
        let batches = self.rank.context.plan()?.step(self.rank.context.step + later)?;
        if batches.counted == 0 {
            let source = self.rank.context.config.data.described();
            let why =
                format!("step {} has no target, and so no gradient", self.rank.context.step + later + 1);
            return Err(Error::data(Path::new(&source), why));
        }
        let RankState { context, model, buffers: Some(buffers), activations, .. } = &mut self.rank else {
            return Err(CoreError::shape("gradient", "buffers", "none", "made").into());
        };
        buffers.restart(b, context.step)?;
        buffers.write_inputs(context, 0.0, Told::default(), [0; 2], &batches)?;
        // No exchange may overflow, since the pass is not retried. Data are already here: from now on the seed only decides rounding and signs.
        let (seed, factor) = (context.config.seed, context.capacity_factor);
        context.config.seed = seed ^ redraw.rotate_left(32);
        context.capacity_factor = f64::INFINITY;
        let names: Vec<String> = model.optimized().iter().map(|param| param.name.clone()).collect();
        let mut work = || -> Result<(Vec<Vec<f32>>, Vec<SiteError>)> {
            let mut step = Step::new(context, model, buffers)?;
            if errors {
                step.measure_errors();
            }
            step.micro_batches()?;
            let gradients = step.gradients(|param, grad| gather(b, mesh, param, grad))?;
            let errors = step.take_errors();
            step.end();
            Ok((gradients, errors))
        };
        let found = b.within(activations, || Ok(work()));
        (context.config.seed, context.capacity_factor) = (seed, factor);
        let (gradients, errors) = found??;
        let named = names.into_iter().zip(gradients);
        Ok((named.map(|(name, values)| ParamGradient { name, values }).collect(), errors))
    }

    /// Computes the held-out loss in nats of each evaluated sequence, and the number of their targets. `batches` batches of
    /// [`HeldOut::BATCH`](crate::evaluation::HeldOut::BATCH) sequences are taken from all over the data; 0 means all sequences. With these
    /// losses, two recipes with the same weights can be compared sequence by sequence. The results are the same on every rank.
    ///
    /// # Errors
    /// Returns the errors of [`Trainer::evaluate`].
    pub fn held_out_sequences(&mut self, batches: usize) -> Result<(Vec<f32>, u64)> {
        self.require_settled("held_out_sequences")?;
        let RankState { context, model, activations, .. } = &mut self.rank;
        let sequences = context
            .b
            .within(activations, || Ok(context.held_out_sequences(model, batches, &mut |_, _| Ok(true))));
        // `go_on` never returned false, so there is a result.
        Ok(sequences??.unwrap_or_default())
    }
}
