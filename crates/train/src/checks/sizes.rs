//! Sizes that can be counted at all: everything after this multiplies them without looking.

use crate::config::{Config, ModelConfig};
use crate::error::{Error, Result};

/// The most numbers a model may have.
const MOST_PARAMETERS: u128 = 1 << 48;
/// The most experts of all layers: each has tensors of its own in a checkpoint, and names for them.
const MOST_EXPERTS: usize = 1 << 18;
/// The most columns of a norm: the host makes its weights.
const MOST_COLUMNS: usize = 1 << 24;
/// The most tokens of a micro-batch on one rank: the host has a list of them, too.
const MOST_TOKENS: usize = 1 << 24;
/// The most elements of one tensor of activations.
const MOST_ELEMENTS: u128 = 1 << 50;

/// Sizes by their keys.
pub(crate) type Sizes = Vec<(&'static str, usize)>;

/// Parameters of one kind.
pub(crate) struct Parameters {
    /// What has them.
    pub what: &'static str,
    /// What their number is a product of.
    pub sizes: Sizes,
    /// How often they are there.
    pub times: usize,
}

impl Parameters {
    /// How many; none beyond 128 bits.
    pub fn count(&self) -> Option<u128> {
        let mut sizes = self.sizes.iter().map(|(_, size)| *size as u128);
        sizes.try_fold(self.times as u128, u128::checked_mul)
    }
}

/// The larger width of a head.
pub(crate) fn head_width(m: &ModelConfig) -> (&'static str, usize) {
    match m.value_head_dim > m.head_dim {
        true => ("model.value_head_dim", m.value_head_dim),
        false => ("model.head_dim", m.head_dim),
    }
}

/// The layers with experts, and those with an MLP, under the key that says how many there are.
pub(crate) fn layers_of(m: &ModelConfig) -> [(&'static str, usize); 2] {
    let routed = if m.dense_layers == 0 { "model.layers" } else { "model.layers - model.dense_layers" };
    let dense = if m.experts == 0 { "model.layers" } else { "model.dense_layers" };
    [(routed, m.num_routed()), (dense, m.num_dense())]
}

/// All parameters but those of norms, and no fewer: keys and values have no more heads than queries have, and all are taken as wide.
pub(crate) fn parameters(m: &ModelConfig) -> [Parameters; 6] {
    let [routed, dense] = layers_of(m);
    let (layers, width) = (("model.layers", m.layers), ("model.d_model", m.d_model));
    let (heads, head_dim) = (("model.heads", m.heads), head_width(m));
    let (experts, vocabulary) = (("model.experts", m.experts), ("model.vocab_size", m.vocab_size));
    let of = |what, times, sizes: &[_]| Parameters { what, times, sizes: sizes.to_vec() };
    [
        match m.tie_embeddings {
            true => of("the embedding", 1, &[vocabulary, width]),
            false => of("embedding and head", 2, &[vocabulary, width]),
        },
        of("attention", 4, &[layers, width, heads, head_dim]),
        of("the MLPs", 3, &[dense, width, ("model.ffn", m.ffn)]),
        of("the shared experts", 3, &[routed, width, ("model.shared_ffn", m.shared_ffn)]),
        of(EXPERTS, 3, &[routed, experts, width, ("model.expert_ffn", m.expert_ffn)]),
        of("the routers", 1, &[routed, experts, width]),
    ]
}

/// These alone are divided over ranks.
pub(crate) const EXPERTS: &str = "the experts";

/// `model.layers = 2, model.d_model = 64`.
pub(crate) fn listed(sizes: &[(&str, usize)]) -> String {
    sizes.iter().map(|(key, size)| format!("{key} = {size}")).collect::<Vec<_>>().join(", ")
}

/// Whether every size of this configuration can be counted, and is not beyond what any machine has.
///
/// # Errors
/// [`Error::Config`] naming the key.
pub fn check_sizes(config: &Config) -> Result<()> {
    let (m, t, ranks) = (&config.model, &config.train, config.run.ranks.max(1));
    let wide = |n: usize| n as u128;
    let times =
        |factors: &[usize]| factors.iter().try_fold(1u128, |product, n| product.checked_mul(wide(*n)));
    let parts = parameters(m);
    let count = parts.iter().try_fold(0u128, |sum, part| sum.checked_add(part.count()?));
    if count.is_none_or(|n| n > MOST_PARAMETERS) {
        // Beyond counting is the largest.
        let most = parts.iter().max_by_key(|part| part.count().unwrap_or(u128::MAX));
        let most = most.map_or(String::new(), |part| {
            format!("; most of them are of {}: {}", part.what, listed(&part.sizes))
        });
        return Err(Error::config("model", format!("has more than 2^48 parameters{most}")));
    }
    if m.num_routed().saturating_mul(m.experts) > MOST_EXPERTS {
        let why = format!(
            "is {}, and with model.layers = {} the model has more than {MOST_EXPERTS} experts",
            m.experts, m.layers
        );
        return Err(Error::config("model.experts", why));
    }
    let columns = [
        ("model.d_model", m.d_model),
        ("model.head_dim", m.head_dim),
        ("model.value_head_dim", m.value_head_dim),
    ];
    for (key, columns) in columns {
        if columns > MOST_COLUMNS {
            return Err(Error::config(key, format!("is {columns}, expected at most {MOST_COLUMNS}")));
        }
    }
    let tokens = times(&[t.batch_size / ranks, config.data.seq_len]);
    if tokens.is_none_or(|n| n > wide(MOST_TOKENS)) {
        let why = format!(
            "is {}: with sequences of {} a rank has more than {MOST_TOKENS} tokens of a micro-batch; make it smaller, and \
             train.grad_accum larger",
            t.batch_size, config.data.seq_len
        );
        return Err(Error::config("train.batch_size", why));
    }
    // Sizes up to here have no more than 48 bits each.
    let tokens = tokens.unwrap_or(0);
    let rows = tokens * wide(m.top_k.max(1)) * wide(ranks) + wide(m.experts) * 128;
    let widest = [
        2 * wide(m.expert_ffn),
        wide(m.d_model),
        wide(m.heads) * wide(head_width(m).1),
        2 * wide(m.shared_ffn),
        2 * wide(m.ffn),
    ];
    let widest = widest.into_iter().max().unwrap_or(0).max(wide(m.experts));
    let table = wide(config.data.seq_len).saturating_mul(wide(m.head_dim));
    if rows.saturating_mul(widest) > MOST_ELEMENTS || table > MOST_ELEMENTS {
        let why = format!(
            "is {}: rows of {widest} for each slot of a token are more than 2^50 elements",
            t.batch_size
        );
        return Err(Error::config("train.batch_size", why));
    }
    Ok(())
}
