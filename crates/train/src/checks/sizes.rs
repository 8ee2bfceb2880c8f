//! Upper bounds of sizes. Because of these bounds, later code can multiply sizes without overflow checks.

use crate::config::Config;
use crate::error::{Error, Result};
use crate::spec::{ModelSpec, Size};

/// Largest number of parameters of a model.
const MOST_PARAMETERS: u128 = 1 << 48;
/// Largest number of experts over all layers. The number is limited because each expert has its own named tensors in a checkpoint.
const MOST_EXPERTS: usize = 1 << 18;
/// Largest number of columns of a norm. The number is limited because the host initializes norm weights.
const MOST_COLUMNS: usize = 1 << 24;
/// Largest number of tokens of a micro-batch on one rank. The number is limited because the host also lists these tokens.
const MOST_TOKENS: usize = 1 << 24;
/// Largest number of elements of one activation tensor.
const MOST_ELEMENTS: u128 = 1 << 50;

/// Formats sizes as text: `model.layers = 2, model.d_model = 64`.
pub(crate) fn listed(sizes: &[Size]) -> String {
    sizes.iter().map(|size| format!("{} = {}", size.key, size.value)).collect::<Vec<_>>().join(", ")
}

/// Checks that the sizes of this configuration do not overflow, and that they do not require more memory than any machine can have.
///
/// # Errors
/// Returns [`Error::Config`], which names the key of the size.
pub fn check_sizes(config: &Config) -> Result<()> {
    let (m, t, ranks) = (&config.model, &config.train, config.run.ranks.max(1));
    let mesh = config.run.mesh();
    let wide = |n: usize| n as u128;
    let times =
        |factors: &[usize]| factors.iter().try_fold(1u128, |product, n| product.checked_mul(wide(*n)));
    let spec = ModelSpec::new(m);
    if spec.num_parameters().is_none_or(|n| n > MOST_PARAMETERS) {
        let groups = spec.parameters();
        // A group whose count overflows is the largest group.
        let most = groups.iter().max_by_key(|group| group.count.unwrap_or(u128::MAX));
        let most = most.map_or(String::new(), |group| {
            format!("; most of them are of {}: {}", group.what, listed(&group.sizes))
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
        ("model.kv_rank", m.kv_rank),
        ("model.q_rank", m.q_rank),
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
    // All sizes computed so far have at most 48 bits.
    let tokens = tokens.unwrap_or(0);
    let parts = wide(t.expert_shards) / wide(mesh.dp.max(1));
    let rows = tokens * wide(m.top_k.max(1)) * wide(mesh.ep) + wide(m.experts) * parts.max(1) * 128;
    let widest = spec.widest().unwrap_or(u128::MAX);
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
