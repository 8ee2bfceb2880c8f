//! Prepares the batches of the next steps on a separate thread while the device computes.

use super::{Batch, Dataset};
use crate::error::Result;
use crate::files::hexadecimal;
use nibble_core::Error as CoreError;
use sha2::{Digest, Sha256};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, sync_channel};
use std::thread::{Builder, JoinHandle};

/// The training data of one step that one rank processes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StepBatches {
    /// This rank's share of each micro-batch.
    pub micro_batches: Vec<Batch>,
    /// Number of targets in all micro-batches of the step, over all ranks. The trainer divides the sum of the losses by this number of
    /// targets.
    pub counted: u64,
}

impl StepBatches {
    /// Hexadecimal SHA-256 of the sequences. The hash covers the inputs, the targets and the beginnings of documents of every micro-batch,
    /// as little-endian 32-bit integers.
    #[must_use]
    pub fn sha256(&self) -> String {
        let mut sha = Sha256::new();
        for batch in &self.micro_batches {
            for ids in [&batch.inputs, &batch.targets, &batch.starts] {
                ids.iter().for_each(|id| sha.update(id.to_le_bytes()));
            }
        }
        hexadecimal(&sha.finalize())
    }
}

/// Determines which sequences one rank processes in each micro-batch. The sequences are a pure function of the step.
#[derive(Debug, Clone)]
pub struct BatchPlan {
    /// The data of the run.
    pub data: Arc<Dataset>,
    /// Number of sequences of a micro-batch, over all ranks.
    pub batch_size: usize,
    /// Number of micro-batches of a step.
    pub micro_batches: usize,
    /// The index of this rank.
    pub rank: usize,
    /// Number of ranks.
    pub ranks: usize,
}

impl BatchPlan {
    /// The sequences of a micro-batch that this rank processes.
    ///
    /// # Errors
    /// The errors of [`Dataset::train_batch`].
    pub fn batch(&self, step: u64, micro: usize) -> Result<Batch> {
        Ok(self.part(&self.whole(step, micro)?))
    }

    /// The sequences of all micro-batches of a step that this rank processes.
    ///
    /// # Errors
    /// The errors of [`Dataset::train_batch`].
    pub fn step(&self, step: u64) -> Result<StepBatches> {
        let mut batches = StepBatches { micro_batches: Vec::new(), counted: 0 };
        for micro in 0..self.micro_batches {
            let whole = self.whole(step, micro)?;
            batches.counted += whole.counted() as u64;
            batches.micro_batches.push(self.part(&whole));
        }
        Ok(batches)
    }

    /// The same plan for a single rank, which processes the sequences of all ranks.
    #[must_use]
    pub fn of_all_ranks(self) -> Self {
        Self { rank: 0, ranks: 1, ..self }
    }

    /// A micro-batch with the parts of all ranks.
    fn whole(&self, step: u64, micro: usize) -> Result<Batch> {
        let number = step * self.micro_batches as u64 + micro as u64;
        self.data.train_batch(number * self.batch_size as u64, self.batch_size)
    }

    /// This rank's part of a micro-batch.
    fn part(&self, whole: &Batch) -> Batch {
        let each = self.batch_size / self.ranks;
        whole.part(self.rank * each, each)
    }
}

/// Prepares the batches of a run, step by step, in a background thread. The loader prepares one or two steps ahead of the consumer.
#[derive(Debug)]
pub struct Loader {
    plan: BatchPlan,
    ahead: Option<Ahead>,
}

/// The thread, and the step of its next batches.
#[derive(Debug)]
struct Ahead {
    next: u64,
    /// The channel of prepared batches; `None` only during drop.
    made: Option<Receiver<Result<StepBatches>>>,
    thread: Option<JoinHandle<()>>,
}

impl Loader {
    /// Creates a loader. The first call of [`Loader::take`] starts the background thread at the step that the call requests.
    #[must_use]
    pub fn new(plan: BatchPlan) -> Self {
        Self { plan, ahead: None }
    }

    /// The batches of a step. Callers should request consecutive steps, because any other step restarts the background thread.
    ///
    /// # Errors
    /// Returns an error if no thread can be started, and [`Error::Data`](crate::Error::Data) if a file has changed since it was opened, or
    /// cannot be read.
    ///
    /// # Panics
    /// If the background thread panicked, this function panics with the same message.
    pub fn take(&mut self, step: u64) -> Result<StepBatches> {
        if self.ahead.as_ref().is_none_or(|ahead| ahead.next != step) {
            // The old thread must end before the new thread starts.
            self.ahead = None;
            self.ahead = Some(Ahead::start(self.plan.clone(), step)?);
        }
        match self.ahead.as_mut().and_then(Ahead::take) {
            Some(batches) => batches,
            // A thread that was not dropped ends only because of a panic.
            None => match self.ahead.take().and_then(|mut ahead| ahead.thread.take()?.join().err()) {
                Some(panic) => std::panic::resume_unwind(panic),
                None => {
                    Err(CoreError::Device { call: "Loader::take".into(), why: "its thread ended".into() }
                        .into())
                }
            },
        }
    }
}

impl Ahead {
    fn start(plan: BatchPlan, first: u64) -> Result<Self> {
        // One prepared step waits in the channel while the thread prepares the next step.
        let (sender, made) = sync_channel(1);
        let make = move || {
            // The loop ends when the receiver is dropped.
            let _ = (first..).try_for_each(|step| sender.send(plan.step(step)));
        };
        let thread = Builder::new().name("nibble-loader".into()).spawn(make);
        let thread = thread.map_err(CoreError::not_started)?;
        Ok(Self { next: first, made: Some(made), thread: Some(thread) })
    }

    fn take(&mut self) -> Option<Result<StepBatches>> {
        let batches = self.made.as_ref()?.recv().ok()?;
        self.next += 1;
        Some(batches)
    }
}

impl Drop for Ahead {
    fn drop(&mut self) {
        // A blocked `send` then returns an error, and the thread ends.
        drop(self.made.take());
        if let Some(thread) = self.thread.take() {
            // If the thread panicked after the last step, the panic is ignored.
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::DataConfig;

    fn plan() -> BatchPlan {
        let data = Dataset::open(&DataConfig { seq_len: 32, ..DataConfig::default() }, 7).unwrap();
        BatchPlan { data: Arc::new(data), batch_size: 4, micro_batches: 3, rank: 1, ranks: 2 }
    }

    #[test]
    fn batches_are_those_of_the_plan_in_any_order_of_steps() {
        let (plan, mut loader) = (plan(), Loader::new(plan()));
        for step in [0, 1, 2, 3, 9, 10, 2, 2, 3] {
            assert_eq!(loader.take(step).unwrap(), plan.step(step).unwrap(), "step {step}");
        }
    }

    #[test]
    fn a_plan_is_this_ranks_part_of_consecutive_sequences() {
        let plan = plan();
        for (micro, batch) in plan.step(5).unwrap().micro_batches.iter().enumerate() {
            let whole = plan.data.train_batch((5 * 3 + micro as u64) * 4, 4).unwrap();
            assert_eq!(*batch, whole.part(2, 2), "micro-batch {micro}");
        }
    }
}
