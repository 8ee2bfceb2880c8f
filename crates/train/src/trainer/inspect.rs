//! One step laid open, for comparison with another implementation: weights, tokens, the experts that were chosen, logits, and
//! the gradient of every weight.

use super::Trainer;
use super::weights::{HostTensor, TensorRef, gather, slices};
use crate::checkpoint::{header, little_endian};
use crate::cx::Cx;
use crate::error::Result;
use crate::model::Inside;
use crate::rank::{RankState, Step};
use crate::recompute::Scope;
use nibble_core::{Error as CoreError, Kernels};
use safetensors::Dtype;
use std::collections::BTreeMap;
use std::io::{self, Write};

/// The tensors of one step, named and on the host.
#[derive(Debug, Default)]
pub struct Inspection {
    tensors: Vec<HostTensor>,
}

impl Inspection {
    fn push(&mut self, name: impl Into<String>, shape: &[usize], values: Vec<f32>) {
        self.tensors.push((name.into(), shape.to_vec(), values));
    }

    /// What a forward pass chooses and gives.
    fn look<B: Kernels>(&mut self, cx: &Cx<'_, B>, inside: &Inside<'_, B>) -> nibble_core::Result<()> {
        for (layer, routing) in inside.routings() {
            let tokens = routing.probs.rows;
            let shape = [tokens, B::len(&routing.expert) / tokens.max(1)];
            let experts = cx.b.download(&routing.expert)?.into_iter().map(|expert| expert as f32).collect();
            self.push(format!("experts.{layer}"), &shape, experts);
            self.push(format!("gates.{layer}"), &shape, cx.b.download(&routing.weight)?);
        }
        let logits = inside.logits(cx)?;
        self.push("logits", &[logits.rows, logits.cols], logits.to_f32_vec(cx.b)?);
        Ok(())
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

impl<B: Kernels> Trainer<'_, B> {
    /// The next step's first micro-batch, forward and backward, without an optimizer: all of it of one pass, that of the step, with its
    /// shards. The trainer is used up.
    ///
    /// Tensors: `ids`, `targets` `[sequences, seq_len]`; of layers with experts `experts.LAYER` and `gates.LAYER` `[t, k]`; `logits` `[t, v]`; each
    /// weight under its checkpoint's name, and its gradient under `grad.NAME`. The loss is the mean of the tokens' nats and the
    /// routers' losses.
    ///
    /// # Errors
    /// On several ranks or with several micro-batches; from the backend and the data.
    pub fn inspect(mut self) -> Result<Inspection> {
        let t = &self.rank.context.config.train;
        if self.rank.context.mesh.all.world() != 1 || t.grad_accum != 1 {
            return Err(
                CoreError::shape("inspect", "run", "several ranks or micro-batches", "one of each").into()
            );
        }
        self.require_settled("inspect")?;
        // What routers chose is looked at, and so kept.
        let scopes = self.rank.context.config.train.recompute.iter().copied();
        let kept: Vec<Scope> =
            scopes.filter(|scope| !matches!(scope, Scope::Layers | Scope::Experts)).collect();
        self.rank.model.recompute(&kept);
        self.rank.make_buffers()?;
        let mut seen = Inspection::default();
        let batch = self.rank.context.plan()?.batch(self.rank.context.step, 0);
        let as_floats = |ids: &[i32]| ids.iter().map(|&id| id as f32).collect();
        let shape = [batch.sequences, batch.seq_len];
        seen.push("ids", &shape, as_floats(&batch.inputs));
        seen.push("targets", &shape, as_floats(&batch.targets));

        let named = self.rank.model.named_tensors();
        let (b, ep) = (self.rank.context.b, self.rank.context.mesh.ep);
        for (param, named) in self.rank.model.params().into_iter().zip(&named) {
            let values = gather(b, ep, param, &param.master)?;
            for TensorRef { name, shape, data } in slices(named, "", &values) {
                seen.push(name, &shape, data.to_vec());
            }
        }
        let RankState { context, model, buffers: Some(buffers), activations, .. } = &mut self.rank else {
            return Err(CoreError::shape("inspect", "buffers", "none", "made").into());
        };
        buffers.write_inputs(context, (0.0, false), &[batch])?;
        let mut work = || -> Result<()> {
            let mut step = Step::new(context, model, buffers)?;
            step.first_micro_batch_seen(|cx, inside| seen.look(cx, &inside))?;
            for (values, named) in step.gradients()?.iter().zip(&named) {
                for TensorRef { name, shape, data } in slices(named, "", values) {
                    seen.push(format!("grad.{name}"), &shape, data.to_vec());
                }
            }
            step.end();
            Ok(())
        };
        context.b.within(activations, || Ok(work()))??;
        Ok(seen)
    }
}
