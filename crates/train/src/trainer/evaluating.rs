//! Evaluations during a run: the held-out loss, and the scores of tasks.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::Trainer;
use super::options::{Observer, Options};
use super::start::outputs::Outputs;
use crate::config::Config;
use crate::error::Result;
use crate::evaluation::{Beginning, HeldOut, Request, Task};
use crate::fault::{Point, reach};
use crate::metrics::Metrics;
use crate::tokenizer::Bytes;
use nibble_core::Kernels;
use nibble_core::allocation::{part, phase};

/// The metric of the share of held-out images that are classified rightly.
const ACCURACY: &str = "eval/images/acc";

/// Returns whether to continue. The arguments are the number of finished batches and the total number of batches.
type GoOn<'a> = dyn FnMut(usize, usize) -> Result<bool> + 'a;

/// Evaluates a run, and stops an evaluation on request.
pub(super) struct Evaluator {
    pub options: Options,
    tasks: Vec<(Task, Vec<Request>)>,
}

impl Evaluator {
    /// Reads the tasks of a run. The first rank reports requests that are longer than a sequence.
    ///
    /// # Errors
    /// Returns an error for invalid tasks, and for texts without ids.
    pub fn of(
        config: &Config,
        options: Options,
        is_first: bool,
        observer: &mut dyn Observer,
    ) -> Result<Self> {
        let mut tasks = Vec::new();
        if !config.eval.tasks.is_empty() {
            let tokenizer = config.tokenizer()?.unwrap_or_else(|| Arc::new(Bytes));
            let beginning = Beginning::of_run(config)?;
            for task in Task::open_all(&config.eval.tasks)? {
                let requests = task.requests(&*tokenizer, &beginning)?;
                let note = task.cut_note(&requests, config.data.seq_len).filter(|_| is_first);
                note.iter().for_each(|note| observer.note(note));
                tasks.push((task, requests));
            }
        }
        Ok(Self { options, tasks })
    }

    /// SHA-256 of the tasks' requests and right answers.
    pub fn sha256(&self) -> String {
        crate::files::sha256_hex(format!("{:?}", self.tasks).as_bytes())
    }

    /// Computes the held-out loss over `batches` batches of [`HeldOut::BATCH`] sequences (0: all sequences), and the scores of the tasks.
    /// Writes, plots and reports the results. The result is `None` if the run was stopped before the evaluation was complete.
    pub fn evaluate<B: Kernels>(
        &self,
        trainer: &mut Trainer<'_, B>,
        batches: usize,
        outputs: &mut Option<Outputs>,
        observer: &mut dyn Observer,
    ) -> Result<Option<HeldOut>> {
        phase(format_args!("the held-out loss"));
        part("evaluation");
        reach(Point::EvaluationBegins)?;
        let first = outputs.is_some();
        let evaluated =
            self.told(trainer, first, observer, |trainer, go_on| trainer.evaluate_while(batches, go_on));
        let Some(held_out) = evaluated? else { return Ok(None) };
        let Some(other) = self.scores(trainer, first, observer)? else { return Ok(None) };
        if let Some(outputs) = outputs {
            let (step, valid_loss) = (trainer.step(), held_out.loss());
            let mut other = other;
            other.extend(held_out.accuracy().map(|share| (ACCURACY.to_owned(), share)));
            let valid_target_fraction = valid_loss.is_none().then_some(0.0);
            outputs.write(&Metrics {
                step,
                valid_loss,
                valid_target_fraction,
                other,
                ..Metrics::default()
            })?;
            outputs.draw()?;
            observer.evaluation(step, valid_loss);
            if let (Some(right), Some(share)) = (held_out.right, held_out.accuracy()) {
                observer.accuracy(step, right, share);
            }
        }
        Ok(Some(held_out))
    }

    /// Runs `work`, which asks all ranks after every batch whether to continue. The first rank reports progress and retries.
    fn told<'b, B: Kernels, T>(
        &self,
        trainer: &mut Trainer<'b, B>,
        first: bool,
        observer: &mut dyn Observer,
        work: impl FnOnce(&mut Trainer<'b, B>, &mut GoOn<'_>) -> Result<Option<T>>,
    ) -> Result<Option<T>> {
        let (b, comm) = trainer.backend();
        let done = work(trainer, &mut |done, of| {
            if first {
                observer.evaluating(done, of);
            }
            Ok(done == of || self.options.stop_asked_of_any(b, comm)? == 0)
        });
        trainer.tell_notes(first, observer);
        done.map_err(|error| trainer.of_divergence(error, true))
    }

    /// The scores of all tasks by name; `None` if the run was asked to stop before the scores were complete.
    fn scores<B: Kernels>(
        &self,
        trainer: &mut Trainer<'_, B>,
        first: bool,
        observer: &mut dyn Observer,
    ) -> Result<Option<BTreeMap<String, f64>>> {
        let mut scores = BTreeMap::new();
        for (task, requests) in &self.tasks {
            let found = self.told(trainer, first, observer, |trainer, go_on| {
                trainer.log_likelihoods_while(requests, go_on)
            });
            let Some(found) = found? else { return Ok(None) };
            let scored = task.score(&found);
            if first {
                observer.task(trainer.step(), &task.name, &scored);
            }
            let named = scored.named().map(|(score, of)| (format!("eval/{}/{score}", task.name), of.share));
            scores.extend(named);
        }
        Ok(Some(scores))
    }
}
