//! The cosines and sines of RoPE, and the changes of a model's frequencies for longer sequences. The host computes all of them in F64, with
//! the same bits on every machine.

use crate::config::{RopeScaling, RopeScalingKind};
use crate::spec::Rope;
use nibble_core::formats::double;
use nibble_core::{Kernels, Result, Tensor};
use std::f64::consts::PI;

/// The RoPE table, F32 `[positions, dim]`: for each pair of a head, the cosines of position · frequency, then the sines, all multiplied by
/// the [amplitude](Rope::amplitude). Each value of the table is rounded only once.
///
/// # Errors
/// Passes on errors of the backend.
pub fn rope_table<B: Kernels>(b: &B, positions: usize, rope: Rope) -> Result<Tensor<B>> {
    let (frequencies, amplitude) = (rope.frequencies(), rope.amplitude());
    let mut values = Vec::with_capacity(positions * rope.dim);
    for position in 0..positions {
        let angles = frequencies.iter().map(|frequency| double::sin_cos(position as f64 * frequency));
        let (sines, cosines): (Vec<f32>, Vec<f32>) =
            angles.map(|(sin, cos)| ((amplitude * sin) as f32, (amplitude * cos) as f32)).unzip();
        values.extend(cosines);
        values.extend(sines);
    }
    Tensor::from_f32(b, &values, positions, rope.dim)
}

impl Rope {
    /// The frequency of each pair of elements of a head, in radians per position: θ^(−2i/dim), modified by the model's RoPE scaling.
    #[must_use]
    pub fn frequencies(&self) -> Vec<f64> {
        if self.theta == 0.0 {
            return vec![0.0; self.dim / 2];
        }
        let log_step = double::ln(self.theta) * -2.0 / self.dim as f64;
        let frequencies = (0..self.dim / 2).map(|i| double::exp(i as f64 * log_step));
        match self.scaling.kind {
            RopeScalingKind::None => frequencies.collect(),
            RopeScalingKind::Llama3 => frequencies.map(|f| llama3(f, &self.scaling)).collect(),
            RopeScalingKind::Yarn => {
                let kept = self.kept_by_yarn();
                let divided = |(i, f): (usize, f64)| between(f / self.scaling.factor, f, kept(i));
                frequencies.enumerate().map(divided).collect()
            }
        }
    }

    /// The share of a pair's frequency that YaRN leaves unchanged. The share is 1 up to the pair that rotates `beta_fast` times over the
    /// original positions, 0 from the pair that rotates `beta_slow` times, and linear in between. The index of the first of these pairs is
    /// rounded down, and the index of the second is rounded up. (Peng et al. 2023, "YaRN: Efficient Context Window Extension of Large
    /// Language Models", section 3.2.)
    fn kept_by_yarn(&self) -> impl Fn(usize) -> f64 {
        let (dim, scaling) = (self.dim as f64, self.scaling);
        let pair = |turns: f64| {
            let log = double::ln(scaling.original_positions as f64 / (turns * 2.0 * PI));
            dim * log / (2.0 * double::ln(self.theta))
        };
        let first = pair(scaling.beta_fast).floor().max(0.0);
        let last = pair(scaling.beta_slow).ceil().min(dim - 1.0);
        // As in the publication, the ramp becomes a step if both pairs are the same.
        let width = if first == last { 0.001 } else { last - first };
        move |i| 1.0 - ((i as f64 - first) / width).clamp(0.0, 1.0)
    }

    /// The factor by which RoPE multiplies cosines and sines; the factor is 1 except under YaRN. Under YaRN, the amplitude is g(mscale) /
    /// g(mscale_all_dim) if both values are given, and g(1) otherwise, where g(m) = 0.1 · m · ln(factor) + 1.
    #[must_use]
    pub fn amplitude(&self) -> f64 {
        let RopeScaling { kind, factor, mscale, mscale_all_dim, .. } = self.scaling;
        match kind {
            RopeScalingKind::None | RopeScalingKind::Llama3 => 1.0,
            RopeScalingKind::Yarn if mscale == 0.0 || mscale_all_dim == 0.0 => growth(factor, 1.0),
            RopeScalingKind::Yarn => growth(factor, mscale) / growth(factor, mscale_all_dim),
        }
    }

    /// The factor by which latent attention multiplies its scores: 1/√`head_dim`, and under YaRN also (0.1 · mscale_all_dim · ln(factor) +
    /// 1)².
    #[must_use]
    pub fn latent_scale(&self, head_dim: usize) -> f32 {
        let RopeScaling { kind, factor, mscale_all_dim, .. } = self.scaling;
        let growth = match kind {
            RopeScalingKind::Yarn => growth(factor, mscale_all_dim),
            RopeScalingKind::None | RopeScalingKind::Llama3 => 1.0,
        };
        (growth * growth / (head_dim as f64).sqrt()) as f32
    }
}

/// Returns 0.1 · mscale · ln(factor) + 1.
fn growth(factor: f64, mscale: f64) -> f64 {
    0.1 * mscale * double::ln(factor) + 1.0
}

/// The rule of Llama 3.1, which depends on how often a pair rotates over the original positions. With many rotations the frequency does not
/// change; with few rotations it is divided by the factor.
fn llama3(frequency: f64, scaling: &RopeScaling) -> f64 {
    let turns = scaling.original_positions as f64 * frequency / (2.0 * PI);
    let (few, many) = (scaling.low_freq_factor, scaling.high_freq_factor);
    between(frequency / scaling.factor, frequency, ((turns - few) / (many - few)).clamp(0.0, 1.0))
}

/// Returns the linear interpolation from `a` at 0 to `b` at 1.
fn between(a: f64, b: f64, share: f64) -> f64 {
    (1.0 - share) * a + share * b
}

#[cfg(test)]
mod tests;
