//! What a user may not ask for, though a stored run that has it resumes: values that decide nothing, and numbers that end no run well.

use super::{Config, ScheduleKind};
use crate::error::{Error, Result};

/// Where a user has written a value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Written {
    /// In the file.
    File,
    /// In an override.
    Override,
}

/// A value other than its default that decides nothing.
struct Moot {
    key: &'static str,
    /// The keys that make it so.
    by: &'static [&'static str],
    why: String,
}

impl Config {
    /// Checks the values that `written` says a user has written.
    ///
    /// # Errors
    /// [`Error::Config`] for one that decides nothing, that single precision does not hold, or that ends every run.
    pub(super) fn check_asked(&self, written: &dyn Fn(&str) -> Option<Written>) -> Result<()> {
        for Moot { key, by, why } in self.moot() {
            // What an override makes of a file's other values is no mistake of the file.
            let overridden = by.iter().any(|by| written(by) == Some(Written::Override));
            match written(key) {
                Some(Written::File) if overridden => {}
                Some(_) => return Err(Error::config(key, why)),
                None => {}
            }
        }
        for (key, value) in self.singles().into_iter().filter(|(key, _)| written(key).is_some()) {
            let single = value as f32;
            if !single.is_finite() || single == 0.0 && value != 0.0 {
                return Err(Error::config(
                    key,
                    format!(
                        "is {value:?}, expected a number that single precision holds: up to 3.4e38, and no smaller than 1.4e-45"
                    ),
                ));
            }
        }
        self.check_optimizer(written)?;
        let is_other_source = written("data.source") == Some(Written::Override);
        if self.data.mixture.is_empty() && written("data.mixture").is_some() && !is_other_source {
            let why = "is empty: list what is mixed, as mixture = [{ source = \"a.jsonl\", weight = 2.0 }, ...], or leave it out";
            return Err(Error::config("data.mixture", why));
        }
        match self.run.log_every == 0 && written("run.log_every").is_some() {
            true => Err(Error::config("run.log_every", "is 0, expected at least 1")),
            false => Ok(()),
        }
    }

    /// Every value that decides nothing.
    fn moot(&self) -> Vec<Moot> {
        let (default, mut moot) = (Self::default(), Vec::new());
        let mut add = |is: bool, key, by, why: String| {
            if is {
                moot.push(Moot { key, by, why });
            }
        };
        let (d, t, source) = (&self.data, &self.train, &self.data.source);
        add(
            t.schedule != ScheduleKind::Wsd && t.decay_fraction != default.train.decay_fraction,
            "train.decay_fraction",
            &["train.schedule"],
            format!(
                "is {:?}, but decides nothing: train.schedule is not \"wsd\", which alone decays at its end; leave it out, or set that",
                t.decay_fraction
            ),
        );
        add(
            !self.is_text() && d.valid_fraction != default.data.valid_fraction,
            "data.valid_fraction",
            &["data.source"],
            format!(
                "is {:?}, but decides nothing: data.source = \"{source}\" has held-out tokens of its own, of one size; leave it out",
                d.valid_fraction
            ),
        );
        add(
            !self.is_text() && d.bytes,
            "data.bytes",
            &["data.source"],
            format!("is true, but decides nothing: data.source = \"{source}\" is no file; leave it out"),
        );
        for (key, value, usual) in [
            ("data.tokenizer", &d.tokenizer, &default.data.tokenizer),
            ("data.bos_token", &d.bos_token, &default.data.bos_token),
            ("data.eos_token", &d.eos_token, &default.data.eos_token),
        ] {
            // Random tokens are below the size of a tokenizer's vocabulary, if one is named.
            let decides = self.is_text() || key == "data.tokenizer" && !self.is_synthetic();
            add(
                !decides && value != usual,
                key,
                &["data.source"],
                format!(
                    "is \"{value}\", but decides nothing: data.source = \"{source}\" has tokens of its own; leave it out"
                ),
            );
        }
        for (key, is) in [
            ("data.text_key", d.text_key != default.data.text_key),
            ("data.prompt_key", !d.prompt_key.is_empty()),
            ("data.answer_key", !d.answer_key.is_empty()),
            ("data.messages_key", !d.messages_key.is_empty()),
            ("data.on_error", d.on_error != default.data.on_error),
            ("data.cache_dir", !d.cache_dir.is_empty()),
        ] {
            let why =
                format!("is set, but decides nothing: data.source = \"{source}\" is no file; leave it out");
            add(!self.is_text() && is, key, &["data.source"], why);
        }
        add(
            !d.prompt_key.is_empty() && d.text_key != default.data.text_key,
            "data.text_key",
            &["data.prompt_key"],
            format!("is \"{}\", but decides nothing: data.prompt_key is set; leave it out", d.text_key),
        );
        add(
            !d.messages_key.is_empty() && d.text_key != default.data.text_key,
            "data.text_key",
            &["data.messages_key"],
            format!("is \"{}\", but decides nothing: data.messages_key is set; leave it out", d.text_key),
        );
        add(
            self.eval.every == 0 && self.eval.batches != default.eval.batches,
            "eval.batches",
            &["eval.every"],
            format!(
                "is {}, but decides nothing: eval.every = 0, and the evaluation at the end takes all of the held-out data; leave it out, or set that",
                self.eval.batches
            ),
        );
        add(
            self.eval.tasks.is_empty() && !self.eval.add_bos_token,
            "eval.add_bos_token",
            &["eval.tasks"],
            "is false, but decides nothing: eval.tasks names no questions; leave it out, or set that".into(),
        );
        for (key, why) in self.model.rope_scaling.moot() {
            add(true, key, &["model.rope_scaling.kind"], why);
        }
        add(
            !self.model.router_bias && t.router_bias_rate != default.train.router_bias_rate,
            "train.router_bias_rate",
            &["model.router_bias"],
            format!(
                "is {:?}, but decides nothing: model.router_bias = false; leave it out, or set that",
                t.router_bias_rate
            ),
        );
        add(
            self.model.experts == 0 && t.force_load_balance,
            "train.force_load_balance",
            &["model.experts"],
            "is true, but decides nothing: model.experts = 0; leave it out, or set that".into(),
        );
        add(
            self.model.groups == 0 && self.model.group_score != default.model.group_score,
            "model.group_score",
            &["model.groups"],
            "is \"top2\", but decides nothing: model.groups = 0; leave it out, or set that".into(),
        );
        let factor = self.run.capacity_factor;
        add(
            (self.run.mesh().ep == 1 || self.model.experts == 0) && factor != default.run.capacity_factor,
            "run.capacity_factor",
            &["run.ranks", "run.dp", "model.experts"],
            format!(
                "is {factor:?}, but decides nothing: no experts are divided among ranks; leave it out, or set run.ranks"
            ),
        );
        add(
            self.run.ranks == 1 && self.run.reductions != default.run.reductions,
            "run.reductions",
            &["run.ranks"],
            "is \"nccl\", but decides nothing: one rank has nothing to sum with others; leave it out, or set run.ranks".into(),
        );
        let c = &self.checkpoint;
        let none = c.every == 0 && !c.at_end;
        for (key, value, usual) in [
            ("checkpoint.keep", c.keep, default.checkpoint.keep),
            ("checkpoint.host_gib", c.host_gib, default.checkpoint.host_gib),
            ("checkpoint.file_mib", c.file_mib, default.checkpoint.file_mib),
        ] {
            add(
                none && value != usual,
                key,
                &["checkpoint.every", "checkpoint.at_end"],
                format!(
                    "is {value}, but decides nothing: checkpoint.every = 0 and checkpoint.at_end = false, so there is no checkpoint; leave it out"
                ),
            );
        }
        moot
    }

    /// Numbers that kernels compute with in single precision.
    fn singles(&self) -> [(&'static str, f64); 13] {
        let (m, t) = (&self.model, &self.train);
        [
            ("model.rope_theta", m.rope_theta),
            ("model.norm_eps", m.norm_eps),
            ("model.aux_loss_coef", m.aux_loss_coef),
            ("model.z_loss_coef", m.z_loss_coef),
            ("train.lr", t.lr),
            ("train.min_lr", t.min_lr),
            ("train.weight_decay", t.weight_decay),
            ("train.beta1", t.beta1),
            ("train.beta2", t.beta2),
            ("train.eps", t.eps),
            ("train.clip_norm", t.clip_norm),
            ("train.router_bias_rate", t.router_bias_rate),
            ("model.route_scale", m.route_scale),
        ]
    }

    /// Numbers of the optimizer that leave no weight what it was.
    fn check_optimizer(&self, written: &dyn Fn(&str) -> Option<Written>) -> Result<()> {
        let t = &self.train;
        for (key, beta) in [("train.beta1", t.beta1), ("train.beta2", t.beta2)] {
            if written(key).is_some() && beta as f32 >= 1.0 {
                let why = format!("is {beta:?}, which is 1 in single precision, expected below 1");
                return Err(Error::config(key, why));
            }
        }
        let share = t.lr * t.weight_decay;
        let key = ["train.weight_decay", "train.lr"].into_iter().find(|key| written(key).is_some());
        match key {
            Some(key) if share >= 1.0 => {
                let why = format!(
                    "is too large: train.lr = {:?} times train.weight_decay = {:?} is {share:.3e}, the share of every weight that a step \
                     takes away, expected less than 1",
                    t.lr, t.weight_decay
                );
                Err(Error::config(key, why))
            }
            _ => Ok(()),
        }
    }
}
