//! Sampled routings: the experts of each token.

use nibble_formats::{Purpose, Stream};

/// How the probabilities of experts are distributed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Routing {
    /// All experts have equal probabilities.
    Balanced,
    /// Expert e has weight 1 / (e + 1), so rank 0 has the busiest experts.
    Zipf,
}

impl Routing {
    /// All distributions.
    pub const ALL: [Self; 2] = [Self::Balanced, Self::Zipf];

    /// The routing's name in tables and files.
    pub fn name(self) -> &'static str {
        match self {
            Self::Balanced => "balanced",
            Self::Zipf => "zipf",
        }
    }

    fn weight(self, expert: usize) -> f64 {
        match self {
            Self::Balanced => 1.0,
            Self::Zipf => 1.0 / (expert + 1) as f64,
        }
    }

    /// Samples the experts of each (token, slot): `[tokens · top_k]`. A token's experts are distinct.
    ///
    /// # Panics
    /// Panics if there are fewer experts than `top_k`.
    pub fn draw(self, tokens: usize, top_k: usize, experts: usize) -> Vec<i32> {
        assert!(top_k <= experts, "top {top_k} of {experts} experts");
        let stream = Stream::new(1, Purpose::Data, self as u32, 0);
        let weights: Vec<f64> = (0..experts).map(|expert| self.weight(expert)).collect();
        let mut drawn = Vec::with_capacity(tokens * top_k);
        for _ in 0..tokens {
            let mut left = weights.clone();
            for _ in 0..top_k {
                let mut at = left.iter().sum::<f64>() * f64::from(stream.f32_at(drawn.len() as u64));
                let passed = |weight: &f64| {
                    at -= weight;
                    at < 0.0
                };
                // Rounding may leave a remainder after the last expert.
                let last = || left.iter().rposition(|weight| *weight > 0.0).unwrap_or(0);
                let expert = left.iter().position(passed).unwrap_or_else(last);
                left[expert] = 0.0;
                drawn.push(expert as i32);
            }
        }
        drawn
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_token_has_an_expert_twice_and_each_has_its_share() {
        for routing in Routing::ALL {
            let drawn = routing.draw(4096, 4, 16);
            for experts in drawn.chunks(4) {
                let mut sorted = experts.to_vec();
                sorted.sort_unstable();
                sorted.dedup();
                assert_eq!(sorted.len(), 4, "{experts:?}");
            }
            // The first sample of each token depends on the weights alone.
            let all: f64 = (0..16).map(|expert| routing.weight(expert)).sum();
            for expert in 0..16 {
                let times = drawn.iter().step_by(4).filter(|e| **e == expert as i32).count() as f64;
                let want = 4096.0 * routing.weight(expert) / all;
                assert!((times - want).abs() < 4.0 * want.sqrt(), "{routing:?}, {expert}: {times}, {want}");
            }
        }
    }

    #[test]
    fn all_experts_are_drawn_where_a_token_has_all() {
        let mut drawn = Routing::Zipf.draw(1, 16, 16);
        drawn.sort_unstable();
        assert_eq!(drawn, (0..16).collect::<Vec<_>>());
    }
}
