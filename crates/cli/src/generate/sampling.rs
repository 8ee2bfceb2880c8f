//! Samples the next token from logits, with temperature, top-k and top-p in the order of `transformers`.

use nibble_command::error::{Error, Result};
use nibble_formats::math::exp;
use std::cmp::Ordering;

/// Sampling options.
#[derive(Debug, Clone, Copy, clap::Args)]
pub struct Sampling {
    /// Sampling temperature: the logits are divided by T. With T = 0, Nibble always picks the likeliest token.
    #[arg(long, value_name = "T", default_value_t = 1.0, allow_negative_numbers = true)]
    temperature: f32,
    /// Samples only from the K likeliest tokens; with K = 0, samples from all tokens.
    #[arg(long, value_name = "K", default_value_t = 0)]
    top_k: usize,
    /// Samples only from the smallest set of likeliest tokens whose probabilities sum to at least P. --top-k is applied before --top-p.
    /// With P = 1, --top-p excludes no token.
    #[arg(long, value_name = "P", default_value_t = 1.0, allow_negative_numbers = true)]
    top_p: f64,
}

/// Number of tokens that are sorted first for top-p. The number is doubled until the sorted tokens suffice. A vocabulary has hundreds of
/// thousands of tokens, but most texts need only a few.
const SORTED_AT_FIRST: usize = 256;

impl Sampling {
    /// Refuses options with which no token could ever be sampled.
    ///
    /// # Errors
    /// Returns a usage error that names the option.
    pub fn check(&self) -> Result<()> {
        let Self { temperature, top_p, .. } = *self;
        if !(temperature.is_finite() && temperature >= 0.0) {
            let why = format!("--temperature: got {temperature}, expected a number of at least 0");
            return Err(Error::usage(why));
        }
        if !(top_p > 0.0 && top_p <= 1.0) {
            return Err(Error::usage(format!("--top-p: got {top_p}, expected a number above 0, at most 1")));
        }
        Ok(())
    }

    /// Samples a token from softmax(logits / temperature), restricted by top-k and top-p, with 32 random bits; `None` if a logit is not
    /// finite. Every machine samples the same token, because the exponential is Nibble's own and sums are in F64 in the order of ids.
    pub fn token(&self, logits: &[f32], random: u32) -> Option<usize> {
        if logits.iter().any(|l| !l.is_finite()) {
            return None;
        }
        let likeliest = (0..logits.len()).min_by(|a, b| by_likelihood(logits, *a, *b))?;
        if self.temperature == 0.0 {
            return Some(likeliest);
        }
        let weight = |l: &f32| f64::from(exp((l - logits[likeliest]) / self.temperature));
        let weights: Vec<f64> = logits.iter().map(weight).collect();
        let kept = self.kept(logits, &weights);
        let total: f64 = kept.iter().map(|id| weights[*id]).sum();
        let mut left = f64::from(random) / 2f64.powi(32) * total;
        let drawn = kept.iter().find(|id| {
            left -= weights[**id];
            left < 0.0
        });
        // Rounding may leave a remainder, in which case the last token with a nonzero weight is chosen.
        drawn.or_else(|| kept.iter().rfind(|id| weights[**id] > 0.0)).copied()
    }

    /// The tokens that may be sampled, in the order of their ids. Ties go to lower ids.
    fn kept(&self, logits: &[f32], weights: &[f64]) -> Vec<usize> {
        let order = |a: &usize, b: &usize| by_likelihood(logits, *a, *b);
        let mut ids: Vec<usize> = (0..logits.len()).collect();
        if (1..ids.len()).contains(&self.top_k) {
            ids.select_nth_unstable_by(self.top_k - 1, order);
            ids.truncate(self.top_k);
            ids.sort_unstable();
        }
        if self.top_p < 1.0 {
            let total: f64 = ids.iter().map(|id| weights[*id]).sum();
            let count = likeliest_with(&mut ids, self.top_p * total, order, weights);
            ids.truncate(count);
            ids.sort_unstable();
        }
        ids
    }
}

/// Orders likelier tokens first; ties go to the lower id.
fn by_likelihood(logits: &[f32], a: usize, b: usize) -> Ordering {
    logits[b].total_cmp(&logits[a]).then(a.cmp(&b))
}

/// Moves the likeliest tokens to the front. Returns how many of them reach the weight `enough`, including the token that crosses it.
fn likeliest_with(
    ids: &mut [usize],
    enough: f64,
    order: impl Fn(&usize, &usize) -> Ordering + Copy,
    weights: &[f64],
) -> usize {
    let (mut sum, mut sorted) = (0.0, 0);
    while sorted < ids.len() {
        let rest = &mut ids[sorted..];
        let count = sorted.max(SORTED_AT_FIRST).min(rest.len());
        if count < rest.len() {
            rest.select_nth_unstable_by(count - 1, order);
        }
        rest[..count].sort_unstable_by(order);
        let crosses = rest[..count].iter().position(|id| {
            sum += weights[*id];
            sum >= enough
        });
        match crosses {
            Some(at) => return sorted + at + 1,
            None => sorted += count,
        }
    }
    sorted
}

#[cfg(test)]
mod tests {
    use super::*;
    use nibble_formats::{Purpose, Stream};

    const ALL: Sampling = Sampling { temperature: 1.0, top_k: 0, top_p: 1.0 };

    #[test]
    fn samples_follow_the_softmax() {
        let logits = [0.0, 2f32.ln(), f32::MIN, 5f32.ln()]; // weights 1 : 2 : 0 : 5
        let mut seen = [0u32; 4];
        let stream = Stream::new(3, Purpose::Sample, 0, 0);
        for i in 0..8000 {
            seen[ALL.token(&logits, stream.u32_at(i)).unwrap()] += 1;
        }
        for (count, expected) in seen.iter().zip([1000u32, 2000, 0, 5000]) {
            assert!(count.abs_diff(expected) < 150, "{seen:?}");
        }
    }

    #[test]
    fn the_extremes() {
        let logits = [1.0, 3.0, 3.0, 2.0];
        let token = |sampling: Sampling| sampling.token(&logits, u32::MAX);
        assert_eq!(token(Sampling { temperature: 0.0, ..ALL }), Some(1), "ties: the lower id");
        assert_eq!(token(Sampling { top_k: 1, ..ALL }), Some(1));
        assert_eq!(token(Sampling { temperature: 100.0, top_k: 2, ..ALL }), Some(2));
        assert_eq!(token(Sampling { top_p: f64::MIN_POSITIVE, ..ALL }), Some(1));
        assert_eq!(token(ALL), Some(3));
        assert_eq!(ALL.token(&[1.0, f32::MIN], u32::MAX), Some(0), "what has no probability is not drawn");
        assert_eq!(ALL.token(&[0.0, f32::NAN], 0), None);
        assert_eq!(ALL.token(&[], 0), None);
    }

    #[test]
    fn what_cannot_be_is_refused() {
        for top_p in [0.0, -0.1, 1.5, f64::NAN] {
            assert!(
                Sampling { top_p, ..ALL }.check().unwrap_err().to_string().contains("--top-p"),
                "{top_p}"
            );
        }
        for temperature in [-1.0, f32::NAN, f32::INFINITY] {
            let error = Sampling { temperature, ..ALL }.check().unwrap_err().to_string();
            assert!(error.contains("--temperature"), "{temperature}");
        }
        ALL.check().unwrap();
    }

    /// Compares the kept tokens with those of the warpers of `transformers`; `filters.py` generates the expected table.
    #[test]
    fn transformers_keeps_the_same_tokens() {
        let table: serde_json::Value = serde_json::from_str(include_str!("filters.json")).unwrap();
        let numbers = |value: &serde_json::Value| -> Vec<f64> {
            value.as_array().unwrap().iter().map(|n| n.as_f64().unwrap()).collect()
        };
        let groups = table.as_array().unwrap();
        let cases = |group: &serde_json::Value| group["cases"].as_array().unwrap().clone();
        assert!(groups.iter().map(|group| cases(group).len()).sum::<usize>() > 20);
        for (group, case) in
            groups.iter().flat_map(|group| cases(group).into_iter().map(move |case| (group, case)))
        {
            let logits: Vec<f32> = numbers(&group["logits"]).into_iter().map(|l| l as f32).collect();
            let sampling = Sampling {
                temperature: case["temperature"].as_f64().unwrap() as f32,
                top_k: case["top_k"].as_u64().unwrap() as usize,
                top_p: case["top_p"].as_f64().unwrap(),
            };
            let best = logits.iter().copied().fold(f32::MIN, f32::max);
            let weights: Vec<f64> =
                logits.iter().map(|l| f64::from(exp((l - best) / sampling.temperature))).collect();
            let kept = sampling.kept(&logits, &weights);
            let ids: Vec<f64> = kept.iter().map(|id| *id as f64).collect();
            assert_eq!(ids, numbers(&case["kept"]), "{sampling:?} of {} logits", logits.len());
            let total: f64 = kept.iter().map(|id| weights[*id]).sum();
            for (id, expected) in kept.iter().zip(numbers(&case["probabilities"])) {
                assert!((weights[*id] / total - expected).abs() < 1e-5, "{sampling:?}: token {id}");
            }
        }
    }
}
