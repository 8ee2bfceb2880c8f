//! AdamW with F32 masters and global-norm clipping. All values stay on the device.
//!
//! Gradients that are still separate per shard are first summed by a tree, then over the ranks; each rank gets the sums of its own rows.
//! Sums of squares of chunks are gathered from all ranks, together with the tables of the ranks' records. `EndStep` computes the norm and
//! the clipping factor, and decides whether the step counts. `AdamW` reads these results from the control buffer. A router's bias
//! (`model.router_bias`) is a parameter without gradient and moments, of which every rank holds all values. `BalanceBias` changes the bias
//! according to the loads in the tables of all ranks.
//!
//! **A step that fails changes nothing.** `EndStep` sets the *stop* flag if a block held a NaN or an infinity, a row did not fit its
//! buffer, a token id is outside the vocabulary, or the loss, the norm or the learning rate is not finite. While the flag is set, `AdamW`,
//! `BalanceBias` and `PushAmax` change nothing, in this step and in every later step. Only the host clears the flag. The host reads the
//! report one step later and ends the run with the tensor, the layer and the step. A checkpoint is written only after its step's report has
//! been read. `train/tests/steps/faults.rs` replaces a result with NaN after every op of a step.

use crate::config::TrainConfig;
use crate::cx::Cx;
use crate::param::{Moments, Optimized, Param, Placement, reduce_gradients};
use crate::record::Layout;
use crate::spec::Update;
use nibble_core::allocation::{in_part, part};
use nibble_core::formats::double::power;
use nibble_core::ops::{
    AdamW, AdamWTensor, BalanceBias, ChunkSums, CloseSquares, Control, EndStep, REPORT_HEAD, Squared,
    SumSquares, squares_chunks,
};
use nibble_core::{DType, Data, Error, Kernels, MeshShape, Result};
use std::ops::Range;

/// The scalars that the host computes for a step: the learning rate, AdamW's bias corrections after `updates` earlier updates, and 1 /
/// `counted`. `counted` is the number of targets in the loss, and is at least one.
pub fn scalars(config: &TrainConfig, lr: f64, updates: u64, counted: u64) -> [f32; Control::FROM_HOST] {
    let bias = |beta: f64| (1.0 / (1.0 - power(beta, updates + 1))) as f32;
    [lr as f32, bias(config.beta1), bias(config.beta2), 1.0 / counted as f32]
}

/// The optimizer's device buffers, except the buffers that each parameter owns.
#[derive(Debug)]
pub struct OptimizerState<B: Kernels> {
    /// Sums of squares of this rank's gradients, in canonical order of the parameters: one sum per parameter, or one per expert of a stack.
    squares: B::Buf<f32>,
    /// The index, among the sums of all ranks, of each sum of the whole model. The sums are in canonical order, and experts are ordered by
    /// global number.
    order: B::Buf<i32>,
    /// See [`Control`].
    pub control: B::Buf<f32>,
    /// A ring of two reports; see [`EndStep`].
    pub reports: B::Buf<f64>,
}

impl<B: Kernels> OptimizerState<B> {
    /// Creates the state for these parameters. `layout` is the layout of the step's record.
    pub fn new(b: &B, params: &[&mut Param<B>], mesh: MeshShape, layout: &Layout) -> Result<Self> {
        let each: usize = params.iter().map(|p| p.stack()).sum();
        let mut order = Vec::new();
        let mut first = 0;
        for param in params {
            // If several ranks hold a sum, the first rank's copy counts. For experts this is the first replica, which consists of the first
            // ranks.
            let ranks = if param.placement == Placement::Replicated { 1 } else { mesh.ep };
            order.extend((0..ranks).flat_map(|rank| {
                let first = rank * each + first;
                (first..first + param.stack()).map(|i| i as i32)
            }));
            first += param.stack();
        }
        Ok(Self {
            squares: b.zeros(each)?,
            order: b.upload(&order)?,
            control: b.zeros(Control::LEN)?,
            reports: b.zeros(2 * (REPORT_HEAD + mesh.ranks() * layout.cells()))?,
        })
    }

    /// Number of values of one report.
    pub fn report_len(&self) -> usize {
        B::len(&self.reports) / 2
    }
}

/// Reduces all gradients, computes their norm, decides whether the step counts, and writes the step's report. If the step counts, takes one
/// AdamW step and updates router biases. `table` is this rank's table of the step's record.
///
/// A rank has the summed gradients of the rows that it stores, and updates only these rows. The sum of squares of each gradient tensor (or
/// of each expert's gradient) is rounded to F32. The rounded sums are added in canonical order, so the norm is the same on every rank and
/// for any number of ranks.
///
/// # Errors
/// Passes on errors of the backend and of other ranks. Non-finite values cause no error of this call; the report flags such values instead.
pub fn step<B: Kernels>(
    cx: &mut Cx<'_, B>,
    params: Vec<&mut Param<B>>,
    config: &TrainConfig,
    state: &mut OptimizerState<B>,
    table: &B::Buf<f64>,
    layout: &Layout,
) -> Result<()> {
    let changing = params.into_iter().filter(|param| param.update != Update::Never);
    let (mut params, biases): (Vec<_>, Vec<_>) = changing.partition(|param| param.has_gradient());
    in_part("reduce", || {
        reduce_gradients(cx, &mut params)?;
        sum_squares(cx, &mut params, &mut state.squares)?;
        end(cx, config, state, (table, layout), biases)
    })?;
    part("optimizer");
    let kept = params.iter_mut().filter(|param| param.master.rows > 0);
    let tensors = kept.map(|param| {
        let weight_decay = if param.decays { config.weight_decay as f32 } else { 0.0 };
        let Optimized { master, grad, moments: Moments { exp_avg, exp_avg_sq } } = param.optimized()?;
        Ok(AdamWTensor { param: master, grad, exp_avg, exp_avg_sq, weight_decay })
    });
    AdamW {
        tensors: tensors.collect::<Result<_>>()?,
        control: &state.control,
        beta1: config.beta1 as f32,
        beta2: config.beta2 as f32,
        eps: config.eps as f32,
    }
    .run(cx.b)?;
    params.into_iter().for_each(Param::clear_gradient);
    Ok(())
}

/// The sum of squares of each matrix on this rank. For a parameter whose rows are split over ranks, each rank sums the chunks of its own
/// rows.
fn sum_squares<B: Kernels>(
    cx: &Cx<'_, B>,
    params: &mut [&mut Param<B>],
    squares: &mut B::Buf<f32>,
) -> Result<()> {
    let (mut first, mut at) = (0, 0);
    let matrices = params.iter().map(|param| {
        let chunks = squares_chunks(param.slices.matrix_values());
        let matrices = ChunkSums { first, parts: param.stack(), chunks, at };
        (first, at) = (first + matrices.parts * chunks, at + matrices.parts);
        matrices
    });
    let matrices: Vec<ChunkSums> = matrices.collect();
    let mut sums = cx.b.alloc::<f64>(first)?;

    let whole = |param: &Param<B>| !param.slices.is_divided();
    let places = matrices.iter().map(|matrices| matrices.first);
    let tensors = params.iter_mut().zip(places).filter(|(param, _)| whole(param));
    let tensors = tensors.map(|(param, at)| squared(param, at)).collect::<Result<Vec<_>>>()?;
    if !tensors.is_empty() {
        SumSquares { tensors, into: &mut sums }.run(cx.b)?;
    }
    for placed in
        [|placement| placement == Placement::Replicated, |placement| placement != Placement::Replicated]
    {
        let mut divided: Vec<(&mut Param<B>, usize)> = params
            .iter_mut()
            .zip(&matrices)
            .filter(|(param, _)| param.slices.is_divided() && placed(param.placement))
            .map(|(param, matrices)| (&mut **param, matrices.first))
            .collect();
        sums = gather_chunks(cx, &mut divided, sums)?;
    }
    CloseSquares { sums: &sums, tensors: matrices, into: squares }.run(cx.b)
}

/// The chunks of this rank's rows. The sums of these chunks are written from index `at` on.
fn squared<B: Kernels>(param: &mut Param<B>, at: usize) -> Result<Squared<'_, B>> {
    let (part, skip) = (param.slices.matrix_values(), param.slices.skip());
    Ok(Squared { x: param.optimized()?.grad, part, skip, at })
}

/// Gathers the sums of chunks, for parameters whose rows the same ranks share. Each parameter comes with the number of its first chunk.
fn gather_chunks<B: Kernels>(
    cx: &Cx<'_, B>,
    params: &mut [(&mut Param<B>, usize)],
    sums: B::Buf<f64>,
) -> Result<B::Buf<f64>> {
    let Some((param, _)) = params.first() else { return Ok(sums) };
    let ranks = param.replicas(cx.mesh);
    let (b, rank) = (cx.b, ranks.rank());
    let mut parts = vec![Vec::new(); ranks.world()];
    for (param, first) in &*params {
        let of_f64 = |chunks: Range<usize>| {
            (first + chunks.start) * size_of::<f64>()..(first + chunks.end) * size_of::<f64>()
        };
        let chunks = param.slices.chunks().into_iter().map(of_f64);
        parts.iter_mut().zip(chunks).for_each(|(part, chunks)| part.push(chunks));
    }
    let mut end = 0;
    let tensors = params.iter_mut().map(|(param, _)| {
        let at = end;
        end += param.slices.chunks()[rank].len();
        squared(param, at)
    });
    let tensors = tensors.collect::<Result<Vec<_>>>()?;
    let mut mine = b.alloc::<f64>(end)?;
    SumSquares { tensors, into: &mut mine }.run(b)?;
    let all = b.reinterpret::<f64, u8>(&sums)?;
    // A second handle to the buffer would force a copy of the buffer.
    drop(sums);
    let all = ranks.begin_all_gather_parts(b, b.reinterpret(&mine)?, &parts, all)?.wait(b)?;
    b.reinterpret(&all)
}

/// Computes the norm, the decision whether the step counts, and the report, over all ranks. Then updates the router biases, one for each
/// layer after the dense layers.
fn end<B: Kernels>(
    cx: &mut Cx<'_, B>,
    config: &TrainConfig,
    state: &mut OptimizerState<B>,
    (table, layout): (&B::Buf<f64>, &Layout),
    biases: Vec<&mut Param<B>>,
) -> Result<()> {
    let OptimizerState { squares, order, control, reports } = state;
    let (all_squares, all_tables);
    let (squares, tables) = match cx.mesh.all.world() {
        1 => (&*squares, table),
        _ => {
            all_squares = cx.mesh.all.all_gather(cx.b, squares)?;
            all_tables = cx.mesh.all.all_gather_f64(cx.b, table)?;
            (&all_squares, &all_tables)
        }
    };
    let Some(clock) = &mut cx.clock else {
        return Err(Error::shape("optimizer", "clock", "none", "the device's count of steps"));
    };
    let op = EndStep {
        squares,
        order,
        tables,
        ranks: cx.mesh.all.world(),
        alarms: layout.alarms(),
        finite: layout.finite(),
        clip_norm: config.clip_norm,
        clock,
        control,
        reports,
    };
    op.run(cx.b)?;
    let (ranks, rate) = (cx.mesh.all.world(), config.router_bias_rate as f32);
    for (layer, bias) in (layout.dense..).zip(biases).filter(|_| rate != 0.0) {
        let Data::F32(bias) = &mut bias.master.data else {
            return Err(Error::shape(
                "optimizer",
                "type of a router's bias",
                bias.master.dtype(),
                DType::F32,
            ));
        };
        BalanceBias { tables, ranks, at: layout.load(layer), rate, control, bias }.run(cx.b)?;
    }
    Ok(())
}
