//! One step laid open, for comparison with another implementation: weights, tokens, the experts that were chosen, logits, and
//! the gradient of every weight.

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

/// The tensors of one step, named and on the host.
#[derive(Debug, Default)]
pub struct Inspection {
    tensors: Vec<HostTensor>,
}

impl Inspection {
    /// A tensor of which every rank has as many rows of this length: all of them, in the order of the ranks, which is that of the tokens.
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

    /// What a forward pass chooses and gives, on all ranks.
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

    /// Names and shapes, in the order they were made.
    pub fn shapes(&self) -> impl Iterator<Item = (&str, &[usize])> {
        self.tensors.iter().map(|(name, shape, _)| (name.as_str(), shape.as_slice()))
    }

    /// The values of one of them.
    pub fn values(&self, name: &str) -> Option<&[f32]> {
        self.tensors.iter().find(|(n, ..)| n == name).map(|(.., values)| values.as_slice())
    }

    /// Writes them as one safetensors file, all F32, with these metadata.
    ///
    /// # Errors
    /// What the system says.
    pub fn write(&self, metadata: &BTreeMap<String, String>, to: &mut dyn Write) -> io::Result<()> {
        let tensors: BTreeMap<&str, _> =
            self.tensors.iter().map(|(name, ..)| name.as_str()).zip(&self.tensors).collect();
        let shapes = tensors.iter().map(|(name, (_, shape, _))| (*name, Dtype::F32, shape.as_slice()));
        to.write_all(&header(metadata, shapes)?)?;
        tensors.values().try_for_each(|(.., values)| to.write_all(&little_endian(values)))
    }
}

/// Whole numbers below 2²⁴, which ids and numbers of experts are.
fn as_floats(numbers: &[i32]) -> Vec<f32> {
    numbers.iter().map(|&number| number as f32).collect()
}

impl<B: Kernels> Trainer<'_, B> {
    /// The next step's only micro-batch, forward and backward, without an optimizer: all of it of one pass, that of the step, with its
    /// shards. The trainer is used up. Every rank returns the tensors of all ranks, with the bits of one: rows in the order of the tokens, experts by
    /// their number.
    ///
    /// Tensors: `ids`, `targets` `[sequences, seq_len]`, where documents are kept apart `starts` as well, and `ids.K`, `targets.K` of the K-th step after it, for as many `steps` in all, so that another
    /// implementation can train on the same tokens; of layers with experts `experts.LAYER` and `gates.LAYER` `[t, k]`; `logits` `[t, v]`; each
    /// weight under its checkpoint's name, and its gradient under `grad.NAME`. The loss is the mean of the tokens' nats and the
    /// routers' losses.
    ///
    /// # Errors
    /// [`Error::Data`] of a step without a target. With several micro-batches, since a step's gradients are the sum over all of them, and the tensors of one would not explain them; from
    /// the backend, the data and other ranks.
    pub fn inspect(mut self, steps: u64) -> Result<Inspection> {
        let micro_batches = self.rank.context.config.train.grad_accum;
        if micro_batches != 1 {
            let got = format!("{micro_batches} micro-batches a step");
            return Err(CoreError::shape("inspect", "train.grad_accum", got, "one").into());
        }
        self.require_settled("inspect")?;
        // Done once: there is room for whatever is sent.
        self.rank.context.capacity_factor = f64::INFINITY;
        // What routers chose is looked at, and so kept.
        let scopes = self.rank.context.config.train.recompute.iter().copied();
        let kept: Vec<Scope> =
            scopes.filter(|scope| !matches!(scope, Scope::Layers | Scope::Experts)).collect();
        self.rank.model.recompute(&kept);
        self.rank.make_buffers()?;
        let mut seen = Inspection::default();
        let (b, mesh) = (self.rank.context.b, self.rank.context.mesh);
        let mut tokens = |later: u64| -> Result<StepBatches> {
            let batches = self.rank.context.plan()?.step(self.rank.context.step + later)?;
            let number = if later == 0 { String::new() } else { format!(".{later}") };
            // There is one.
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
            // By the number of the parameter; of what has none nothing.
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
