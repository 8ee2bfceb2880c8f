//! Advice for runs whose loss or gradients are not finite.

use crate::config::Config;
use crate::error::Error;

/// Adds advice to an error of non-finite numbers in a step or in the held-out loss. Other errors are unchanged.
pub(super) fn of_divergence(error: Error, config: &Config, held_out: bool) -> Error {
    match error {
        Error::Core(source @ nibble_core::Error::NonFinite { .. }) => {
            let mut advice = against_divergence(config);
            if let (false, nibble_core::Error::NonFinite { step, .. }) = (held_out, &source) {
                advice = format!("{advice}. {}", how_to_replay(&config.run.dir, step + 1));
            }
            Error::Diverged { advice, held_out, source }
        }
        other => other,
    }
}

/// The command that finds the cause of a step's spike. `step` is counted from 1.
pub(super) fn how_to_replay(dir: &str, step: u64) -> String {
    format!("`nibble replay {dir} {step}` says whether data, weights or formats are the cause")
}

/// The most likely cause of divergence, and a remedy. A setting that is far from its usual value is named first.
fn against_divergence(config: &Config) -> String {
    let (m, t) = (&config.model, &config.train);
    let far = [
        ("model.aux_loss_coef", m.aux_loss_coef, 0.01),
        ("model.z_loss_coef", m.z_loss_coef, 0.001),
        ("train.weight_decay", t.weight_decay, 0.1),
    ];
    let far = far.into_iter().filter(|(_, is, usual)| *is > 1000.0 * usual);
    let far: Vec<String> =
        far.map(|(key, is, usual)| format!("a smaller {key} (now {is:?}, usual is {usual:?})")).collect();
    if !far.is_empty() {
        return format!("Most likely a setting is too large. What helps: {}", far.join(", "));
    }
    let clip = match t.clip_norm {
        0.0 => "a train.clip_norm, such as 1.0 (now 0: none)".to_owned(),
        norm => format!("a smaller train.clip_norm (now {norm:?})"),
    };
    format!(
        "Most likely the run diverges. What helps: a smaller train.lr (now {:?}), more train.warmup_steps (now {}), {clip}",
        t.lr, t.warmup_steps
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_helps_against_divergence_fits_the_settings() {
        let told = |sets: &[&str]| {
            let sets: Vec<String> = sets.iter().map(|set| (*set).to_owned()).collect();
            let config = Config::load("tiny", &sets).unwrap();
            let core = nibble_core::Error::NonFinite { site: "the loss".into(), layer: "-".into(), step: 3 };
            of_divergence(core.into(), &config, false).to_string()
        };
        let usual = told(&[]);
        assert!(
            usual.contains("step 3: the loss") && usual.contains("a smaller train.lr (now 0.005)"),
            "{usual}"
        );
        assert!(usual.contains("`nibble replay runs/tiny 4`"), "{usual}");
        assert!(told(&["train.clip_norm=0"]).contains("a train.clip_norm, such as 1.0"));
        let aux = told(&["model.aux_loss_coef=1e30"]);
        assert!(
            aux.contains("a smaller model.aux_loss_coef (now 1e30") && !aux.contains("train.lr"),
            "{aux}"
        );
    }
}
