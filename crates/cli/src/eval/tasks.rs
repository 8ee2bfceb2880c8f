//! `nibble eval --task`: questions with choices.

use crate::checkpoint::Trained;
use nibble_command::device::{Device, On, Work};
use nibble_command::error::Result;
use nibble_command::output::Mark;
use nibble_command::{say, warn};
use nibble_core::Recipe;
use nibble_train::config::Config;
use nibble_train::evaluation::{Request, Score, Scored, Task, num_cut};
use serde_json::{Map, Value, json};
use std::path::PathBuf;

/// Tasks and the model that they are asked of.
pub(super) struct Tasks<'a> {
    pub trained: &'a Trained,
    pub config: &'a Config,
    pub recipe: &'a Recipe,
    pub tasks: Vec<Task>,
}

/// A file of log-likelihoods.
pub(super) const SAMPLES: Mark = Mark::Figures("nibble eval");

/// Reads them.
pub(super) fn open(paths: &[PathBuf]) -> Result<Vec<Task>> {
    Ok(paths.iter().map(|path| Task::open(path)).collect::<nibble_train::Result<_>>()?)
}

impl Work for Tasks<'_> {
    /// By the name of a task, of each question the log-likelihoods of its choices.
    type Out = Value;

    fn run<B: Device>(&self, on: &On<'_, B>) -> Result<Value> {
        on.announce();
        let mut trainer = self.trained.load(on, self.config, self.recipe)?;
        let tokenizer = trainer.tokenizer()?;
        let mut samples = Map::new();
        for task in &self.tasks {
            let requests = task.requests(&*tokenizer)?;
            warn_of_cut(&task.name, &requests, self.config.data.seq_len);
            let found = trainer.log_likelihoods(&requests, &mut super::evaluating_line)?;
            say!("{}", line(task, &task.score(&found)));
            samples.insert(task.name.clone(), by_question(task, &found));
        }
        Ok(json!({"log_likelihoods": samples}))
    }
}

fn warn_of_cut(name: &str, requests: &[Request], seq_len: usize) {
    match num_cut(requests, seq_len) {
        0 => {}
        cut => warn!(
            "warning: {name}: of {cut} of {} choices the beginning is left out, as they are longer than data.seq_len = {seq_len}; \
             --set data.seq_len=N takes more, up to the model's positions",
            requests.len()
        ),
    }
}

/// What a task came to, each share with its standard error.
fn line(task: &Task, Scored { acc, acc_norm, acc_bytes }: &Scored) -> String {
    let one = |name: &str, Score { share, error }: &Score| format!("{name} {share:.4} ± {error:.4}");
    format!(
        "task {}: {} questions, {}, {}, {}",
        task.name,
        task.questions.len(),
        one("acc", acc),
        one("acc_norm", acc_norm),
        one("acc_bytes", acc_bytes)
    )
}

/// The log-likelihoods of each question's choices.
fn by_question(task: &Task, found: &[f64]) -> Value {
    let mut rest = found;
    let questions = task.questions.iter().map(|question| {
        let (own, behind) = rest.split_at(question.choices.len());
        rest = behind;
        Value::from(own)
    });
    questions.collect()
}
