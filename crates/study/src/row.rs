//! A row: the stored result of a run, a few kilobytes of JSON.

use crate::cell::Cell;
use crate::curve::Curve;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// The outcome of a run.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "is")]
pub enum Outcome {
    /// The run trained all of its steps.
    Done,
    /// The run diverged, by the rule of [`diverged_at`](crate::diverged_at) or because its gradients were not finite. The run's losses are not compared.
    Diverged {
        /// The step at which the run diverged.
        step: u64,
    },
    /// The run ended for a reason unrelated to the recipe, such as too little memory.
    Failed {
        /// The reason.
        why: String,
    },
}

/// The hardware on which a run was executed, and the version of Nibble.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Provenance {
    /// The machine: the name of its processor, or another name.
    pub machine: String,
    /// The device, such as `NVIDIA H200`.
    pub device: String,
    /// The commit of Nibble, marked if files were modified.
    pub commit: String,
    /// Versions of other software that affects the bits or the speed: driver, NVRTC, Nibble.
    pub versions: BTreeMap<String, String>,
}

/// The stored result of a run.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Row {
    /// Id of the cell.
    pub cell: String,
    /// The kind of the cell, as [`Cell::kind_name`] writes it.
    pub kind: String,
    /// Name of the configuration.
    pub config: String,
    /// Name of the recipe.
    pub recipe: String,
    /// SHA-256 of the recipe's text.
    pub recipe_sha256: String,
    /// The seed of the run.
    pub seed: u64,
    /// Settings of the study.
    pub settings: Vec<String>,
    /// The hardware and software of the run.
    pub provenance: Provenance,
    /// How the run ended.
    pub outcome: Outcome,
    /// Seconds of the run, including evaluations.
    pub seconds: f64,
    /// Number of tokens on which the run trained.
    pub tokens: u64,
    /// The median over the steps of the tokens per second. `None` if another run used the device at the same time.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub tokens_per_second: Option<f64>,
    /// Joules per token, if the device reports its power and no other run used the device at the same time.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub joules_per_token: Option<f64>,
    /// Mean training loss in nats over the last tenth of the steps, as [`last_tenth`](crate::last_tenth) computes it. The row of every
    /// finished run has this value.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub last_tenth: Option<f64>,
    /// Pairs of a step and the held-out loss in nats, in the order of steps.
    pub held_out: Vec<(u64, f64)>,
    /// The curve of training losses.
    pub curve: Curve,
}

impl Row {
    /// Creates a row of this cell without any losses.
    #[must_use]
    pub fn of(cell: &Cell, provenance: Provenance, outcome: Outcome) -> Self {
        Self {
            cell: cell.id.clone(),
            kind: cell.kind_name(),
            config: cell.config.clone(),
            recipe: cell.recipe.clone(),
            recipe_sha256: cell.recipe_sha256.clone(),
            seed: cell.seed,
            settings: cell.settings.clone(),
            provenance,
            outcome,
            seconds: 0.0,
            tokens: 0,
            tokens_per_second: None,
            joules_per_token: None,
            last_tenth: None,
            held_out: Vec::new(),
            curve: Curve::default(),
        }
    }

    /// The same row with all measured numbers rounded to 15 significant digits. All JSON readers convert a number with at most 15 digits to
    /// the nearest `f64`; for more digits, some readers return a neighbouring number. So the numbers of a row are read exactly as they were
    /// written.
    #[must_use]
    pub fn rounded(mut self) -> Self {
        let round = |value: f64| format!("{value:.14e}").parse().unwrap_or(value);
        self.seconds = round(self.seconds);
        self.tokens_per_second = self.tokens_per_second.map(round);
        self.joules_per_token = self.joules_per_token.map(round);
        self.last_tenth = self.last_tenth.map(round);
        self.held_out.iter_mut().for_each(|(_, loss)| *loss = round(*loss));
        self
    }

    /// Checks that the row can be written, read again and compared.
    ///
    /// # Errors
    /// Returns the key with a wrong value, and what is wrong.
    pub fn check(&self) -> Result<(), String> {
        let plain = |c: char| c.is_ascii_alphanumeric() || "._-".contains(c);
        if self.cell.is_empty() || self.cell.starts_with('.') || !self.cell.chars().all(plain) {
            return Err(format!("`cell` is {:?}, expected the id of a cell", self.cell));
        }
        let positive = |key: &str, value: Option<f64>| match value {
            Some(value) if !(value.is_finite() && value > 0.0) => {
                Err(format!("`{key}` is {value}, expected a positive number"))
            }
            _ => Ok(()),
        };
        if !(self.seconds.is_finite() && self.seconds >= 0.0) {
            return Err(format!("`seconds` is {}, expected a number from 0 on", self.seconds));
        }
        positive("tokens_per_second", self.tokens_per_second)?;
        positive("joules_per_token", self.joules_per_token)?;
        positive("last_tenth", self.last_tenth)?;
        self.held_out.iter().try_for_each(|(_, loss)| positive("held_out", Some(*loss)))?;
        if self.held_out.windows(2).any(|pair| pair[0].0 >= pair[1].0) {
            return Err("`held_out` is not in the order of steps".into());
        }
        if self.outcome == Outcome::Done && self.last_tenth.is_none() {
            return Err("is done and has no `last_tenth`".into());
        }
        self.curve.check()
    }
}
