//! Rehearses a run on a backend that computes nothing. Each part of the run that allocates memory is executed once.

use super::RankState;
use super::step::Step;
use crate::checks::{check_sizes, steps_of_change};
use crate::config::Config;
use crate::data::{Batch, ImageCounts};
use crate::error::{Error, Result};
use crate::fault::rehearsing;
use crate::ledger::{Ledger, in_words};
use crate::record::LayerSample;
use crate::spec::ModelSpec;
use nibble_core::allocation::aside;
use nibble_core::{Comm, DType, DeviceKind, Kernels, Mesh, MeshShape, Recipe, SoloComm, Tensor};
use nibble_dry::{Dry, DryComm};
use std::collections::BTreeMap;

/// Calls `run` as this rank, with a device that computes nothing.
///
/// # Errors
/// Returns [`Error::Memory`] with `usize::MAX` bytes if the number of bytes that `run` needs overflows.
pub(crate) fn on_dry<R>(
    kind: DeviceKind,
    mesh: MeshShape,
    rank: usize,
    config: &Config,
    run: impl FnOnce(&Dry, Mesh<'_, Dry>) -> Result<R>,
) -> Result<R> {
    check_sizes(config)?;
    let dry = Dry::new(kind);
    let tokens = config.train.batch_size / mesh.ranks() * config.data.seq_len;
    let (dp_rank, ep_rank) = mesh.place(rank);
    let [all, ep, dp] =
        [(rank, mesh.ranks()), (ep_rank, mesh.ep), (dp_rank, mesh.dp)].map(|(rank, world)| {
            let several: Box<dyn Comm<Dry>> = match world {
                1 => Box::new(SoloComm),
                _ => Box::new(DryComm { rank, world, tokens, top_k: config.model.top_k }),
            };
            several
        });
    // The phases of the rehearsal are not reported as phases of the process.
    match aside(|| rehearsing(|| run(&dry, Mesh { all: &*all, ep: &*ep, dp: &*dp }))) {
        Err(_) if dry.has_overflowed() => {
            let most = in_words(Dry::MOST_BYTES);
            let why = format!("a run takes more than {most}, and no device has that");
            Err(Error::Memory { needed: usize::MAX, settings: Vec::new(), why })
        }
        done => done,
    }
}

impl<'a, B: Kernels> RankState<'a, B> {
    /// A rank with these sizes. Weights and gradients have buffers, but their values are meaningless.
    pub(crate) fn of_shapes(b: &'a B, mesh: Mesh<'a, B>, config: &Config, recipe: &Recipe) -> Result<Self> {
        let dim = ModelSpec::new(&config.model).rope.dim;
        let table = |b: &B| Tensor::unwritten(b, DType::F32, config.data.seq_len, dim);
        let mut rank = Self::assemble(b, mesh, config, recipe.clone(), table)?;
        if config.model.sees_images() {
            let (rows, cols) = (ImageCounts::of(config)?.rows(config), config.model.patch_size.pow(2));
            let pixels = b.within(&rank.weights, || Tensor::unwritten(b, DType::F32, rows, cols))?;
            rank.model.embed.patches.iter_mut().for_each(|patches| patches.pixels = Some(pixels.clone()));
        }
        rank.make_buffers()?;
        Ok(rank)
    }

    /// Runs a forward pass, and lists the buffers that it saves. Then runs a step and an evaluation at every point of the run at which
    /// precisions change.
    ///
    /// # Errors
    /// Returns an error of the backend, if its memory runs out.
    pub(crate) fn rehearse(&mut self) -> Result<Ledger> {
        let config = self.context.config.clone();
        let (size, seq_len, steps) = (config.train.batch_size, config.data.seq_len, config.train.steps);
        let world = self.context.mesh.all.world();
        // A third micro-batch needs no more memory than the second.
        let micro_batches = config.train.grad_accum.min(2);
        let apart = self.context.config.data.document_mask;
        let [mine, all] = [size / world, size].map(|sequences| Batch::zeroed(sequences, seq_len, apart));
        let (ledger, _) = self.ledger_of(&mine)?;
        self.activations = self.context.b.arena("activations")?;
        // A step that measures quantization needs a little more memory, and the amount differs between such steps.
        let turns = LayerSample::turns(config.model.layers);
        let measuring = config.train.measured_steps().take(turns);
        for step in steps_of_change(self.context.plans.recipe(), steps).into_iter().chain(measuring) {
            self.context.step = step;
            if step < steps {
                self.rehearse_step(micro_batches)?;
            }
            let Self { context, model, activations, .. } = self;
            context.b.within(activations, || {
                Ok((|| -> Result<()> {
                    model.prepare(&context.inference_cx(1)?)?;
                    context.held_out_nats(model, &all)?;
                    model.release();
                    Ok(())
                })())
            })??;
        }
        Ok(ledger)
    }

    /// Runs the step of this number, with all of its micro-batches.
    ///
    /// # Errors
    /// Returns the errors of [`RankState::rehearse`].
    pub(crate) fn rehearse_whole_step(&mut self, step: u64) -> Result<()> {
        self.context.step = step;
        self.rehearse_step(self.context.config.train.grad_accum)
    }

    /// Runs the parts of a step with this number of micro-batches.
    fn rehearse_step(&mut self, micro_batches: usize) -> Result<()> {
        let Self { context, model, buffers, activations, .. } = self;
        let Some(buffers) = buffers else { return Ok(()) };
        context.b.within(activations, || {
            Ok((|| -> Result<()> {
                let mut step = Step::new(context, model, buffers)?;
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

impl RankState<'_, Dry> {
    /// Number of bytes that the rank sends to other ranks in the first step, by collective.
    ///
    /// # Errors
    /// Returns the errors of [`RankState::rehearse`].
    pub(crate) fn sent_in_a_step(&mut self) -> Result<BTreeMap<&'static str, u64>> {
        let (dry, micro_batches) = (self.context.b, self.context.config.train.grad_accum as u64);
        if self.context.mesh.all.world() == 1 {
            return Ok(BTreeMap::new());
        }
        self.context.step = 0;
        let mut sent_by = |micro_batches| -> Result<BTreeMap<&'static str, u64>> {
            let before = dry.sent();
            self.rehearse_step(micro_batches)?;
            let sent =
                dry.sent().into_iter().map(|(call, bytes)| (call, bytes - before.get(call).unwrap_or(&0)));
            Ok(sent.collect())
        };
        let one = sent_by(1)?;
        if micro_batches == 1 {
            return Ok(one);
        }
        // Each later micro-batch sends as many bytes as the second micro-batch.
        let two = sent_by(2)?;
        let all = one.iter().map(|(call, bytes)| {
            (*call, bytes + (two.get(call).unwrap_or(bytes) - bytes) * (micro_batches - 1))
        });
        Ok(all.collect())
    }
}
