//! One training step on the device: the step's buffers, its phases, and its record.
//!
//! The host writes a step's tokens and scalars into one of two slots of a ring and issues the step's phases. Then the host reads the record
//! of the previous step. The device does not wait for the host in between. On several ranks, the host also reads the counts of each
//! exchange plan.
//!
//! 1. **Begin** ([`BeginStep`]). The device's clock selects the slot. The scalars of the slot are copied to the *control* buffer, and the
//!    table of sums is set to zero.
//! 2. **Prepare.** Each weight's copies are computed from its F32 master: quantized and quantized transposed, or cast and transposed. All
//!    micro-batches use them. They are dropped before the optimizer changes the master. One copy is not prepared: the plain transpose of
//!    quantized values (`dgrad.w` with `by = "requantize"`), which `Param::wt` decodes whenever a backward pass asks.
//! 3. **Forward**, for each micro-batch. [`BeginMicroBatch`] brings its tokens and numbers its rows. Where documents are kept apart, the
//!    index at which a token's document begins decides which keys a query sees ([`Sight`]), restarts positions, and separates
//!    documents' balance losses.
//! 4. **Head and loss** are one op, which also computes the gradients (`layers/head.rs`). The loss is the mean over the targets of the step
//!    that count, of all micro-batches and ranks. Prompts, and the last tokens of separated documents, have no target (`NO_TARGET`). Each
//!    rank's loader counts the targets of all ranks on the host, and 1 divided by this number is a scalar of the step
//!    (`Control::LOSS_SCALE`).
//! 5. **Collect.** Conversions count blocks, and routers compute loads and losses. [`Collect`] adds all of these to the table (`record`),
//!    after the forward and after the backward pass.
//! 6. **Backward** consumes [`DecoderSaved`] from the last layer to the first. The first micro-batch overwrites the gradients, and later
//!    micro-batches add to them. With one micro-batch, shards are summed immediately after each GEMM, so memory holds one gradient instead
//!    of one per shard.
//! 7. **Optimize** ([`optim::step`]).
//!
//! Under `model.balance = "batch"`, the loads of all expert layers are added after the last block, also over the ranks, as whole numbers in
//! F64. Each router's backward pass reads these sums. Under `"sequence"`, a router's losses and loads are computed per sequence instead of
//! per shard.
//!
//! A step without any target is not issued. Every rank counts the targets of all ranks and therefore makes the same decision. Only the
//! device's clock advances. A checkpoint stores the number of such steps (`Position::passed_over`), because AdamW's bias corrections count
//! updates.

use super::context::RankContext;
use crate::config::Config;
use crate::cx::Cx;
use crate::data::StepBatches;
use crate::delayed::{DelayedRecords, DelayedSites};
use crate::error::Result;
use crate::fault::{Point, reach};
use crate::model::{Decoder, DecoderOut, DecoderSaved, Inside};
use crate::model_plan::sites_of_run;
use crate::moe::Placed;
use crate::optim::{self, OptimizerState};
use crate::param::{GradientPlan, Param, reduce_gradients};
use crate::record::{Counted, LayerSample, Layout, SiteError, Told, Waiting};
use crate::shards::{Shards, Sight, SpanCounts};
use crate::spec::ModelSpec;
use nibble_core::allocation::{in_part, part};
use nibble_core::ops::{
    BeginMicroBatch, BeginStep, Clock, Collect, Entry, EntrySource, InputLayout, OCCUPANCY_VALUES, PushAmax,
};
use nibble_core::{DType, Error as CoreError, Kernels, Tensor};
use std::cell::RefCell;

/// The buffers that a training step reads and writes, at addresses that do not change during a run. Activations are in an arena.
#[derive(Debug)]
pub(crate) struct StepBuffers<B: Kernels> {
    /// A ring of two slots into which the host writes.
    inputs: B::Buf<i32>,
    input_layout: InputLayout,
    /// Tokens of the current micro-batch.
    ids: B::Buf<i32>,
    targets: B::Buf<i32>,
    /// The beginnings of documents, with document masking.
    starts: B::Buf<i32>,
    /// This rank's sums of the current step.
    table: B::Buf<f64>,
    pub layout: Layout,
    pub optimizer: OptimizerState<B>,
    /// The arenas of the parameters' gradients and moments.
    pub gradients: B::Arena,
    pub moments: B::Arena,
    /// The objects that the context of a step owns during the step; `None` during a step.
    handed: Option<HandedOver<B>>,
}

/// The objects that move from the buffers to the context of a step, and back.
#[derive(Debug)]
struct HandedOver<B: Kernels> {
    shards: Shards<B>,
    clock: B::Buf<u32>,
    counted: Counted<B>,
    delayed: DelayedRecords<B>,
}

impl<B: Kernels> StepBuffers<B> {
    /// Allocates the buffers of this rank for this configuration, the parameters' gradients and moments, and the histories of delayed
    /// scales.
    pub fn new(context: &RankContext<'_, B>, model: &mut Decoder<B>) -> Result<Self> {
        let (b, mesh, config) = (context.b, context.mesh.shape(), &context.config);
        let t = &config.train;
        let shards = context.training_shards(0)?;
        let input_layout = InputLayout {
            tokens: shards.tokens(),
            micro_batches: t.grad_accum,
            apart: config.data.document_mask,
        };
        let planned = sites_of_run(config, &context.plans)?;
        let spans = SpanCounts {
            shards: shards.local,
            experts: config.model.experts / mesh.ep,
            expert_parts: shards.expert_parts.local,
        };
        let delayed = DelayedSites::of(&planned, spans);
        let counted = Counted::at(planned.into_iter().map(|planned| planned.site));
        let layout = Layout {
            sites: counted.sites().len(),
            shards: shards.local,
            runs: shards.balance_runs(config.model.balance),
            spans: delayed.spans(),
            measures: t.quantization_every > 0,
            ..Layout::of(&ModelSpec::new(&config.model))
        };
        let (gradients, moments) = (b.arena("gradients")?, b.arena("moments")?);
        place_parameters(b, config, model, &shards, [&gradients, &moments])?;
        let delayed = b.within(&moments, || DelayedRecords::new(b, delayed))?;
        Ok(Self {
            gradients,
            moments,
            inputs: b.zeros(2 * input_layout.slot_len())?,
            input_layout,
            ids: b.zeros(shards.tokens())?,
            targets: b.zeros(shards.tokens())?,
            starts: b.zeros(input_layout.starts())?,
            table: b.zeros(layout.cells())?,
            layout,
            optimizer: OptimizerState::new(b, &model.optimized(), mesh, &layout)?,
            handed: Some(HandedOver { shards, clock: b.zeros(Clock::LEN)?, counted, delayed }),
        })
    }

    /// The sites whose counts have been recorded so far.
    pub fn sites(&self) -> &[crate::record::CountSite] {
        self.handed.as_ref().map_or(&[], |handed| handed.counted.sites())
    }

    /// The histories of delayed scales; `None` during a step.
    pub fn delayed(&self) -> Option<&DelayedRecords<B>> {
        self.handed.as_ref().map(|handed| &handed.delayed)
    }

    /// A mutable reference to the histories of delayed scales; `None` during a step.
    pub fn delayed_mut(&mut self) -> Option<&mut DelayedRecords<B>> {
        self.handed.as_mut().map(|handed| &mut handed.delayed)
    }

    /// Sets the step counter on the device to `step`, and clears the control buffer including its stop flag.
    pub fn restart(&mut self, b: &B, step: u64) -> Result<()> {
        b.clear(&mut self.optimizer.control)?;
        self.set_clock(b, step)
    }

    /// Advances the step counter on the device past `step` without running this step.
    pub fn pass_over(&mut self, b: &B, step: u64) -> Result<()> {
        self.set_clock(b, step + 1)
    }

    fn set_clock(&mut self, b: &B, step: u64) -> Result<()> {
        match &mut self.handed {
            Some(handed) => Ok(b.write(&mut handed.clock, 0, &[step as u32, 0])?),
            None => Ok(()),
        }
    }

    /// Fills the input slot of the next step: the step's scalars, this rank's message to the other ranks, the time of the previous step,
    /// and the step's tokens.
    pub fn write_inputs(
        &mut self,
        context: &RankContext<'_, B>,
        lr: f64,
        told: Told,
        spent: [i32; 2],
        batches: &StepBatches,
    ) -> Result<()> {
        let config = &context.config;
        let updates = context.step - context.passed_over;
        let scalars = optim::scalars(&config.train, lr, updates, batches.counted);
        let mut words: Vec<i32> = scalars.iter().map(|x| x.to_bits() as i32).collect();
        words.resize(InputLayout::TOLD, 0);
        words.push(told.word());
        words.extend(spent);
        for batch in &batches.micro_batches {
            words.extend(batch.inputs.iter().chain(&batch.targets).chain(&batch.starts));
        }
        let slot = context.step as usize % 2 * self.input_layout.slot_len();
        Ok(context.b.write(&mut self.inputs, slot, &words)?)
    }
}

/// Allocates the gradients and moments of all parameters that have them. Gradients and moments have separate arenas.
fn place_parameters<B: Kernels>(
    b: &B,
    config: &Config,
    model: &mut Decoder<B>,
    shards: &Shards<B>,
    [gradients, moments]: [&B::Arena; 2],
) -> Result<()> {
    let t = &config.train;
    let table = model.embed.weight.name.clone();
    let head = model.head.own.as_ref().map_or(&table, |weight| &weight.name).clone();
    let mut params: Vec<&mut Param<B>> = model.optimized();
    b.within(gradients, || {
        params.iter_mut().try_for_each(|param| {
            // With tied weights, the head and the embedding both add to the same gradient.
            let at_once = t.grad_accum == 1 && (param.name != table || table != head);
            // The gradients of norms, the embedding and the head are accumulated several times per micro-batch. This accumulation is in
            // F32, unless the sum is temporary.
            let several = !param.decays || param.name == table || param.name == head;
            let dtype = if several && !at_once { DType::F32 } else { t.grad_dtype.into() };
            param.place_gradient(b, GradientPlan { dtype, at_once }, param.placement.shards(shards))
        })
    })?;
    b.within(moments, || {
        params.iter_mut().try_for_each(|param| param.place_moments(b, t.moment_dtype.into()))
    })?;
    Ok(())
}

/// The phases of a step with one model and its buffers.
pub(crate) struct Step<'s, 'a, B: Kernels> {
    context: &'s RankContext<'a, B>,
    model: &'s mut Decoder<B>,
    buffers: &'s mut StepBuffers<B>,
    cx: Cx<'s, B>,
}

impl<'s, 'a, B: Kernels> Step<'s, 'a, B> {
    /// Starts a step of this rank, with the recipe's current precisions. The caller must call [`Step::end`] to end the step.
    pub fn new(
        context: &'s RankContext<'a, B>,
        model: &'s mut Decoder<B>,
        buffers: &'s mut StepBuffers<B>,
    ) -> Result<Self> {
        let Some(HandedOver { shards, clock, counted, delayed }) = buffers.handed.take() else {
            let got = "taken by a step that failed";
            return Err(CoreError::shape("step", "buffers", got, "those of a run that goes on").into());
        };
        let cx = Cx {
            step: context.step,
            seed: context.config.seed,
            training: true,
            micro_batches: context.config.train.grad_accum,
            clock: Some(clock),
            counted: RefCell::new(counted),
            delayed: Some(delayed),
            measures: LayerSample::of(&context.config, context.step),
            ..context.cx(shards)
        };
        Ok(Self { context, model, buffers, cx })
    }

    /// Measures the quantization of all layers, if the record has cells for measurements.
    pub fn measure_all(&mut self) {
        self.cx.measures = self.buffers.layout.measures.then_some(LayerSample::ALL);
    }

    /// From now on, measures the error of every quantization of this rank.
    pub fn measure_errors(&mut self) {
        self.cx.measures = Some(LayerSample::ALL);
        self.cx.errors = Some(RefCell::default());
    }

    /// The errors since [`Step::measure_errors`].
    pub fn take_errors(&mut self) -> Vec<SiteError> {
        self.cx.errors.take().map(RefCell::into_inner).unwrap_or_default()
    }

    /// Moves the objects that `new` took out of the buffers back into the buffers.
    pub fn end(self) {
        let Cx { shards, clock, counted, delayed, .. } = self.cx;
        let counted = counted.into_inner();
        // `new` moved these objects into the context.
        self.buffers.handed =
            clock.zip(delayed).map(|(clock, delayed)| HandedOver { shards, clock, counted, delayed });
    }

    /// Runs the whole step. Before the optimizer changes any value, `before_optimizer` waits until no thread reads these values any more.
    pub fn run(&mut self, before_optimizer: impl FnOnce()) -> Result<()> {
        reach(Point::StepBegins)?;
        self.micro_batches()?;
        reach(Point::BeforeOptimizer)?;
        before_optimizer();
        self.optimize()?;
        reach(Point::AfterOptimizer)
    }

    /// Runs the forward and backward passes of all micro-batches, which leave the step's gradients.
    pub fn micro_batches(&mut self) -> Result<()> {
        self.first_micro_batch()?;
        (1..self.context.config.train.grad_accum).try_for_each(|_| self.next_micro_batch())
    }

    /// Creates the copies of weights, and runs the forward and backward passes of the first micro-batch, which overwrite the gradients.
    pub fn first_micro_batch(&mut self) -> Result<()> {
        self.first_micro_batch_seen(|_, _| Ok(()))
    }

    /// Like [`Step::first_micro_batch`], but also calls `look` with the state of the forward pass.
    pub fn first_micro_batch_seen(
        &mut self,
        look: impl FnOnce(&Cx<'_, B>, Inside<'_, B>) -> nibble_core::Result<()>,
    ) -> Result<()> {
        let Self { model, buffers, cx, .. } = self;
        let StepBuffers { inputs, input_layout, table, layout, optimizer, .. } = &mut **buffers;
        let clock = cx.clock.as_mut().ok_or_else(no_clock)?;
        let (control, told) = (&mut optimizer.control, layout.told());
        BeginStep { inputs, layout: *input_layout, clock, control, table, told }.run(self.context.b)?;
        in_part("gather", || model.begin_prepare(cx))?;
        self.micro_batch(look)
    }

    /// Runs the forward and backward passes of a later micro-batch, which add to the existing gradients.
    pub fn next_micro_batch(&mut self) -> Result<()> {
        self.micro_batch(|_, _| Ok(()))
    }

    fn micro_batch(
        &mut self,
        look: impl FnOnce(&Cx<'_, B>, Inside<'_, B>) -> nibble_core::Result<()>,
    ) -> Result<()> {
        let Self { context, model, buffers, cx } = self;
        let StepBuffers { inputs, input_layout, ids, targets, starts, .. } = &mut **buffers;
        let (rank, ranks) = (cx.mesh.all.rank(), cx.mesh.all.world());
        let Cx { clock, shards, .. } = cx;
        let op = BeginMicroBatch {
            inputs,
            layout: *input_layout,
            clock: clock.as_mut().ok_or_else(no_clock)?,
            ids,
            targets,
            starts,
            row_id: &mut shards.groups.row_id,
            rank,
            ranks,
        };
        op.run(context.b)?;

        part("forward");
        cx.sight = context.sight_of(input_layout.apart.then_some(&*starts), cx.shards.tokens())?;
        let cx = &*cx;
        let look = |inside: Inside<'_, B>| look(cx, inside);
        let (out, saved) = model.forward_seen(
            cx,
            buffers.ids.clone(),
            &buffers.targets,
            &buffers.optimizer.control,
            look,
        )?;
        self.collect(Some((&out, &saved)))?;
        part("backward");
        self.model.backward(&self.cx, saved)?;
        self.cx.sight = Sight::default();
        self.collect(None)
    }

    /// Adds the counts of ops to the record. After a forward pass, also adds its losses and other results.
    fn collect(&mut self, forward: Option<(&DecoderOut<B>, &DecoderSaved<B>)>) -> Result<()> {
        let StepBuffers { table, layout, optimizer, .. } = &mut *self.buffers;
        let waiting = self.cx.counted.borrow_mut().take(layout)?;
        let mut entries: Vec<Entry<'_, B>> =
            waiting.iter().map(|waiting| layout.counts(waiting.site, &waiting.counts)).collect();
        for Waiting { site, found, measured, .. } in &waiting {
            entries.extend(measured.iter().map(|counts| layout.measurements(*site, counts)));
            entries.extend(found.iter().flat_map(|(cells, found)| layout.found(*site, *cells, found)));
        }
        let entry = |source, at, cells| Entry { source, at, cells, stride: 1 };
        if let Some((out, saved)) = forward {
            entries.push(entry(EntrySource::F64(&out.shard_nats), layout.nats(), layout.shards));
            entries.push(entry(EntrySource::F32(&optimizer.control), layout.scalars(), 1));
            for (i, bad_ids) in out.bad_ids.iter().enumerate() {
                entries.push(entry(EntrySource::U64(bad_ids), layout.bad_ids() + i, 1));
            }
            for (layer, block) in saved.blocks.iter().enumerate() {
                let Some(routed) = &block.routed else { continue };
                let (losses, load) = (layout.router_losses(layer), layout.load(layer));
                entries.push(entry(EntrySource::F32(&routed.losses), losses, 2 * layout.runs));
                entries.push(entry(EntrySource::I32(&routed.load), load, layout.experts));
                let (placed, cells) = match &routed.placed {
                    Placed::Here(occupancy) => (EntrySource::Occupancy(occupancy), OCCUPANCY_VALUES),
                    Placed::AmongRanks(overflow) => (EntrySource::Largest(overflow), 1),
                };
                entries.push(entry(placed, layout.occupancy(layer), cells));
            }
        }
        Ok(Collect { entries: &entries, table }.run(self.context.b)?)
    }

    /// Every gradient, summed over shards and ranks, in the order of [`Decoder::optimized`]. `read` copies a gradient to the host.
    pub fn gradients(
        &mut self,
        read: impl Fn(&Param<B>, &Tensor<B>) -> Result<Vec<f32>>,
    ) -> Result<Vec<Vec<f32>>> {
        self.model.release();
        let mut gradients = Vec::new();
        let mut params = self.model.optimized();
        reduce_gradients(&self.cx, &mut params)?;
        for param in params {
            let grad = param.reduced().ok_or_else(|| no_gradient(&param.name))?;
            gradients.push(read(param, grad)?);
            param.clear_gradient();
        }
        Ok(gradients)
    }

    /// Reduces the gradients, takes an AdamW step, and writes the report.
    pub fn optimize(&mut self) -> Result<()> {
        self.model.release();
        let StepBuffers { table, layout, optimizer, .. } = &mut *self.buffers;
        let train = &self.context.config.train;
        optim::step(&mut self.cx, self.model.params(), train, optimizer, table, layout)?;
        match &mut self.cx.delayed {
            Some(DelayedRecords { records, spans, .. }) if layout.spans > 0 => {
                let op = PushAmax { table, at: layout.amax(), spans, control: &optimizer.control, records };
                Ok(op.run(self.context.b)?)
            }
            _ => Ok(()),
        }
    }
}

fn no_gradient(param: &str) -> CoreError {
    CoreError::shape("gradients", "parameter", param, "one whose gradient has been summed")
}

fn no_clock() -> CoreError {
    CoreError::shape("step", "clock", "none", "the device's count of steps")
}
