//! Training, one rank's view of it: a step, an evaluation, and what goes into a checkpoint.

mod run;
mod weights;

pub use run::{Observer, Options, Start, Summary, run};

use crate::config::Config;
use crate::cx::{Cx, Event, Shards, SiteCounts};
use crate::data::{Batch, Dataset};
use crate::error::Result;
use crate::ledger::{Ledger, Saved};
use crate::metrics::Metrics;
use crate::model::{Decoder, DecoderSaved};
use crate::optim;
use crate::tokenizer::Tokenizer;
use nibble_core::ops::CrossEntropy;
use nibble_core::{Comm, Error as CoreError, Kernels, Recipe};
use std::cell::RefCell;
use std::collections::BTreeMap;

/// One rank of a training run.
#[derive(Debug)]
pub struct Trainer<'a, B: Kernels> {
    b: &'a B,
    comm: &'a dyn Comm<B>,
    config: Config,
    recipe: Recipe,
    data: Option<Dataset>,
    /// The model, this rank's part of it.
    pub model: Decoder<B>,
    step: u64,
}

/// Tallies of a step that are sums over its micro-batches, until they become [`Metrics`].
#[derive(Debug, Default)]
struct Tally {
    /// Nats of each local shard.
    shard_nats: Vec<f64>,
    /// Load-balancing and z-loss of each local shard, summed over layers.
    router_losses: Vec<[f64; 2]>,
    /// For each layer, slots that chose each expert.
    load: Vec<Vec<f64>>,
    counts: BTreeMap<String, SiteCounts>,
}

impl<'a, B: Kernels> Trainer<'a, B> {
    /// A run at its beginning.
    ///
    /// # Errors
    /// For a recipe or data that cannot be read, or a batch that the recipe's blocks do not divide.
    pub fn new(b: &'a B, comm: &'a dyn Comm<B>, config: &Config) -> Result<Self> {
        let mut trainer = Self::without_data(b, comm, config)?;
        trainer.data = Some(Dataset::open(&config.data, config.seed)?);
        Ok(trainer)
    }

    /// A model alone, to generate with: the data need not be there.
    ///
    /// # Errors
    /// As [`Trainer::new`], the data aside.
    pub fn without_data(b: &'a B, comm: &'a dyn Comm<B>, config: &Config) -> Result<Self> {
        let recipe = load_recipe(&config.recipe)?;
        check_blocks(config, &recipe)?;
        let model = Decoder::new(b, comm, &recipe, &config.model, config.data.seq_len, config.seed)?;
        Ok(Self { b, comm, config: config.clone(), recipe, data: None, model, step: 0 })
    }

    /// Optimizer steps done.
    pub fn step(&self) -> u64 {
        self.step
    }

    /// The run's configuration.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// The run's recipe.
    pub fn recipe(&self) -> &Recipe {
        &self.recipe
    }

    /// The run's data.
    ///
    /// # Errors
    /// [`crate::Error::Config`] if it was made without.
    pub fn data(&self) -> Result<&Dataset> {
        self.data.as_ref().ok_or_else(|| crate::Error::config("data.source", "was not opened"))
    }

    /// The tokenizer of the run's data.
    pub fn tokenizer(&self) -> Tokenizer {
        if self.config.is_synthetic() { Tokenizer::Synthetic } else { Tokenizer::Bytes }
    }

    /// Trainable numbers over all ranks.
    pub fn parameters(&mut self) -> usize {
        self.model.named_tensors().iter().flatten().map(|t| t.shape.iter().product::<usize>()).sum()
    }

    fn progress(&self) -> f64 {
        self.step as f64 / self.config.train.steps.max(1) as f64
    }

    /// This rank's tokens of a micro-batch.
    fn shards(&self, micro: usize) -> Result<Shards<B>> {
        let t = &self.config.train;
        let local = t.shards / self.comm.world();
        let rows_each = t.batch_size / t.shards * self.config.data.seq_len;
        Ok(Shards::new(self.b, local, rows_each, micro * self.comm.world() + self.comm.rank())?)
    }

    /// The context of this step, at its first micro-batch.
    fn cx<'t>(&'t self, trace: Option<&'t RefCell<Vec<Event>>>) -> Result<Cx<'t, B>> {
        let t = &self.config.train;
        let inference = Cx::inference(self.b, self.comm, &self.recipe, self.shards(0)?, self.progress());
        Ok(Cx {
            step: self.step,
            seed: self.config.seed,
            training: true,
            micro_batches: t.grad_accum,
            trace,
            ..inference
        })
    }

    /// This rank's part of a micro-batch.
    fn batch(&self, micro: usize) -> Result<Batch> {
        let size = self.config.train.batch_size;
        let cursor = self.step * self.config.sequences_per_step() + (micro * size) as u64;
        let each = size / self.comm.world();
        Ok(self.data()?.train_batch(cursor, size).part(self.comm.rank() * each, each))
    }

    /// One optimizer step.
    ///
    /// # Errors
    /// [`CoreError::NonFinite`] naming the first tensor that is not finite, before any weight has changed; errors of
    /// other ranks.
    pub fn train_step(&mut self) -> Result<Metrics> {
        self.traced_step(None)
    }

    /// One optimizer step, noting every change of representation.
    ///
    /// # Errors
    /// As [`Trainer::train_step`].
    pub fn traced_step(&mut self, trace: Option<&RefCell<Vec<Event>>>) -> Result<Metrics> {
        let started = std::time::Instant::now();
        let mut model = self.take_model()?;
        let done = self.step_with(&mut model, trace);
        self.model = model;
        let mut metrics = done?;
        self.step += 1;
        let seconds = started.elapsed().as_secs_f64();
        metrics.step = self.step;
        metrics.n_tokens_seen = Some(self.step * self.config.tokens_per_step());
        metrics.tps = Some(self.config.tokens_per_step() as f64 / seconds);
        metrics.seconds = Some(seconds);
        Ok(metrics)
    }

    /// The model by value, so that a context may borrow the rest of the trainer; handles are cheap to copy.
    fn take_model(&mut self) -> Result<Decoder<B>> {
        let empty = Decoder { blocks: Vec::new(), head: None, ..self.model.clone() };
        Ok(std::mem::replace(&mut self.model, empty))
    }

    fn step_with(&self, model: &mut Decoder<B>, trace: Option<&RefCell<Vec<Event>>>) -> Result<Metrics> {
        let mut cx = self.cx(trace)?;
        let lr = self.config.schedule().lr(self.step);
        model.prepare(&cx)?;
        let mut tally = Tally::default();
        for micro in 0..self.config.train.grad_accum {
            cx.shards = self.shards(micro)?;
            self.micro_batch(&cx, model, &self.batch(micro)?, &mut tally)?;
        }
        tally.counts = cx.site_counts()?;
        let mut metrics = self.metrics(&cx, tally)?;
        let grad_norm = optim::step(&cx, model.params(), &self.config.train, lr)?;
        metrics.grad_norm = Some(grad_norm);
        metrics.lr = Some(lr);
        Ok(metrics)
    }

    /// Forward and backward of one micro-batch.
    fn micro_batch(
        &self,
        cx: &Cx<'_, B>,
        model: &mut Decoder<B>,
        batch: &Batch,
        tally: &mut Tally,
    ) -> Result<()> {
        let (logits, saved) = model.forward(cx, self.b.upload(&batch.inputs)?)?;
        let scale = 1.0 / self.config.tokens_per_step() as f32;
        let targets = self.b.upload(&batch.targets)?;
        let op =
            CrossEntropy { logits: &logits, targets: &targets, scale, grad: Some(self.recipe.activations) };
        let out = op.run(self.b)?;
        drop(logits);
        tally.add(cx, &self.b.download(&out.loss)?, &saved)?;
        if let Some(dlogits) = out.dlogits {
            model.backward(cx, saved, dlogits)?;
        }
        Ok(())
    }

    /// A step's tallies over all ranks, the same for any number of them.
    fn metrics(&self, cx: &Cx<'_, B>, tally: Tally) -> Result<Metrics> {
        let gather = |values: Vec<f32>| -> Result<Vec<f64>> {
            let all = self.comm.all_gather(self.b, &self.b.upload(&values)?)?;
            Ok(self.b.download(&all)?.into_iter().map(f64::from).collect())
        };
        let nats = gather(tally.shard_nats.iter().map(|n| *n as f32).collect())?;
        let loss = tree_sum(&nats) / self.config.tokens_per_step() as f64;
        let losses = gather(tally.router_losses.iter().flatten().map(|l| *l as f32).collect())?;
        let shards = (self.config.train.shards * self.config.train.grad_accum) as f64;
        let router_loss = |i: usize| Some(losses.iter().skip(i).step_by(2).sum::<f64>() / shards);
        let mut load = tally.load;
        for layer in &mut load {
            let all = gather(layer.iter().map(|n| *n as f32).collect())?;
            let experts = layer.len();
            *layer = (0..experts).map(|e| all.iter().skip(e).step_by(experts).sum()).collect();
        }
        if !loss.is_finite() {
            return Err(CoreError::NonFinite { site: "loss".into(), layer: "-".into(), step: cx.step }.into());
        }
        let converted = tally.counts.iter().filter(|(site, _)| site.contains('→'));
        let (non_zero, inexact) =
            converted.fold((0, 0), |sum, (_, c)| (sum.0 + c.non_zero, sum.1 + c.inexact));
        let pairs: usize = load.iter().map(Vec::len).sum();
        let dead = load.iter().flatten().filter(|n| **n == 0.0).count();
        let fullest = load.iter().map(|layer| {
            let mean = layer.iter().sum::<f64>() / layer.len().max(1) as f64;
            layer.iter().fold(0.0, |a: f64, b| a.max(*b)) / mean
        });
        Ok(Metrics {
            loss: Some(loss),
            aux_loss: router_loss(0),
            z_loss: router_loss(1),
            load_max_over_mean: fullest.reduce(f64::max),
            dead_expert_fraction: (pairs > 0).then(|| dead as f64 / pairs as f64),
            inexact_fraction: (non_zero > 0).then(|| inexact as f64 / non_zero as f64),
            ..Metrics::default()
        })
    }

    /// Mean cross-entropy in nats over held-out sequences, all ranks together: the first `batches` batches, or all of
    /// them (0), the shorter tail included.
    ///
    /// # Errors
    /// [`CoreError::NonFinite`] if the loss is not a number; from the backend and other ranks.
    pub fn evaluate(&mut self, batches: usize) -> Result<f64> {
        let mut model = self.take_model()?;
        let done = self.evaluate_with(&mut model, batches);
        self.model = model;
        done
    }

    fn evaluate_with(&self, model: &mut Decoder<B>, batches: usize) -> Result<f64> {
        let size = self.config.train.batch_size;
        let data = self.data()?;
        let windows = data.valid_windows();
        let last = if batches == 0 { windows } else { windows.min(batches * size) };
        let (mut nats, mut tokens) = (0.0, 0);
        model.prepare(&self.inference_cx(1)?)?;
        for first in (0..last).step_by(size) {
            let batch = data.valid_batch(first, size.min(last - first));
            nats += self.held_out_nats(model, &batch)?;
            tokens += batch.tokens();
        }
        if let Some(tail) = data.valid_tail().filter(|_| batches == 0) {
            nats += self.held_out_nats(model, &tail)?;
            tokens += tail.tokens();
        }
        if !nats.is_finite() {
            let site = "held-out loss".into();
            return Err(CoreError::NonFinite { site, layer: "-".into(), step: self.step }.into());
        }
        Ok(nats / tokens.max(1) as f64)
    }

    fn inference_cx(&self, tokens: usize) -> Result<Cx<'_, B>> {
        let shards = Shards::new(self.b, 1, tokens, self.comm.rank())?;
        Ok(Cx::inference(self.b, self.comm, &self.recipe, shards, self.progress()))
    }

    /// Nats of a batch that every rank holds: each evaluates its part, the sums meet in the order of the sequences.
    fn held_out_nats(&self, model: &Decoder<B>, batch: &Batch) -> Result<f64> {
        let each = batch.sequences.div_ceil(self.comm.world());
        let mine = batch.part(self.comm.rank() * each, each);
        // Every rank runs as many tokens; those past the batch have no target.
        let tokens = each * batch.seq_len;
        let padded = |ids: &[i32], with: i32| -> Vec<i32> {
            ids.iter().copied().chain(std::iter::repeat(with)).take(tokens).collect()
        };
        let cx = self.inference_cx(tokens)?;
        let (logits, _) = model.forward(&cx, self.b.upload(&padded(&mine.inputs, 0))?)?;
        let targets = self.b.upload(&padded(&mine.targets, -1))?;
        let out = CrossEntropy { logits: &logits, targets: &targets, scale: 0.0, grad: None }.run(self.b)?;
        let losses = self.b.download(&out.loss)?;
        let sums: Vec<f32> = losses
            .chunks(batch.seq_len)
            .map(|s| s.iter().map(|l| f64::from(*l)).sum::<f64>() as f32)
            .collect();
        let all = self.comm.all_gather(self.b, &self.b.upload(&sums)?)?;
        Ok(self.b.download(&all)?.into_iter().map(f64::from).sum())
    }

    /// Logits of the last of these tokens, one sequence, every rank alike.
    ///
    /// # Errors
    /// From the backend.
    pub fn next_logits(&mut self, ids: &[i32]) -> Result<Vec<f32>> {
        let mut model = self.take_model()?;
        let done = (|| {
            let cx = self.inference_cx(ids.len())?;
            model.prepare(&cx)?;
            let (logits, _) = model.forward(&cx, self.b.upload(ids)?)?;
            let all = logits.to_f32_vec(self.b)?;
            Ok(all[all.len() - logits.cols..].to_vec())
        })();
        self.model = model;
        done
    }

    /// What a forward pass of this run keeps for its backward pass, measured by doing one; and the bytes the
    /// allocator holds for it.
    ///
    /// # Errors
    /// As [`Trainer::train_step`].
    pub fn ledger(&mut self) -> Result<(Ledger, usize)> {
        let mut model = self.take_model()?;
        let done = (|| {
            let cx = self.cx(None)?;
            model.prepare(&cx)?;
            let batch = self.batch(0)?;
            let ids = self.b.upload(&batch.inputs)?;
            cx.counts.borrow_mut().clear();
            let before = self.b.memory().live_bytes - batch.inputs.len() * 4;
            let (logits, saved) = model.forward(&cx, ids)?;
            drop(logits);
            cx.counts.borrow_mut().clear();
            let live = self.b.memory().live_bytes - before;
            let mut ledger = Ledger::default();
            saved.ledger(&mut ledger);
            Ok((ledger, live))
        })();
        self.model = model;
        done
    }
}

impl Tally {
    fn add<B: Kernels>(&mut self, cx: &Cx<'_, B>, nats: &[f32], saved: &DecoderSaved<B>) -> Result<()> {
        let shards = cx.shards.local;
        self.shard_nats.resize(shards, 0.0);
        self.router_losses.resize(shards, [0.0; 2]);
        self.load.resize(saved.blocks.len(), Vec::new());
        for (sum, nats) in self.shard_nats.iter_mut().zip(nats.chunks(nats.len() / shards)) {
            *sum += nats.iter().map(|n| f64::from(*n)).sum::<f64>();
        }
        for (block, layer) in saved.blocks.iter().zip(&mut self.load) {
            let losses = cx.b.download(block.moe.losses())?;
            for (sum, pair) in self.router_losses.iter_mut().zip(losses.chunks(2)) {
                sum[0] += f64::from(pair[0]);
                sum[1] += f64::from(pair[1]);
            }
            let load = cx.b.download(block.moe.load())?;
            let experts = load.len() / shards;
            layer.resize(experts, 0.0);
            for shard in load.chunks(experts) {
                layer.iter_mut().zip(shard).for_each(|(sum, n)| *sum += f64::from(*n));
            }
        }
        Ok(())
    }
}

/// ((0+1)+(2+3))…
fn tree_sum(values: &[f64]) -> f64 {
    match values {
        [] => 0.0,
        [one] => *one,
        _ => {
            let (left, right) = values.split_at(values.len().div_ceil(2));
            tree_sum(left) + tree_sum(right)
        }
    }
}

/// A built-in recipe by name, or a recipe file by path.
///
/// # Errors
/// [`CoreError::Recipe`] for an unknown name or a bad recipe; an unreadable file.
pub fn load_recipe(name_or_path: &str) -> Result<Recipe> {
    if !name_or_path.ends_with(".toml") {
        return Ok(Recipe::builtin(name_or_path)?);
    }
    let path = std::path::Path::new(name_or_path);
    let text = std::fs::read_to_string(path).map_err(crate::Error::io(path))?;
    let name = path.file_stem().map_or_else(|| name_or_path.into(), |stem| stem.to_string_lossy());
    Ok(Recipe::parse(&name, &text)?)
}

/// What a recipe's blocks ask of the model's widths and of the batch.
fn check_blocks(config: &Config, recipe: &Recipe) -> Result<()> {
    use nibble_core::recipe::Site;
    let blocks = recipe.linear.has_blocks() || recipe.expert.has_blocks();
    if !blocks {
        return Ok(());
    }
    let shard = config.train.batch_size / config.train.shards * config.data.seq_len;
    if !shard.is_multiple_of(128) {
        let why = format!(
            "recipe {} sums weight gradients in blocks of 128 tokens, and a shard has {shard} \
             (batch_size / shards · seq_len); make it a multiple of 128",
            recipe.name
        );
        return Err(crate::Error::config("train.batch_size", why));
    }
    let widths = [
        ("model.d_model", config.model.d_model),
        ("model.expert_ffn", config.model.expert_ffn),
        ("model.shared_ffn", config.model.shared_ffn),
        ("model.head_dim", config.model.heads * config.model.head_dim),
    ];
    for section in [&recipe.linear, &recipe.expert] {
        for block in Site::ALL.map(|site| section.at(site).format.spec()).iter().filter(|s| !s.ragged) {
            if let Some((key, width)) = widths.iter().find(|(_, w)| !w.is_multiple_of(block.block)) {
                let why = format!(
                    "recipe {} stores {} in blocks of {}, and a width of {width} is not a multiple of it",
                    recipe.name, block.name, block.block
                );
                return Err(crate::Error::config(*key, why));
            }
        }
    }
    Ok(())
}
