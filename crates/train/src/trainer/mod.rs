//! Training, one rank's view of it: a step, an evaluation, and what goes into a checkpoint.

mod checks;
mod run;
mod setup;
mod tally;
mod weights;

pub use checks::load_recipe;
pub use run::{Observer, Options, Start, Summary, run};

use crate::config::Config;
use crate::cx::Event;
use crate::data::Dataset;
use crate::error::Result;
use crate::ledger::{Ledger, Saved};
use crate::metrics::Metrics;
use crate::model::Decoder;
use crate::tokenizer::Tokenizer;
use nibble_core::ops::verify_ids;
use nibble_core::{Comm, Kernels, Recipe};
use setup::Setup;
use std::cell::RefCell;

/// One rank of a training run.
#[derive(Debug)]
pub struct Trainer<'a, B: Kernels> {
    setup: Setup<'a, B>,
    /// The model, this rank's part of it.
    pub model: Decoder<B>,
}

impl<'a, B: Kernels> Trainer<'a, B> {
    /// A run at its beginning.
    ///
    /// # Errors
    /// For a recipe or data that cannot be read, or a batch that the recipe's blocks do not divide.
    pub fn new(b: &'a B, comm: &'a dyn Comm<B>, config: &Config) -> Result<Self> {
        let mut trainer = Self::without_data(b, comm, config)?;
        trainer.setup.data = Some(Dataset::open(&config.data, config.seed)?);
        Ok(trainer)
    }

    /// A model alone, to generate with: the data need not be there.
    ///
    /// # Errors
    /// As [`Trainer::new`], the data aside.
    pub fn without_data(b: &'a B, comm: &'a dyn Comm<B>, config: &Config) -> Result<Self> {
        let recipe = load_recipe(&config.recipe)?;
        checks::check_blocks(config, &recipe)?;
        checks::check_memory(b, config)?;
        let model = Decoder::new(b, comm, &recipe, &config.model, config.data.seq_len, config.seed)?;
        let setup = Setup { b, comm, config: config.clone(), recipe, data: None, step: 0 };
        Ok(Self { setup, model })
    }

    /// Optimizer steps done.
    pub fn step(&self) -> u64 {
        self.setup.step
    }

    /// The run's configuration.
    pub fn config(&self) -> &Config {
        &self.setup.config
    }

    /// The run's recipe.
    pub fn recipe(&self) -> &Recipe {
        &self.setup.recipe
    }

    /// The run's data.
    ///
    /// # Errors
    /// [`crate::Error::Config`] if it was made without.
    pub fn data(&self) -> Result<&Dataset> {
        self.setup.data()
    }

    /// The tokenizer of the run's data.
    pub fn tokenizer(&self) -> Tokenizer {
        if self.setup.config.is_synthetic() { Tokenizer::Synthetic } else { Tokenizer::Bytes }
    }

    /// Trainable numbers over all ranks.
    pub fn parameters(&mut self) -> usize {
        self.model.named_tensors().iter().flatten().map(|t| t.shape.iter().product::<usize>()).sum()
    }

    /// One optimizer step.
    ///
    /// # Errors
    /// [`nibble_core::Error::NonFinite`] naming the first tensor that is not finite, before any weight has changed; errors of
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
        let mut metrics = self.setup.train_step(&mut self.model, trace)?;
        let setup = &mut self.setup;
        setup.step += 1;
        let seconds = started.elapsed().as_secs_f64();
        metrics.step = setup.step;
        metrics.n_tokens_seen = Some(setup.step * setup.config.tokens_per_step());
        metrics.tps = Some(setup.config.tokens_per_step() as f64 / seconds);
        metrics.seconds = Some(seconds);
        Ok(metrics)
    }

    /// Mean cross-entropy in nats over held-out sequences, all ranks together: `batches` batches from all over the data,
    /// or all of it (0), the shorter tail included.
    ///
    /// # Errors
    /// [`nibble_core::Error::NonFinite`] if the loss is not a number; from the backend and other ranks.
    pub fn evaluate(&mut self, batches: usize) -> Result<f64> {
        self.setup.evaluate(&mut self.model, batches)
    }

    /// Logits of the last of these tokens, one sequence, every rank alike.
    ///
    /// # Errors
    /// If an id is no token of the vocabulary; from the backend.
    pub fn next_logits(&mut self, ids: &[i32]) -> Result<Vec<f32>> {
        let cx = self.setup.inference_cx(ids.len())?;
        self.model.prepare(&cx)?;
        let (logits, bad_ids) = self.model.last_logits(&cx, &cx.b.upload(ids)?)?;
        verify_ids(cx.b, "next_logits", "ids", &bad_ids, logits.cols)?;
        Ok(logits.to_f32_vec(cx.b)?)
    }

    /// What a forward pass of this run keeps for its backward pass, measured by doing one; and the bytes the
    /// allocator holds for it.
    ///
    /// # Errors
    /// As [`Trainer::train_step`].
    pub fn ledger(&mut self) -> Result<(Ledger, usize)> {
        let cx = self.setup.cx(None)?;
        self.model.prepare(&cx)?;
        let batch = self.setup.batch(0)?;
        let (ids, targets) = (cx.b.upload(&batch.inputs)?, cx.b.upload(&batch.targets)?);
        // Counts of conversions live until the end of the step; they are not for the backward pass.
        cx.counts.borrow_mut().clear();
        let before = cx.b.memory().live_bytes - size_of::<i32>() * B::len(&ids);
        let (out, saved) = self.model.forward(&cx, ids, &targets, 0.0)?;
        drop(out);
        // The head's gradient is no part of what a backward pass reads; before a step there is none.
        self.model.clear_grads();
        cx.counts.borrow_mut().clear();
        let live = cx.b.memory().live_bytes - before;
        let mut ledger = Ledger::default();
        saved.ledger(&mut ledger);
        Ok((ledger, live))
    }
}
