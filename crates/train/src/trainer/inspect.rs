//! Exposes one step for comparison with another implementation: weights, tokens, selected experts, logits, and the gradient of every
//! weight.

use super::Trainer;
use super::weights::{HostTensor, assembled, gather};
use crate::checkpoint::{header, little_endian};
use crate::cx::Cx;
use crate::data::StepBatches;
use crate::error::{Error, Result};
use crate::family::Named;
use crate::model::Inside;
use crate::rank::{RankState, Step};
use crate::recompute::Scope;
use crate::record::Told;
use nibble_core::ops::Cast;
use nibble_core::{Comm, DType, Error as CoreError, Kernels};
use safetensors::Dtype;
use std::collections::BTreeMap;
use std::io::{self, Write};
use std::path::Path;

/// The named tensors of one step, on the host.
#[derive(Debug, Default)]
pub struct Inspection {
    tensors: Vec<HostTensor>,
}

impl Inspection {
    /// Adds a tensor of which every rank has equally many rows. The rows of all ranks are concatenated in rank order, which is the order of
    /// the tokens.
    fn push_rows<B: Kernels>(
        &mut self,
        name: impl Into<String>,
        (b, all): (&B, &dyn Comm<B>),
        row_len: usize,
        rows: &B::Buf<f32>,
    ) -> nibble_core::Result<()> {
        let values = b.download(&all.all_gather(b, rows)?)?;
        self.push(name, &[values.len() / row_len.max(1), row_len], values);
        Ok(())
    }

    fn push(&mut self, name: impl Into<String>, shape: &[usize], values: Vec<f32>) {
        self.tensors.push((name.into(), shape.to_vec(), values));
    }

    /// Adds the routing and the logits of a forward pass, with the rows of all ranks.
    fn look<B: Kernels>(&mut self, cx: &Cx<'_, B>, inside: &Inside<'_, B>) -> nibble_core::Result<()> {
        let ranks = (cx.b, cx.mesh.all);
        for (layer, routing) in inside.routings() {
            let top_k = B::len(&routing.expert) / routing.kept.rows.max(1);
            let experts = cx.b.upload(&as_floats(&cx.b.download(&routing.expert)?))?;
            self.push_rows(format!("experts.{layer}"), ranks, top_k, &experts)?;
            self.push_rows(format!("gates.{layer}"), ranks, top_k, &routing.weight)?;
        }
        let logits = Cast { x: &inside.logits(cx)?, dtype: DType::F32 }.run(cx.b)?;
        self.push_rows("logits", ranks, logits.cols, logits.f32("inspect", "logits")?)
    }

    /// Names and shapes of the tensors, in the order in which they were added.
    pub fn shapes(&self) -> impl Iterator<Item = (&str, &[usize])> {
        self.tensors.iter().map(|(name, shape, _)| (name.as_str(), shape.as_slice()))
    }

    /// The values of the tensor `name`.
    pub fn values(&self, name: &str) -> Option<&[f32]> {
        self.tensors.iter().find(|(n, ..)| n == name).map(|(.., values)| values.as_slice())
    }

    /// Writes the tensors as one safetensors file with this metadata. All tensors are F32.
    ///
    /// # Errors
    /// Returns the errors of the operating system.
    pub fn write(&self, metadata: &BTreeMap<String, String>, to: &mut dyn Write) -> io::Result<()> {
        let tensors: BTreeMap<&str, _> =
            self.tensors.iter().map(|(name, ..)| name.as_str()).zip(&self.tensors).collect();
        let shapes = tensors.iter().map(|(name, (_, shape, _))| (*name, Dtype::F32, shape.as_slice()));
        to.write_all(&header(metadata, shapes)?)?;
        tensors.values().try_for_each(|(.., values)| to.write_all(&little_endian(values)))
    }
}

/// Converts integers below 2²⁴, such as token ids and expert indices, to F32.
fn as_floats(numbers: &[i32]) -> Vec<f32> {
    numbers.iter().map(|&number| number as f32).collect()
}

impl<B: Kernels> Trainer<'_, B> {
    /// Runs the forward and backward passes of the next step's only micro-batch, without the optimizer. All tensors come from the step's
    /// own pass, with the step's shards. The trainer is consumed. Every rank returns the tensors of all ranks, with the same bits as one
    /// rank: rows are in token order, and experts are ordered by index.
    ///
    /// The tensors are `ids` and `targets` `[sequences, seq_len]`, and `starts` if documents are separated. `ids.K` and `targets.K` belong
    /// to the K-th following step, for `steps` steps in total, so that another implementation can train on the same tokens. `experts.LAYER`
    /// and `gates.LAYER` `[t, k]` belong to layers with experts, and `logits` is `[t, v]`. Each weight has its name in checkpoints, and its
    /// gradient has the name `grad.NAME`. The loss of these gradients is the mean over the tokens in nats, plus the routers' losses.
    ///
    /// # Errors
    /// Returns [`Error::Data`] for a step without a target. Returns an error for several micro-batches, because a step's gradients are sums
    /// over all micro-batches, so the tensors of one micro-batch do not explain the gradients. Passes on errors of the backend, the data
    /// and other ranks.
    pub fn inspect(mut self, steps: u64) -> Result<Inspection> {
        let micro_batches = self.rank.context.config.train.grad_accum;
        if micro_batches != 1 {
            let got = format!("{micro_batches} micro-batches a step");
            return Err(CoreError::shape("inspect", "train.grad_accum", got, "one").into());
        }
        self.require_settled("inspect")?;
        // There is only a single pass, so the capacity is unlimited.
        self.rank.context.capacity_factor = f64::INFINITY;
        // The routing must be saved, because it is exposed.
        let recompute = &self.rank.context.config.train.recompute;
        self.rank.model.recompute(&recompute.without(&[Scope::Layers, Scope::Experts]));
        self.rank.make_buffers()?;
        let mut seen = Inspection::default();
        let (b, mesh) = (self.rank.context.b, self.rank.context.mesh);
        let mut tokens = |later: u64| -> Result<StepBatches> {
            let batches = self.rank.context.plan()?.step(self.rank.context.step + later)?;
            let number = if later == 0 { String::new() } else { format!(".{later}") };
            // There is exactly one micro-batch.
            for batch in &batches.micro_batches {
                let all = [("ids", &batch.inputs), ("targets", &batch.targets), ("starts", &batch.starts)];
                for (name, ids) in all.into_iter().filter(|(_, ids)| !ids.is_empty()) {
                    let ids = b.upload(&as_floats(ids))?;
                    seen.push_rows(format!("{name}{number}"), (b, mesh.all), batch.seq_len, &ids)?;
                }
            }
            Ok(batches)
        };
        let batches = tokens(0)?;
        if batches.counted == 0 {
            let source = self.rank.context.config.data.described();
            let why =
                format!("step {} has no target, and so no loss and no gradient", self.rank.context.step + 1);
            return Err(Error::data(Path::new(&source), why));
        }
        (1..steps).try_for_each(|later| tokens(later).map(drop))?;

        let named = self.rank.model.named_tensors();
        let params = self.rank.model.params();
        let with_gradients: Vec<bool> = params.iter().map(|param| param.has_gradient()).collect();
        let weights = params.into_iter().map(|param| gather(b, mesh, param, &param.master));
        let weights = weights.collect::<Result<Vec<_>>>()?;
        seen.tensors.extend(named.iter().map(|tensor| assembled(tensor, "", &weights)));
        drop(weights);
        let RankState { context, model, buffers: Some(buffers), activations, .. } = &mut self.rank else {
            return Err(CoreError::shape("inspect", "buffers", "none", "made").into());
        };
        buffers.write_inputs(context, 0.0, Told::default(), [0; 2], &batches)?;
        let mut work = || -> Result<()> {
            let mut step = Step::new(context, model, buffers)?;
            step.first_micro_batch_seen(|cx, inside| seen.look(cx, &inside))?;
            let gradients = step.gradients(|param, grad| gather(b, mesh, param, grad))?;
            let mut gradients = gradients.into_iter();
            // The list is indexed by parameter, and `None` for parameters without a gradient.
            let all = with_gradients.iter().map(|has| if *has { gradients.next() } else { None });
            let all: Vec<Vec<f32>> = all.map(Option::unwrap_or_default).collect();
            let has_one = |tensor: &&Named| tensor.rows.iter().all(|rows| with_gradients[rows.param]);
            let tensors = named.iter().filter(has_one).map(|tensor| assembled(tensor, "grad.", &all));
            seen.tensors.extend(tensors);
            step.end();
            Ok(())
        };
        context.b.within(activations, || Ok(work()))??;
        Ok(seen)
    }
}
