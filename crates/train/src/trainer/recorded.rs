//! Records a step once and replays it. A recording contains the step's phases at one point of the precision schedule.
//!
//! If the backend can record, three phases are recorded without being executed: the first micro-batch, the other micro-batches, and the
//! optimizer. If a recipe's precisions change within a run, the old recording is dropped before a new recording is made. A step that
//! measures quantization (`train.quantization_every`) is issued op by op.
//!
//! Several ranks issue each op separately, because the host must read the row counts of each all-to-all. The work between two such reads
//! could be recorded separately if the experts' buffers had fixed addresses. Separate recordings would gain little: on two GPUs the gaps
//! between kernels take as small a share of a step as in a replayed step on one GPU.
//!
//! The CPU backend cannot record. Tests wrap the CPU backend in a backend that can record (`testkit/src/recorder`), and compare recorded
//! runs bit for bit with issued runs.

use super::saving::Saving;
use crate::error::Result;
use crate::fault::{Point, reach};
use crate::model::Decoder;
use crate::rank::{RankContext, Step, StepBuffers};
use crate::spec::ModelSpec;
use nibble_core::recipe::{LayerPlan, Passes};
use nibble_core::{Error as CoreError, Kernels};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The recordings of a step's phases. With one micro-batch, `next` is `None`.
#[derive(Debug)]
pub(super) struct Recorded<B: Kernels> {
    /// The precisions of every layer at the time of recording.
    precisions: Vec<Arc<LayerPlan>>,
    first: B::Recording,
    next: Option<B::Recording>,
    optimize: B::Recording,
}

impl<B: Kernels> Recorded<B> {
    /// Replays a step. If there is no recording of the step, or the precisions have changed, the step is recorded first; the old recording
    /// is dropped before the new recording is made. The optimizer waits until a checkpoint in progress has copied the values that the
    /// optimizer changes. Returns the time that the recording took.
    pub fn run(
        recorded: &mut Option<Self>,
        context: &RankContext<'_, B>,
        model: &mut Decoder<B>,
        buffers: &mut StepBuffers<B>,
        saving: &mut Saving<B>,
    ) -> Result<Duration> {
        let started = Instant::now();
        let precisions: Vec<Arc<LayerPlan>> = ModelSpec::new(&context.config.model)
            .recipe_layers()
            .iter()
            .map(|layer| context.plans.plan(layer, context.progress(), Passes::TRAINING))
            .collect();
        let kept = recorded.take().filter(|recorded| recorded.precisions == precisions);
        let recorded = recorded.insert(match kept {
            Some(kept) => kept,
            None => {
                // No other work may run on the device during a recording.
                saving.wait_copied();
                Self::record(context, model, buffers, precisions)?
            }
        });
        let (b, recording) = (context.b, started.elapsed());
        reach(Point::StepBegins)?;
        b.replay(&recorded.first)?;
        if let Some(next) = &recorded.next {
            (1..context.config.train.grad_accum).try_for_each(|_| b.replay(next))?;
        }
        reach(Point::BeforeOptimizer)?;
        saving.wait_copied();
        b.replay(&recorded.optimize)?;
        reach(Point::AfterOptimizer)?;
        Ok(recording)
    }

    /// Records the phases one after the other. Nothing is executed: no weight, gradient or clock changes.
    fn record(
        context: &RankContext<'_, B>,
        model: &mut Decoder<B>,
        buffers: &mut StepBuffers<B>,
        precisions: Vec<Arc<LayerPlan>>,
    ) -> Result<Self> {
        let mut step = Step::new(context, model, buffers)?;
        let first = part(context.b, || step.first_micro_batch())?;
        let next = match context.config.train.grad_accum {
            1 => None,
            _ => Some(part(context.b, || step.next_micro_batch())?),
        };
        let optimize = part(context.b, || step.optimize())?;
        step.end();
        Ok(Self { precisions, first, next, optimize })
    }
}

/// Records one phase. If the phase itself fails, its own error is returned.
fn part<B: Kernels>(b: &B, mut work: impl FnMut() -> Result<()>) -> Result<B::Recording> {
    let mut failed = None;
    let recording = b.record(&mut || {
        work().map_err(|error| {
            let why = error.to_string();
            failed = Some(error);
            CoreError::Device { call: "record".into(), why }
        })
    });
    match failed {
        Some(error) => Err(error),
        None => Ok(recording?),
    }
}
