//! Reads parameters and moments from checkpoints, and gathers them from all ranks. Tensors in checkpoints are logical, so the number of
//! ranks may change.

use super::Trainer;
use super::saving::files::{Part, kept_by};
use crate::checkpoint::{Checkpoint, PIECE, Position, Tensors, little_endian};
use crate::config::{Config, InitState};
use crate::delayed::{DelayedRecords, History};
use crate::error::{Error, Result};
use crate::family::Named;
use crate::files::hexadecimal;
use crate::param::{Param, Placement};
use crate::pretrained::Initial;
use half::bf16;
use nibble_core::allocation::phase;
use nibble_core::ops::Cast;
use nibble_core::{DType, Data, Kernels, Mesh, Tensor};
use sha2::{Digest, Sha256};
use std::path::Path;

/// Name, shape and values of a tensor.
pub(super) type HostTensor = (String, Vec<usize>, Vec<f32>);

/// All values of one tensor of a parameter. This rank has the values `mine`; the function gathers the other ranks' rows, and the experts of
/// other expert-parallel ranks.
pub(super) fn gather<B: Kernels>(
    b: &B,
    mesh: Mesh<'_, B>,
    param: &Param<B>,
    mine: &Tensor<B>,
) -> Result<Vec<f32>> {
    let all = param.gathered(b, mesh, mine)?;
    if param.placement == Placement::Replicated || mesh.ep.world() == 1 {
        return Ok(all.to_f32_vec(b)?);
    }
    let values = match all.dtype() {
        DType::F32 => all,
        DType::Bf16 => Cast { x: &all, dtype: DType::F32 }.run(b)?,
    };
    Ok(b.download(&mesh.ep.all_gather(b, values.f32("checkpoint", "parameter")?)?)?)
}

/// A checkpoint's tensor, assembled from the values of all parameters.
pub(super) fn assembled(tensor: &Named, prefix: &str, params: &[Vec<f32>]) -> HostTensor {
    let values = tensor.runs().flat_map(|(param, range)| &params[param][range]).copied().collect();
    (format!("{prefix}{}", tensor.name), tensor.shape.clone(), values)
}

/// Reads this rank's values of one part of the parameters from a checkpoint's tensors.
fn take<B: Kernels>(
    b: &B,
    mesh: Mesh<'_, B>,
    params: &mut [&mut Param<B>],
    (named, part): (&[Named], Part),
    from: &mut Tensors,
) -> Result<()> {
    let mut piece = Vec::new();
    for tensor in named {
        // Router biases have no moments, so these tensors are not in the checkpoint.
        if tensor.runs().all(|(param, _)| part.of_mut(params[param]).is_none()) {
            continue;
        }
        let stored = from.find(&format!("{}{}", tensor.name, part.suffix()), &tensor.shape)?;
        // `begin` is the offset of a run of values within the tensor.
        let mut begin = 0;
        for (param, range) in tensor.runs() {
            let kept = kept_by(params[param], mesh.shape(), mesh.all.rank());
            let (mut at, end) = (range.start.max(kept.start), range.end.min(kept.end));
            while at < end {
                piece.resize((end - at).min(PIECE), 0.0);
                let index = begin + at - range.start;
                match part {
                    Part::Master => from.read_weights((&tensor.name, &stored), index, &mut piece)?,
                    _ => from.read(&stored, index, &mut piece)?,
                }
                if let Some(to) = part.of_mut(params[param]) {
                    write(b, to, at - kept.start, &piece)?;
                }
                at += piece.len();
            }
            begin += range.len();
        }
    }
    Ok(())
}

/// Writes values into a tensor from index `at` on. The values are rounded if the tensor is BF16.
pub(super) fn write<B: Kernels>(b: &B, to: &mut Tensor<B>, at: usize, values: &[f32]) -> Result<()> {
    match &mut to.data {
        Data::F32(buf) => b.write(buf, at, values)?,
        Data::Bf16(buf) => {
            let rounded: Vec<bf16> = values.iter().map(|x| bf16::from_f32(*x)).collect();
            b.write(buf, at, &rounded)?;
        }
    }
    Ok(())
}

/// Restores the amax histories of this rank's delayed scales. A run that was extended may have other tensors: histories that are missing in
/// the checkpoint start at zero, and additional histories are ignored.
fn restore<B: Kernels>(
    b: &B,
    (mesh, expert_parts): (Mesh<'_, B>, usize),
    delayed: &mut DelayedRecords<B>,
    checkpoint: &Checkpoint,
) -> Result<()> {
    let sites = delayed.sites.clone();
    if sites.sites().is_empty() {
        return Ok(());
    }
    let mut scales = checkpoint.scales()?;
    for site in sites.sites() {
        let shape = site.shape(mesh.shape());
        let found = scales.as_mut().map(|scales| scales.take_if_there(&site.tensor_name(), &shape));
        let all = found.transpose()?.flatten().unwrap_or_else(|| vec![0.0; shape.iter().product()]);
        delayed.restore(b, site, (mesh.all.rank(), mesh.shape(), expert_parts), &all)?;
    }
    scales.map_or(Ok(()), Tensors::finish_with_others)
}

/// The key that says how much of a checkpoint a run takes.
const INIT_STATE: &str = "train.init_state";

/// Checks that a run can continue from a checkpoint's position: it has steps left, and a step is as many sequences as in the earlier run,
/// since the position in the data is counted in sequences.
fn require_position(config: &Config, position: &Position) -> Result<()> {
    let (step, steps) = (position.step, config.train.steps);
    if step >= steps {
        let why = format!(
            "is \"all\", and the checkpoint is at step {step}, but train.steps = {steps}: no step is left"
        );
        return Err(Error::config(INIT_STATE, why));
    }
    let (per_step, cursor) = (config.sequences_per_step(), position.cursor);
    if step.checked_mul(per_step) != Some(cursor) {
        let why = format!(
            "is \"all\", and the checkpoint has read {cursor} sequences in {step} steps, but here a step is {per_step} sequences \
             (train.batch_size × train.grad_accum): use the same number"
        );
        return Err(Error::config(INIT_STATE, why));
    }
    Ok(())
}

impl<B: Kernels> Trainer<'_, B> {
    /// SHA-256 of all weights, in hexadecimal: the name and the little-endian F32 values of every parameter in canonical order. If two runs
    /// have equal hashes, their weights are bit-identical, even on different meshes and devices. The function needs host memory for one
    /// parameter. Every rank must call this function.
    ///
    /// # Errors
    /// Returns the errors of the backend and other ranks.
    pub fn digest(&mut self) -> Result<String> {
        let (b, mesh) = (self.rank.context.b, self.rank.context.mesh);
        let mut sha = Sha256::new();
        for param in self.rank.model.params() {
            let values = gather(b, mesh, param, &param.master)?;
            sha.update(param.name.as_bytes());
            sha.update(little_endian(&values));
        }
        mesh.all.check()?;
        Ok(hexadecimal(&sha.finalize()))
    }

    /// Continues from a checkpoint that was written by any number of ranks.
    ///
    /// # Errors
    /// Returns [`crate::Error::Checkpoint`] naming a tensor that is missing, left over or of another shape, or a file that does not match
    /// its checksum. The trainer is unusable after an error, because some tensors may have been loaded.
    pub fn load(&mut self, checkpoint: &Checkpoint) -> Result<()> {
        self.load_weights(checkpoint)?;
        self.rank.make_buffers().map_err(|error| self.without_room(error, "loading a checkpoint"))?;
        let (b, mesh, mut optim) = (self.rank.context.b, self.rank.context.mesh, checkpoint.optim()?);
        let named = self.rank.model.named_tensors();
        let params = &mut self.rank.model.params();
        take(b, mesh, params, (&named, Part::ExpAvg), &mut optim)?;
        take(b, mesh, params, (&named, Part::ExpAvgSq), &mut optim)?;
        optim.finish()?;
        let Some(buffers) = &mut self.rank.buffers else { return Ok(()) };
        if let Some(delayed) = buffers.delayed_mut() {
            restore(b, (self.rank.context.mesh, self.rank.context.expert_parts()), delayed, checkpoint)?;
        }
        buffers.restart(b, self.rank.context.step)
    }

    /// The amax histories of delayed scales on this rank. The list is empty if the recipe has no delayed scales, and before the first step.
    ///
    /// # Errors
    /// Returns an error if a step's record has not been read, and passes on errors of the backend.
    pub fn histories(&mut self) -> Result<Vec<History>> {
        self.require_settled("histories")?;
        let delayed = self.rank.buffers.as_ref().and_then(|buffers| buffers.delayed());
        Ok(delayed.map_or(Ok(Vec::new()), |delayed| delayed.histories(self.rank.context.b))?)
    }

    /// Loads the weights and the step of a checkpoint, but not the moments, which evaluation and generation do not need.
    ///
    /// # Errors
    /// Returns the errors of [`Trainer::load`].
    pub fn load_weights(&mut self, checkpoint: &Checkpoint) -> Result<()> {
        self.require_settled("load")?;
        phase(format_args!("loading {}", checkpoint.path().display()));
        self.saving.wait_copied();
        let (b, mesh, mut model) = (self.rank.context.b, self.rank.context.mesh, checkpoint.model()?);
        let named = self.rank.model.named_tensors();
        let params = &mut self.rank.model.params();
        take(b, mesh, params, (&named, Part::Master), &mut model)?;
        model.finish()?;
        let position = checkpoint.position();
        self.rank.context.step = position.step;
        self.rank.context.passed_over = position.passed_over.min(position.step);
        Ok(())
    }

    /// Loads the weights of `train.init_from`, if this key is set; with `train.init_state = "all"`, also loads the other state of that run.
    ///
    /// # Errors
    /// Returns [`crate::Error::Checkpoint`] if a tensor is missing, unexpected or of another shape (the error names the tensor), or if the
    /// folder cannot be read. Returns [`crate::Error::Config`] if `train.init_state = "all"` cannot be met: the folder has no optimizer
    /// state, or its position is not one of this run.
    pub fn load_initial(&mut self) -> Result<()> {
        let from = self.rank.context.config.train.init_from.clone();
        let takes_all = self.rank.context.config.train.init_state == InitState::All;
        if from.is_empty() {
            return Ok(());
        }
        phase(format_args!("loading {from}"));
        let (b, mesh) = (self.rank.context.b, self.rank.context.mesh);
        match Initial::open(Path::new(&from))? {
            Initial::Folder(_) if takes_all => {
                let why = format!(
                    "is \"all\", but {from} is a model folder, which has no optimizer state and no step"
                );
                Err(Error::config(INIT_STATE, why))
            }
            Initial::Checkpoint(checkpoint) if takes_all => {
                require_position(self.config(), checkpoint.position())?;
                self.load(&checkpoint)
            }
            Initial::Folder(folder) => {
                self.rank.context.notes.extend(folder.notes.iter().cloned());
                let mut tensors = folder.tensors()?;
                take(b, mesh, &mut self.rank.model.params(), (&folder.named(), Part::Master), &mut tensors)?;
                tensors.finish_but(|name| folder.passes_over(name))
            }
            Initial::Checkpoint(checkpoint) => {
                let (named, mut model) = (self.rank.model.named_tensors(), checkpoint.model()?);
                take(b, mesh, &mut self.rank.model.params(), (&named, Part::Master), &mut model)?;
                model.finish()
            }
        }
    }
}
