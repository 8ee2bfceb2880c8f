//! The arithmetic of a training step, as throughput is commonly compared by.

use super::{Config, ModelConfig};

impl ModelConfig {
    /// Parameters of the matrices that a token meets: attention, router, its experts, the shared expert, dense MLPs, the head.
    #[must_use]
    pub fn active_matrix_parameters(&self) -> u64 {
        let attention = self.d_model * (self.heads + self.kv_heads) * (self.head_dim + self.value_head_dim());
        let experts = 3 * self.d_model * (self.top_k * self.expert_ffn + self.shared_ffn);
        let router = self.d_model * self.experts;
        let mlps = self.num_routed() * (experts + router) + self.num_dense() * 3 * self.d_model * self.ffn;
        (self.layers * attention + mlps + self.vocab_size * self.d_model) as u64
    }
}

impl Config {
    /// Flops of the products for a token, forward and backward: two a multiply-add, three products for each of the model.
    /// Attention counts the half of the square that a causal mask leaves, experts their routed rows without padding; what is
    /// computed again counts once.
    #[must_use]
    pub fn flops_per_token(&self) -> f64 {
        let m = &self.model;
        let heads = m.layers * m.heads * (m.head_dim + m.value_head_dim());
        let attention = heads as f64 * self.data.seq_len as f64 / 2.0;
        6.0 * (m.active_matrix_parameters() as f64 + attention)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flops_of_a_token_written_out() {
        let set = ["model.layers=1", "model.shared_ffn=32"].map(String::from);
        let config = Config::load("tiny", &set).unwrap();
        // d 64, 4 heads and 2 key-value heads of 16, 8 experts of 64, 2 a token, 64 symbols, sequences of 128.
        let multiply_adds = 64 * 64 + 2 * 64 * 32 + 64 * 64 // q, k and v, out
            + 2 * 64 * 128 / 2 // scores and values, half of the square
            + 64 * 8 + 2 * 3 * 64 * 64 + 3 * 64 * 32 // router, experts, shared expert
            + 64 * 64; // head
        assert_eq!(config.flops_per_token(), (3 * 2 * multiply_adds) as f64);
        // Values of 8: half of v and of what goes out, and of the product of probabilities and values.
        let config = Config::load("tiny", &[&set[..], &["model.value_head_dim=8".into()]].concat()).unwrap();
        let fewer = 64 * 16 + 32 * 64 + 32 * 128 / 2;
        assert_eq!(config.flops_per_token(), (3 * 2 * (multiply_adds - fewer)) as f64);
    }

    #[test]
    fn dense_layers_have_an_mlp_and_no_router() {
        let set = ["model.layers=3", "model.dense_layers=2", "model.ffn=96"].map(String::from);
        let model = Config::load("tiny", &set).unwrap().model;
        let attention = 64 * 64 + 2 * 64 * 32 + 64 * 64;
        let routed = 64 * 8 + 2 * 3 * 64 * 64;
        assert_eq!(model.active_matrix_parameters(), 3 * attention + 2 * 3 * 64 * 96 + routed + 64 * 64);
    }
}
