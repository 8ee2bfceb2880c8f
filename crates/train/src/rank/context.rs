//! Everything that a pass needs besides the model: one rank's backend, data, recipe and position in the run.

use crate::config::Config;
use crate::cx::Cx;
use crate::data::{Batch, BatchPlan, Dataset};
use crate::error::{Error, Result};
use crate::evaluation::HeldOut;
use crate::layer_plans::LayerPlans;
use crate::model::Decoder;
use crate::shards::{ExpertParts, Shards, Sight};
use nibble_core::{Error as CoreError, Kernels, Mesh};
use std::ops::Range;
use std::sync::Arc;

/// The state of a rank, except the model and the buffers of the rank's steps.
#[derive(Debug)]
pub(crate) struct RankContext<'a, B: Kernels> {
    pub b: &'a B,
    pub mesh: Mesh<'a, B>,
    pub config: Config,
    pub plans: Arc<LayerPlans>,
    pub data: Option<Arc<Dataset>>,
    /// Number of steps that have been issued.
    pub step: u64,
    /// Number of issued steps that were skipped because their batch has no target. The optimizer has made `step - passed_over` updates.
    pub passed_over: u64,
    /// Capacity factor of the all-to-all buffers: `run.capacity_factor`, or a larger factor after an overflow. The factor is the same on
    /// every rank.
    pub capacity_factor: f64,
    /// Messages to the user about overflows of all-to-all buffers.
    pub notes: Vec<String>,
    /// Number of images, over all ranks, that evaluations have classified correctly.
    pub right: u64,
}

impl<B: Kernels> RankContext<'_, B> {
    pub fn data(&self) -> Result<&Dataset> {
        self.data.as_deref().ok_or_else(no_data)
    }

    /// The progress of the run: step / number of steps.
    pub fn progress(&self) -> f64 {
        self.step as f64 / self.config.train.steps.max(1) as f64
    }

    /// The plan that selects the sequences of this rank's micro-batches.
    pub fn plan(&self) -> Result<BatchPlan> {
        let data = self.data.clone().ok_or_else(no_data)?;
        let train = &self.config.train;
        let (rank, ranks) = (self.mesh.all.rank(), self.mesh.all.world());
        Ok(BatchPlan { data, batch_size: train.batch_size, micro_batches: train.grad_accum, rank, ranks })
    }

    /// Number of parts into which a rank divides the rows of an expert.
    pub fn expert_parts(&self) -> usize {
        self.config.train.expert_shards / self.mesh.dp.world()
    }

    /// This rank's shards of a training micro-batch. See [`Shards::new`] for `run`.
    pub fn training_shards(&self, run: usize) -> nibble_core::Result<Shards<B>> {
        self.shards_of(self.config.train.batch_size * self.config.data.seq_len, run)
    }

    /// This rank's shards of `tokens` tokens over all ranks.
    fn shards_of(&self, tokens: usize, run: usize) -> nibble_core::Result<Shards<B>> {
        let (mesh, t) = (self.mesh.shape(), &self.config.train);
        let shards = Shards::new(self.b, t.shards / mesh.ranks(), tokens / t.shards, run)?;
        let shards = shards.with_sequences_of(self.config.data.seq_len);
        Ok(shards.with_expert_parts(ExpertParts::of(tokens, t.expert_shards, mesh.dp)))
    }

    /// Computes the held-out loss over `batches` batches of [`HeldOut::BATCH`] sequences, taken from all parts of the data; 0 batches means
    /// all sequences. After every batch, calls `go_on` with the number of finished batches and the total number of batches. If `go_on`
    /// returns `false`, the result is `None`.
    pub fn evaluate(
        &mut self,
        model: &mut Decoder<B>,
        batches: usize,
        go_on: &mut dyn FnMut(usize, usize) -> Result<bool>,
    ) -> Result<Option<HeldOut>> {
        self.right = 0;
        let sees_images = self.config.model.sees_images();
        let found = self.held_out_sequences(model, batches, go_on)?;
        Ok(found.map(|(nats, targets)| HeldOut {
            right: sees_images.then_some(self.right),
            ..HeldOut::of_sequences(&nats, targets)
        }))
    }

    /// The loss in nats of each sequence that [`RankContext::evaluate`] evaluates, and the number of targets.
    pub fn held_out_sequences(
        &mut self,
        model: &mut Decoder<B>,
        batches: usize,
        go_on: &mut dyn FnMut(usize, usize) -> Result<bool>,
    ) -> Result<Option<(Vec<f32>, u64)>> {
        let data = self.data.clone().ok_or_else(no_data)?;
        let parts = parts_of(data.valid_windows(), batches, self.config.train.batch_size);
        let (mut nats, mut targets) = (Vec::new(), 0);
        model.prepare(&self.inference_cx(1)?)?;
        for (i, part) in parts.iter().enumerate() {
            let batch = data.valid_batch(part.start, part.len())?;
            nats.extend(self.held_out_nats(model, &batch)?);
            targets += batch.counted() as u64;
            if !go_on(i + 1, parts.len())? {
                model.release();
                return Ok(None);
            }
        }
        if batches == 0
            && let Some(tail) = data.valid_tail()?
        {
            nats.extend(self.held_out_nats(model, &tail)?);
            targets += tail.counted() as u64;
        }
        model.release();
        if !nats.iter().all(|nats| nats.is_finite()) {
            let site = "held-out loss".into();
            return Err(CoreError::NonFinite { site, layer: "-".into(), step: self.step }.into());
        }
        Ok(Some((nats, targets)))
    }

    /// Raises the capacity of the all-to-all buffers, because the slots sent to a rank were `needed` times the rank's equal share. `again`
    /// names the work that is retried.
    pub fn make_room(&mut self, needed: f64, again: &str) {
        // The factor adds spare capacity, because the next routing may be even less balanced.
        const SPARE: f64 = 1.125;
        let (before, now) = (self.capacity_factor, needed.max(self.capacity_factor) * SPARE);
        self.notes.push(format!(
            "capacity overflow: a rank was sent {needed:.2} times its share of the tokens, and the capacity is {before:.2}. The capacity is {now:.2} from now on, \
             and {again} is retried; no bit changes. With run.capacity_factor={now:.2} a run starts with this capacity"
        ));
        self.capacity_factor = now;
    }

    /// The context of a forward pass over one sequence of `tokens` tokens, without a backward pass. No all-to-all buffer can overflow in
    /// this pass.
    pub fn inference_cx(&self, tokens: usize) -> Result<Cx<'_, B>> {
        let shards = Shards::new(self.b, 1, tokens, self.mesh.all.rank())?;
        let sight = Sight::find(self.b, &self.config.model, None, (tokens, tokens))?;
        Ok(Cx { capacity_factor: f64::INFINITY, sight, ..self.cx(shards) })
    }

    /// The context of inference over these tokens.
    pub fn cx(&self, shards: Shards<B>) -> Cx<'_, B> {
        let combine = self.config.train.combine.unwrap_or_default();
        let (capacity_factor, experts_in_turn) = (self.capacity_factor, self.config.train.force_load_balance);
        Cx {
            combine,
            experts_in_turn,
            capacity_factor,
            ..Cx::under(self.b, self.mesh, Arc::clone(&self.plans), shards, self.progress())
        }
    }

    /// The keys to which the queries of `tokens` tokens attend. For each token, `starts` contains the position at which its document
    /// begins; `starts` is empty without document masking.
    pub fn sight(&self, starts: &[i32], tokens: usize) -> nibble_core::Result<Sight<B>> {
        let starts = (!starts.is_empty()).then(|| self.b.upload(starts)).transpose()?;
        self.sight_of(starts.as_ref(), tokens)
    }

    /// Like [`RankContext::sight`], but with `starts` on the device.
    pub fn sight_of(&self, starts: Option<&B::Buf<i32>>, tokens: usize) -> nibble_core::Result<Sight<B>> {
        Sight::find(self.b, &self.config.model, starts, (tokens, self.config.data.seq_len))
    }

    /// The loss of each sequence of a batch, in nats. Every rank has the whole batch and evaluates its own part.
    pub fn held_out_nats(&mut self, model: &Decoder<B>, batch: &Batch) -> Result<Vec<f32>> {
        let mut nats = self.nats_of_runs(model, batch, 1)?;
        // The truncation removes the sequences that pad the ranks' parts.
        nats.truncate(batch.sequences);
        Ok(nats)
    }

    /// The loss of every token of a batch in nats, including the tokens that pad each rank's part.
    pub fn nats_of_tokens(&mut self, model: &Decoder<B>, batch: &Batch) -> Result<Vec<f32>> {
        self.nats_of_runs(model, batch, self.config.data.seq_len)
    }

    /// The losses in nats of `runs` equal runs of every sequence.
    fn nats_of_runs(&mut self, model: &Decoder<B>, batch: &Batch, runs: usize) -> Result<Vec<f32>> {
        loop {
            match self.nats_that_fit(model, batch, runs)? {
                Ok((nats, right)) => {
                    self.right += right;
                    return Ok(nats);
                }
                Err(needed) => self.make_room(needed, "a batch of held-out sequences"),
            }
        }
    }

    /// Like [`Self::nats_of_runs`], with the number of images that are classified rightly. If an exchange overflowed, the error is the number of slots sent to the fullest rank, as a multiple of
    /// its share.
    fn nats_that_fit(
        &self,
        model: &Decoder<B>,
        batch: &Batch,
        runs: usize,
    ) -> Result<std::result::Result<(Vec<f32>, u64), f64>> {
        let (ranks, shards) = (self.mesh.all.world(), self.config.train.shards);
        // The shards are those of training. So the scale of a shard, or of a part of an expert's rows, is the same on every mesh.
        let each = batch.sequences.next_multiple_of(shards) / ranks;
        let mine = batch.part(self.mesh.all.rank() * each, each);
        // Every rank runs the same number of tokens. Tokens after the end of the batch, or of a single shorter sequence, have no target.
        let tokens = each * self.config.data.seq_len;
        let padded = |ids: &[i32], with: i32| -> Vec<i32> {
            ids.iter().copied().chain(std::iter::repeat(with)).take(tokens).collect()
        };
        let starts = padded_starts(&mine.starts, (self.config.data.seq_len, tokens));
        let shards = self.shards_of(ranks * tokens, self.mesh.all.rank())?;
        let cx = self.cx(shards).with_sight(self.sight(&starts, tokens)?);
        let ids = self.b.upload(&padded(&mine.inputs, 0))?;
        let targets = self.b.upload(&padded(&mine.targets, -1))?;
        let (out, x_td) = model.losses_and_input(&cx, &ids, &targets, each * runs)?;
        out.verify_ids(self.b, "evaluate", model.config.vocab_size)?;
        let mut sums: Vec<f32> =
            self.b.download(&out.shard_nats)?.into_iter().map(|nats| nats as f32).collect();
        let len = sums.len() + 2;
        sums.push(match self.config.model.sees_images() {
            true => right(&model.logits(&cx, &x_td)?.to_f32_vec(self.b)?, &mine.targets) as f32,
            false => 0.0,
        });
        sums.push(cx.overflow.get());
        let all = self.b.download(&self.mesh.all.all_gather(self.b, &self.b.upload(&sums)?)?)?;
        self.mesh.all.check()?;
        let (sums, needed): (Vec<&[f32]>, Vec<f32>) =
            all.chunks_exact(len).map(|of_rank| (&of_rank[..len - 2], of_rank[len - 1])).unzip();
        let right = all.chunks_exact(len).map(|of_rank| of_rank[len - 2] as u64).sum();
        Ok(match needed.into_iter().fold(0.0, f32::max) {
            0.0 => Ok((sums.concat(), right)),
            needed => Err(needed.into()),
        })
    }
}

/// Selects the held-out sequences to evaluate from `windows` sequences, in parts of at most `size` sequences. The selection does not depend
/// on `size`. The sequences come from all parts of the data, so that a loss during the run is comparable with the final loss.
fn parts_of(windows: usize, batches: usize, size: usize) -> Vec<Range<usize>> {
    let all = windows.div_ceil(HeldOut::BATCH);
    let whole = |first: usize, end: usize| {
        (first..end).step_by(size.max(1)).map(move |first| first..(first + size.max(1)).min(end))
    };
    if batches == 0 || batches >= all {
        return whole(0, windows).collect();
    }
    let firsts = (0..batches).map(|i| i * all / batches * HeldOut::BATCH);
    firsts.flat_map(|first| whole(first, (first + HeldOut::BATCH).min(windows))).collect()
}

/// The number of rows of logits whose largest logit, the first of several, is the row's target. Rows without a target do not count.
fn right(logits: &[f32], targets: &[i32]) -> usize {
    let classes = logits.len().checked_div(targets.len()).unwrap_or(0).max(1);
    let is_right = |(row, target): (&[f32], &i32)| {
        let best = row.iter().enumerate().reduce(|best, one| if one.1 > best.1 { one } else { best });
        best.is_some_and(|(class, _)| class as i32 == *target)
    };
    logits.chunks_exact(classes).zip(targets).filter(|row| is_right(*row)).count()
}

/// The beginnings of documents for `tokens` tokens. `starts` contains the beginnings for the first of these tokens; later tokens continue
/// the last document of their sequence. Empty if `starts` is empty.
fn padded_starts(starts: &[i32], (seq_len, tokens): (usize, usize)) -> Vec<i32> {
    let mut padded = Vec::new();
    let tokens = if starts.is_empty() { 0 } else { tokens };
    for i in 0..tokens {
        let before = padded.last().filter(|_| !i.is_multiple_of(seq_len)).copied();
        padded.push(starts.get(i).copied().or(before).unwrap_or(0));
    }
    padded
}

fn no_data() -> Error {
    Error::config("data.source", "was not opened")
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The same sequences, in groups of sixteen consecutive sequences, are evaluated for every size of a part.
    #[test]
    fn what_is_evaluated_does_not_depend_on_the_batch_size() {
        for (windows, batches) in [(1, 0), (15, 1), (16, 1), (17, 1), (64, 3), (1000, 7), (1000, 0), (40, 9)]
        {
            let sequences = |size| parts_of(windows, batches, size).into_iter().flatten().collect::<Vec<_>>();
            let wanted: Vec<usize> = match (windows, batches) {
                (64, 3) => (0..32).chain(32..48).collect(),
                (15, 1) => (0..15).collect(),
                (16 | 17, 1) => (0..16).collect(),
                (1000, 7) => [0, 9, 18, 27, 36, 45, 54].iter().flat_map(|i| i * 16..i * 16 + 16).collect(),
                _ => (0..windows).collect(),
            };
            for size in [1, 3, 8, 16, 24, 64, 2000] {
                assert_eq!(sequences(size), wanted, "{windows} windows, {batches} batches, {size} at once");
                assert!(parts_of(windows, batches, size).iter().all(|part| (1..=size).contains(&part.len())));
            }
        }
    }
}
