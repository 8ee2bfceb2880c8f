//! Values that a user may not set, although a stored run with such values resumes: unused settings, and numbers that ruin every run.

use super::values::settings;
use super::{Config, RopeScaling, ScheduleKind};
use crate::error::{Error, Result};

/// Where a user has written a value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Written {
    /// The user wrote the value in the file.
    File,
    /// The user wrote the value in an override.
    Override,
}

/// A setting that has no effect, although its value differs from the default.
struct Moot {
    key: &'static str,
    /// The keys because of which the setting has no effect.
    by: &'static [&'static str],
    why: String,
}

impl Config {
    /// Checks the values that the user has written. `written` says where the user has written a key.
    ///
    /// # Errors
    /// [`Error::Config`] for a value that has no effect, that single precision cannot represent, or that ruins every run.
    pub(super) fn check_asked(&self, written: &dyn Fn(&str) -> Option<Written>) -> Result<()> {
        for Moot { key, by, why } in self.moot()? {
            // If an override made a value of the file unused, the file is not at fault.
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
                        "is {value:?}, expected a number in the range of single precision: at most 3.4e38, and not smaller than 1.4e-45"
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

    /// Every setting that has no effect.
    fn moot(&self) -> Result<Vec<Moot>> {
        let (mut moot, is, mut usual) = (Vec::new(), self.settings()?, Self::default().settings()?);
        // The serialized configuration omits this table if all of its values are defaults.
        usual.extend(settings("model.rope_scaling", &RopeScaling::default())?);
        let mut add = |holds: bool, keys: &[&'static str], by, because: &str| {
            for key in keys.iter().filter(|key| holds && is.get(**key) != usual.get(**key)) {
                if let Some(is) = is.get(*key) {
                    moot.push(Moot { key, by, why: format!("is {is}, but has no effect: {because}") });
                }
            }
        };
        let (d, t, m) = (&self.data, &self.train, &self.model);
        let because = "only train.schedule = \"wsd\" uses it; leave it out, or set train.schedule";
        add(t.schedule != ScheduleKind::Wsd, &["train.decay_fraction"], &["train.schedule"], because);

        let (is_text, by, of_source) =
            (self.is_text(), &["data.source"], format!("data.source = \"{}\"", d.source));
        let because = format!("{of_source} has its own held-out tokens; leave it out");
        add(!is_text, &["data.valid_fraction"], by, &because);
        let no_file = format!("{of_source} is not a file; leave it out");
        add(!is_text, &["data.bytes"], by, &no_file);
        // If a tokenizer is named, random tokens are sampled below the tokenizer's vocabulary size.
        let because = format!("{of_source} has its own tokens; leave it out");
        add(self.is_synthetic(), &["data.tokenizer"], by, &because);
        add(!is_text, &["data.bos_token", "data.eos_token"], by, &because);
        let of_rows = ["data.text_key", "data.prompt_key", "data.answer_key", "data.messages_key"];
        add(!is_text, &of_rows, by, &no_file);
        add(!is_text, &["data.on_error", "data.cache_dir"], by, &no_file);
        let because = "data.prompt_key is set; leave it out";
        add(!d.prompt_key.is_empty(), &["data.text_key"], &["data.prompt_key"], because);
        let because = "data.messages_key is set; leave it out";
        add(!d.messages_key.is_empty(), &["data.text_key"], &["data.messages_key"], because);

        let because = "eval.every = 0, and the evaluation at the end uses all held-out data; leave it out, or set eval.every";
        add(self.eval.every == 0, &["eval.batches"], &["eval.every"], because);
        let because = "eval.tasks is empty; leave it out, or set eval.tasks";
        add(self.eval.tasks.is_empty(), &["eval.add_bos_token"], &["eval.tasks"], because);

        for (key, because) in m.rope_scaling.moot() {
            add(true, &[key], &["model.rope_scaling.kind"], &because);
        }
        let because = "model.router_bias = false; leave it out, or set model.router_bias";
        add(!m.router_bias, &["train.router_bias_rate"], &["model.router_bias"], because);
        let because = "model.experts = 0; leave it out, or set model.experts";
        add(m.experts == 0, &["train.force_load_balance"], &["model.experts"], because);
        let because = "model.groups = 0; leave it out, or set model.groups";
        add(m.groups == 0, &["model.group_score"], &["model.groups"], because);

        let because = "no experts are sharded over ranks; leave it out, or set run.ranks";
        let by = &["run.ranks", "run.dp", "model.experts"];
        add(self.run.mesh().ep == 1 || m.experts == 0, &["run.capacity_factor"], by, because);
        let because = "a single rank has no other rank to sum with; leave it out, or set run.ranks";
        add(self.run.ranks == 1, &["run.reductions"], &["run.ranks"], because);

        let none = self.checkpoint.every == 0 && !self.checkpoint.at_end;
        let because =
            "checkpoint.every = 0 and checkpoint.at_end = false, so there is no checkpoint; leave it out";
        let keys =
            ["checkpoint.keep", "checkpoint.keep_spikes", "checkpoint.host_gib", "checkpoint.file_mib"];
        add(none, &keys, &["checkpoint.every", "checkpoint.at_end"], because);
        let because = "checkpoint.keep = 0, so every checkpoint stays; leave it out, or set checkpoint.keep";
        add(!none && self.checkpoint.keep == 0, &["checkpoint.keep_spikes"], &["checkpoint.keep"], because);
        Ok(moot)
    }

    /// Numbers that kernels convert to single precision.
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

    /// Rejects optimizer settings that destroy the weights.
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
