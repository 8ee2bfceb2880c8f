//! Scaling of RoPE's frequencies for sequences longer than those of the original training.

use super::require::{positive, require};
use crate::error::Result;
use serde::{Deserialize, Serialize};

/// The rule by which the RoPE frequencies are scaled.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum RopeScalingKind {
    /// The frequencies are not scaled.
    #[default]
    None,
    /// Llama 3.1's rule, which scales a frequency according to its wavelength.
    Llama3,
    /// YaRN, which scales a frequency according to its number of rotations. YaRN also scales queries and keys.
    Yarn,
}

/// The table `[model.rope_scaling]`. Most keys of `[model.rope_scaling]` have the same names as in `rope_parameters` of a Hugging Face
/// `config.json`. [`crate::layers::rope_table`] has the formulas.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct RopeScaling {
    /// The kind of scaling: `none`, `llama3` or `yarn`.
    pub kind: RopeScalingKind,
    /// For `llama3` and `yarn`: the number (at least 1) by which low frequencies are divided.
    pub factor: f64,
    /// For `llama3` and `yarn`: the number of positions of the original training, before the context was extended.
    pub original_positions: usize,
    /// For `llama3`: a frequency is divided by `factor` if it makes fewer than `low_freq_factor` rotations over the original positions.
    pub low_freq_factor: f64,
    /// For `llama3`: a frequency is unchanged if it makes more than `high_freq_factor` rotations over the original positions. A frequency
    /// whose number of rotations lies between `low_freq_factor` and `high_freq_factor` is interpolated.
    pub high_freq_factor: f64,
    /// For `yarn`: a frequency is unchanged if it makes more than `beta_fast` rotations over the original positions.
    pub beta_fast: f64,
    /// For `yarn`: a frequency is divided by `factor` if it makes fewer than `beta_slow` rotations over the original positions. A frequency
    /// whose number of rotations lies between `beta_slow` and `beta_fast` is interpolated.
    pub beta_slow: f64,
    /// For `yarn`: cosines and sines are multiplied by g(mscale) / g(mscale_all_dim), where g(m) = 0.1 · m · ln(factor) + 1. If `mscale` or
    /// `mscale_all_dim` is 0, cosines and sines are multiplied by g(1).
    pub mscale: f64,
    /// `yarn`: see `mscale`. Latent attention (`model.kv_rank`) also multiplies its attention scores by g(mscale_all_dim)².
    pub mscale_all_dim: f64,
}

impl Default for RopeScaling {
    fn default() -> Self {
        Self {
            kind: RopeScalingKind::None,
            factor: 0.0,
            original_positions: 0,
            low_freq_factor: 1.0,
            high_freq_factor: 4.0,
            beta_fast: 32.0,
            beta_slow: 1.0,
            mscale: 0.0,
            mscale_all_dim: 0.0,
        }
    }
}

impl RopeScaling {
    /// Keys that have no effect with this kind of scaling, each with the reason. The caller ignores keys with default values.
    pub(super) fn moot(&self) -> Vec<(&'static str, String)> {
        use RopeScalingKind::{Llama3, Yarn};
        let keys: [(&str, &[RopeScalingKind]); 8] = [
            ("model.rope_scaling.original_positions", &[Llama3, Yarn]),
            ("model.rope_scaling.factor", &[Llama3, Yarn]),
            ("model.rope_scaling.low_freq_factor", &[Llama3]),
            ("model.rope_scaling.high_freq_factor", &[Llama3]),
            ("model.rope_scaling.beta_fast", &[Yarn]),
            ("model.rope_scaling.beta_slow", &[Yarn]),
            ("model.rope_scaling.mscale", &[Yarn]),
            ("model.rope_scaling.mscale_all_dim", &[Yarn]),
        ];
        let kind = self.kind.name();
        let because = format!("model.rope_scaling.kind = \"{kind}\" does not use this key; leave it out");
        let others = keys.into_iter().filter(|(_, kinds)| !kinds.contains(&self.kind));
        let alone = "model.rope_scaling.mscale_all_dim is 0; leave it out, or set mscale_all_dim";
        let is_alone = self.kind == Yarn && self.mscale_all_dim == 0.0;
        let alone = is_alone.then(|| ("model.rope_scaling.mscale", alone.to_owned()));
        others.map(|(key, _)| (key, because.clone())).chain(alone).collect()
    }

    /// Checks the numbers of this kind of scaling against each other and against the base of the frequencies.
    pub(super) fn validate(&self, theta: f64) -> Result<()> {
        const FACTOR: &str = "model.rope_scaling.factor";
        const HIGH: &str = "model.rope_scaling.high_freq_factor";
        const FAST: &str = "model.rope_scaling.beta_fast";
        if self.kind == RopeScalingKind::None {
            return Ok(());
        }
        let kind = self.kind.name();
        require(self.factor.is_finite() && self.factor >= 1.0, FACTOR, || {
            format!(
                "is {:?}, expected a number of at least 1: model.rope_scaling.kind = \"{kind}\"",
                self.factor
            )
        })?;
        require(self.original_positions > 0, "model.rope_scaling.original_positions", || {
            format!(
                "is 0, expected the positions that the model was first trained with: model.rope_scaling.kind = \"{kind}\""
            )
        })?;
        if self.kind == RopeScalingKind::Llama3 {
            positive("model.rope_scaling.low_freq_factor", self.low_freq_factor)?;
            positive(HIGH, self.high_freq_factor)?;
            return require(self.high_freq_factor > self.low_freq_factor, HIGH, || {
                let (high, low) = (self.high_freq_factor, self.low_freq_factor);
                format!("is {high:?}, expected more than model.rope_scaling.low_freq_factor = {low:?}")
            });
        }
        positive("model.rope_scaling.beta_slow", self.beta_slow)?;
        positive(FAST, self.beta_fast)?;
        require(self.beta_fast > self.beta_slow, FAST, || {
            format!(
                "is {:?}, expected more than model.rope_scaling.beta_slow = {:?}",
                self.beta_fast, self.beta_slow
            )
        })?;
        for (key, mscale) in [
            ("model.rope_scaling.mscale", self.mscale),
            ("model.rope_scaling.mscale_all_dim", self.mscale_all_dim),
        ] {
            require(mscale.is_finite() && mscale >= 0.0, key, || {
                format!("is {mscale:?}, expected 0, or more")
            })?;
        }
        require(theta > 1.0, "model.rope_theta", || {
            format!("is {theta:?}, expected more than 1: model.rope_scaling.kind = \"{kind}\"")
        })
    }
}

impl RopeScalingKind {
    /// The name of this kind of scaling in a configuration.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Llama3 => "llama3",
            Self::Yarn => "yarn",
        }
    }
}
