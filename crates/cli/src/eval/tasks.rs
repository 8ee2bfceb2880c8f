//! `nibble eval --task`: questions with choices.

use crate::checkpoint::Trained;
use nibble_command::device::{Device, On, Work};
use nibble_command::error::{Error, Result};
use nibble_command::{say, warn};
use nibble_core::Recipe;
use nibble_train::config::Config;
use nibble_train::evaluation::{Request, Score, Scored, Task, num_cut};
use serde_json::json;
use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};

/// Tasks and the model that they are asked of.
pub(super) struct Tasks<'a> {
    pub trained: &'a Trained,
    pub config: &'a Config,
    pub recipe: &'a Recipe,
    pub tasks: Vec<Task>,
    /// Where each choice's log-likelihood is written, if anywhere.
    pub samples: Option<&'a Path>,
}

/// Reads them.
pub(super) fn open(paths: &[PathBuf]) -> Result<Vec<Task>> {
    Ok(paths.iter().map(|path| Task::open(path)).collect::<nibble_train::Result<_>>()?)
}

impl Work for Tasks<'_> {
    type Out = ();

    fn run<B: Device>(&self, on: &On<'_, B>) -> Result<()> {
        on.announce();
        let mut trainer = self.trained.load(on, self.config, self.recipe)?;
        let tokenizer = trainer.tokenizer()?;
        let mut samples = String::new();
        for task in &self.tasks {
            let requests = task.requests(&*tokenizer)?;
            warn_of_cut(&task.name, &requests, self.config.data.seq_len);
            let found = trainer.log_likelihoods(&requests, &mut super::evaluating_line)?;
            say!("{}", line(task, &task.score(&found)));
            write_samples(task, &found, &mut samples);
        }
        match self.samples {
            Some(path) => {
                fs::write(path, samples).map_err(|e| Error::Failed(format!("{}: {e}", path.display())))
            }
            None => Ok(()),
        }
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

/// A line of JSON for each question.
fn write_samples(task: &Task, found: &[f64], into: &mut String) {
    let mut rest = found;
    for (number, question) in task.questions.iter().enumerate() {
        let (own, behind) = rest.split_at(question.choices.len());
        rest = behind;
        let line =
            json!({"task": task.name, "question": number, "log_likelihoods": own, "answer": question.answer});
        // Writing to a string does not fail.
        let _ = writeln!(into, "{line}");
    }
}
