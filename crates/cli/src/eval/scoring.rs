//! `nibble eval --task` and `--perplexity`: multiple-choice questions, and perplexity of whole texts.

use crate::caching::ReadingBar;
use crate::checkpoint::Trained;
use nibble_command::console::thousands;
use nibble_command::device::{Device, On, Work};
use nibble_command::error::Result;
use nibble_command::output::Mark;
use nibble_command::{say, warn};
use nibble_core::Recipe;
use nibble_train::config::Config;
use nibble_train::data::LeftOut;
use nibble_train::evaluation::{Perplexity, Task};
use serde_json::{Map, Value, json};

/// The tasks and texts on which a model is scored.
pub(super) struct Scoring<'a> {
    pub trained: &'a Trained,
    pub config: &'a Config,
    pub recipe: &'a Recipe,
    pub tasks: Vec<Task>,
    /// Files, folders and globs whose perplexity is computed.
    pub texts: Vec<String>,
    /// Number of tokens predicted per pass.
    pub stride: usize,
}

/// The mark of files of log-likelihoods, by which a later run recognises its own output.
pub(super) const SAMPLES: Mark = Mark::Figures("nibble eval");

impl Work for Scoring<'_> {
    /// For each task name and question, the log-likelihoods of the choices.
    type Out = Value;

    fn run<B: Device>(&self, on: &On<'_, B>) -> Result<Value> {
        on.announce();
        let mut trainer = self.trained.load(on, self.config, self.recipe)?;
        let (tokenizer, beginning) = (trainer.tokenizer()?, self.trained.beginning(self.config)?);
        let mut samples = Map::new();
        for task in &self.tasks {
            let requests = task.requests(&*tokenizer, &beginning)?;
            if let Some(note) = task.cut_note(&requests, self.config.data.seq_len) {
                warn!("warning: {note}");
            }
            let found = trainer.log_likelihoods(&requests, &mut super::evaluating_line)?;
            say!("task {}: {} questions, {}", task.name, task.questions.len(), task.score(&found));
            samples.insert(task.name.clone(), by_question(task, &found));
        }
        for text in &self.texts {
            let mut bar = ReadingBar::new(format!("predicting {text}"), None);
            let (found, left_out) = trainer.perplexity(text, (beginning.clone(), self.stride), &mut bar)?;
            drop(bar);
            warn_of_left_out(text, &left_out);
            say!("{}", perplexity_line(text, &found, self.config.unit()));
        }
        Ok(json!({"log_likelihoods": samples}))
    }
}

fn warn_of_left_out(text: &str, left_out: &LeftOut) {
    if let Some(bad) = left_out.first.first() {
        warn!(
            "warning: {text}: rows that cannot be read and are left out: {}, the first of them: {bad}",
            thousands(left_out.rows)
        );
    }
}

/// The line with a text's perplexity. For a byte-level model, perplexity per token and per byte are the same.
fn perplexity_line(text: &str, found: &Perplexity, unit: &str) -> String {
    let of_tokens = (unit != "byte")
        .then(|| format!("{:.4} a token ({:.4} nats)", found.by_token(), found.nats / found.tokens as f64));
    let by_byte = found.by_byte().zip(found.bits_per_byte());
    let of_bytes = by_byte.map(|(by_byte, bits)| format!("{by_byte:.4} a byte ({bits:.4} bits)"));
    format!(
        "perplexity {text}: {} documents, {} {unit}s predicted: {}",
        thousands(found.documents),
        thousands(found.tokens),
        of_tokens.into_iter().chain(of_bytes).collect::<Vec<_>>().join(", ")
    )
}

/// The log-likelihoods of the choices, by question.
fn by_question(task: &Task, found: &[f64]) -> Value {
    let mut rest = found;
    let questions = task.questions.iter().map(|question| {
        let (own, behind) = rest.split_at(question.choices.len());
        rest = behind;
        Value::from(own)
    });
    questions.collect()
}
