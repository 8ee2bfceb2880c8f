//! What a pass needs besides the model: one rank's backend, data, recipe and place in the run.

use crate::config::Config;
use crate::cx::{Cx, Documents, ExpertParts, Shards};
use crate::data::{Batch, BatchPlan, Dataset};
use crate::error::{Error, Result};
use crate::model::Decoder;
use nibble_core::{Error as CoreError, Kernels, Mesh, Recipe};
use std::sync::Arc;

/// Everything of a rank but the model and the buffers of its steps.
#[derive(Debug)]
pub(crate) struct RankContext<'a, B: Kernels> {
    pub b: &'a B,
    pub mesh: Mesh<'a, B>,
    pub config: Config,
    pub recipe: Recipe,
    pub data: Option<Arc<Dataset>>,
    /// Steps issued.
    pub step: u64,
    /// How much room an exchange has: `run.capacity_factor`, or more, once that was too little. The same on every rank.
    pub capacity_factor: f64,
    /// What whoever runs this should be told of that.
    pub notes: Vec<String>,
}

impl<B: Kernels> RankContext<'_, B> {
    pub fn data(&self) -> Result<&Dataset> {
        self.data.as_deref().ok_or_else(no_data)
    }

    /// Step / steps.
    pub fn progress(&self) -> f64 {
        self.step as f64 / self.config.train.steps.max(1) as f64
    }

    /// Which sequences this rank's micro-batches are.
    pub fn plan(&self) -> Result<BatchPlan> {
        let data = self.data.clone().ok_or_else(no_data)?;
        let train = &self.config.train;
        let (rank, ranks) = (self.mesh.all.rank(), self.mesh.all.world());
        Ok(BatchPlan { data, batch_size: train.batch_size, micro_batches: train.grad_accum, rank, ranks })
    }

    /// Parts of an expert's rows on a rank.
    pub fn expert_parts(&self) -> usize {
        self.config.train.expert_shards / self.mesh.dp.world()
    }

    /// This rank's shards of a training micro-batch. `run` says which run of so many tokens of a step it is.
    pub fn training_shards(&self, run: usize) -> nibble_core::Result<Shards<B>> {
        self.shards_of(self.config.train.batch_size * self.config.data.seq_len, run)
    }

    /// The same of so many tokens over all ranks.
    fn shards_of(&self, tokens: usize, run: usize) -> nibble_core::Result<Shards<B>> {
        let (mesh, t) = (self.mesh.shape(), &self.config.train);
        let shards = Shards::new(self.b, t.shards / mesh.ranks(), tokens / t.shards, run)?;
        let shards = shards.with_sequences_of(self.config.data.seq_len);
        Ok(shards.with_expert_parts(ExpertParts::of(tokens, t.expert_shards, mesh.dp)))
    }

    /// Mean held-out nats: `batches` batches from all over the data, or all of it (0). `go_on` is asked after every batch, told how many
    /// are done, of how many; none once it has said no.
    pub fn evaluate(
        &mut self,
        model: &mut Decoder<B>,
        batches: usize,
        go_on: &mut dyn FnMut(usize, usize) -> Result<bool>,
    ) -> Result<Option<f64>> {
        let size = self.config.train.batch_size;
        let data = self.data.clone().ok_or_else(no_data)?;
        let windows = data.valid_windows();
        // A part of the data is taken from all over it, so that losses during a run are comparable with the last one.
        let all = windows.div_ceil(size);
        let taken = if batches == 0 { all } else { batches.min(all) };
        let (mut nats, mut counted) = (0.0, 0);
        model.prepare(&self.inference_cx(1)?)?;
        for i in 0..taken {
            let first = i * all / taken * size;
            let batch = data.valid_batch(first, size.min(windows - first))?;
            nats += self.held_out_nats(model, &batch)?;
            counted += batch.counted();
            if !go_on(i + 1, taken)? {
                model.release();
                return Ok(None);
            }
        }
        if batches == 0
            && let Some(tail) = data.valid_tail()?
        {
            nats += self.held_out_nats(model, &tail)?;
            counted += tail.counted();
        }
        model.release();
        if !nats.is_finite() {
            let site = "held-out loss".into();
            return Err(CoreError::NonFinite { site, layer: "-".into(), step: self.step }.into());
        }
        Ok(Some(nats / counted.max(1) as f64))
    }

    /// Gives exchanges more room, since a rank was sent `needed` times its share. `again` is what is done again therefore.
    pub fn make_room(&mut self, needed: f64, again: &str) {
        // More than was asked for: what comes next may be less even still.
        const SPARE: f64 = 1.125;
        let (before, now) = (self.capacity_factor, needed.max(self.capacity_factor) * SPARE);
        self.notes.push(format!(
            "a rank was sent {needed:.2} times its share of the tokens, and had room for {before:.2}: from here on it is {now:.2}, and {again} is \
             done again. run.capacity_factor={now:.2} has this room from the beginning"
        ));
        self.capacity_factor = now;
    }

    /// The context of a forward pass alone over so many tokens, with room for whatever is sent.
    pub fn inference_cx(&self, tokens: usize) -> Result<Cx<'_, B>> {
        let shards = Shards::new(self.b, 1, tokens, self.mesh.all.rank())?;
        Ok(Cx { capacity_factor: f64::INFINITY, ..self.cx(shards) })
    }

    /// The context of a forward pass alone over these tokens.
    pub fn cx(&self, shards: Shards<B>) -> Cx<'_, B> {
        let combine = self.config.train.combine.unwrap_or_default();
        let (capacity_factor, experts_in_turn) = (self.capacity_factor, self.config.train.force_load_balance);
        Cx {
            combine,
            experts_in_turn,
            capacity_factor,
            ..Cx::inference(self.b, self.mesh, &self.recipe, shards, self.progress())
        }
    }

    /// The documents that begin there; none where no beginnings are given, as documents are not kept apart.
    pub fn documents(&self, starts: &[i32]) -> nibble_core::Result<Option<Documents<B>>> {
        let find = || Documents::find(self.b, &self.b.upload(starts)?, self.config.data.seq_len);
        (!starts.is_empty()).then(find).transpose()
    }

    /// Nats of a batch that every rank holds: each evaluates its part, the sums meet in the order of the sequences.
    pub fn held_out_nats(&mut self, model: &Decoder<B>, batch: &Batch) -> Result<f64> {
        Ok(self.nats_of_runs(model, batch, 1)?.into_iter().map(f64::from).sum())
    }

    /// The same of every token of the batch, and of those with which each rank fills up its part.
    pub fn nats_of_tokens(&mut self, model: &Decoder<B>, batch: &Batch) -> Result<Vec<f32>> {
        self.nats_of_runs(model, batch, self.config.data.seq_len)
    }

    /// The same of so many equal runs of each sequence.
    fn nats_of_runs(&mut self, model: &Decoder<B>, batch: &Batch, runs: usize) -> Result<Vec<f32>> {
        loop {
            match self.nats_that_fit(model, batch, runs)? {
                Ok(nats) => return Ok(nats),
                Err(needed) => self.make_room(needed, "a batch of held-out sequences"),
            }
        }
    }

    /// [`Self::nats_of_runs`]; if an exchange had too little room, what the rank that was sent most was sent, in shares.
    fn nats_that_fit(
        &self,
        model: &Decoder<B>,
        batch: &Batch,
        runs: usize,
    ) -> Result<std::result::Result<Vec<f32>, f64>> {
        let (ranks, shards) = (self.mesh.all.world(), self.config.train.shards);
        // The shards of training: what has a scale of a shard, or of a part of an expert's rows, has the same on every mesh.
        let each = batch.sequences.next_multiple_of(shards) / ranks;
        let mine = batch.part(self.mesh.all.rank() * each, each);
        // Every rank runs as many tokens; those past the batch, and past the one sequence of a batch that is shorter, have no target.
        let tokens = each * self.config.data.seq_len;
        let padded = |ids: &[i32], with: i32| -> Vec<i32> {
            ids.iter().copied().chain(std::iter::repeat(with)).take(tokens).collect()
        };
        let starts = padded_starts(&mine.starts, (self.config.data.seq_len, tokens));
        let shards = self.shards_of(ranks * tokens, self.mesh.all.rank())?;
        let cx = self.cx(shards).with_documents(self.documents(&starts)?);
        let ids = self.b.upload(&padded(&mine.inputs, 0))?;
        let targets = self.b.upload(&padded(&mine.targets, -1))?;
        let out = model.losses(&cx, &ids, &targets, each * runs)?;
        out.verify_ids(self.b, "evaluate", model.config.vocab_size)?;
        let mut sums: Vec<f32> =
            self.b.download(&out.shard_nats)?.into_iter().map(|nats| nats as f32).collect();
        let len = sums.len() + 1;
        sums.push(cx.overflow.get());
        let all = self.b.download(&self.mesh.all.all_gather(self.b, &self.b.upload(&sums)?)?)?;
        self.mesh.all.check()?;
        let (sums, needed): (Vec<&[f32]>, Vec<f32>) =
            all.chunks_exact(len).map(|of_rank| (&of_rank[..len - 1], of_rank[len - 1])).unzip();
        Ok(match needed.into_iter().fold(0.0, f32::max) {
            0.0 => Ok(sums.concat()),
            needed => Err(needed.into()),
        })
    }
}

/// The beginnings of documents of so many tokens, of which these are the first; none where there are none. What is behind them belongs to the last document of its sequence.
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
