//! Multiple-choice questions. The score is the log-likelihood of each choice given its question, as in lm-evaluation-harness.

use std::fmt;
use std::ops::Range;
use std::path::{Path, PathBuf};

use serde_json::{Map, Value};

use super::packing::num_cut;
use super::{Beginning, Request};
use crate::error::{Error, Result};
use crate::files;
use crate::json_rows;
use crate::tokenizer::Tokenizer;

/// A multiple-choice question with its choices and the index of the right choice.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Question {
    /// The text that precedes each choice. A space separates the question from the choice.
    pub question: String,
    /// The possible answers.
    pub choices: Vec<String>,
    /// Index of the right choice, counted from 0.
    pub answer: usize,
}

/// A file of questions.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Task {
    /// The file's name without its extension.
    pub name: String,
    /// The questions in the order of the file.
    pub questions: Vec<Question>,
}

/// The fraction of questions that are answered correctly, with its standard error.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Score {
    /// The fraction of questions that are answered correctly.
    pub share: f64,
    /// The standard error of the fraction, computed from the sample variance. The error is NaN for a single question.
    pub error: f64,
}

/// The accuracies of a model on a task, under three rules that determine the model's answer.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Scored {
    /// Accuracy if the choice with the largest log-likelihood counts as the model's answer.
    pub acc: Score,
    /// Accuracy if the choice with the largest log-likelihood per character counts as the model's answer.
    pub acc_norm: Score,
    /// Accuracy if the choice with the largest log-likelihood per UTF-8 byte counts as the model's answer.
    pub acc_bytes: Score,
}

/// Largest size of a task's file in bytes.
const MOST_BYTES: u64 = 1 << 30;

impl Task {
    /// Reads the questions of a task from a JSON Lines file. Each line is an object with `question`, `choices` (a list of texts), and
    /// `answer` (the index of the right choice, counted from 0).
    ///
    /// # Errors
    /// Returns [`Error::Io`] if the file cannot be read, and [`Error::Data`] for an empty file or an invalid line. The error names the
    /// line.
    pub fn open(path: &Path) -> Result<Self> {
        let text = files::read_text(path, MOST_BYTES).map_err(Error::io(path))?;
        let question = |(number, _, row): (usize, &str, Result<Map<String, Value>, String>)| {
            let read = row.and_then(|row| Question::of_row(&row));
            read.map_err(|why| Error::data(path, format!("line {number}: {why}")))
        };
        let questions = json_rows::objects(&text).map(question).collect::<Result<Vec<_>>>()?;
        if questions.is_empty() {
            return Err(Error::data(path, "has no questions"));
        }
        let name = PathBuf::from(path).file_stem().map(|stem| stem.to_string_lossy().into_owned());
        Ok(Self { name: name.unwrap_or_default(), questions })
    }

    /// Reads several task files, whose names must differ.
    ///
    /// # Errors
    /// Returns the errors of [`Task::open`], and [`Error::Data`] if two files have the same name.
    pub fn open_all(paths: &[impl AsRef<Path>]) -> Result<Vec<Self>> {
        let mut all: Vec<Self> = Vec::new();
        for path in paths {
            let task = Self::open(path.as_ref())?;
            if all.iter().any(|other| other.name == task.name) {
                let why = format!("another task is called {} too; rename the file", task.name);
                return Err(Error::data(path.as_ref(), why));
            }
            all.push(task);
        }
        Ok(all)
    }

    /// A message to the user about requests that are longer than a sequence of `seq_len` tokens; `None` if every request fits.
    #[must_use]
    pub fn cut_note(&self, requests: &[Request], seq_len: usize) -> Option<String> {
        let cut = num_cut(requests, seq_len);
        (cut > 0).then(|| {
            format!(
                "{}: of {cut} of {} choices the beginning is left out, as they are longer than data.seq_len = {seq_len}; \
                 --set data.seq_len=N takes more, up to the model's positions",
                self.name,
                requests.len()
            )
        })
    }

    /// One request for each choice of each question, in the order of the file. The tokens that `beginning` specifies precede the question.
    ///
    /// # Errors
    /// Returns [`Error::Data`] for a choice that has no tokens.
    pub fn requests(&self, tokenizer: &dyn Tokenizer, beginning: &Beginning) -> Result<Vec<Request>> {
        let all = self.questions.iter().enumerate();
        let all = all.flat_map(|(number, one)| one.choices.iter().map(move |choice| (number, one, choice)));
        let made = all.map(|(number, one, choice)| {
            let made = beginning.request(tokenizer, &one.question, &format!(" {choice}"))?;
            if made.scored.iter().all(Range::is_empty) {
                let why = format!("question {}: the tokenizer has no token of \"{choice}\"", number + 1);
                return Err(Error::data(Path::new(&self.name), why));
            }
            Ok(made)
        });
        made.collect()
    }

    /// Computes the scores from the log-likelihoods of the requests of [`Task::requests`], in the same order. If several choices are
    /// equally likely, the first of them counts as the answer.
    #[must_use]
    pub fn score(&self, log_likelihoods: &[f64]) -> Scored {
        let mut rest = log_likelihoods;
        let mut right: [Vec<bool>; 3] = Default::default();
        for Question { choices, answer, .. } in &self.questions {
            let (own, behind) = rest.split_at(choices.len().min(rest.len()));
            rest = behind;
            let lengths: [fn(&String) -> usize; 3] = [|_| 1, |choice| choice.chars().count(), String::len];
            for (right, length) in right.iter_mut().zip(lengths) {
                let over = own.iter().zip(choices).map(|(nats, choice)| nats / length(choice) as f64);
                right.push(first_largest(over) == Some(*answer));
            }
        }
        let [acc, acc_norm, acc_bytes] = right.map(|right| Score::of(&right));
        Scored { acc, acc_norm, acc_bytes }
    }
}

impl Scored {
    /// The scores of the task, each with its name.
    #[must_use]
    pub fn named(&self) -> [(&'static str, Score); 3] {
        [("acc", self.acc), ("acc_norm", self.acc_norm), ("acc_bytes", self.acc_bytes)]
    }
}

/// Writes each fraction with its standard error, if the error is known.
impl fmt::Display for Scored {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let one = |(name, Score { share, error }): (&str, Score)| match error.is_finite() {
            true => format!("{name} {share:.4} ± {error:.4}"),
            false => format!("{name} {share:.4}"),
        };
        f.write_str(&self.named().map(one).join(", "))
    }
}

impl Question {
    fn of_row(row: &Map<String, Value>) -> Result<Self, String> {
        let get = |key: &str| row.get(key).ok_or_else(|| format!("has no \"{key}\""));
        let text = |value: &Value, what: &str| match value {
            Value::String(text) => Ok(text.clone()),
            other => Err(format!("{what} is {other}, expected a text")),
        };
        let question = text(get("question")?, "\"question\"")?;
        let Value::Array(choices) = get("choices")? else {
            return Err("\"choices\" is no list".into());
        };
        let choices =
            choices.iter().map(|choice| text(choice, "a choice")).collect::<Result<Vec<_>, String>>()?;
        if choices.len() < 2 || choices.iter().any(String::is_empty) {
            return Err("\"choices\" has fewer than two texts, or an empty one".into());
        }
        let answer = get("answer")?;
        match answer.as_u64().and_then(|n| usize::try_from(n).ok()).filter(|n| *n < choices.len()) {
            Some(answer) => Ok(Self { question, choices, answer }),
            None => Err(format!("\"answer\" is {answer}, expected a number from 0 to {}", choices.len() - 1)),
        }
    }
}

impl Score {
    fn of(right: &[bool]) -> Self {
        let count = right.len() as f64;
        let share = right.iter().filter(|right| **right).count() as f64 / count;
        let squares: f64 = right.iter().map(|right| (f64::from(u8::from(*right)) - share).powi(2)).sum();
        Self { share, error: (squares / (count - 1.0)).sqrt() / count.sqrt() }
    }
}

/// Index of the first maximum; `None` if there are no values, or if a value is NaN.
fn first_largest(values: impl Iterator<Item = f64>) -> Option<usize> {
    let mut best: Option<(usize, f64)> = None;
    for (i, value) in values.enumerate() {
        if value.is_nan() {
            return None;
        }
        if best.is_none_or(|(_, most)| value > most) {
            best = Some((i, value));
        }
    }
    best.map(|(i, _)| i)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn task() -> Task {
        let question = |choices: &[&str], answer| Question {
            question: "?".into(),
            choices: choices.iter().map(|choice| (*choice).to_owned()).collect(),
            answer,
        };
        Task { name: "t".into(), questions: vec![question(&["a", "bcd"], 1), question(&["éé", "xyz"], 0)] }
    }

    #[test]
    fn choices_are_compared_whole_and_by_length() {
        // First question: −2 and −3; divided by characters −2 and −1. Second question: −4 and −5; by characters −2 and −5/3, by bytes −1
        // and −5/3.
        let Scored { acc, acc_norm, acc_bytes } = task().score(&[-2.0, -3.0, -4.0, -5.0]);
        assert_eq!([acc.share, acc_norm.share, acc_bytes.share], [0.5, 0.5, 1.0]);
        assert_eq!([acc.error, acc_bytes.error], [0.5, 0.0]);
    }

    #[test]
    fn of_equal_choices_the_first_is_taken() {
        assert_eq!(task().score(&[-1.0, -1.0, -1.0, -1.0]).acc.share, 0.5);
        assert_eq!(task().score(&[f64::NAN, -1.0, -1.0, -1.0]).acc.share, 0.5);
    }

    #[test]
    fn what_is_no_question_is_named() {
        for (line, why) in [
            (r#"{"question": "a", "choices": ["b", "c"]}"#, "has no \"answer\""),
            (r#"{"question": null, "choices": ["b", "c"], "answer": 0}"#, "\"question\" is null"),
            (r#"{"question": "a", "choices": ["b"], "answer": 0}"#, "fewer than two"),
            (r#"{"question": "a", "choices": ["b", ""], "answer": 0}"#, "an empty one"),
            (r#"{"question": "a", "choices": ["b", "c"], "answer": 2}"#, "a number from 0 to 1"),
            (r#"{"question": "a", "choices": ["b", "c"], "answer": "b"}"#, "a number from 0 to 1"),
        ] {
            let error = json_rows::object(line).and_then(|row| Question::of_row(&row)).unwrap_err();
            assert!(error.contains(why), "{line}: {error}");
        }
    }
}
