//! The records of spikes, and what `nibble replay` needs to find their cause: a step on any batch that changes nothing, the losses of single
//! sequences, and all weights.

use super::Trainer;
use super::weights::gather;
use crate::data::{Batch, StepBatches};
use crate::error::{Error, Result};
use crate::metrics::{LayerMetrics, Metrics, Watchdog};
use crate::rank::{RankState, Step};
use crate::record::{Report, Told};
use crate::spikes::{Spike, Usual};
use nibble_core::ops::Control;
use nibble_core::{DeviceKind, Error as CoreError, Kernels};
use std::path::Path;

/// The results that a step computes before the optimizer runs.
#[derive(Debug, Clone, PartialEq)]
pub struct Tried {
    /// Loss in nats, with the meaning that the loss has in the metrics.
    pub loss: f64,
    /// Norm of the gradient before clipping.
    pub grad_norm: f64,
    /// The first tensor that is not finite, with the name that a run would report.
    pub non_finite: Option<String>,
    /// The layer metrics of the step, with quantization measured in all layers.
    pub layers: LayerMetrics,
}

/// The loss of a training sequence.
#[derive(Debug, Clone, PartialEq)]
pub struct ScoredSequence {
    /// Position of the sequence in the run's data.
    pub cursor: u64,
    /// Loss of every target, in nats. 0 for a token without a target.
    pub nats: Vec<f32>,
    /// Number of targets.
    pub targets: usize,
    /// Token ids of the inputs.
    pub inputs: Vec<i32>,
    /// Token ids of the targets; [`crate::data::NO_TARGET`] for a token without a target.
    pub wanted: Vec<i32>,
}

impl ScoredSequence {
    /// Mean loss of the targets in nats; 0 without targets.
    #[must_use]
    pub fn mean(&self) -> f64 {
        let sum: f64 = self.nats.iter().map(|nats| f64::from(*nats)).sum();
        if self.targets == 0 { 0.0 } else { sum / self.targets as f64 }
    }
}

impl<B: Kernels> Trainer<'_, B> {
    /// The record of a step whose loss begins a spike; `None` for other steps. The watchdog has not taken the step yet.
    ///
    /// # Errors
    /// Returns errors of the data.
    pub(super) fn spike_of_step(&self, metrics: &Metrics, watchdog: &Watchdog) -> Result<Option<Spike>> {
        match metrics.loss.filter(|loss| watchdog.begins_spike(*loss)) {
            Some(loss) => {
                let found = Spike { loss: Some(loss), grad_norm: metrics.grad_norm, ..Spike::default() };
                self.spike(metrics.step, watchdog.usual_loss(), found).map(Some)
            }
            None => Ok(None),
        }
    }

    /// The record of a step that ends with this error; `None` unless a value of the step was not finite.
    ///
    /// # Errors
    /// Returns errors of the data.
    pub(super) fn spike_of_error(&self, error: &Error, usual: Usual) -> Result<Option<Spike>> {
        let Error::Core(CoreError::NonFinite { site, step, .. }) = error else { return Ok(None) };
        let found = Spike { non_finite: Some(site.clone()), ..Spike::default() };
        self.spike(step + 1, usual, found).map(Some)
    }

    /// The record of step `step`, counted from 1, of which `found` says what is out of order.
    fn spike(&self, step: u64, usual: Usual, found: Spike) -> Result<Spike> {
        let context = &self.rank.context;
        let batches = context.plan()?.of_all_ranks().step(step - 1)?;
        let sequences = context.config.sequences_per_step();
        Ok(Spike {
            step,
            usual_loss: (usual.samples > 0).then_some(usual.mean),
            limit: usual.is_settled().then(|| usual.limit()),
            sequences: [(step - 1) * sequences, sequences],
            batch_sha256: batches.sha256(),
            device: self.device_kind().into(),
            ..found
        })
    }

    /// `cpu` or `gpu`, with the meaning of [`Spike::device`].
    pub fn device_kind(&self) -> &'static str {
        match self.rank.context.b.kind() {
            DeviceKind::Host => "cpu",
            DeviceKind::Gpu => "gpu",
        }
    }

    /// The sequences of all ranks in step `step`, which is counted from 0.
    ///
    /// # Errors
    /// Returns errors of the data.
    pub fn batches_of(&self, step: u64) -> Result<StepBatches> {
        self.rank.context.plan()?.of_all_ranks().step(step)
    }

    /// Runs the next step on the batch of step `data` (counted from 0), but changes nothing: neither weights nor moments nor delayed
    /// scales. With the step's own batch, the loss and the norm are bit-identical to those of the real step. Quantization is measured in
    /// all layers if `train.quantization_every` is not 0. The result is `None` if the batch has no target. Every rank must call this
    /// function.
    ///
    /// # Errors
    /// Returns errors of the backend, the data and other ranks. Values that are not finite are no error.
    pub fn try_step(&mut self, data: u64) -> Result<Option<Tried>> {
        self.require_settled("try_step")?;
        self.rank.make_buffers()?;
        let b = self.rank.context.b;
        let batches = self.rank.context.plan()?.step(data)?;
        if batches.counted == 0 {
            return Ok(None);
        }
        let RankState { context, model, buffers: Some(buffers), activations, .. } = &mut self.rank else {
            return Err(CoreError::shape("try_step", "buffers", "none", "made").into());
        };
        buffers.restart(b, context.step)?;
        // While this flag is set, the optimizer changes nothing.
        b.write(&mut buffers.optimizer.control, Control::STOP, &[1.0])?;
        buffers.write_inputs(context, 0.0, Told::default(), [0; 2], &batches)?;
        // No exchange may overflow, since the pass is not retried.
        let factor = std::mem::replace(&mut context.capacity_factor, f64::INFINITY);
        let mut work = || -> Result<()> {
            let mut step = Step::new(context, model, buffers)?;
            step.measure_all();
            step.micro_batches()?;
            step.optimize()?;
            step.end();
            Ok(())
        };
        let done = b.within(activations, || Ok(work()));
        context.capacity_factor = factor;
        done??;
        let len = buffers.optimizer.report_len();
        let first = context.step as usize % 2 * len;
        let values = b.finish_download(b.begin_download(&buffers.optimizer.reports, first..first + len)?)?;
        buffers.restart(b, context.step)?;
        context.mesh.all.check()?;
        let report = Report::new(buffers.layout, buffers.sites(), &values)?;
        let non_finite = match report.fault() {
            None => None,
            Some(CoreError::NonFinite { site, .. }) => Some(site),
            Some(other) => return Err(other.into()),
        };
        let metrics = Metrics::of_step(&report, &context.config, batches.counted);
        Ok(Some(Tried {
            // A step with targets has a loss and a norm.
            loss: metrics.loss.unwrap_or(f64::NAN),
            grad_norm: metrics.grad_norm.unwrap_or(f64::NAN),
            non_finite,
            layers: LayerMetrics::of_step(&report),
        }))
    }

    /// The loss of each sequence in the batch of step `data` (counted from 0), in the order of the batch. On one rank only.
    ///
    /// # Errors
    /// Returns the errors of [`Trainer::try_step`].
    pub fn sequences_of(&mut self, data: u64) -> Result<Vec<ScoredSequence>> {
        self.require_settled("sequences_of")?;
        let batches = self.batches_of(data)?;
        let mut cursor = data * self.config().sequences_per_step();
        let mut scored = Vec::new();
        let RankState { context, model, activations, .. } = &mut self.rank;
        for batch in &batches.micro_batches {
            let nats = context.b.within(activations, || {
                Ok((|| -> Result<Vec<f32>> {
                    model.prepare(&context.inference_cx(1)?)?;
                    let nats = context.nats_of_tokens(model, batch)?;
                    model.release();
                    Ok(nats)
                })())
            })??;
            scored.extend(of_sequences(batch, &nats, cursor));
            cursor += batch.sequences as u64;
        }
        Ok(scored)
    }

    /// All weights: the name and the values of every parameter, in canonical order. Every rank must call this function.
    ///
    /// # Errors
    /// Returns errors of the backend and other ranks.
    pub fn weights(&mut self) -> Result<Vec<(String, Vec<f32>)>> {
        let (b, mesh) = (self.rank.context.b, self.rank.context.mesh);
        let params = self.rank.model.params().into_iter();
        params.map(|param| Ok((param.name.clone(), gather(b, mesh, param, &param.master)?))).collect()
    }

    /// Replaces all weights by the weights of another trainer of the same model, and sets the position in the run to that trainer's
    /// position. On one rank only.
    ///
    /// # Errors
    /// Returns an error if the parameters are not those of the model, and passes on errors of the backend.
    pub fn set_weights(&mut self, weights: &[(String, Vec<f32>)], step: u64) -> Result<()> {
        self.require_settled("set_weights")?;
        let b = self.rank.context.b;
        let params = self.rank.model.params();
        if params.len() != weights.len() {
            return Err(CoreError::shape("set_weights", "weights", weights.len(), params.len()).into());
        }
        for (param, (name, values)) in params.into_iter().zip(weights) {
            if param.name != *name || param.master.rows * param.master.cols != values.len() {
                let got = format!("{name} with {} values", values.len());
                let expected = format!("{} with {}", param.name, param.master.rows * param.master.cols);
                return Err(CoreError::shape("set_weights", "weights", got, expected).into());
            }
            super::weights::write(b, &mut param.master, 0, values)?;
        }
        self.rank.context.step = step;
        Ok(())
    }

    /// Finds where a training sequence lies in the run's data: the name of the source, and the index of the sequence's first token in this
    /// source.
    ///
    /// # Errors
    /// Returns an error if the trainer has no data.
    pub fn place_of(&self, cursor: u64) -> Result<(String, u64)> {
        let (source, token) = self.data()?.place(cursor);
        Ok((source.map_or_else(|| self.config().data.described(), str::to_owned), token))
    }

    /// Checks that the trainer's data have this SHA-256 hash.
    ///
    /// # Errors
    /// Returns [`Error::Data`] if the trainer has other data.
    pub fn require_data(&self, sha256: &str) -> Result<()> {
        if self.data()?.sha256() == sha256 {
            return Ok(());
        }
        let source = self.config().data.described();
        Err(Error::data(Path::new(&source), "has changed since the run: its steps cannot be repeated"))
    }
}

/// The sequences of a batch whose first sequence has this position. `nats` has the losses of all tokens, and those of padding.
fn of_sequences(batch: &Batch, nats: &[f32], cursor: u64) -> Vec<ScoredSequence> {
    let of = |index: usize| {
        let tokens = index * batch.seq_len..(index + 1) * batch.seq_len;
        let wanted = batch.targets[tokens.clone()].to_vec();
        ScoredSequence {
            cursor: cursor + index as u64,
            nats: nats[tokens.clone()].to_vec(),
            targets: wanted.iter().filter(|target| **target >= 0).count(),
            inputs: batch.inputs[tokens].to_vec(),
            wanted,
        }
    };
    (0..batch.sequences).map(of).collect()
}
